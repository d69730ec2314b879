"""Ranks that hang, each in its way. Started without a supervisor, so a watch alone can end them."""

import _thread
import ctypes
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch
import torch.distributed as dist

from torchdistpackage.comm import p2p, primitives
from torchdistpackage.comm.flight_recorder import recorder
from torchdistpackage.comm.runtime import setup_distributed
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.harness.hang import dump
from torchdistpackage.harness.hang.dump import from_json
from torchdistpackage.harness.watchdog import watch
from torchdistpackage.launch.process import SignalFlag
from torchdistpackage.launch.supervisor import WatchedRank, supervise
from torchdistpackage.parallel import context_attention
from torchdistpackage.parallel.context.merge import Merged

STEPS, AT = 50, 3
"""Length of the loop, and the step that goes wrong."""
LONG_S = 60


def start_a_worker() -> None:
    subprocess.Popen(["/bin/sleep", str(LONG_S)])


def load_for_ever() -> None:
    start_a_worker()
    recorder.phase = "data"
    time.sleep(LONG_S)


def compute_for_ever() -> None:
    threading.Event().wait(LONG_S)


def hold_the_interpreter() -> None:
    ctypes.PyDLL(None).sleep(LONG_S)


def stop() -> None:
    start_a_worker()
    os.kill(os.getpid(), signal.SIGSTOP)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise ValueError("this rank was told to fail")


def leave_by_exit() -> None:
    sys.exit(3)


def receive_from_the_next() -> None:
    world = tpc.get_group("global")
    p2p.receive(torch.zeros(5), world, (tpc.rank + 1) % world.size())


def do_something_else() -> None:
    primitives.all_gather(torch.zeros(7), tpc.get_group("data"))


def bring_another_shape() -> None:
    primitives.all_reduce(torch.zeros(50_000), tpc.get_group("data"))


def attend() -> None:
    x = torch.ones(1, 2, 4, 8, requires_grad=True)
    context_attention(x, x, x, is_causal=True).sum().backward()


def attend_for_ever() -> None:
    """With the first scores: keys and values are on their way to the others already."""
    with patch.object(Merged, "add", lambda *given: compute_for_ever()):
        attend()


def in_a_hook(what: Callable[[], object]) -> Callable[[], None]:
    """As on a device: autograd's thread, which Python did not start, runs it; the loop waits."""

    def _engine_run_backward() -> None:
        done = _thread.allocate_lock()
        done.acquire()
        _thread.start_new_thread(lambda: (what(), done.release()), ())
        done.acquire()

    return _engine_run_backward


def reduce_bare() -> None:
    dist.all_reduce(torch.zeros(2, 3))


def recorded(includeCollectives: bool, onlyActive: bool) -> bytes:
    """What NCCL's flight recorder would have, of a call that nobody ends."""
    entry = {"record_id": 4, "process_group": ["0", "default_pg"], "collective_seq_id": 41,
             "p2p_seq_id": 0, "profiling_name": "nccl:all_reduce", "is_p2p": False,
             "state": "scheduled" if dist.get_rank() else "started"}  # fmt: skip
    group = {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}
    return json.dumps({"entries": [entry], "pg_config": {"0": group}}).encode()


FAULTS: dict[str, dict[int, Callable[[], None]]] = {
    "loading": {1: load_for_ever},
    "computing": {2: compute_for_ever},
    "stopped": {0: stop},
    "alone": {0: stop},
    "killed": {0: die},
    "several": {0: stop, 1: die, 3: load_for_ever},
    "all": {0: load_for_ever, 1: load_for_ever, 2: load_for_ever},
    "raised": {1: fail},
    "lingering": {1: fail},
    "exits": {1: leave_by_exit},
    "first": {1: load_for_ever},
    "raw": {1: load_for_ever},
    "held": {0: hold_the_interpreter},
    "left": {},
    "circle": dict.fromkeys(range(3), receive_from_the_next),
    "operation": {0: do_something_else},
    "shape": {0: bring_another_shape},
    "attention": {0: attend, 1: attend, 2: attend, 3: attend_for_ever},
    "hooked": {0: in_a_hook(reduce_bare), 1: in_a_hook(load_for_ever)},
}
"""Name -> what ranks do in the step that goes wrong, before they go on as usual."""
AXES = {
    "several": [("data", 2), ("tensor", 2)],
    "computing": [("data", 2), ("tensor", 2)],
    "attention": [("data", 2), ("context", 2)],
}


