"""Drawings of timelines: a text table, an SVG, a PNG with the same boxes, a Chrome trace.

Each draws one row for a pipe index, with time to the right and one box for each computation,
exactly where the timeline has it. matplotlib, which the PNG needs, is an optional extra and
imported late.
"""

import json
import math
from collections.abc import Iterable
from html import escape
from io import BytesIO
from typing import Any

from torchdistpackage.bounded import printable
from torchdistpackage.errors import ConfigError
from torchdistpackage.schedule.actions import Action, ActionKind
from torchdistpackage.schedule.engine import Span, Timeline

ROW_PX, BOX_PX, LEFT_PX, UNIT_PX, TOP_PX, AXIS_PX = 30, 24, 64, 26, 34, 34
COLOURS = {
    ActionKind.F: "#7aa6da",
    ActionKind.B: "#8fc98f",
    ActionKind.I: "#e8b86d",
    ActionKind.W: "#c79fd6",
}
WAIT_COLOUR = "#d9d9d9"
WIDEST_PX = 24_000
WIDTH_IN, ROW_IN, PANEL_IN, DPI = 14.0, 0.28, 0.75, 100
_MOST_LABELS = 500
_TICKS = 8
_WORDS = {
    ActionKind.F: "F forward",
    ActionKind.B: "B backward",
    ActionKind.I: "I input part",
    ActionKind.W: "W weight part",
}


def table(timeline: Timeline, unit: float = 1.0, columns: int | None = None) -> str:
    """Return a text table with one line a rank; a cell is one unit of time wide, `.` is idle.

    A box begins with its action, without the stage if a rank has only one. Times are rounded to
    full cells, so choose a `unit` that divides them, or that is well below the shortest action.

    columns: width in characters; longer tables continue below, all ranks together. None: no limit.
    """
    stages = [sorted({s.action.stage for s in _compute(row)}) for row in timeline.spans]
    full = any(len(row_stages) > 1 for row_stages in stages)
    labels = [
        [(s, str(s.action) if full else str(s.action)[len(str(s.action.stage)) :]) for s in row]
        for row in map(_compute, timeline.spans)
    ]
    width = max((len(label) for row in labels for _, label in row), default=2)
    num_cells = round(timeline.total / unit)
    rows: list[list[str]] = []
    for row in labels:
        cells = ["." * width] * num_cells
        for span, label in row:
            start, end = round(span.start / unit), round(span.end / unit)
            if start < end:
                cells[start:end] = [label.ljust(width, "-"), *["-" * width] * (end - start - 1)]
        rows.append(cells)
    per_line = num_cells if columns is None else (columns - len("  0 | ") + 1) // (width + 1)
    per_line = max(per_line, 1)
    return "\n\n".join(
        "\n".join(
            f"{i:>3} | " + " ".join(row[offset : offset + per_line]) for i, row in enumerate(rows)
        )
        for offset in range(0, max(num_cells, 1), per_line)
    )


def svg(timeline: Timeline, measured: Timeline | None = None) -> str:
    """Return an SVG of a timeline, with one `rect` and its `data-action` for each computation.

    The box of a span starts at x = LEFT_PX + start * px and is (end - start) * px wide, where px =
    `px_per_unit(timeline)`. Colours distinguish F, B, I and W; later chunks are lighter.

    measured: a second timeline to draw below on the same time axis, in seconds. Each timeline is a
        group (`g`) with its `data-timeline`. Waits for messages are grey, with a `data-wait`.
    """
    panels = _panels(timeline, measured)
    return _svg(panels, px_per_unit(*(shown for shown, _ in panels.values())))


def png(timeline: Timeline, measured: Timeline | None = None) -> bytes:
    """Return the same picture as a PNG. Raises ConfigError if matplotlib is not installed."""
    return _png(_panels(timeline, measured))


def px_per_unit(*timelines: Timeline) -> float:
    """Return UNIT_PX for the first timeline's shortest computation, less if the picture were too
    wide.
    """
    longest = max(timeline.total for timeline in timelines)
    durations = [s.end - s.start for row in timelines[0].spans for s in _compute(row)]
    shortest = min((d for d in durations if d > 0), default=1.0)
    return min(UNIT_PX / shortest, WIDEST_PX / longest) if longest else UNIT_PX


Panels = dict[str, tuple[Timeline, str]]
"""Name -> a timeline and its caption."""


def _panels(timeline: Timeline, measured: Timeline | None) -> Panels:
    if measured is None:
        return {"predicted": (timeline, head(timeline))}
    timelines = {"predicted": timeline, "measured": measured}
    return {name: (t, f"{name}: {head(t, 's')}") for name, t in timelines.items()}


