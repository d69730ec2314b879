"""The structure of an operation's outputs, for the ranks outside of its place."""

from __future__ import annotations

from typing import Any

from torchdistpackage.compat.placed.program import PlacedValue, Program
from torchdistpackage.compat.placed.structure import from_text, to_text
from torchdistpackage.errors import PlacementError

Kind = tuple[str, list[Any]]
"""Kind and part names of an output, as `structure.parts_of` returns them."""


class Kinds:
    """The structure of one operation's outputs; the ranks outside of its place learn it once.

    dynamic: it may change from call to call, so they learn it each time.
    """

    def __init__(self, dynamic: bool = True):
        self._dynamic = dynamic
        self._kind: Kind | None = None
        self._parts: dict[Any, Kinds] = {}

    def part(self, key: Any) -> Kinds:
        """Return the `Kinds` of one part."""
        return self._parts.setdefault(key, Kinds(self._dynamic))

    def of(self, program: Program, value: PlacedValue, local: Kind | None) -> Kind:
        """Return the kind of a value on every rank. local: the kind, on ranks of the place.

        Raises:
            PlacementError: on the place: the first call had another kind.
        """
        if self._kind is None or self._dynamic:
            text = None if local is None else to_text(list(local))
            kind, names = from_text(program.tell(value.place, "the parts of an output", text))
            self._kind = (kind, names)
        elif local is not None and local != self._kind:
            raise PlacementError(
                f"operation {value.number} gave {_shown(local)}, but its first call gave "
                f"{_shown(self._kind)}, which the other ranks rely on; make it with "
                f"F(function, dynamic=True) if its outputs change from call to call"
            )
        return self._kind


def _shown(kind: Kind) -> str:
    kind_name, names = kind
    return f"a {kind_name}" if kind_name in ("tensor", "value") else f"{len(names)} parts ({names})"
