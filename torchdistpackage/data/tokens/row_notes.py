"""Notes on rows after reading them: how replies were found, and keys that nobody used.

A cache entry keeps the counts with the ids, so every start prints the notes. No torch.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

MARKED = "chats whose replies the chat template marks with {% generation %}"
PREFIXED = "chats whose replies are what each adds to the chat before it"
REWRITTEN = "chats whose replies were found by writing them again with a sentinel"
_WAYS = (MARKED, PREFIXED, REWRITTEN)
"""Counted names that say how replies were found."""
_SHOWN = 20
"""Largest number of unused keys in a note: some files have another key in every row."""

Tally = Counter[str]
"""Number of rows that each note is about."""


def count_unused(tally: Tally, value: Mapping[str, Any], used: Collection[str], of: str) -> None:
    """Count the keys of `value` that are not null and that nobody uses."""
    tally.update(
        f"{key!r} of {of}" for key, x in value.items() if key not in used and x is not None
    )


def row_notes(counts: Mapping[str, int]) -> list[str]:
    """Return the notes on rows with these counts."""
    ways = [f"{counts[way]:,} {way}" for way in _WAYS if way in counts]
    return [*ways, *unused_notes(counts)]


def unused_notes(counts: Mapping[str, int]) -> list[str]:
    """Return a note on the keys that nobody used, or no note if all were used."""
    notes = list[str]()
    unused = Counter({name: x for name, x in counts.items() if name not in _WAYS}).most_common()
    if unused:
        shown = ", ".join(f"{name} ({number:,})" for name, number in unused[:_SHOWN])
        more = f" and {len(unused) - _SHOWN:,} more" if len(unused) > _SHOWN else ""
        notes.append(f"keys that were not used: {shown}{more}")
    return [note if note.isprintable() else ascii(note) for note in notes]
