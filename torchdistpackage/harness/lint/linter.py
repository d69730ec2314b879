"""`lint`: a step of every rank, run as threads of this process, proved to be in one order.

The step is the real one. It talks over an in-memory transport that delivers, under the strictest
meaning that a transport may give its calls: within a group (matcher.py), and, once it has come to
its end, by two checks that run once more what all ranks did. The process is afterwards as it was.

In the first a device runs what it is given one by one, whatever the groups: one queue a rank
instead of one a rank and group. NCCL asks for it: kernels of several communicators wait on a device
for room that others hold, so groups whose ranks issue on them in different orders may stop for
ever, though each group sees one order. What ends with one queue ends with several.

In the second a host stops before a call for which NCCL connects, whether or not it waits for the
call: the first collective or batch of a group for all members, since a communicator is made there;
the first message one way between two ranks for the other end. What else blocks (the making of a
group, what a rank waits for) blocks here too.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from torchdistpackage.harness.lint.report import LintReport, group_kinds
from torchdistpackage.thread_ranks.findings import Finding, Name, disagreement, stuck
from torchdistpackage.thread_ranks.matcher import (
    CREATION,
    SPLIT,
    Disagreement,
    LintGroup,
    Matcher,
    OpSignature,
    P2POp,
    PendingOp,
    Queues,
)
from torchdistpackage.thread_ranks.run import Trace, run_ranks
from torchdistpackage.topology.mesh import Size, Topology, topology

Before = Callable[[PendingOp, Sequence[P2POp]], Iterator[PendingOp]]
"""Yields the entries that are waited for before an entry with these messages is issued."""
Groups = dict[LintGroup, LintGroup]
"""Maps each group in the traces to the group that stands for it."""

FIRST_USE = OpSignature("first use")
CONNECTS = (("connects", "the pair"),)

_LAUNCH_ORDER = (
    "ranks issue on groups that they share in different orders; a device that runs what it is "
    "given one by one, as NCCL may, stops for ever. Issue in one order on all ranks, or wait for "
    "the first before the second:\n"
)
_FIRST_USE = (
    "the first call of a group stops the host on NCCL until its members come to theirs, and ranks "
    "that do so wait for ever. Connect groups when they are made, or let all members make their "
    "first call at one point:\n"
)


def launch_order(traces: Sequence[Trace], name: Name) -> Finding | None:
    """Replay the calls of a finished run with one queue for each rank; return a deadlock or
    None.
    """
    queues: Queues = {rank: deque() for rank in range(len(traces))}
    # hosts make groups, and no device; what goes through host memory holds no device up
    on_device = [[(e, w) for e, w in t if e.call not in (CREATION, SPLIT)] for t in traces]
    groups = {
        old: LintGroup(old.ranks, old.name, None if old.in_host else queues)
        for old in _groups(on_device)
    }

    def runs(board: Matcher) -> list[Iterator[PendingOp]]:
        return [_replay(board, trace, groups) for trace in on_device]

    finding = drive(runs, list(groups.values()), name)
    return finding and replace(finding, kind="launch order", text=_LAUNCH_ORDER + finding.text)


def host_blocking(
    traces: Sequence[Trace], name: Name, earlier: Sequence[Trace] = ()
) -> Finding | None:
    """Replay the calls of a finished run with hosts that block to connect a group.

    Returns a deadlock, or None.

    earlier: calls before a point that all ranks have passed.
    """
    if earlier and (finding := host_blocking(earlier, name)):
        return finding
    groups = {old: LintGroup(old.ranks, old.name, lazy=old.lazy) for old in _groups(traces)}
    for old, new in groups.items():
        new.eager = old.eager

    def runs(board: Matcher) -> list[Iterator[PendingOp]]:
        connections = Connections(board)
        for trace in earlier:
            for entry, _ in trace:
                if entry.group in groups:
                    connections.note(entry, groups[entry.group], entry.messages)
        return [_replay(board, trace, groups, connections.before) for trace in traces]

    finding = drive(runs, list(groups.values()), name)
    return finding and replace(finding, kind="first use", text=_FIRST_USE + finding.text)


def drive(
    start: Callable[[Matcher], Sequence[Iterator[PendingOp]]],
    groups: Sequence[LintGroup],
    name: Name,
) -> Finding | None:
    """Run every rank's calls on a board; a rank yields each entry that it waits for."""
    ready: deque[int] = deque()

    def done(entry: PendingOp) -> None:
        if board.waiting.get(entry.rank) is entry:
            del board.waiting[entry.rank]
            ready.append(entry.rank)

    board = Matcher(done=done)
    runs = start(board)
    ready.extend(range(len(runs)))
    try:
        while ready:
            rank = ready.popleft()
            entry = next(runs[rank], None)
            if entry is None:
                board.ended.add(rank)
            elif entry.done:
                ready.append(rank)
            else:
                board.waiting[rank] = entry
    except Disagreement as mismatch:
        return disagreement(mismatch, name)
    unmatched = [board.waiting[rank] for rank in sorted(board.waiting)] or board.leftovers(groups)
    return stuck(board, unmatched, name) if unmatched else None


