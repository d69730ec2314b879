"""Choose layouts to compare with one process, and make the table of differences. No torch.

Each axis alone comes first, then pairs, then all: who finds a difference with few axes needs no
larger layout to look for it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

Axes = Mapping[str, int]


def layouts_of(axes: Axes) -> list[dict[str, int]]:
    """Return each axis with several ranks alone, all pairs, and all together; two ranks per
    axis.
    """
    several = [axis for axis, size in axes.items() if size > 1]
    sizes = dict.fromkeys(several, 2)
    layouts = [
        {axis: sizes[axis] for axis in chosen}
        for number in (1, 2)
        for chosen in combinations(several, number)
    ]
    return [*layouts, *([sizes] if len(several) > 2 else [])]


def text_of(axes: Axes) -> str:
    """Return `data 2, pipe 2`; without axes `one process`."""
    return ", ".join(f"{axis} {size}" for axis, size in axes.items()) or "one process"


@dataclass(frozen=True)
class ParityReport:
    """The first difference, or None, of each layout that was compared.

    runs: for each of them the runs that were compared, if these are runs of a configuration.
    """

    findings: Sequence[tuple[dict[str, int], Any]]
    runs: Sequence[Any] = ()

    @property
    def is_right(self) -> bool:
        return all(finding is None for _, finding in self.findings)

    @property
    def first(self) -> tuple[dict[str, int], Any] | None:
        """The difference of the layout with the fewest axes."""
        return next((x for x in self.findings if x[1] is not None), None)

    def __str__(self) -> str:
        names = "; ".join(text_of(axes) for axes, _ in self.findings)
        if self.first is None:
            return f"the same as one process, to 1e-9 in float64: {names}"
        lines = []
        seen: list[set[str]] = []
        for axes, finding in self.findings:
            if finding is None:
                lines.append(f"{text_of(axes)}: the same as one process")
            elif any(seen_axes and seen_axes <= set(axes) for seen_axes in seen):
                lines.append(f"{text_of(axes)}: differs too")
            else:
                seen.append(set(axes))
                lines.append(f"{text_of(axes)}: {finding}")
        return "\n".join(lines)


def checked(layouts: Iterable[Axes], most_ranks: int) -> list[dict[str, int]]:
    """Return the layouts as plain dicts, without axes of one rank and without layouts of one rank.

    Raises:
        ValueError: a layout has no ranks, or more than `most_ranks`.
    """
    problems = []
    for axes in layouts:
        ranks = 1
        for axis, size in axes.items():
            if not isinstance(size, int) or size < 1:
                raise ValueError(
                    f"{axis}={size!r} is not a number of ranks; give a whole number of at least 1"
                )
            ranks *= size
        if ranks > most_ranks:
            raise ValueError(
                f"{text_of(axes)} has {ranks} ranks, but at most {most_ranks} are allowed here; "
                "two ranks on an axis show what more would"
            )
        if ranks > 1:
            problems.append({axis: size for axis, size in axes.items() if size > 1})
    return problems
