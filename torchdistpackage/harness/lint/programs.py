"""Calls on paper: every rank's program of calls, run on the board without data.

One rule: a program says what a rank issues in order and where it waits; whether all programs
together come to their end is found out by running them, by the rules of `matcher.py`. No torch.

Ranks share operations: what two of them do alike is one tuple, and a run of collectives that
block one by one on one group is one meeting, so that thousands of ranks take seconds.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torchdistpackage.harness.lint.device_order import as_launch_order, drive, one_queue
from torchdistpackage.harness.lint.explain import Finding
from torchdistpackage.harness.lint.host import Before, Connections, Making, as_first_use
from torchdistpackage.harness.lint.matcher import LintGroup, Matcher, OpSignature, P2POp, PendingOp
from torchdistpackage.harness.lint.report import LintReport, group_kinds, group_name, rank_name
from torchdistpackage.layout.groups import Creation
from torchdistpackage.topology.views import Topology


@dataclass(frozen=True, slots=True)
class Collective:
    """Calls on one of the rank's groups, by the name that the program gives it.

    calls: one, or several that follow each other; blocks: each is waited for before what comes next
    (otherwise at the next `WaitAll`). label: what the rank is at, such as `2F5`.
    """

    group: str
    calls: tuple[OpSignature, ...]
    blocks: bool = True
    label: str = ""


@dataclass(frozen=True, slots=True)
class ProgramMessage:
    """One message: to, or from, the rank at `peer` in the order of the group."""

    call: OpSignature
    peer: int


@dataclass(frozen=True, slots=True)
class Messages:
    """Messages that go together, waited for before what comes next: stricter than any executor
    is, and so a proof for all.

    channel: of one message that has a road of its own (see matcher.py), and is not waited for.
    """

    group: str
    parts: tuple[ProgramMessage, ...]
    label: str = ""
    channel: Hashable = None


@dataclass(frozen=True, slots=True)
class WaitAll:
    """Until all that does not block is done, in the order in which it was issued."""


@dataclass(frozen=True, slots=True)
class Make:
    """The making of one of the rank's groups, for which its members wait for each other.

    connects: it is connected from then on; otherwise its first calls stop hosts (host.py).
    split: it is split from the world, by all ranks together, each of which makes its next one.
    """

    group: str
    connects: bool = True
    split: bool = False


Op = Collective | Messages | WaitAll | Make


@dataclass(frozen=True, slots=True)
class CallProgram:
    """What one rank does. groups: its groups by the names in `ops`: (ranks, use), where two groups
    of the same ranks for different uses are two."""

    ops: tuple[Op, ...]
    groups: Mapping[str, tuple[Sequence[int], str]]


def check(
    programs: Sequence[CallProgram], topology: Topology, unknown: Sequence[str] = ()
) -> LintReport:
    """Whether all programs, one a rank, agree in every group and come to their end."""
    finding, groups = _run(programs, topology, in_one_queue=True, stops=True)
    if finding is not None:
        # the strictest reading fails; is it that alone?
        strict, (finding, groups) = finding, _run(programs, topology)
        if finding is None:
            of_devices, _ = _run(programs, topology, in_one_queue=True)
            finding = as_launch_order(of_devices) if of_devices else as_first_use(strict)
        elif any(_is_run(op) for program in programs for op in program.ops):
            # one by one, so that the call is named in which they part
            finding, groups = _run([_opened(program) for program in programs], topology)
    return LintReport(topology, finding, group_kinds(groups), tuple(unknown))


def _run(
    programs: Sequence[CallProgram],
    topology: Topology,
    in_one_queue: bool = False,
    stops: bool = False,
) -> tuple[Finding | None, list[LintGroup]]:
    queues = one_queue(len(programs)) if in_one_queue else None
    groups: dict[tuple[tuple[int, ...], str], LintGroup] = {}
    # many ranks have the same list; to hash it for each of them takes longer than all the rest
    seen: dict[tuple[int, str], LintGroup] = {}

    def group_of(ranks: Sequence[int], use: str) -> LintGroup:
        if (id(ranks), use) not in seen:
            key = (tuple(ranks), use)
            if key not in groups:
                groups[key] = LintGroup(ranks, group_name(topology, key[0]), queues)
            seen[id(ranks), use] = groups[key]
        return seen[id(ranks), use]

    own = [{word: group_of(*g) for word, g in program.groups.items()} for program in programs]
    making = Making(topology.world_size)

    def runs(board: Matcher) -> list[Iterator[PendingOp]]:
        before = Connections(board).before if stops else None
        return [
            _steps(board, rank, p.ops, own[rank], making, before) for rank, p in enumerate(programs)
        ]

    found = drive(runs, list(groups.values()), partial(rank_name, topology), making.met)
    return found, list(groups.values())


def _steps(
    board: Matcher,
    rank: int,
    ops: Sequence[Op],
    groups: Mapping[str, LintGroup],
    making: Making,
    before: Before | None,
) -> Iterator[PendingOp]:
    """Issue one rank's calls; gives every entry that is to be waited for and is not done."""
    under_way: list[PendingOp] = []
    for op in ops:
        if isinstance(op, Collective):
            entry = PendingOp(rank, groups[op.group], op.calls, where=op.label)
            if before is not None:
                yield from before(entry, ())
            board.issue(entry)
            if not op.blocks:
                under_way.append(entry)
            elif not entry.done:
                yield entry
        elif isinstance(op, Messages):
            group = groups[op.group]
            entry = PendingOp(
                rank, group, (), len(op.parts), op.label, channel=op.channel, is_batch=True
            )
            messages = [_message(rank, group, op, part) for part in op.parts]
            # what has a road of its own goes through host memory
            if before is not None and op.channel is None:
                yield from before(entry, messages)
            board.issue(entry)
            for message in messages:
                board.post(entry, message)
            if not entry.done and op.channel is None:
                yield entry
        elif isinstance(op, Make):
            group = groups[op.group]
            group.lazy = not op.connects
            entry = making.entry(rank, group, op.split)
            board.issue(entry)
            if not entry.done:
                yield entry
        else:
            for entry in under_way:
                if not entry.done:
                    yield entry
            under_way.clear()


def _message(rank: int, group: LintGroup, op: Messages, part: ProgramMessage) -> P2POp:
    ends = rank, group.ranks[part.peer]
    if part.call.operation != "send":
        ends = ends[::-1]
    return P2POp(part.call, *ends, int(op.channel is not None), op.label)


def _is_run(op: Op) -> bool:
    return isinstance(op, Collective) and len(op.calls) > 1


def _opened(program: CallProgram) -> CallProgram:
    """The same program with every collective by itself."""
    ops: list[Op] = []
    for op in program.ops:
        if isinstance(op, Collective):
            ops += [replace(op, calls=(call,)) for call in op.calls]
        else:
            ops.append(op)
    return replace(program, ops=tuple(ops))


def made_first(
    programs: Sequence[CallProgram], orders: Sequence[Sequence[Creation]], *, split: bool = False
) -> list[CallProgram]:
    """The same programs behind the making of groups, of which `orders` has each rank's.

    split: as torch makes them in a world that is bound to a device, unless told otherwise.
    """
    found: list[CallProgram] = []
    for program, order in zip(programs, orders, strict=True):
        made = {f"made {i}": one for i, one in enumerate(order) if len(one.ranks) < len(programs)}
        ops = tuple(Make(word, one.connects, split) for word, one in made.items())
        groups = {word: (one.ranks, "") for word, one in made.items()}
        found.append(CallProgram((*ops, *program.ops), {**program.groups, **groups}))
    return found
