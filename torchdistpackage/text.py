"""Text for people: tables, times, sizes and lists of ranks, each in one form everywhere."""

import math
import os
import re
import shutil
import sys
from collections.abc import Iterable, Sequence

SHOWN_RANKS = 8
"""Largest number of ranks of a list that are named; the others are counted."""


_CREDENTIALS = re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^/@\s]+@", re.IGNORECASE)


def terminal_width() -> int | None:
    """Columns of the terminal that the output goes to, or COLUMNS; None: it goes elsewhere."""
    if sys.stdout.isatty() or "COLUMNS" in os.environ:
        return shutil.get_terminal_size().columns
    return None


def without_credentials(text: str) -> str:
    """Return the text with `user:password@` of its URLs replaced by `***@`."""
    return _CREDENTIALS.sub(r"\1***@", text)


def text_table(
    rows: Iterable[Sequence[object]],
    *,
    num_left: int = 0,
    last_left: bool = False,
    num_keys: int = 0,
) -> str:
    """Columns two spaces apart, aligned to the right but for the first `num_left` and, if
    `last_left`, the last.

    num_keys: if not 0, a table wider than the terminal is printed in blocks of columns, one below
    another, each of which begins with the first `num_keys` columns.
    """
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    align = [str.ljust if i < num_left else str.rjust for i in range(len(widths))]
    align[-1:] = [str.ljust] if last_left else align[-1:]
    blocks = _blocks(widths, num_keys) if num_keys else [range(len(widths))]
    texts = (
        "\n".join("  ".join(align[i](row[i], widths[i]) for i in block).rstrip() for row in cells)
        for block in blocks
    )
    return "\n\n".join(texts)


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of Markdown."""

    def line(cells: Sequence[str]) -> str:
        return "|" + "".join(f" {cell} |" if cell else " |" for cell in cells) + "\n"

    return line(head) + f"|{'---|' * len(head)}\n" + "".join(map(line, rows))


def _blocks(widths: Sequence[int], num_keys: int) -> list[list[int]]:
    """The columns of each block; one that has only the keys takes a column of any width."""
    keys, limit = list(range(num_keys)), terminal_width() or math.inf
    blocks = [list(keys)]
    for i in range(num_keys, len(widths)):
        width = sum(widths[k] + 2 for k in blocks[-1]) + widths[i]
        if width > limit and len(blocks[-1]) > num_keys:
            blocks.append(list(keys))
        blocks[-1].append(i)
    return blocks


def duration(seconds: float) -> str:
    """Return a time that people wait for, such as 3 d 4 h, 2 h 05 min, 4 min 10 s, 12 s."""
    whole_s = max(int(seconds), 0)
    minutes, s = divmod(whole_s, 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    if days:
        return f"{days} d {h} h"
    if hours:
        return f"{hours} h {m:02} min"
    return f"{minutes} min {s:02} s" if minutes else f"{s} s"


def short_time(seconds: float) -> str:
    """Return the time of a call or step with three or more digits, in us, ms or s."""
    for factor, unit in ((1e6, "us"), (1e3, "ms")):
        if seconds * factor < 1000:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"


def size_text(num_bytes: float) -> str:
    """Return a number of bytes in binary units: `4 MiB`, `1.5 KiB`, `12 B`.

    Every size of memory, files and messages is shown so; rates are in GB/s, as networks have them.
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:,.4g} TiB"


def ranks_listed(ranks: Sequence[int], noun: str = "") -> str:
    """Return a list of ranks: `rank 3`, `ranks 0, 4, 8, ... (32 ranks)`."""
    shown = ", ".join(map(str, ranks[:SHOWN_RANKS]))
    more = "" if len(ranks) <= SHOWN_RANKS else f", ... ({len(ranks)} ranks)"
    return f"{noun or ('ranks' if len(ranks) > 1 else 'rank')} {shown}{more}"
