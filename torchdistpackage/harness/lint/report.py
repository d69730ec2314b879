"""The report of a lint: whether every group saw one order of calls, and their number. No torch."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torchdistpackage.errors import CommError
from torchdistpackage.thread_ranks.findings import Finding
from torchdistpackage.thread_ranks.matcher import LintGroup
from torchdistpackage.topology.mesh import Topology, describe


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
        """Name, groups, traffic."""
        traffic = f"{_many(self.num_calls, 'collective')}, {_many(self.num_messages, 'message')}"
        return self.name, f"{_many(self.num_groups, 'group')} of {self.num_ranks}", traffic


@dataclass(frozen=True)
class LintReport:
    """The result of a lint: whether every group saw one order of calls and all ranks finished.

    finding: the first problem, or None. kinds: one for each kind of group. unknown: what could not
    be checked, in words. results: what `step` returned on each rank.
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
        """Return this report if it has no finding.

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


def group_kinds(groups: Iterable[LintGroup]) -> tuple[GroupKind, ...]:
    """Return one kind for all groups of the same name and size, without groups that saw no call."""
    by_kind: dict[tuple[str, int], list[LintGroup]] = {}
    for group in groups:
        if group.num_calls or group.num_messages:
            by_kind.setdefault((group.name, len(group.ranks)), []).append(group)
    return tuple(
        GroupKind(
            name, len(of), size, sum(g.num_calls for g in of), sum(g.num_messages for g in of)
        )
        for (name, size), of in by_kind.items()
    )


def _many(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
