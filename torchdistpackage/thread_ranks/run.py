"""`run_ranks`: one function on every rank of a layout, each rank a thread of this process.

The ranks talk over an in-memory transport that delivers, under the strictest meaning that a
transport may give its calls within a group (matcher.py). The process is afterwards as it was.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch.distributed as dist

from torchdistpackage.comm.tpc import tpc
from torchdistpackage.thread_ranks.findings import Finding, Name, group_name, rank_name
from torchdistpackage.thread_ranks.matcher import LintGroup, Matcher, PendingOp
from torchdistpackage.thread_ranks.threads import Threads, settings_kept, worlds
from torchdistpackage.thread_ranks.transport import BACKEND, LintContext, attach, carry, deliver
from torchdistpackage.topology.mesh import Topology

Trace = Sequence[tuple[PendingOp, bool]]
"""A rank's entries in order, each with True if the rank waited for it, and False if it issued it.
"""


@dataclass(frozen=True)
class RankResults:
    """The results of a run.

    results: what `step` returned on each rank. finding: why the ranks did not all return, or None.
    name: a rank as people call it. groups: all that were made. setup, traces: the calls of each
    rank before and in `step`.
    """

    results: Sequence[object]
    finding: Finding | None
    name: Name
    groups: Sequence[LintGroup]
    setup: Sequence[Trace]
    traces: Sequence[Trace]


def run_ranks(
    step: Callable[[int], object], layout: Topology, *, limit_s: float, queued: bool
) -> RankResults:
    """Run `step(rank)` on every rank of `layout`, for which `tpc` is set up.

    limit_s: wall seconds after which the finding says who still computes. queued: calls behave as
        on NCCL, and groups connect at first use; False: as on a back end that blocks and is
        connected.

    Raises:
        CommError: other ranks are running as threads of this process.
    """
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
    return RankResults(
        results=tuple(results),
        finding=threads.finding,
        name=name,
        groups=[group for _, group in context.made.values()],
        setup=context.setup,
        traces=context.traces,
    )
