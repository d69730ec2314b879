"""A rank lost a peer that leaves no word: its task stays for a while, so that Slurm learns why.

One rule: only a rank whose own failure is the consequence of another's waits, and only while some
rank has left no report. Whoever was killed or raised has a watcher that reports and ends at once.

Why it pays: a node on which no task is left confirms the end of its job in its answer to slurmctld,
which reads the answers when it has all of them, and for that of a node that is gone it waits one
MessageTimeout. A node on which a task still runs confirms by a message of its own.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path

from torchdistpackage.launch.signals import SignalFlag

HOLD_S = 30.0
"""Lost where a connection broke, no node is gone, and a rank goes on without noticing."""
_LOOK_S = 1.0
_SIGNAL_S = 0.1


def wait_for_word(
    failures: Path,
    rank: int,
    num_ranks: int,
    noted: SignalFlag,
    has_ended: Callable[[], bool],
    limit_s: float = HOLD_S,
) -> None:
    """Until all ranks have left reports in `failures`, or Slurm tells this process to end.

    has_ended: whether the run came to an end, and so not all ranks leave reports.
    """
    until_s = time.monotonic() + limit_s
    look_s, said = 0.0, False
    while not noted.all_received and (now_s := time.monotonic()) < until_s:
        if now_s >= look_s:
            first, look_s = not look_s, now_s + _LOOK_S
            # names alone, since every rank looks
            left = {int(path.stem.removeprefix("rank")) for path in failures.glob("rank*.json")}
            if len(left) >= num_ranks or has_ended():
                return
            if not first and not said and rank == min(left, default=rank):
                said = True
                sys.stderr.write(
                    f"no word from {num_ranks - len(left)} of {num_ranks} ranks; if their node is "
                    f"gone, Slurm has up to {limit_s:g} s to find out\n"
                )
        time.sleep(_SIGNAL_S)
