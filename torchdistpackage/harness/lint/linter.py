"""`lint`: a step of every rank, run as threads of this process, proved to be in one order.

One rule: the step is the real one. It talks over an in-memory transport that delivers, under
the strictest meaning that a transport may give its calls: within a group (matcher.py), and, once it
has come to its end, over all groups of a device (replay.py). The process is afterwards as it
was.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch.distributed as dist

from torchdistpackage.comm.tpc import tpc
from torchdistpackage.harness.lint import data_movement
from torchdistpackage.harness.lint.handles import LintContext
from torchdistpackage.harness.lint.matcher import LintGroup, Matcher
from torchdistpackage.harness.lint.replay import host_blocking, launch_order
from torchdistpackage.harness.lint.report import LintReport, group_kinds, group_name, rank_name
from torchdistpackage.harness.lint.thread_worlds import settings_kept, worlds
from torchdistpackage.harness.lint.threads import Threads
from torchdistpackage.harness.lint.transport import BACKEND, attach, carry
from torchdistpackage.topology.views import Size, Topology, topology

Axes = Topology | Mapping[str, int] | Sequence[tuple[str, Size]] | int
"""A topology, its axes outermost first, or a number of ranks along `data`."""


def lint(
    step: Callable[[int], object], axes: Axes, *, limit_s: float = 60.0, queued: bool = True
) -> LintReport:
    """Run `step(rank)` on every rank of a layout, each as a thread, and check all its calls.

    step: may call torch.distributed, the package's own functions, `tpc`, which is set up for
        each rank, executors, NaiveDDP or a whole trainer. Each rank has random numbers of its own,
        which all start where this process is.
    axes: the layout, such as `[("data", 2), ("pipe", 2)]`.
    limit_s: wall seconds after which the report says who still computes.
    queued: calls behave as on NCCL, the package takes the branches that it takes there, and groups
        connect at first use (replay.py). False: as on a back end that blocks and is connected.

    Proved is: the members of each group make the same calls on it in the same order (operation,
    shape, dtype, reduce operation, root), every message has its other end, and nobody waits in a
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
        board = Matcher(
            met=data_movement.deliver, matched=carry, done=lambda entry: threads.done(entry)
        )
        threads = Threads(size, board, name, limit_s)
        wire = LintContext(
            threads,
            LintGroup(range(size), "global"),
            queued,
            partial(group_name, layout),
            calls=[[] for _ in range(size)],
            traces=[[] for _ in range(size)],
        )
        store = dist.HashStore()

        def body(rank: int) -> object:
            torch_worlds.enter()
            attach(wire)
            dist.init_process_group(BACKEND, store=store, rank=rank, world_size=size)
            with tpc.isolated():
                tpc.setup(layout, rank)
                wire.start(rank)
                return step(rank)

        results = threads.run(body)
    return LintReport(
        topology=layout,
        finding=threads.finding
        or launch_order(wire.traces, name)
        or host_blocking(wire.traces, name, wire.setup or ()),
        kinds=group_kinds(group for _, group in wire.made.values()),
        results=tuple(results),
        calls=tuple(tuple((g.ranks, call, peer) for g, call, peer in c) for c in wire.calls),
    )


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
