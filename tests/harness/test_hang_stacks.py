"""What stacks tell of a hang in which nothing is numbered, and who writes them. No torch."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.harness.test_hang import INSIDE, STACK, WAITING, call, one, snapshot, told
from tests.tells import tells
from torchdistpackage.harness.hang.diagnosis import Cause
from torchdistpackage.harness.hang.dump import State
from torchdistpackage.harness.hang.stacks import FOREIGN, innermost, is_waiting

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
    assert found.suspects[0].rank == 1
    assert "in no call of ours, in a step that has taken 9 s" in found.text.splitlines()[0]


def test_who_stands_in_a_call_that_waits_is_not_blamed_for_it():
    """A loop on raw torch.distributed: nothing is numbered, the stacks say who waits."""
    quiet = snapshot((0, 1), phase="")
    for waiting in (REDUCE, ITEM):
        found = told(one(0, quiet, stack=waiting), one(1, quiet))
        assert [c.rank for c in found.suspects] == [1]
    head = told(one(0, quiet, stack=REDUCE), one(1, quiet, stack=ITEM)).text.splitlines()[0]
    assert "and rank 1 are waiting, in calls that are not numbered" in head
    head = told(one(0, quiet), one(1, quiet, stack=INSIDE)).text.splitlines()[0]
    assert "and rank 1 are in no call of ours" in head and "is not known" in head


ENGINE = """\
  File "/home/me/train.py", line 14, in step
    loss.backward()
  File "/x/torch/autograd/graph.py", line 980, in _engine_run_backward
    return Variable._execution_engine.run_backward(
"""
HOOK = f"{FOREIGN}:\n" + STACK


def at(line: str, file: str = "/home/me/train.py", function: str = "step") -> str:
    return f'  File "{file}", line 12, in {function}\n    {line}\n'


READS = ("float(loss)", "if bool(done):", "n = int(count)", "x = batch.to(device)", "x.cuda()")


@pytest.mark.parametrize("line", READS)
def test_on_a_device_who_reads_a_number_of_it_waits(line: str):
    assert is_waiting([at(line)], on_device=True)
    assert not is_waiting([at(line)])
    assert not is_waiting([at(line) + STACK], on_device=True), "only the innermost call counts"


def test_on_a_device_who_stands_where_kernels_are_issued_waits_for_room_in_the_queue():
    linear = at("return F.linear(x, w)", "/x/torch/nn/modules/linear.py", "forward")
    update = at("torch._foreach_add_(a, b)", "/x/torch/optim/adamw.py", "_multi_tensor_adamw")
    for stack in (linear, update, ENGINE):
        assert is_waiting([stack], on_device=True)
        assert not is_waiting([stack]), "a processor computes there"
    assert not is_waiting([STACK], on_device=True)


def test_making_a_communicator_is_waiting():
    made = at("pg._set_default_backend(b)", "/x/torch/distributed/distributed_c10d.py", "new_group")
    assert is_waiting([made]) and is_waiting([made], on_device=True)


def test_a_loop_in_the_engine_of_autograd_is_where_the_thread_of_autograd_is():
    assert innermost([ENGINE, HOOK]) == innermost([STACK])
    assert not is_waiting([ENGINE, HOOK], on_device=True)
    assert is_waiting([ENGINE, f"{FOREIGN}:\n{ITEM}"])
    assert innermost([ENGINE, f"thread loader:\n{STACK}"]) == innermost([ENGINE])
    busy_and_waiting = [ENGINE, f"{FOREIGN}:\n{ITEM}", HOOK]
    assert not is_waiting(busy_and_waiting), "one of two devices' threads does something else"


def test_who_is_stuck_in_a_hook_is_blamed_with_it():
    quiet = snapshot((0, 1), phase="backward", device=True)
    found = told(
        replace(one(0, quiet), stacks=(ENGINE, f"{FOREIGN}:\n{ITEM}")),
        replace(one(1, quiet), stacks=(ENGINE, HOOK)),
    )
    assert [c.rank for c in found.suspects] == [1]
    assert "is in its backward pass" in found.text.splitlines()[0]
    assert "in _engine_run_backward" in found.suspects[0].detail
    assert "time.sleep(60)" in found.suspects[0].detail


def test_who_is_behind_because_its_device_is_says_so():
    ahead = snapshot((0, 1), call("all_reduce", 7, "issued"), device=True)
    late = snapshot((0, 1), call("all_reduce", 6, "issued"), device=True, phase="backward")
    found = told(one(0, ahead), one(1, late, stack=at("if float(norm) > 1:")))
    head = found.text.splitlines()[0]
    assert tells(head, "rank 1", "node01", "1 other")


def test_where_all_have_issued_all_the_devices_are_stuck():
    """Nobody is behind, so no host is to blame, whatever its stack."""
    same = snapshot((0, 1), call("all_reduce", 7, "issued"), device=True)
    found = told(*(one(r, same, stack=x) for r, x in enumerate((ITEM, ENGINE))))
    head = found.text.splitlines()[0]
    assert [(c.rank, c.cause) for c in found.suspects] == [(0, Cause.CIRCLE)]
    assert "and rank 1 wait for their devices" in head and "different orders" in head
    alone = told(one(0, snapshot((0,), device=True), stack=ITEM)).text.splitlines()[0]
    assert "waits for its device: look for a kernel that does not end" in alone


def crash(operation: str) -> str:
    """As faulthandler writes it, of a rank that gloo aborts."""
    return (
        "Fatal Python error: Aborted\n\nThread 0x7f (most recent call first):\n"
        '  File "/x/torch/distributed/distributed_c10d.py", line 3252 in ' + operation + "\n"
        '  File "/x/torchdistpackage/comm/work.py", line 34 in now\n'
        '  File "/x/torchdistpackage/comm/primitives.py", line 197 in _' + operation + "\n"
        '  File "/x/torchdistpackage/comm/primitives.py", line 76 in ' + operation + "\n"
        '  File "/home/me/train.py", line 12 in <module>\n'
    )


def aborted(stack: str, *others: dict, group: tuple[int, ...] = (0, 1)) -> str:
    """The first line of the report, where rank 0 has crashed with `stack`."""
    gone = one(0, state=State.HERE)
    rest = [one(r, snapshot(group, other), neighbours={0: ""}) for r, other in enumerate(others, 1)]
    return told(gone, *rest, stacks={0: stack}).text.splitlines()[0]


def test_who_aborts_in_a_collective_is_told_with_what_the_others_brought():
    ours = call("all_reduce", 8, "failed", shape=[7])
    head = aborted(crash("all_reduce"), call("all_reduce", 8, "failed", shape=[7]))
    assert tells(head, "all_reduce", "number 8", "ranks 0, 1")
    assert "brought all_reduce float32[7] (rank 1)" in head and "comm.checked_calls()" in head
    head = aborted(crash("all_gather"), ours)
    assert head.startswith(
        "hang: rank 0 on node00 and rank 1 do not agree on collective number 8 of the data group "
        "of ranks 0, 1: it crashed (Fatal Python error: Aborted) inside all_gather, where the "
        "others have all_reduce float32[7] (rank 1)"
    )
    other = call("all_reduce", 8, shape=[3])
    head = aborted(crash("all_reduce"), ours, other, group=(0, 1, 2))
    assert "and ranks 1, 2 do not agree" in head
    assert "all_reduce float32[7] (rank 1), all_reduce float32[3] (rank 2)" in head


def test_a_crash_elsewhere_is_no_disagreement():
    ours = call("all_reduce", 8)
    elsewhere = 'Fatal Python error: Aborted\n  File "/home/me/train.py", line 9 in step\n'
    fault = crash("all_reduce").replace("Aborted", "Segmentation fault")
    for stack in (elsewhere, fault):
        assert "is gone: its process (100) has crashed (Fatal" in aborted(stack, ours)


def test_a_death_is_no_long_step():
    text = told(one(0, WAITING, neighbours={1: ""}, limit_s=60.0), one(1, state=State.HERE)).text
    assert "the longest step" not in text
    over = told(one(0, WAITING, limit_s=8.0), one(1, WAITING, limit_s=8.0)).text
    assert tells(over, "taken 9.0", "take 8")


def test_who_has_ended_its_loop_has_no_stack_of_ours():
    text = told(one(0, WAITING, stack=INSIDE), one(1, state=State.LEFT)).text
    assert "time.sleep(60)" not in text


def test_a_fork_of_a_watched_rank_can_end(tmp_path):
    """Its interpreter would wait for the thread of the timer, which only the parent has."""
    fd = f"os.open({str(tmp_path / 'stacks')!r}, os.O_RDWR | os.O_CREAT)"
    text = (
        "import os, sys\nfrom torchdistpackage.harness.hang.stacks import CStacks\n"
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
        "from torchdistpackage.harness.hang.shutdown import Shutdown\n"
        "from torchdistpackage.harness.hang.dump import Process\n"
        "worker = subprocess.Popen(['/bin/sh', '-c', 'sleep 60 & echo $!; wait'], stdout=-1)\n"
        "print(worker.stdout.readline().decode(), flush=True)\n"
        f"ending = Shutdown(Folder(Path({str(tmp_path)!r}), 'a'), 0, 1, None, None)\n"
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
