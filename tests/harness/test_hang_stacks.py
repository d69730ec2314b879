"""What stacks tell of a hang in which nothing is numbered, and who writes them."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.harness.test_hang import INSIDE, STACK, call, one, snapshot, told

REDUCE = """\
  File "/home/me/train.py", line 9, in step
    dist.all_reduce(x)
  File "/x/torch/distributed/distributed_c10d.py", line 3252, in all_reduce
    work.wait()
"""
ITEM = """\
  File "/home/me/train.py", line 12, in step
    loss.item()
"""


def test_without_a_wait_the_rarest_stack_is_shown_first():
    quiet = snapshot((0, 1, 2), call("all_reduce", 3, "done"), phase="")
    found = told(*(one(r, quiet, stack=STACK if r == 1 else INSIDE) for r in range(3)))
    assert found.culprits[0].rank == 1
    assert "in no call of ours, in a step that has taken 9 s" in found.text.splitlines()[0]


def test_who_stands_in_a_call_that_waits_is_not_blamed_for_it():
    """A loop on raw torch.distributed: nothing is numbered, the stacks say who waits."""
    quiet = snapshot((0, 1), phase="")
    for waiting in (REDUCE, ITEM):
        found = told(one(0, quiet, stack=waiting), one(1, quiet))
        assert [c.rank for c in found.culprits] == [1]
    head = told(one(0, quiet, stack=REDUCE), one(1, quiet, stack=ITEM)).text.splitlines()[0]
    assert "and rank 1 are waiting, in calls that are not numbered" in head
    head = told(one(0, quiet), one(1, quiet, stack=INSIDE)).text.splitlines()[0]
    assert "and rank 1 are in no call of ours" in head and "cannot be told" in head


def test_a_fork_of_a_watched_rank_can_end(tmp_path):
    """Its interpreter would wait for the thread of the timer, which only the parent has."""
    fd = f"os.open({str(tmp_path / 'stacks')!r}, os.O_RDWR | os.O_CREAT)"
    text = (
        "import os, sys\nfrom torchdistpackage.harness.hang.c_stacks import CStacks\n"
        f"stacks = CStacks(enabled=True)\nstacks.open({fd})\npid = os.fork()\n"
        "if pid == 0: sys.exit(0)\n"
        "os.waitpid(pid, 0)\nstacks.arm()\nstacks.close()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", text], start_new_session=True)
    try:
        assert process.wait(20) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def test_what_a_rank_has_started_ends_with_it(tmp_path):
    text = (
        "import subprocess, threading\nfrom pathlib import Path\n"
        "from torchdistpackage.harness.hang.dump import Dump, Folder, State\n"
        "from torchdistpackage.harness.hang.ending import Ending\n"
        "from torchdistpackage.harness.hang.process import Process\n"
        "worker = subprocess.Popen(['/bin/sh', '-c', 'sleep 60 & echo $!; wait'], stdout=-1)\n"
        "print(worker.stdout.readline().decode(), flush=True)\n"
        f"ending = Ending(Folder(Path({str(tmp_path)!r}), 'a'), 0, 1, None, None)\n"
        "mine = Dump(0, State.DUMPED, Process.mine(), 0.0)\n"
        "ending.end(mine, None, threading.Event())\n"
    )
    out = tmp_path / "out"
    with out.open("wb") as stream:
        code = subprocess.run([sys.executable, "-c", text], stdout=stream, timeout=30).returncode
    assert code == 1
    pid, end_s = out.read_text().strip(), time.monotonic() + 5
    while (stat := Path(f"/proc/{pid}/stat")).exists() and ") Z " not in stat.read_text():
        assert time.monotonic() < end_s, f"process {pid} is still there"
        time.sleep(0.02)
