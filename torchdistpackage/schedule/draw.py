"""A timeline for the eye: a table of characters, and an SVG.

Both put one row to a pipe index and time to the right, one box to each action that
computes, exactly where the timeline has it.
"""

from torchdistpackage.schedule.actions import Kind
from torchdistpackage.schedule.simulate import Span, Timeline

ROW_PX, BOX_PX, LEFT_PX, UNIT_PX, TOP_PX = 30, 24, 64, 26, 34
COLOURS = {Kind.F: "#7aa6da", Kind.B: "#8fc98f"}


def table(timeline: Timeline) -> str:
    """One line a rank; a cell is one time unit wide, `.` is idle, the microbatch opens its box.

    Times are rounded to whole units, so give costs that are whole numbers.
    """
    width = max(2, *(len(str(s.action.microbatch)) + 1 for row in timeline.spans for s in row)) + 1
    lines: list[str] = []
    for index, row in enumerate(timeline.spans):
        cells = ["." * (width - 1)] * round(timeline.total)
        for span in _compute(row):
            start, end = round(span.start), round(span.end)
            label = f"{span.action.kind}{span.action.microbatch}".ljust(width - 1, "-")
            cells[start:end] = [label, *["-" * (width - 1)] * (end - start - 1)]
        lines.append(f"{index:>3} | " + " ".join(cells))
    return "\n".join(lines)


def svg(timeline: Timeline) -> str:
    """A picture of the timeline: one `rect` with a `data-action` for each F and B.

    The box of a span starts at x = LEFT_PX + start * UNIT_PX and is (end - start) * UNIT_PX wide.
    """
    width = LEFT_PX + timeline.total * UNIT_PX + 10
    height = TOP_PX + len(timeline.spans) * ROW_PX + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
        f'font-family="sans-serif" font-size="11">',
        f'<text x="6" y="20">{timeline.name}: {timeline.total:g} units, '
        f"bubble {timeline.bubble:.1%}, live microbatches "
        f"{'/'.join(map(str, timeline.peak_live))}</text>",
    ]
    for index, row in enumerate(timeline.spans):
        top = TOP_PX + index * ROW_PX
        parts.append(f'<text x="6" y="{top + 16}">pipe {index}</text>')
        for span in _compute(row):
            x, box = LEFT_PX + span.start * UNIT_PX, (span.end - span.start) * UNIT_PX
            parts.append(
                f'<rect data-action="{span.action}" x="{x:g}" y="{top}" width="{box:g}" '
                f'height="{BOX_PX}" fill="{COLOURS[span.action.kind]}" stroke="white"/>'
            )
            parts.append(
                f'<text x="{x + box / 2:g}" y="{top + 16}" text-anchor="middle">'
                f"{span.action.microbatch}</text>"
            )
    return "\n".join([*parts, "</svg>", ""])


def _compute(row: tuple[Span, ...]) -> list[Span]:
    return [span for span in row if not span.action.kind.is_message]
