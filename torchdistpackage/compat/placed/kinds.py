"""What the outputs of an operation consist of, as the ranks outside of its place know it."""

from __future__ import annotations

from typing import Any

from torchdistpackage.compat.placed.program import PlacedValue, Program
from torchdistpackage.compat.placed.structure import from_text, to_text
from torchdistpackage.errors import PlacementError

Kind = tuple[str, list[Any]]
"""The kind and the names of the parts of an output, as `structure.parts_of` gives them."""


class Kinds:
    """What the outputs of one operation consist of, which the ranks outside ask for once.

    dynamic: it may change from call to call, so they ask each time.
    """

    def __init__(self, dynamic: bool = True):
        self._dynamic = dynamic
        self._known: Kind | None = None
        self._parts: dict[Any, Kinds] = {}

    def part(self, key: Any) -> Kinds:
        """The same of one part."""
        return self._parts.setdefault(key, Kinds(self._dynamic))

    def of(self, program: Program, value: PlacedValue, mine: Kind | None) -> Kind:
        """The kind of a value on every rank. mine: what this rank sees, if it is of the place.

        Raises:
            PlacementError: on the place: it is not what the first call made.
        """
        if self._known is None or self._dynamic:
            text = None if mine is None else to_text(list(mine))
            kind, names = from_text(program.tell(value.place, "the parts of an output", text))
            self._known = (kind, names)
        elif mine is not None and mine != self._known:
            raise PlacementError(
                f"operation {value.number} gave {_shown(mine)}, but its first call gave "
                f"{_shown(self._known)}, which the other ranks rely on; make it with "
                f"F(function, dynamic=True) if its outputs change from call to call"
            )
        return self._known


def _shown(kind: Kind) -> str:
    what, names = kind
    return f"a {what}" if what in ("tensor", "value") else f"{len(names)} parts ({names})"
