"""A rank's side of the bench: run each round, check what arrived, time ours and the bare call.

Of each iteration the slowest rank counts, and all ranks know all figures, so every rank arrives at
the same report. All learn of a wrong element too, and stop. A rank that does not come through a
round in time is named by the others (harness/guarded.py).

Calls are timed in turns: the host's seconds where a call blocks, the device's where it queues.
Nothing but the call is inside a time. Before each one its ranks meet, so that none is timed waiting
for a late peer or behind a full queue. Where several units are busy at the same time all of them
meet, or they would drift apart and each be measured alone. On a device the stream sleeps first,
then come the meeting and the call, which are so issued before either runs: no launch is inside a
time, and sleeps of unlike length end in the meeting.
"""

import getpass
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import cast

import torch

from torchdistpackage.comm import primitives
from torchdistpackage.comm.collective_table import COLLECTIVES
from torchdistpackage.comm.groups import connect
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.errors import CommError, TopologyError
from torchdistpackage.harness.bench.profile import MeasuredDevice, slowest
from torchdistpackage.harness.bench.report import (
    PAIRS,
    BenchReport,
    Measurement,
    Pair,
    Pairs,
    Row,
    Times,
    rows_of,
)
from torchdistpackage.harness.bench.request import (
    CONCURRENT,
    ELEMENT_BYTES,
    ISOLATED,
    Request,
    Round,
    all_at_once,
    link_of,
    one_by_one,
    tournament,
    units_of,
)
from torchdistpackage.harness.calls import (
    Call,
    GroupMember,
    compare,
    expected,
    make_input,
    sync,
    sync_all,
    tdp_call,
    torch_call,
)
from torchdistpackage.harness.device_speed import device_speed
from torchdistpackage.harness.guarded import GuardedThread, SharedStatus, run_guarded

NUM_SIDES = 2
"""Number of sides that each call is measured on: ours and the bare one."""
KEPT = 3
"""Rows of times: ours, the bare call's, and the host's time to issue ours."""
MARGIN_S = 60.0
"""Extra seconds that the backend waits beyond the watcher, because NCCL's limit ends the process
without a report.
"""
_LOOK_S, _SETTLE_S = 0.5, 3.0
Begin = Callable[[Measurement, Round], object]
"""Function called as each round begins, on every rank."""


class DataCorruptionError(CommError):
    """Raised when data arrived different from what was sent; all ranks raise it alike."""


def bench(request: Request) -> BenchReport | None:
    """Return the report on rank 0 and None on the others; raises as `watched`."""
    last = ""

    def say(cell: Measurement) -> None:
        nonlocal last
        line = f"measuring {cell.operation} over {cell.axis}\n"
        if tpc.rank == 0 and line != last:
            sys.stderr.write(line)
        last = line

    report = watched(request, on_round=say)
    return report if tpc.rank == 0 else None


def watched(
    request: Request, on_round: Callable[[Measurement], object] = lambda _: None
) -> BenchReport:
    """Run `measure`, each round of which must end within `request.timeout_s`.

    on_round: called as each one begins, in another thread.

    Raises:
        CommTestError: ranks did not come, or failed; names them and the operation.
        CommError: an element arrived wrong, on all ranks alike.
    """
    tpc.groups.set_timeout(request.timeout_s + MARGIN_S)
    if tpc.topology.world_size == 1:
        return measure(request)
    everyone = tuple(range(tpc.topology.world_size))
    reports: list[BenchReport] = []

    def run(thread: GuardedThread) -> None:
        def begin(cell: Measurement, part: Round) -> None:
            groups = f"ranks {list(part[0])}" if len(part) == 1 else f"{len(part)} groups at once"
            thread.begin(
                f"{cell.operation} over {cell.axis}, {groups}, {cell.size_bytes} bytes of "
                f"{cell.dtype}",
                everyone,
            )
            on_round(cell)

        thread.begin("the start of the bench", everyone)
        reports.append(measure(request, begin))

    run_guarded(
        run,
        SharedStatus("comm bench"),
        tpc.get_group("global"),
        limit_s=request.timeout_s,
        step_s=request.timeout_s,
        settle_s=_SETTLE_S,
        look_s=_LOOK_S,
        alike=(DataCorruptionError, TopologyError),
        title="the bench cannot go on",
    )
    return reports[0]


