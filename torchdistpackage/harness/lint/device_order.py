"""Whether all ends if each device runs what it is given one by one, whatever the groups.

One rule: it is the board once more, with one queue a rank instead of one a rank and group. NCCL
asks for it: kernels of several communicators wait on a device for room that others hold, so
groups whose ranks issue on them in different orders may stop for ever, though each group sees one
order. What ends with one queue ends with several, for a queue only ever holds back. No torch.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from torchdistpackage.harness.lint.explain import Finding, Name, disagreement, stuck
from torchdistpackage.harness.lint.matcher import (
    CREATION,
    SPLIT,
    Disagreement,
    LintGroup,
    Matcher,
    P2POp,
    PendingOp,
    Queues,
)

Trace = Sequence[tuple[PendingOp, bool]]
"""What a rank did, in order: an entry, and whether it waited for it (or else issued it)."""

HEAD = (
    "ranks issue on groups that they share in different orders; a device that runs what it is "
    "given one by one, as NCCL may, stops for ever. Issue in one order on all ranks, or wait for "
    "the first before the second:\n"
)


def launch_order(traces: Sequence[Trace], name: Name) -> Finding | None:
    """What stops if all that ranks did, which came to its end, is run with one queue a rank."""
    queues: Queues = {rank: deque() for rank in range(len(traces))}
    # hosts make groups, and no device
    on_device = [[(e, w) for e, w in t if not {CREATION, SPLIT} & set(e.calls)] for t in traces]

    def again(old: LintGroup) -> LintGroup:
        """What goes through host memory holds no device up."""
        return LintGroup(old.ranks, old.name, None if old.in_host else queues)

    groups = groups_again(on_device, again)

    def runs(board: Matcher) -> list[Iterator[PendingOp]]:
        return [replay(board, trace, groups) for trace in on_device]

    found = drive(runs, list(groups.values()), name)
    return None if found is None else replace(found, kind="launch order", text=HEAD + found.text)


def drive(
    start: Callable[[Matcher], Sequence[Iterator[PendingOp]]],
    groups: Sequence[LintGroup],
    name: Name,
) -> Finding | None:
    """Run every rank's calls on a board; a rank gives each entry that it waits for."""
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
    except Disagreement as found:
        return disagreement(found, name)
    left = [board.waiting[rank] for rank in sorted(board.waiting)] or board.leftovers(groups)
    return stuck(board, left, name) if left else None


def groups_again(
    traces: Sequence[Trace], again: Callable[[LintGroup], LintGroup]
) -> dict[LintGroup, LintGroup]:
    """For each group in the traces the one that stands for it."""
    old = dict.fromkeys(entry.group for trace in traces for entry, _ in trace)
    return {group: again(group) for group in old}


def replay(
    board: Matcher,
    trace: Trace,
    groups: dict[LintGroup, LintGroup],
    before: Callable[[PendingOp, Sequence[P2POp]], Iterator[PendingOp]] | None = None,
) -> Iterator[PendingOp]:
    """The same entries on other groups; gives those that are waited for.

    before: what else is waited for when an entry with these messages comes.
    """
    new: dict[PendingOp, PendingOp] = {}
    for entry, is_wait in trace:
        if is_wait:
            yield new[entry]
            continue
        parts = entry.messages
        again = new[entry] = PendingOp(
            *(entry.rank, groups[entry.group], entry.calls, len(parts), entry.where),
            channel=entry.channel,
            is_batch=entry.is_batch,
        )
        if before is not None:
            yield from before(again, parts)
        board.issue(again)
        for m in parts:
            board.post(again, P2POp(m.call, m.source, m.target, m.tag, m.where))
