"""The threads in which gloo reads its sockets, and what they may interrupt.

One rule: they never push the thread that computes off its core. gloo's thread wakes with every
byte that comes. Where all cores compute, it takes the core of a thread that is often just about to
post a message, finds the lock of that connection taken, leaves the event to its next look at the
socket (`Pair::handleEvents` in gloo's transport/tcp/pair.cc), which comes at once, and so polls
until the scheduler has mercy. On two cores a pipeline step of small messages takes 1.6 to 2.3 times
as long by that (docs/pipeline_benchmarks.md). As a batch thread (SCHED_BATCH) it waits for an idle
core or the end of a time slice. Where a core is idle nothing changes. No rights are needed.
"""

import os
from pathlib import Path

_READERS = "gloo_tcp_loop"
"""What gloo calls them; one for each group."""
_TASKS = Path("/proc/self/task")


def deprioritize(yielding: bool = True) -> int:
    """Let those that there are now yield, or (False) interrupt as others do; how many there are.

    On systems without such threads, or without Linux's list of them, there are none.
    """
    policy = getattr(os, "SCHED_BATCH" if yielding else "SCHED_OTHER", None)
    if policy is None or not _TASKS.is_dir():
        return 0
    number = 0
    for task in _TASKS.iterdir():
        try:
            if (task / "comm").read_text().strip() == _READERS:
                os.sched_setscheduler(int(task.name), policy, os.sched_param(0))
                number += 1
        except OSError:
            continue  # it has ended, or a sandbox forbids it: then all stays as it was
    return number