def measure(request: Request, begin: Begin = lambda *_: None) -> BenchReport:
    """Measure all that `request` asks for over the groups of `tpc`; all ranks call it and get the
    same report.

    Raises:
        DataCorruptionError: an element arrived wrong; on every rank, naming which.
        CommError: the backend failed.
        TopologyError: there is no group of a name in `request.over`.
    """
    user = user_name()  # before hours of measuring, after which nothing may fail any more
    hosts = tuple(cast(list[str], primitives.gather_objects(socket.gethostname())))
    rows: list[Row] = []
    for cell, plan in _cells(request, hosts):
        times = [seconds for part in plan for seconds in _round(cell, part, request, begin)]
        rows += rows_of(cell, times, {unit: link_of(unit, hosts) for unit, *_ in times})
    on_cuda = primitives.is_nccl(tpc.get_group("global"))
    speed = None
    if request.device:
        primitives.gather_objects("ready")  # all compute at once, as in a run
        speed = device_speed(on_cuda, sum(x == hosts[tpc.rank] for x in hosts))
        speed = slowest(cast(list[MeasuredDevice], primitives.gather_objects(speed)))
    return BenchReport(
        date=datetime.now().astimezone().isoformat(timespec="seconds"),
        by=f"{user}@{hosts[0]}",
        backend="nccl" if on_cuda else "gloo",
        device=torch.cuda.get_device_name() if on_cuda else "cpu",
        torch=str(torch.__version__),
        topology=tpc.topology.dense.axes,
        hosts=hosts,
        iterations=request.iterations,
        warmup=request.warmup,
        rows=tuple(rows),
        pairs=_pairs(request, len(hosts), begin) if request.pairs and len(hosts) > 1 else None,
        speed=speed,
    )


