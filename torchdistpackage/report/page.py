"""Write one HTML file for one or several runs that opens without a network: data, style and script
are inside.

All text of a run is escaped, its pictures are images, in which no script runs, and the page's
content security policy lets it load nothing.
"""

import base64
import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

from torchdistpackage.bounded import printable
from torchdistpackage.errors import ConfigError
from torchdistpackage.files import atomic_write
from torchdistpackage.report.charts import Chart, charts, series
from torchdistpackage.report.peaks import peak_flops_of
from torchdistpackage.report.run import Run, when
from torchdistpackage.report.story import Table, life, tables
from torchdistpackage.report.svg import escape

_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
)
_WIDE = ("life", "loss")


def write_report(
    folders: Sequence[Path], out: Path, now_s: float, peak_flops: float | None = None
) -> list[Run]:
    """Write the report of the run folders to `out`, and return the runs that were read.

    now_s: seconds since 1970. peak_flops: FLOP/s of one device; None: from its name.

    Raises:
        ConfigError: a folder is not a run folder, plotly is not installed, or `out` cannot be
            written.
    """
    runs = [Run(folder) for folder in folders]
    text = html(runs, now_s, peak_flops)
    try:
        atomic_write(out, text)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}") from error
    return runs


def plotly_script() -> str:
    """Return the text of plotly's library.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return (files("plotly") / "package_data" / "plotly.min.js").read_text("utf-8")
    except (ModuleNotFoundError, FileNotFoundError) as error:
        raise ConfigError(
            f"a report needs plotly, which cannot be imported ({error}); "
            'pip install "torchdistpackage[report]"'
        ) from error


def html(runs: Sequence[Run], now_s: float, peak_flops: float | None = None) -> str:
    """Return the page. Raises ConfigError: plotly is not installed."""
    if peak_flops is None:
        devices = (start.device for run in runs for start in reversed(run.starts))
        peak_flops = next((peak for d in devices if (peak := peak_flops_of(d))), None)
    shown = [life(runs, now_s), *charts(runs, peak_flops)]
    shown = [chart for chart in shown if chart.traces]
    tables_html = tables(runs)
    title = ", ".join(run.name for run in runs)
    figures = [{"key": c.key, "traces": c.traces, "layout": c.layout} for c in shown]
    # within a script no text may look like its end
    data = json.dumps(_shown(figures), separators=(",", ":"), allow_nan=False).replace(
        "<", "\\u003c"
    )
    names = ("page.css", "page.js")
    css, script = (Path(__file__).with_name(name).read_text("utf-8") for name in names)
    sections = [*map(_chart, shown), *_pictures(runs), *map(_table, tables_html)]
    links = [(c.key, c.title) for c in shown] + [(f"t-{t.key}", t.title) for t in tables_html]
    menu = " ".join(f'<a href="#{escape(key)}">{escape(text)}</a>' for key, text in links)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<link rel="icon" href="data:,">
<title>{escape(title)}</title><style>{css}</style></head><body>
<header><h1>{escape(title)}</h1>{"".join(_facts(run) for run in runs)}
<nav aria-label="Parts of the report">{menu}</nav></header>
<main>{"".join(sections)}{_notes(runs)}</main>
<footer><p>Written {when(now_s)}.</p></footer>
<script type="application/json" id="figures">{data}</script>
<script>{plotly_script()}</script><script>{script}</script></body></html>
"""


def _shown(value: Any) -> Any:
    """Return the same value with all its texts made printable."""
    match value:
        case str():
            return printable(value)
        case dict():
            return {key: _shown(item) for key, item in cast(dict[str, Any], value).items()}
        case list() | tuple():
            return [_shown(item) for item in cast(list[Any], value)]
        case _:
            return value


def _facts(run: Run) -> str:
    last = run.rows[-1] if run.rows else {}
    facts = {"run": run.name, "step": f"{last.get('step', 0)} of {run.num_steps or '?'}"}
    for key, name in (("loss", "loss"), ("val_loss", "validation loss")):
        if points := series(run.rows, key):
            facts[name] = f"{points[-1][1]:.4f}"
    if axes := run.mesh.axes:
        facts["ranks"] = " x ".join(f"{name} {size}" for name, size in axes)
    if run.starts:
        facts["state"] = str(run.state)
        facts["starts"] = str(len(run.starts))
    words = (f"<span>{escape(key)} <b>{escape(text)}</b></span>" for key, text in facts.items())
    return f'<p class="facts">{"".join(words)}</p>'


def _chart(chart: Chart) -> str:
    kind = ' class="wide"' if chart.key in _WIDE else ""
    key, title, note = escape(chart.key), escape(chart.title), escape(chart.note)
    box = f'<div class="chart" id="{key}" role="img" aria-label="{title}: {note}"></div>'
    return f"<section{kind}><h2>{title}</h2><p>{note}</p>{box}</section>"


def _table(table: Table) -> str:
    key, title = escape(f"t-{table.key}"), escape(table.title)
    head = "".join(
        f'<th scope="col"><button type="button">{escape(x)}</button></th>' for x in table.head
    )
    rows = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in table.rows
    )
    box = f"{key}-rows"
    look = (
        f'<input type="search" data-table="{box}" aria-label="Filter {title}" placeholder="filter">'
    )
    return (
        f'<section class="wide" id="{key}"><h2>{title}</h2><p>{escape(table.note)}</p>'
        f"{look if len(table.rows) > 8 else ''}"
        f'<div class="scroll" tabindex="0" role="region" aria-label="{title}">'
        f'<table id="{box}"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
        "</section>"
    )


def _pictures(runs: Sequence[Run]) -> list[str]:
    """Return pictures of the pipeline: predicted, and measured below it."""
    pictures = []
    for run in runs:
        if run.picture is None:
            continue
        of = f" of {escape(run.name)}" if len(runs) > 1 else ""
        text = base64.b64encode(run.picture).decode("ascii")
        label = f"Timeline of the pipeline{of}, predicted above measured"
        pictures.append(
            f'<section class="wide"><h2>Timeline of the pipeline{of}</h2>'
            f"<p>As the schedule predicts it, and below as measured in the last recorded step.</p>"
            f'<div class="picture" tabindex="0" role="region" aria-label="{label}">'
            f'<img alt="{label}" src="data:image/svg+xml;base64,{text}"></div></section>'
        )
    return pictures


def _notes(runs: Sequence[Run]) -> str:
    lines = [
        f"<li>{escape(f'{run.name}: {note}' if len(runs) > 1 else note)}</li>"
        for run in runs
        for note in run.notes
    ]
    if not lines:
        return ""
    return f'<section class="wide notes"><h2>Not shown</h2><ul>{"".join(lines)}</ul></section>'
