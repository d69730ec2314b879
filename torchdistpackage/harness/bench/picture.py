"""Draw slow links, and times by size with their fits, for `tdp comm bench --picture`.

No torch and no matplotlib.
"""

import math
from collections.abc import Callable, Iterator, Sequence

from torchdistpackage.comm.collective_table import COLLECTIVES
from torchdistpackage.harness.bench.profile import CostModel
from torchdistpackage.harness.bench.report import BenchReport, Pairs, Row
from torchdistpackage.report.svg import box, colour_between, colour_of, document, ink_on, text
from torchdistpackage.text import size_text

_MOST_RANKS = 64
_LEFT, _CELL = 110, 34
_PANEL_WIDTH, _PANEL_HEIGHT = 560, 220


def picture(report: BenchReport) -> str:
    """Return heat maps of the bandwidth between all pairs of hosts, and of ranks if there are few.

    A panel for each axis and link follows, with the time of a call by its bytes.
    """
    parts: list[str] = []
    width, y = float(_LEFT + _PANEL_WIDTH + 250), 26.0
    parts.append(text(12, 18, f"{report.backend} on {len(report.hosts)} ranks, {report.date}"))
    if report.pairs is not None:
        for names, of, title in _matrices(report):
            drawn, size = _heat_map(report.pairs, names, of, title)
            parts += _moved(drawn, y)
            width, y = max(width, size + 40), y + size + 30
    kinds = dict.fromkeys((row.axis, row.link) for row in report.rows)
    for axis, link in kinds:
        rows = [row for row in report.rows if (row.axis, row.link) == (axis, link)]
        lines = [series for series in report.lines if (series.axis, series.link) == (axis, link)]
        parts += _moved(_times(f"{axis}, {link}", rows, lines), y)
        y += max(_PANEL_HEIGHT + 70, 40 + 15 * len({_kind(row) for row in rows}))
    return document(width, y, parts)


def _moved(parts: Sequence[str], y: float) -> list[str]:
    return [f'<g transform="translate(0 {y:g})">', *parts, "</g>"]


def _matrices(report: BenchReport) -> Iterator[tuple[Sequence[str], Callable[[int], int], str]]:
    """Yield the names of rows and columns, the row of each rank, and the meaning of a row."""
    hosts = list(dict.fromkeys(report.hosts))
    if len(hosts) > 1:
        yield hosts, lambda rank: hosts.index(report.hosts[rank]), "hosts"
    if len(hosts) < len(report.hosts) <= _MOST_RANKS:
        names = [f"{rank} {host}" for rank, host in enumerate(report.hosts)]
        yield names, lambda rank: rank, "ranks"


def _heat_map(
    pairs: Pairs, names: Sequence[str], of: Callable[[int], int], kind: str
) -> tuple[list[str], float]:
    """Return the SVG elements of a heat map, and its height.

    A cell shows the slowest pair between two hosts or ranks, so that one slow card or cable is
    visible.
    """
    cells: dict[tuple[int, int], tuple[float, tuple[int, int]]] = {}
    for pair in pairs.times:
        cell = of(pair[0]), of(pair[1])
        speed_and_pair = pairs.busbw_bytes_per_s(pair), pair
        for ranks in {cell, cell[::-1]}:
            cells[ranks] = min(cells.get(ranks, speed_and_pair), speed_and_pair)
    speeds = [speed for speed, _ in cells.values()]
    least, most = min(speeds, default=0.0), max(speeds, default=0.0)
    title = f"GB/s between {kind}, both ways at once, {size_text(pairs.size_bytes)}: the slowest"
    parts = [text(12, 14, f"{title} pair of ranks")]
    for (a, b), (speed, pair) in sorted(cells.items()):
        x, y = _LEFT + b * _CELL, 24 + a * _CELL
        tooltip = (
            f"{names[a]} and {names[b]}: {speed / 1e9:.3g} GB/s, ranks {pair[0]} and {pair[1]}"
        )
        # by their ratio, as within a node a link is many times as fast
        fill = colour_between(math.log(speed), math.log(least), math.log(most))
        data = {"from": names[a], "to": names[b]}
        parts.append(box(x, y, (_CELL, _CELL), fill, tooltip, **data))
        words = f"{speed / 1e9:.0f}" if speed >= 9.5e9 else f"{speed / 1e9:.2g}"
        parts.append(text(x + _CELL / 2, y + 21, words, anchor="middle", fill=ink_on(fill)))
    for index, name in enumerate(names):
        parts.append(text(_LEFT - 6, 24 + index * _CELL + 21, name[-16:], anchor="end"))
    for index, name in enumerate(names):
        at = f"{_LEFT + index * _CELL + 14:g} {24 + len(names) * _CELL + 12:g}"
        column = text(0, 0, name[-16:])
        parts.append(f'<g transform="translate({at}) rotate(50)">{column}</g>')
    return parts, 24.0 + len(names) * _CELL + 90