def user_name() -> str:
    """Return the user's name, or the user id where no variable and no passwd entry has a name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def _cells(request: Request, hosts: Sequence[str]) -> Iterator[tuple[Measurement, list[Round]]]:
    """Yield what to measure in which rounds, the same on all ranks."""
    over = request.over or tuple(name for name, size in tpc.topology.dense.axes if size > 1)
    for axis in over:
        groups = tpc.all_ranks(axis)
        connect(tpc.get_group(axis))  # a message of two needs the others once
        for operation in request.operations:
            spec = COLLECTIVES[operation]
            units = units_of(groups, spec.is_message)
            if not units:
                continue
            together = all_at_once(units)
            modes = {ISOLATED: one_by_one(units, hosts, request.isolated)}
            if any(len(part) > 1 for part in together) or not modes[ISOLATED]:
                modes[CONCURRENT] = together
            num_parts = len(units[0]) if spec.in_parts else 1
            for mode, plan in modes.items():
                for dtype in request.dtypes:
                    for size_bytes in request.counted_sizes(dtype, num_parts):
                        yield _cell(axis, operation, mode, dtype, size_bytes), plan


def _cell(axis: str, operation: str, mode: str, dtype: str, size_bytes: int) -> Measurement:
    return Measurement(
        axis=axis, operation=operation, mode=mode, dtype=dtype, size_bytes=size_bytes
    )


def _pairs(request: Request, num_ranks: int, begin: Begin) -> Pairs:
    """Measure each rank with each other one, with as many pairs at a time as possible."""
    dtype = request.dtypes[0]
    size_bytes = request.counted_sizes(dtype, 1)[-1]
    times_s = time_pairs(tournament(num_ranks), request, begin)
    times = {pair: statistics.median(times_s[pair]) for pair in sorted(times_s)}
    return Pairs(size_bytes=size_bytes, dtype=dtype, times=times)


def time_pairs(
    rounds: Sequence[Round], request: Request, begin: Begin = lambda *_: None
) -> dict[Pair, Sequence[float]]:
    """Return the seconds of each iteration of messages both ways, for each pair of the rounds.

    The largest size and the first dtype of `request` count. All ranks call it, with tpc set up.

    Raises:
        DataCorruptionError: an element arrived wrong; on every rank, naming which.
    """
    dtype = request.dtypes[0]
    size_bytes = request.counted_sizes(dtype, 1)[-1]
    cell = _cell(PAIRS, "p2p_both", CONCURRENT, dtype, size_bytes)
    return {
        (a, b): ours_s
        for part in rounds
        for (a, b), ours_s, *_ in _round(cell, part, request, begin)
    }


def _round(cell: Measurement, part: Round, request: Request, begin: Begin) -> list[Times]:
    """Return the times of every unit of one round, the same on all ranks.

    Raises:
        DataCorruptionError: some rank received other data than was sent, on all ranks alike.
    """
    begin(cell, part)
    number = request.iterations
    own_unit = next((unit for unit in part if tpc.rank in unit), None)
    wrong, seconds = "", [0.0] * (KEPT * number)
    everybody = sync_all() if len(part) > 1 else None
    if own_unit is not None:
        group = tpc.get_group("global" if cell.axis == PAIRS else cell.axis)
        member = GroupMember(group, own_unit, tpc.rank)
        together = everybody or sync(cell.operation, member)
        wrong, seconds = _run(cell, member, request, together)
    elif everybody is not None:
        join_sync(everybody, NUM_SIDES, iterations=number, warmup=request.warmup)
    world = tpc.get_group("global")
    row = torch.tensor(
        [[float(bool(wrong)), *seconds]],
        dtype=torch.float64,
        device=primitives.device_of(world),
    )
    # on a device the host must also wait: who is not in the unit is silent until it is done
    every_row = primitives.all_gather(row, world).cpu()
    if bool(every_row[:, 0].any()):
        texts = [text for text in primitives.gather_objects(wrong) if text]
        raise DataCorruptionError(
            "data arrived wrong:\n  "
            + "\n  ".join(map(str, texts[:8]))
            + "\nsuch a network cannot be measured; run tdp comm test, and look at these hosts"
        )
    times: list[Times] = []
    for unit in part:
        slowest = every_row[list(unit), 1:].amax(dim=0).tolist()
        ours_s, bare_s, host_s = (slowest[i * number :][:number] for i in range(KEPT))
        times.append((unit, ours_s, bare_s, host_s if row.is_cuda else ()))
    return times


def _run(
    cell: Measurement, member: GroupMember, request: Request, together: Call
) -> tuple[str, list[float]]:
    """Return an error or "", and KEPT rows of times of this rank."""
    like = member.like(getattr(torch, cell.dtype.replace("bf16", "bfloat16")))
    number = cell.size_bytes // ELEMENT_BYTES[cell.dtype]
    key = cell.operation, member.ranks, member.index, number, like

    def verify() -> str:
        result = tdp_call(cell.operation, make_input(*key), member)()
        expected_result = expected(*key)
        if (
            result is None
            or expected_result is None
            or not (text := compare(result, expected_result))
        ):
            return ""
        return (
            f"{cell.operation} over {cell.axis} ranks {list(member.ranks)}, {cell.size_bytes} "
            f"bytes of {cell.dtype}: rank {tpc.rank} on {socket.gethostname()} {text}"
        )

    wrong = verify()
    ours, bare = in_turns(
        [make(cell.operation, make_input(*key), member) for make in (tdp_call, torch_call)],
        together,
        like[1],
        iterations=request.iterations,
        warmup=request.warmup,
    )
    mismatch = verify()  # all take part in it, also who has found something already
    host_s = ours.host_s or [0.0] * request.iterations
    return wrong or mismatch, ours.seconds + bare.seconds + host_s


AnyCall = Callable[[], object]

HELD_S, LONGEST_S = 3e-4, 2e-2
"""Seconds for which a stream sleeps at first, and at most, where hosts take longer to issue a call.
"""


@dataclass
class CallTimes:
    """Times of one call, one for each iteration.

    host_s: time that the host took to issue the call; empty if the call blocks the host.
    """

    seconds: list[float] = field(default_factory=list[float])
    host_s: list[float] = field(default_factory=list[float])


def in_turns(
    calls: Sequence[AnyCall],
    together: AnyCall,
    device: torch.device,
    *,
    iterations: int,
    warmup: int,
) -> list[CallTimes]:
    """Return the times of each call on this rank.

    together: brings the ranks together, untimed. The order is turned from one iteration to the
    next, and `warmup` iterations go ahead that are not kept.
    """
    time_call = _DeviceTimer().time if device.type == "cuda" else _time_blocking
    times = [CallTimes() for _ in calls]
    order = list(range(len(calls)))
    for turn in range(-warmup, iterations):
        for i in order:
            time_call(calls[i], together, times[i] if turn >= 0 else CallTimes())
        order.append(order.pop(0))
    return times


def join_sync(together: AnyCall, num_calls: int, *, iterations: int, warmup: int) -> None:
    """Take part in the barriers of `in_turns` with so many calls, on a rank that has none to
    time.
    """
    for _ in range(num_calls * (warmup + iterations)):
        together()


def _time_blocking(call: AnyCall, together: AnyCall, times: CallTimes) -> None:
    together()
    times.seconds.append(_host_s(call))


class _DeviceTimer:
    """Times calls by events on the current stream, which waits for the result of each call."""

    def __init__(self) -> None:
        self._cycles_per_s = _cycles_per_s()
        self._held_s = HELD_S

    def time(self, call: AnyCall, together: AnyCall, times: CallTimes) -> None:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # keep the device busy until the call is issued, so that its launch is not measured
        torch.cuda._sleep(int(self._held_s * self._cycles_per_s))
        together()
        begin.record()
        times.host_s.append(_host_s(call))
        if begin.query():  # the device reached it before the host had issued the call
            self._held_s = min(2 * self._held_s, LONGEST_S)
        end.record()
        end.synchronize()  # the next iteration starts on an empty queue
        times.seconds.append(begin.elapsed_time(end) / 1e3)


def _host_s(call: AnyCall) -> float:
    begin_s = time.perf_counter()
    call()
    return time.perf_counter() - begin_s


def _cycles_per_s() -> float:
    """Return how many cycles torch's sleeping kernel takes in a second."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    cycles = 1_000_000
    torch.cuda._sleep(cycles)  # the first launch loads the kernel
    begin.record()
    torch.cuda._sleep(cycles)
    end.record()
    # elapsed_time raises for an event that has not passed
    end.synchronize()
    return cycles / (begin.elapsed_time(end) / 1e3)
