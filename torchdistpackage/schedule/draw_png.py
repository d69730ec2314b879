"""Timelines as a PNG: the same boxes, colours and rows as in the SVG, one panel above the other.

matplotlib is an optional extra, so it is loaded late; no display and no state of pyplot is used.
"""

from io import BytesIO
from typing import Any

from torchdistpackage.errors import ConfigError
from torchdistpackage.schedule.draw import colours, head, legend
from torchdistpackage.schedule.timeline import Timeline

WIDTH_IN, ROW_IN, PANEL_IN, DPI = 14.0, 0.28, 0.75, 100
_MOST_LABELS = 500


def png(timeline: Timeline) -> bytes:
    """A picture of one timeline.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    return _png([(timeline, head(timeline))])


def png_pair(predicted: Timeline, measured: Timeline) -> bytes:
    """Predicted above measured on one time axis, in seconds; waits for messages are grey.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    return _png(
        [
            (predicted, f"predicted: {head(predicted, 's')}"),
            (measured, f"measured: {head(measured, 's')}"),
        ]
    )


def _png(panels: list[tuple[Timeline, str]]) -> bytes:
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ConfigError(
            f"a PNG needs matplotlib, which cannot be imported ({error}); "
            f"pip install 'torchdistpackage[plot]', or draw an SVG"
        ) from error
    timelines = [timeline for timeline, _ in panels]
    rows = [len(timeline.spans) for timeline in timelines]
    figure: Any = Figure(
        figsize=(WIDTH_IN, sum(rows) * ROW_IN + len(rows) * PANEL_IN),
        dpi=DPI,
        layout="constrained",
    )
    grid = figure.subplots(len(rows), 1, sharex=True, squeeze=False, height_ratios=rows)
    for axes, (timeline, text) in zip(grid[:, 0], panels, strict=True):
        labelled = sum(map(len, timeline.spans)) <= _MOST_LABELS
        for index, row in enumerate(timeline.spans):
            fills = colours(row)
            axes.broken_barh(
                [(span.start, span.end - span.start) for span in row],
                (index - 0.4, 0.8),
                facecolors=[fills[span.action.stage, span.action.kind] for span in row],
                edgecolors="white",
                linewidth=0.5,
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
    patches = [Patch(color=colour, label=word) for word, colour in legend(timelines).items()]
    figure.legend(handles=patches, loc="outside right upper", fontsize=8)
    buffer = BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
