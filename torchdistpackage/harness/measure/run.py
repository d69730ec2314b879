"""A rank's side of the bench: run each round, check what arrived, time ours and the bare call.

One rule: of each iteration the slowest rank counts, and all ranks know all figures, so every rank
arrives at the same report. All learn of a wrong element too, and stop.
"""

import getpass
import os
import socket
import statistics
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import cast

import torch

from torchdistpackage.comm import primitives
from torchdistpackage.comm.groups import connect
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.errors import CommError
from torchdistpackage.harness.bench.report import (
    CONCURRENT,
    ISOLATED,
    PAIRS,
    BenchReport,
    Measurement,
    Pairs,
    Row,
    rows_of,
)
from torchdistpackage.harness.bench.request import (
    ELEMENT_BYTES,
    Participants,
    Request,
    Round,
    all_at_once,
    link_of,
    one_by_one,
    tournament,
    units_of,
    whole_elements,
)
from torchdistpackage.harness.coded import compare
from torchdistpackage.harness.measure.operations import (
    MESSAGES,
    Call,
    UnitRank,
    expected,
    make_input,
    sync,
    sync_all,
    tdp_call,
    torch_call,
)
from torchdistpackage.harness.measure.timing import in_turns, join_sync
from torchdistpackage.harness.operations import COLLECTIVES

NUM_SIDES = 2
"""Of each call: ours and the bare one."""
KEPT = 3
"""Rows of times: ours, the bare call's, and what the host took to issue ours."""
Times = tuple[Participants, Sequence[float], Sequence[float], Sequence[float]]
"""A unit, and KEPT seconds by iteration; none for the host where it blocks in the call."""
Begin = Callable[[Measurement, Round], object]
"""Told of each round as it begins, on every rank."""


class DataCorruptionError(CommError):
    """Data arrived other than it was sent; all ranks raise it alike."""


def measure(request: Request, begin: Begin = lambda *_: None) -> BenchReport:
    """All that was asked for, over the groups of `tpc`; all ranks call it and get the same.

    Raises:
        DataCorruptionError: an element arrived wrong; on every rank, naming which.
        CommError: the backend failed.
        TopologyError: there is no group of a name in `request.over`.
    """
    user = user_name()  # before hours of measuring, after which nothing may fail any more
    hosts = tuple(cast(list[str], primitives.gather_objects(socket.gethostname())))
    found: list[Row] = []
    for cell, plan in _cells(request, hosts):
        times = [one for part in plan for one in _round(cell, part, request, begin)]
        links = {unit: link_of(unit, hosts) for unit, *_ in times}
        found += rows_of(cell, times, links)
    whole = tpc.get_group("global")
    return BenchReport(
        date=datetime.now().astimezone().isoformat(timespec="seconds"),
        by=f"{user}@{hosts[0]}",
        backend="nccl" if primitives.is_nccl(whole) else "gloo",
        device=_device_name(),
        torch=str(torch.__version__),
        topology=tpc.topology.dense.axes,
        hosts=hosts,
        iterations=request.iterations,
        warmup=request.warmup,
        rows=tuple(found),
        pairs=_pairs(request, len(hosts), begin) if request.pairs and len(hosts) > 1 else None,
    )


