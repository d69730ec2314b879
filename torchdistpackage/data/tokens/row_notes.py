"""What is to be said of rows once they are read: how replies were found, and keys that nobody used.

Counts are kept with the ids in a cache entry, so every start says it. No torch.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

MARKED = "chats whose replies the chat template marks with {% generation %}"
PREFIXED = "chats whose replies are what each adds to the chat before it"
REWRITTEN = "chats whose replies were found by writing them again with a sentinel"
_WAYS = (MARKED, PREFIXED, REWRITTEN)
"""How replies were found."""
_SHOWN = 20
"""Names of keys; some files have a name for every row."""

Tally = Counter[str]
"""How many rows each thing is to be said of."""


def count_unused(tally: Tally, value: Mapping[str, Any], used: Collection[str], of: str) -> None:
    """Count the keys of `value` that are not null and that nobody uses."""
    tally.update(
        f"{key!r} of {of}" for key, x in value.items() if key not in used and x is not None
    )


def row_notes(counts: Mapping[str, int]) -> list[str]:
    """Return what to say of the rows with these counts."""
    ways = [f"{counts[way]:,} {way}" for way in _WAYS if way in counts]
    return [*ways, *unused_notes(counts)]


def unused_notes(counts: Mapping[str, int]) -> list[str]:
    """Return which keys of the rows with these counts nobody used, in a line, or nothing."""
    notes = list[str]()
    unused = Counter({name: x for name, x in counts.items() if name not in _WAYS}).most_common()
    if unused:
        shown = ", ".join(f"{name} ({number:,})" for name, number in unused[:_SHOWN])
        more = f" and {len(unused) - _SHOWN:,} more" if len(unused) > _SHOWN else ""
        notes.append(f"keys that were not used: {shown}{more}")
    return [note if note.isprintable() else ascii(note) for note in notes]
