"""`lint`: a step of every rank, run as threads of this process, proved to be in one order.

The step is the real one. It talks over an in-memory transport that delivers, under the strictest
meaning that a transport may give its calls: within a group (matcher.py), and, once it has come to
its end, over all groups of a device (replay.py). The process is afterwards as it was.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch.distributed as dist

from torchdistpackage.comm.tpc import tpc
from torchdistpackage.harness.lint.matcher import (
    CREATION,
    SPLIT,
    LintGroup,
    Matcher,
    OpSignature,
)
from torchdistpackage.harness.lint.replay import Trace, host_blocking, launch_order
from torchdistpackage.harness.lint.report import LintReport, group_kinds, group_name, rank_name
from torchdistpackage.harness.lint.threads import Threads, settings_kept, worlds
from torchdistpackage.harness.lint.transport import BACKEND, LintContext, attach, carry, deliver
from torchdistpackage.topology.views import Size, Topology, topology

Axes = Topology | Mapping[str, int] | Sequence[tuple[str, Size]] | int
"""A topology, its axes outermost first, or a number of ranks along `data`."""


def lint(
    step: Callable[[int], object], axes: Axes, *, limit_s: float = 60.0, queued: bool = True
) -> LintReport:
    """Run `step(rank)` on every rank of a layout, each as a thread, and check all its calls.

    step: may call torch.distributed, the package's own functions, `tpc`, which is set up for
        each rank, executors, NaiveDDP or a trainer. The random numbers of each rank start where
        this process is.
    axes: the layout, such as `[("data", 2), ("pipe", 2)]`.
    limit_s: wall seconds after which the report says who still computes.
    queued: calls behave as on NCCL, the package takes the branches that it takes there, and groups
        connect at first use (replay.py). False: as on a back end that blocks and is connected.

    Proved is: the members of each group make the same calls on it in the same order (operation,
    shape, dtype, reduce operation, root), every message has its other end, and no one waits in a
    circle, also where a device runs all that it was given, on whatever group, one by one.
    It holds for what this step did with its data, not for branches that it did not take.

    Raises:
        TopologyError: the axes are no layout.
        CommError: another lint is running in this process.
    """
    layout = _topology(axes)
    size = layout.world_size
    name = partial(rank_name, layout)
    with worlds() as torch_worlds, settings_kept():
        board = Matcher(met=deliver, matched=carry, done=lambda entry: threads.done(entry))
        threads = Threads(size, board, name, limit_s)
        context = LintContext(
            threads,
            LintGroup(range(size), "global"),
            queued,
            partial(group_name, layout),
            traces=[[] for _ in range(size)],
        )
        store = dist.HashStore()

        def body(rank: int) -> object:
            torch_worlds.enter()
            attach(context)
            dist.init_process_group(BACKEND, store=store, rank=rank, world_size=size)
            with tpc.isolated():
                tpc.setup(layout, rank)
                context.start(rank)
                return step(rank)

        results = threads.run(body)
    return LintReport(
        topology=layout,
        finding=threads.finding
        or launch_order(context.traces, name)
        or host_blocking(context.traces, name, context.setup),
        kinds=group_kinds(group for _, group in context.made.values()),
        results=tuple(results),
        calls=tuple(tuple(_calls(trace)) for trace in context.traces),
    )


def _calls(trace: Trace) -> Iterator[tuple[tuple[int, ...], OpSignature, int | None]]:
    for entry, is_wait in trace:
        if not is_wait and entry.call not in (CREATION, SPLIT):
            ranks = entry.group.ranks
            yield from ((ranks, m.call, m.peer) for m in entry.messages)
            if entry.call is not None:
                yield ranks, entry.call, None


def _topology(axes: Axes) -> Topology:
    if isinstance(axes, Topology):
        return axes
    if isinstance(axes, int):
        axes = [("data", axes)]
    pairs = list(axes.items()) if isinstance(axes, Mapping) else list(axes)
    world_size = 1
    for _, size in pairs:
        if isinstance(size, int | float) and size > 0:
            world_size *= int(size)
    return topology(pairs, world_size)
