"""What a lint found: values that print, and the names of ranks and groups in them. No torch."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torchdistpackage.errors import CommError
from torchdistpackage.harness.lint.explain import Finding
from torchdistpackage.harness.lint.matcher import LintGroup
from torchdistpackage.topology.mesh import describe
from torchdistpackage.topology.views import Topology


@dataclass(frozen=True, slots=True)
class GroupKind:
    """All groups of one name, such as `data`: how many, of how many ranks, and their traffic.

    num_calls, num_messages: of all of them together that met, each counted once.
    """

    name: str
    num_groups: int
    num_ranks: int
    num_calls: int
    num_messages: int

    @property
    def cells(self) -> tuple[str, str, str]:
        """A row of a table: name, groups, traffic."""
        traffic = f"{_many(self.num_calls, 'collective')}, {_many(self.num_messages, 'message')}"
        return self.name, f"{_many(self.num_groups, 'group')} of {self.num_ranks}", traffic


@dataclass(frozen=True)
class LintReport:
    """Whether every group saw one order of calls and everybody came to the end.

    finding: the first thing that is wrong, or None. kinds: one for each kind of group.
    unknown: what could not be looked at, in words. results: what `step` returned on each rank.
    calls: each rank's calls in order, as (ranks of the group, call, peer of a message).
    """

    topology: Topology
    finding: Finding | None
    kinds: tuple[GroupKind, ...] = ()
    unknown: tuple[str, ...] = ()
    results: Sequence[object] = ()
    calls: Sequence[Sequence[tuple[tuple[int, ...], object, int | None]]] = ()

    @property
    def ok(self) -> bool:
        return self.finding is None

    def check(self) -> "LintReport":
        """Itself.

        Raises:
            CommError: there is a finding; the text is its text.
        """
        if self.finding is not None:
            raise CommError(str(self))
        return self

    def __str__(self) -> str:
        if self.finding is not None:
            return f"on {describe(self.topology.dense.axes)}: {self.finding}"
        rows = [kind.cells for kind in self.kinds]
        wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            f"{name:<{wide[0]}}  {groups:<{wide[1]}}  {traffic}, orders agree"
            for name, groups, traffic in rows
        ] or ["no calls"]
        return "\n".join([*lines, *(f"not known: {text}" for text in self.unknown)])


def rank_name(topology: Topology, rank: int) -> str:
    """`rank 3 (data 1 tensor 1)`: axes of one rank are left out."""
    mesh = topology.dense
    coord = mesh.coord(rank)
    shown = " ".join(f"{a} {coord[a]}" for a, size in mesh.axes if size > 1)
    return f"rank {rank} ({shown})" if shown else f"rank {rank}"


def group_name(topology: Topology, ranks: Sequence[int]) -> str:
    """The axes along which the ranks differ, `data+tensor`; `global` for all, if by several.

    Ranks that are not all of those along their axes are a `part of` them, as the two stages that
    share a weight are.
    """
    mesh = topology.dense
    if len(ranks) == mesh.size:
        long = [name for name, size in mesh.axes if size > 1]
        return long[0] if len(long) == 1 else "global"
    coords = [mesh.coord(rank) for rank in ranks]
    axes = [name for name in mesh.names if len({coord[name] for coord in coords}) > 1]
    name = "+".join(axes) or "alone"
    return name if tuple(mesh.group(ranks[0], axes)) == tuple(ranks) else f"part of {name}"


def group_kinds(groups: Iterable[LintGroup]) -> tuple[GroupKind, ...]:
    """Groups of one name and size put together; those that saw no call are left out."""
    number: Counter[tuple[str, int]] = Counter()
    calls, messages = number.copy(), number.copy()
    for group in groups:
        if group.num_calls or group.num_messages:
            key = (group.name, len(group.ranks))
            number[key] += 1
            calls[key] += group.num_calls
            messages[key] += group.num_messages
    return tuple(GroupKind(n, number[n, s], s, calls[n, s], messages[n, s]) for n, s in number)


def _many(number: int, word: str) -> str:
    return f"{number} {word}{'s' * (number != 1)}"