def head(timeline: Timeline, unit: str = "units") -> str:
    """Return name, length, bubble and memory of a timeline in one line."""
    live = "/".join(map(str, timeline.peak_live))
    return (
        f"{timeline.name}: {timeline.total:.4g} {unit}, bubble {timeline.bubble:.1%}, "
        f"live microbatches {live}"
    )


def colours(row: tuple[Span, ...]) -> dict[tuple[int, ActionKind], str]:
    """Return the colour of each (stage, kind) of a rank: by kind, and lighter for later chunks."""
    stages = sorted({span.action.stage for span in row if not span.action.kind.is_message})
    result = {(span.action.stage, span.action.kind): WAIT_COLOUR for span in row}
    for i, stage in enumerate(stages):
        white = 0.5 * i / max(1, len(stages) - 1)
        for kind, colour in COLOURS.items():
            parts = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
            pale = (round(part + (255 - part) * white) for part in parts)
            result[stage, kind] = "#" + "".join(f"{part:02x}" for part in pale)
    return result


def ticks(total: float) -> list[float]:
    """Return round times from 0 to `total`, about _TICKS of them."""
    if total <= 0:
        return [0.0]
    rough = total / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(n * power for n in (1, 2, 5, 10) if n * power >= rough * (1 - 1e-9))
    return [i * step for i in range(int(total / step * (1 + 1e-9)) + 1)]


def _svg(panels: Panels, px: float) -> str:
    """Return the SVG of the panels, one below the other."""
    timelines = [timeline for timeline, _ in panels.values()]
    total = max(timeline.total for timeline in timelines)
    parts: list[str] = []
    top = 0
    for name, (timeline, text) in panels.items():
        parts += [
            f'<g data-timeline="{name}">',
            f'<text x="6" y="{top + 20}">{escape(printable(text))}</text>',
        ]
        for index, row in enumerate(timeline.spans):
            parts += _row(index, row, top + TOP_PX + index * ROW_PX, px)
        parts.append("</g>")
        top += TOP_PX + len(timeline.spans) * ROW_PX
    width = max(LEFT_PX + total * px + 10, 480)
    open_tag = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{top + AXIS_PX}" '
        f'font-family="sans-serif" font-size="11">'
    )
    return "\n".join([open_tag, *parts, *_axis(timelines, total, top, px), "</svg>", ""])


def _row(index: int, row: tuple[Span, ...], top: int, px: float) -> list[str]:
    """Return the SVG elements of one rank's row."""
    parts = [f'<text x="6" y="{top + 16}">pipe {index}</text>']
    fills = colours(row)
    for span in row:
        action, wait = span.action, span.action.kind.is_message
        x, box = LEFT_PX + span.start * px, (span.end - span.start) * px
        attribute = "wait" if wait else "action"
        parts.append(
            f'<rect data-{attribute}="{action}" x="{x:g}" y="{top}" width="{box:g}" '
            f'height="{BOX_PX}" fill="{fills[action.stage, action.kind]}" stroke="white">'
            f"<title>{action}: {span.start:.6g} to {span.end:.6g}</title></rect>"
        )
        if not wait and box >= 8 * len(str(action.microbatch)):
            parts.append(
                f'<text x="{x + box / 2:g}" y="{top + 16}" text-anchor="middle" '
                f'pointer-events="none">{action.microbatch}</text>'
            )
    return parts


def _axis(timelines: list[Timeline], total: float, top: int, px: float) -> list[str]:
    """Return the SVG elements of the time axis and the legend."""
    parts: list[str] = []
    for time in ticks(total):
        x = LEFT_PX + time * px
        parts.append(f'<line x1="{x:g}" y1="{top}" x2="{x:g}" y2="{top + 4}" stroke="black"/>')
        parts.append(f'<text x="{x:g}" y="{top + 15}" text-anchor="middle">{time:g}</text>')
    for i, (text, colour) in enumerate(legend(timelines).items()):
        parts.append(
            f'<text x="{LEFT_PX + 104 * i}" y="{top + 30}">'
            f'<tspan fill="{colour}">■</tspan> {text}</text>'
        )
    return parts


def legend(timelines: Iterable[Timeline]) -> dict[str, str]:
    """Return label -> colour for the kinds in the timelines."""
    kinds = {s.action.kind for timeline in timelines for row in timeline.spans for s in row}
    labels = {_WORDS[kind]: colour for kind, colour in COLOURS.items() if kind in kinds}
    return labels | ({"wait": WAIT_COLOUR} if kinds - COLOURS.keys() else {})


def _compute(row: tuple[Span, ...]) -> list[Span]:
    """Return the spans of a row that compute."""
    return [span for span in row if not span.action.kind.is_message]


