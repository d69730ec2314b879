"""The debug mode: all ranks compare each operation before they run it."""

import sys
from collections.abc import Sequence
from pathlib import Path

from torchdistpackage.comm.creation import Group, ranks_of
from torchdistpackage.comm.primitives import gather_objects
from torchdistpackage.compat.placed.place import Place
from torchdistpackage.errors import PlacementError

_HERE = str(Path(__file__).parent)


class OrderCheck:
    """Compares operations over a group; slow, as every rank waits for all others at each one."""

    def __init__(self, group: Group):
        self._group = group

    def compare(self, number: int, label: str, place: Place | None, reads: Sequence[int]) -> None:
        """Compare the next operation of all ranks.

        Raises:
            PlacementError: on all ranks: their next operations differ.
        """
        description = label if place is None else f"{label} on {place}"
        if reads:
            description += f", which reads {', '.join(map(str, reads))}"
        reports = gather_objects((description, called_at()), self._group)
        texts = [str(text) for text, _ in reports]  # type: ignore[misc]
        if len(set(texts)) == 1:
            return
        ranks = ranks_of(self._group)
        ranks_by_text: dict[str, list[int]] = {}
        for i, text in enumerate(texts):
            ranks_by_text.setdefault(text, []).append(i)
        lines = [
            f"rank {', '.join(str(ranks[i]) for i in at)}: {text} (called at {reports[at[0]][1]})"  # type: ignore[index]
            for text, at in ranks_by_text.items()
        ]
        raise PlacementError(
            f"the ranks take different paths at operation {number}: {'; '.join(lines)}; every rank "
            f"must make the same calls, so let no branch depend on the rank or on a value that "
            f"only some ranks have (`.item()` gives it to all)"
        )


def called_at() -> str:
    """Return file and line of the program that called into this folder."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