def alone_on_its_host(case: str, folder: str, timeout_s: float) -> None:
    """As under srun with a rank a node: forked by a watcher, and not seen by the other ranks."""
    rank, own = int(os.environ["RANK"]), Path(folder)
    dump.socket = SimpleNamespace(gethostname=lambda: f"host{rank}")  # type: ignore[assignment]
    noted = SignalFlag()
    noted.listen(["TERM"])
    place = WatchedRank(rank, own / f"log{rank}", own / "failures")
    sys.exit(supervise(lambda: rank_main(case, folder, timeout_s) or 0, place, noted))


def rank_main(case: str, folder: str, timeout_s: float) -> None:
    """A rank of the case, up to its end; when its wrong step began stands in a file."""
    rank, world_size, *_ = setup_distributed()
    tpc.setup_process_groups(AXES.get(case, [("data", world_size)]))
    if case == "hooked":
        torch._C._distributed_c10d._dump_nccl_trace_json = recorded
    at, first_s = (1, timeout_s) if case == "first" else (AT, None)
    try:
        with watch(folder, timeout_s=timeout_s, first_timeout_s=first_s) as w:
            for step in range(1, AT if (case, rank) == ("left", 1) else STEPS):
                w.step()
                recorder.phase = "forward"
                if step == at:
                    Path(folder, f"wrong{rank}").write_text(str(time.time()))
                    FAULTS[case].get(rank, lambda: None)()
                if case in ("raw", "hooked"):
                    reduce_bare()
                    continue
                primitives.all_reduce(torch.zeros(2, 3), tpc.get_group("data"))
                primitives.all_reduce(torch.zeros(1), tpc.get_group("global"))
    finally:
        if case in ("lingering", "left"):
            time.sleep(LONG_S)


def well(case: str, folder: str, timeout_s: float) -> None:
    """A loop with slow parts that ends well."""
    rank, world_size, *_ = setup_distributed()
    tpc.setup_process_groups([("data", world_size)])
    with watch(folder, timeout_s=timeout_s) as w:
        for step in range(1, 5):
            w.step()
            if step == 1:
                time.sleep(1.5 * timeout_s)  # start-up has its own limit
            if step == 2 and (child := os.fork()) == 0:
                sys.exit(0)  # leaves the loop as well, but is no rank
            if step == 2:
                assert os.waitpid(child, 0)[1] == 0
                (mine,) = Path(folder).glob(f"hang.*/rank{rank}.dump")
                assert from_json(mine.read_text()).state == "here", "the fork does not speak for it"
            if step == 3:
                with w.allow_slow():
                    time.sleep(1.5 * timeout_s * rank)
                    primitives.barrier()
            primitives.barrier()
    primitives.barrier()


def paced(case: str, folder: str, timeout_s: float) -> None:
    """A loop of short steps, until others have stopped it for a while."""
    _, world_size, *_ = setup_distributed(init_timeout_s=LONG_S)
    tpc.setup_process_groups([("data", world_size)])
    with watch(folder, timeout_s=timeout_s) as w:
        last = None
        for step in itertools.count():
            w.step()
            if step == 10:
                Path(folder, "begun").touch()
            if last is None and primitives.gather_objects(Path(folder, "suspended").exists())[0]:
                last = step + 20
            if step == last:
                break
            end_s = time.thread_time() + 0.1
            while time.thread_time() < end_s:
                pass
            primitives.barrier()
