"""`run_ranks`: one function on every rank of a layout, each rank a thread of this process.

The ranks communicate in memory, under the strictest order of calls within a group that a transport
may require (matcher.py). Afterwards the process is as it was.
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

    results: the result of `step` on each rank. finding: why some rank did not return, or None.
    name: returns a rank's name for messages. groups: all groups that were created. setup, traces:
    the calls of each rank before `step` and in it.
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

    limit_s: time limit in seconds; the finding then names the ranks that still compute.
    queued: True: calls behave as on NCCL, whose groups connect at first use; False: as on a back
        end that blocks and connects its groups from the start.

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
        groups=[group for _, group in context.created.values()],
        setup=context.setup,
        traces=context.traces,
    )
