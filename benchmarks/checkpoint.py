"""Saves and loads on two ranks beside torch.distributed.checkpoint, and the bare bytes of each.

One rule: every ratio is of two times that were taken in turns in one run, on one disk.

    python -m benchmarks.checkpoint --folder DISK
    python -m benchmarks.checkpoint --full          4 GB, three rounds, without local copies

save        sharded, in turn; peer: `dcp.save`; limit: the same bytes written and flushed
blocked     how long an asynchronous save keeps training, also as a copy on each of two nodes;
            peer: `dcp.async_save`; limit: a copy
load        from files that are not in memory, checksums included; peer: `dcp.load`; limit: a read
steps       a step of training while a save is written, over a quiet one; limit: beside a raw write
memory      of a process after 20 asynchronous saves, over that after 2
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from benchmarks.common import in_turns, local, rows, show, slowest, write
from torchdistpackage.checkpoint.load import load
from torchdistpackage.checkpoint.local_copies import LocalCopies
from torchdistpackage.checkpoint.local_work import LocalWork
from torchdistpackage.checkpoint.retention import Retention
from torchdistpackage.checkpoint.save import SharedFolder, save, start_save
from torchdistpackage.checkpoint.snapshot import HostCopies
from torchdistpackage.comm.runtime import leave, setup_distributed
from torchdistpackage.layout.layout import Layout
from torchdistpackage.topology.mesh import topology

WIDTH = 1024
NODE = "BENCHMARK_NODE"
"""Variable with the node of a rank."""
STEP_S = 0.15
"""What a step of the quiet measurement takes, about."""


class State:
    """A rank's half of a state of `total_bytes`: squares of float32, split along the first dim."""

    def __init__(self, total_bytes: int):
        size, self.rank = dist.get_world_size(), dist.get_rank()
        number = total_bytes // (4 * WIDTH * WIDTH)
        self.world = topology((("tensor", size),), size)
        shape = (WIDTH // size, WIDTH)
        layout = Layout("w", (WIDTH, WIDTH), (("tensor",), ()))
        self.params = {
            f"w{i}": (nn.Parameter(torch.randn(shape)), layout.named(f"w{i}"))
            for i in range(number)
        }
        self.tensors: dict[str, Tensor] = {
            f"{name}.{self.rank}": p.detach() for name, (p, _) in self.params.items()
        }

    @property
    def how(self) -> dict[str, object]:
        return {"params": self.params, "topology": self.world, "rank": self.rank}


def forget(folder: Path) -> None:
    """Have no page of these files in memory."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def measured(folder: Path, total_bytes: int, rounds: int, with_local: bool) -> dict[str, object]:
    """All sides on one rank: name -> seconds of each round.

    with_local: also copies on nodes, of which each rank is one; they take six times the bytes.
    """
    setup_distributed()
    warnings.filterwarnings("ignore", category=UserWarning)  # of DCP, on every call
    state = State(total_bytes)
    own = folder / f"own{state.rank}"
    own.mkdir(exist_ok=True)
    copies, pending = HostCopies(), list[Any]()
    plain = {name: torch.empty_like(x) for name, x in state.tensors.items()}
    peer_pending: list[object] = []
    count = 0
    os.environ[NODE] = str(state.rank)
    disks = LocalCopies(f"{folder.resolve()}/disk${NODE}", folder / "run", "run")
    disks.begin()

    def step() -> int:
        nonlocal count
        count += 1
        return count

    def ours() -> None:
        save(folder / "ours", step=step(), tokens=0, keep_last=1, **state.how)

    def peer() -> None:
        dcp.save(state.tensors, checkpoint_id=str(folder / "dcp"))

    def raw() -> None:
        with (own / "raw").open("wb", buffering=0) as file:
            for x in state.tensors.values():
                file.write(memoryview(x.reshape(-1).view(torch.uint8).numpy()))
            os.fsync(file.fileno())

    def copy() -> None:
        for name, x in state.tensors.items():
            plain[name].copy_(x)

    def begin() -> None:
        how = {"tokens": 0, "copies": copies, **state.how}
        target = SharedFolder(folder / "async", Retention())
        pending.append(start_save(target, step=step(), **how))

    def begin_local() -> None:
        how = {"tokens": 0, "copies": copies, **state.how}
        pending.append(start_save(disks, step=step(), **how))

    def begin_raw() -> None:
        pending.append(RawWrite(raw))

    def peer_begin() -> None:
        peer_pending.append(dcp.async_save(state.tensors, checkpoint_id=str(folder / "dcpasync")))

    def settle() -> None:
        """Nothing under way any more, and nothing in memory that a load could find."""
        while pending:
            pending.pop().finish()
        while peer_pending:
            peer_pending.pop().result()  # type: ignore[attr-defined]
        for name in ("ours", "dcp", f"own{state.rank}"):
            forget(folder / name)
        dist.barrier()

    def ours_load() -> None:
        load(max((folder / "ours").glob("step_*")), **state.how)

    def peer_load() -> None:
        dcp.load(state.tensors, checkpoint_id=str(folder / "dcp"))

    def raw_load() -> None:
        with (own / "raw").open("rb", buffering=0) as file:
            for x in plain.values():
                file.readinto(memoryview(x.reshape(-1).view(torch.uint8).numpy()))

    sides: dict[str, Callable[[], None]] = {
        "save": ours,
        "save, dcp": peer,
        "save, raw write": raw,
        "blocked": begin,
        "blocked, dcp": peer_begin,
        "blocked, bare copy": copy,
        **({"blocked, local copy": begin_local} if with_local else {}),
    }
    times = in_turns(sides, rounds, settle)
    loads = {"load": ours_load, "load, dcp": peer_load, "load, raw read": raw_load}
    times |= in_turns(loads, rounds, settle)
    settle()
    disks.close()
    steps = step_times({"beside": begin, "beside, raw write": begin_raw}, pending, rounds)
    memory = [used_after(number, begin, pending) for number in (2, 18)]
    leave()
    return {"times": times, "steps": steps, "memory": memory}


class RawWrite(LocalWork[None]):
    """The bytes alone, written as a save's are: in a thread that comes after the steps."""

    def __init__(self, write: Callable[[], None]):
        super().__init__(write, in_thread=True)

    def agree(self) -> bool:
        return True


def step_times(
    beginnings: dict[str, Callable[[], None]], pending: list[Any], rounds: int
) -> dict[str, list[float]]:
    """Seconds of steps, by turns with nothing ("quiet") and with each of these under way."""
    x = torch.randn(512, 512)

    # a step of fixed work: as many products as fit into STEP_S when it is quiet
    began, number = time.perf_counter(), 0
    while time.perf_counter() - began < STEP_S:
        x.mm(x)
        number += 1
    agreed = torch.tensor([number])
    dist.all_reduce(agreed, op=dist.ReduceOp.MIN)

    def one() -> float:
        began = time.perf_counter()
        for _ in range(int(agreed)):
            x.mm(x)
        word = torch.tensor([float(not pending or pending[0].is_done)])
        dist.all_reduce(word)
        took = time.perf_counter() - began
        if pending and word.item() == dist.get_world_size() and pending[0].agree():
            pending.pop()
        return took

    found = {name: list[float]() for name in ("quiet", *beginnings)}
    for _ in range(rounds):
        found["quiet"].append(statistics.median(one() for _ in range(4)))
        for name, begin in beginnings.items():
            begin()
            during = list[float]()
            while pending:
                during.append(one())
            found[name].append(statistics.fmean(during))
            dist.barrier()
    return found


def used_after(number: int, begin: Callable[[], None], pending: list[Any]) -> int:
    """Anonymous memory of this process in bytes after `number` more saves."""
    for _ in range(number):
        begin()
        pending.pop().finish()
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="a folder on the disk to measure")
    parser.add_argument("--full", action="store_true", help="4 GB instead of 400 MB")
    asked = parser.parse_args()
    total_bytes, rounds = (4 << 30, 3) if asked.full else (400 << 20, asked.rounds)
    folder = Path(tempfile.mkdtemp(dir=asked.folder))
    try:
        found = local(measured, folder, total_bytes, rounds, not asked.full)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    table = rows(slowest([rank["times"] for rank in found]))
    for part, peer in (("save", "dcp"), ("blocked", "bare copy"), ("load", "dcp")):
        named = {name: row for name, row in table.items() if name.partition(",")[0] == part}
        show(f"{part}, {total_bytes / 1e6:.0f} MB on 2 ranks", named, "ms", f"{part}, {peer}")
    times = slowest([rank["times"] for rank in found])
    steps = slowest([rank["steps"] for rank in found])
    judged = {
        "save / dcp": (ratio(times, "save", "save, dcp"), 0.75),
        **{
            f"{side} - bare copy, ms": (1e3 * beyond(times, side, "blocked, bare copy"), 20.0)
            for side in ("blocked", "blocked, local copy")
            if side in times
        },
        "load / dcp": (ratio(times, "load", "load, dcp"), 0.80),
        "step beside / quiet": (ratio(steps, "beside", "quiet"), 1.05),
        "memory after 20 / 2": (max(r["memory"][1] / r["memory"][0] for r in found), 1.05),
    }
    print()
    for name, (value, bar) in judged.items():
        print(f"{name:36}{value:8.2f}   at most {bar:g}: {'yes' if value <= bar else 'NO'}")
    limits = {
        "raw write / dcp": ratio(times, "save, raw write", "save, dcp"),
        "step beside a raw write / quiet": ratio(steps, "beside, raw write", "quiet"),
    }
    for name, value in limits.items():
        print(f"{name:36}{value:8.2f}   limit of this disk and these cores")
    bars = {name: {"value": value, "bar": bar} for name, (value, bar) in judged.items()}
    write(asked.json, {"bytes": total_bytes, "times_ms": table, "bars": bars, "limits": limits})


def beyond(times: dict[str, list[float]], one: str, other: str) -> float:
    """Median of the differences round by round."""
    return statistics.median(a - b for a, b in zip(times[one], times[other], strict=True))


def ratio(times: dict[str, list[float]], one: str, other: str) -> float:
    """Median of the ratios round by round."""
    pairs = zip(times[one], times[other], strict=True)
    return statistics.median(a / b for a, b in pairs)


if __name__ == "__main__":
    main()