def user_name() -> str:
    """Of whoever runs this; the number where no variable and no passwd entry has a name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def _cells(request: Request, hosts: Sequence[str]) -> Iterator[tuple[Measurement, list[Round]]]:
    """What to measure in which rounds, the same on all ranks."""
    dense = tpc.topology.dense
    over = request.over or tuple(name for name, size in dense.axes if size > 1)
    for axis in over:
        groups = tpc.all_ranks(axis)
        connect(tpc.get_group(axis))  # a message of two needs the others once
        for operation in request.operations:
            units = units_of(groups, operation in MESSAGES)
            if not units:
                continue
            together = all_at_once(units)
            modes = {ISOLATED: one_by_one(units, hosts, request.isolated)}
            if any(len(part) > 1 for part in together) or not modes[ISOLATED]:
                modes[CONCURRENT] = together
            num_parts = len(units[0]) if COLLECTIVES[operation].in_parts else 1
            for mode, plan in modes.items():
                for dtype in request.dtypes:
                    for size_bytes in _counted(request.sizes_bytes, dtype, num_parts):
                        yield Measurement(axis, operation, mode, dtype, size_bytes), plan


def _counted(sizes_bytes: Sequence[int], dtype: str, num_parts: int) -> list[int]:
    """The sizes in whole elements, so that small ones may fall together."""
    sizes = [whole_elements(x, dtype, num_parts) * ELEMENT_BYTES[dtype] for x in sizes_bytes]
    return list(dict.fromkeys(sizes))


def _pairs(request: Request, num_ranks: int, begin: Begin) -> Pairs:
    """Each rank with each other one, as many at the same time as there can be."""
    dtype = request.dtypes[0]
    (size_bytes,) = _counted(request.sizes_bytes[-1:], dtype, 1)
    cell = Measurement(PAIRS, "p2p_both", CONCURRENT, dtype, size_bytes)
    times: list[tuple[int, int, float]] = []
    for part in tournament(num_ranks):
        for (a, b), mine, *_ in _round(cell, part, request, begin):
            times.append((a, b, statistics.median(mine)))
    return Pairs(size_bytes, dtype, tuple(sorted(times)))


def _round(cell: Measurement, part: Round, request: Request, begin: Begin) -> list[Times]:
    """Times of every unit of one round, known to all ranks.

    Raises:
        DataCorruptionError: some rank received other data than was sent, on all ranks alike.
    """
    begin(cell, part)
    number = request.iterations
    mine = next((unit for unit in part if tpc.rank in unit), None)
    wrong, seconds = "", [0.0] * (KEPT * number)
    everybody = sync_all() if len(part) > 1 else None
    if mine is not None:
        group = tpc.get_group("global" if cell.axis == PAIRS else cell.axis)
        place = UnitRank(mine, mine.index(tpc.rank), group)
        together = everybody if everybody is not None else sync(cell.operation, place)
        wrong, seconds = _run(cell, place, request, together)
    elif everybody is not None:
        join_sync(everybody, NUM_SIDES, iterations=number, warmup=request.warmup)
    whole = tpc.get_group("global")
    told = torch.tensor(
        [[float(bool(wrong)), *seconds]],
        dtype=torch.float64,
        device=primitives.device_of(whole),
    )
    # on a device the host must also wait: who is not in the unit is silent until it is done
    known = primitives.all_gather(told, whole).cpu()
    if bool(known[:, 0].any()):
        texts = [text for text in primitives.gather_objects(wrong) if text]
        raise DataCorruptionError(
            "data arrived wrong:\n  "
            + "\n  ".join(map(str, texts[:8]))
            + "\nfigures of such a network mean nothing; see tdp comm test, and these hosts"
        )
    found: list[Times] = []
    for unit in part:
        slowest = known[list(unit), 1:].amax(dim=0).tolist()
        mine_s, bare_s, host_s = (slowest[i * number :][:number] for i in range(KEPT))
        found.append((unit, mine_s, bare_s, host_s if told.is_cuda else ()))
    return found


def _run(
    cell: Measurement, place: UnitRank, request: Request, together: Call
) -> tuple[str, list[float]]:
    """What was wrong, or "", and times of this rank, KEPT rows of them."""
    dtype = getattr(torch, {"bf16": "bfloat16"}.get(cell.dtype, cell.dtype))
    kind = dtype, primitives.device_of(place.group)
    number = cell.size_bytes // ELEMENT_BYTES[cell.dtype]
    what = cell.operation, place.index, len(place.unit), number, kind

    def verify() -> str:
        got = tdp_call(cell.operation, make_input(*what), place)()
        wanted = expected(*what)
        if got is None or wanted is None or not (text := compare(got, wanted)):
            return ""
        return (
            f"{cell.operation} over {cell.axis} ranks {list(place.unit)}, {cell.size_bytes} bytes "
            f"of {cell.dtype}: rank {tpc.rank} on {socket.gethostname()} {text}"
        )

    wrong = verify()
    sides = [make(cell.operation, make_input(*what), place) for make in (tdp_call, torch_call)]
    mine, bare = in_turns(
        sides,
        together,
        kind[1],
        iterations=request.iterations,
        warmup=request.warmup,
    )
    after = verify()  # all take part in it, also who has found something already
    host_s = mine.host_s or [0.0] * request.iterations
    return wrong or after, mine.seconds + bare.seconds + host_s


def _device_name() -> str:
    on_cuda = primitives.is_nccl(tpc.get_group("global"))
    return torch.cuda.get_device_name() if on_cuda else "cpu"