def _png(panels: Panels) -> bytes:
    """Draw the panels with matplotlib."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ConfigError(
            f"a PNG needs matplotlib, which cannot be imported ({error}); "
            'pip install "torchdistpackage[plot]", or draw an SVG'
        ) from error
    timelines = [timeline for timeline, _ in panels.values()]
    rows = [len(timeline.spans) for timeline in timelines]
    size = WIDTH_IN, sum(rows) * ROW_IN + len(rows) * PANEL_IN
    figure: Any = Figure(figsize=size, dpi=DPI, layout="constrained")
    grid = figure.subplots(len(rows), 1, sharex=True, squeeze=False, height_ratios=rows)
    for axes, (timeline, text) in zip(grid[:, 0], panels.values(), strict=True):
        labelled = sum(map(len, timeline.spans)) <= _MOST_LABELS
        for index, row in enumerate(timeline.spans):
            fills = colours(row)
            boxes = [(span.start, span.end - span.start) for span in row]
            colour = [fills[span.action.stage, span.action.kind] for span in row]
            axes.broken_barh(
                boxes, (index - 0.4, 0.8), facecolors=colour, edgecolors="white", linewidth=0.5
            )
            for span in row if labelled else ():
                if not span.action.kind.is_message:
                    middle = (span.start + span.end) / 2
                    axes.text(middle, index, span.action.microbatch, ha="center", va="center",
                              fontsize=6, clip_on=True)  # fmt: skip
        axes.set_title(text, loc="left", fontsize=9)
        ranks = range(len(timeline.spans))
        axes.set_yticks(ranks, [f"pipe {rank}" for rank in ranks])
        axes.invert_yaxis()
        axes.set_xlim(0, max(t.total for t in timelines) or 1)
    patches = [Patch(color=colour, label=label) for label, colour in legend(timelines).items()]
    figure.legend(handles=patches, loc="outside right upper", fontsize=8)
    buffer = BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


# -- Chrome trace ---------------------------------------------------------------------------------

_US = 1e6


def trace(timeline: Timeline, measured: Timeline | None = None) -> str:
    """Return a Chrome trace: a process for each timeline, with a thread for each pipe rank.

    chrome://tracing and ui.perfetto.dev show it, with one unit of time as a second. Arrows lead
    from an action to the one that waits for its message.

    measured: a second timeline, whose waits are slices too.
    """
    timelines = {timeline.name: timeline}
    if measured is not None:
        timelines = {"predicted": timeline, "measured": measured}
    events: list[dict[str, Any]] = []
    for process, (name, shown) in enumerate(timelines.items()):
        names = [("process_name", f"{name}, bubble {shown.bubble:.1%}", 0)]
        for rank, row in enumerate(shown.spans):
            names.append(("thread_name", f"pipe {rank}", rank))
            events += (slice_event(span, process, rank) for span in row)
        events += (
            {"ph": "M", "name": event, "pid": process, "tid": thread, "args": {"name": text}}
            for event, text, thread in names
        )
        tracks = ({"pid": process, "tid": rank} for rank in range(len(shown.spans)))
        events += message_arrows(zip(tracks, shown.spans, strict=True), str(process))
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}) + "\n"


def slice_event(span: Span, process: int, rank: int) -> dict[str, Any]:
    """Return one action as a complete event of a Chrome trace."""
    stage, kind, microbatch = span.action
    return {
        "ph": "X",
        "name": str(span.action),
        "cat": "wait" if kind.is_message else str(kind),
        "ts": span.start * _US,
        "dur": (span.end - span.start) * _US,
        "pid": process,
        "tid": rank,
        "args": {"stage": stage, "kind": str(kind), "microbatch": microbatch},
    }


def message_arrows(
    rows: Iterable[tuple[dict[str, int], Iterable[Span]]], name: str
) -> list[dict[str, Any]]:
    """Return two flow events a message, from inside the slice that sends it to its user's start.

    rows: for each rank its track (`pid`, `tid`) and its spans. name: prefix of the messages' ids.
    """
    slices = {span.action: (track, span) for track, row in rows for span in row}
    arrows: list[dict[str, Any]] = []
    for action, (track, span) in slices.items():
        if (send := action.send) is None:
            continue
        # a B or an I sends to the B or the I of the previous stage
        kinds = (ActionKind.F,) if action.kind is ActionKind.F else (ActionKind.B, ActionKind.I)
        users = (Action(send.peer, kind, action.microbatch) for kind in kinds)
        user_slice = next((slices[user] for user in users if user in slices), None)
        if user_slice is None or user_slice[0] == track:
            continue
        shared = {"name": "message", "cat": "message", "id": f"{name}:{action}"}
        used = user_slice[1].start
        # a sender that lost its core after the message left ends its slice after the user's start
        sent = max((span.start + min(span.end, used)) / 2, span.start)
        arrows.append({"ph": "s", "ts": sent * _US, **shared, **track})
        arrows.append({"ph": "f", "bp": "e", "ts": used * _US, **shared, **user_slice[0]})
    return arrows