def _kind(row: Row | CostModel) -> tuple[str, str, str, int]:
    return row.operation, row.mode, row.dtype, row.num_ranks


def _times(title: str, rows: Sequence[Row], lines: Sequence[CostModel]) -> Iterator[str]:
    """Draw measured times as dots with their fitted lines, on logarithmic axes."""
    sizes, times = [row.size_bytes for row in rows], [row.p50_s for row in rows]
    smallest, right = min(sizes), max(max(sizes), 2 * min(sizes))
    low, high = min(times) / 1.5, max(times) * 1.5

    def at(size: float, time_s: float) -> tuple[float, float]:
        x = math.log(size / smallest) / math.log(right / smallest)
        y = math.log(min(max(time_s, low), high) / low) / math.log(high / low)
        return _LEFT + x * _PANEL_WIDTH, 24 + (1 - y) * _PANEL_HEIGHT

    yield text(12, 14, f"{title}: seconds of a call by its bytes; dots measured, lines fitted")
    yield (
        f'<rect x="{_LEFT}" y="24" width="{_PANEL_WIDTH}" height="{_PANEL_HEIGHT}" fill="none" '
        f'stroke="#888"/>'
    )
    for size in sorted(set(sizes)):
        yield text(at(size, low)[0], 40 + _PANEL_HEIGHT, size_text(size), anchor="middle")
    for power in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1):
        y = at(smallest, 10.0**power)[1]
        ends = f'x1="{_LEFT}" x2="{_LEFT + _PANEL_WIDTH}" y1="{y:g}" y2="{y:g}"'
        yield f'<line {ends} stroke="#ddd"/>'
        yield text(_LEFT - 6, y + 4, f"{10.0**power:g} s", anchor="end")
    fits = {_kind(link): link for link in lines}
    for index, kind in enumerate(dict.fromkeys(map(_kind, rows))):
        colour = colour_of(index)
        same = [row for row in rows if _kind(row) == kind]
        factor = COLLECTIVES[kind[0]].bus_factor(kind[3])
        if (link := fits.get(kind)) is not None:
            xs = [smallest * (right / smallest) ** (i / 40) for i in range(41)]
            curve = [(x, link.time_s(x * factor)) for x in xs]
            ends = " ".join("{:.4g},{:.4g}".format(*at(x, t)) for x, t in curve if t is not None)
            words = " ".join(map(str, kind[:2]))
            yield f'<polyline points="{ends}" fill="none" stroke="{colour}" data-fit="{words}"/>'
        for row in same:
            x, y = at(row.size_bytes, row.p50_s)
            tooltip = f"{' '.join(kind[:3])}, {size_text(row.size_bytes)}: {row.p50_s:.3g} s"
            yield (
                f'<circle cx="{x:.4g}" cy="{y:.4g}" r="3.5" fill="{colour}" stroke="#444">'
                f"<title>{tooltip}</title></circle>"
            )
        y = 34 + 15 * index
        yield box(_LEFT + _PANEL_WIDTH + 14, y - 9, (10, 10), colour, "")
        yield text(_LEFT + _PANEL_WIDTH + 30, y, " ".join(kind[:3]))