def _groups(traces: Sequence[Trace]) -> list[LintGroup]:
    return list(dict.fromkeys(entry.group for trace in traces for entry, _ in trace))


def _replay(
    board: Matcher, trace: Trace, groups: Groups, earlier: Before | None = None
) -> Iterator[PendingOp]:
    """Issue the same entries on other groups; yield those that are waited for."""
    new: dict[PendingOp, PendingOp] = {}
    for entry, is_wait in trace:
        if is_wait:
            yield new[entry]
            continue
        parts = entry.messages
        again = new[entry] = PendingOp(
            entry.rank,
            groups[entry.group],
            entry.call,
            len(parts),
            entry.where,
            channel=entry.channel,
            is_batch=entry.is_batch,
        )
        if earlier is not None:
            yield from earlier(again, parts)
        board.issue(again)
        for m in parts:
            board.post(again, P2POp(m.call, m.source, m.target, m.tag, m.where))


class Connections:
    """Connections that each rank has made so far, and the entries in which it makes them."""

    def __init__(self, board: Matcher):
        self._board = board
        self._meetings: Groups = {}
        self._known: set[tuple[int, LintGroup]] = set()
        self._pairs: set[tuple[int, LintGroup, int | None, int]] = set()

    def before(self, entry: PendingOp, messages: Sequence[P2POp]) -> Iterator[PendingOp]:
        """Yield the entries that are waited for before this one is issued. messages: messages of
        the entry.
        """
        rank, group = entry.rank, entry.group
        if not group.lazy or len(group.ranks) == 1:
            return
        connects, new = self.note(entry, group, messages)
        if not connects and not new:
            return
        # where members of a group meet to connect it, besides its own queue
        meeting = self._meetings.setdefault(group, LintGroup(group.ranks, group.name))
        if connects:
            first = PendingOp(rank, meeting, FIRST_USE, where=entry.where)
            self._board.issue(first)
            yield first
        if new:
            pairs = PendingOp(rank, meeting, None, len(new), entry.where)
            self._board.issue(pairs)
            for m in new:
                call = OpSignature(m.call.operation, CONNECTS)
                self._board.post(pairs, P2POp(call, m.source, m.target, where=m.where))
            yield pairs

    def note(
        self, entry: PendingOp, group: LintGroup, messages: Sequence[P2POp]
    ) -> tuple[bool, list[P2POp]]:
        """Return whether the entry connects `group`, and which of its messages connect a pair."""
        rank = entry.rank
        connects = entry.call is not None or (entry.is_batch and rank not in group.eager)
        connects = connects and (rank, group) not in self._known
        if connects:
            self._known.add((rank, group))
        new: list[P2POp] = []
        for m in messages:
            key = rank, group, m.source, m.target
            if m.source is not None and key not in self._pairs:
                self._pairs.add(key)
                new.append(m)
        return connects, new


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
        connect at first use (linter.py). False: as on a back end that blocks and is connected.

    Proved is: the members of each group make the same calls on it in the same order (operation,
    shape, dtype, reduce operation, root), every message has its other end, and no one waits in a
    circle, also where a device runs all that it was given, on whatever group, one by one.
    It holds for what this step did with its data, not for branches that it did not take.

    Raises:
        TopologyError: the axes are not a layout.
        CommError: another lint is running in this process.
    """
    layout = _topology(axes)
    run = run_ranks(step, layout, limit_s=limit_s, queued=queued)
    return LintReport(
        topology=layout,
        finding=run.finding
        or launch_order(run.traces, run.name)
        or host_blocking(run.traces, run.name, run.setup),
        kinds=group_kinds(run.groups),
        results=run.results,
        calls=tuple(tuple(_calls(trace)) for trace in run.traces),
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
