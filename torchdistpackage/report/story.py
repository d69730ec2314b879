"""The sections of a report besides charts of steps: starts over time, and tables of text."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torchdistpackage.config.data_section import SourceSection, changed_shares, share_text
from torchdistpackage.launch.run_rows import number
from torchdistpackage.launch.slurm.runs import RunStart
from torchdistpackage.report.charts import Chart
from torchdistpackage.report.run import Run, busy_excess, when
from torchdistpackage.text import size_text

_SOURCES = "data.sources"
COLOURS = {"finished": 2, "requeue": 0, "chain": 0, "again": 5, "running": 4, "failed": 3}
"""Word of an end -> position in the palette of the page; others have 1."""
_MOST_RANKS = 1024
"""Largest number of ranks with their own row; `ranks.jsonl` has them all."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table: rows of text under a header. note: a caption."""

    key: str
    title: str
    note: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def life(runs: Sequence[Run], now_s: float) -> Chart:
    """Return a chart with every start as a bar and checkpoints as marks."""
    traces: list[dict[str, Any]] = []
    shown: set[str] = set()
    for run in runs:
        for row, start in enumerate(run.starts):
            end_s = start.end_s or (now_s if start.word == "running" else start.begin_s)
            text = f"start {row} ({start.attempt}) from step {start.step}: {_end(start)}"
            traces.append(
                {
                    "type": "scatter", "mode": "lines", "line": {"width": 18},
                    "x": [when(start.begin_s), when(end_s)], "y": [run.name, run.name],
                    "name": start.word, "legendgroup": start.word, "text": text,
                    "showlegend": start.word not in shown, "hoverinfo": "text+x",
                    "colour": COLOURS.get(start.word, 1),
                }
            )  # fmt: skip
            shown.add(start.word)
        if run.saves:
            traces.append(
                {
                    "type": "scatter", "mode": "markers", "name": "checkpoint",
                    "x": [when(save.at_s) for save in run.saves], "y": [run.name] * len(run.saves),
                    "text": [f"checkpoint of step {save.step}" for save in run.saves],
                    "hoverinfo": "text+x", "colour": 7, "legendgroup": "checkpoint",
                    "showlegend": "checkpoint" not in shown,
                    "marker": {"symbol": "line-ns-open", "size": 16, "line": {"width": 2}},
                }
            )  # fmt: skip
            shown.add("checkpoint")
    layout = {
        "xaxis": {"type": "date"},
        "yaxis": {"type": "category"},
        "height": 130 + 50 * len(runs),
    }
    note = "Every start of the run, coloured by how it ended, with its checkpoints."
    return Chart("life", "Starts and checkpoints", note, traces, layout)


def tables(runs: Sequence[Run]) -> list[Table]:
    """Return the tables of starts, warnings, missing files and the configuration."""
    several = len(runs) > 1
    names = [run.name for run in runs]

    def named(run: Run, row: Sequence[str]) -> list[str]:
        return [run.name, *row] if several else list(row)

    head = ["run"] if several else []
    starts = [named(run, row) for run in runs for row in _start_rows(run)]
    every = [
        Table(
            "starts", "Starts", "Each start of the run, and how it ended.",
            [*head, "start", "began", "ended", "steps", "ranks", "on", "end", "cause"], starts,
        )
    ]  # fmt: skip
    if several:
        every.append(Table("differs", "What differs", "Keys whose values differ between the runs.",
                           ["key", *names], _differences(runs)))  # fmt: skip
    changed = [named(run, row) for run in runs for row in _changes(run)]
    if changed:
        every.append(Table("changed", "Changed between starts", "Keys that a start set anew.",
                           [*head, "key", "start", "was", "became", "written at"],
                           changed))  # fmt: skip
    ranks = [named(run, row) for run in runs for row in _rank_rows(run)]
    slowest = [f"{run.name}: {text}" if several else text for run in runs
               if (text := run.slowest_text)]  # fmt: skip
    note = ". ".join(["Where each rank is along the axes, as last measured", *slowest])
    every.append(Table("ranks", "Ranks", f"{note}.",
                       [*head, "rank", "coordinates", "on", "busy", "peak memory"],
                       ranks))  # fmt: skip
    saves = [
        named(run, (str(s.step), when(s.at_s), "" if s.took_s is None else f"{s.took_s:.2f}",
                    "kept" if s.kept else "removed"))
        for run in runs for s in run.saves
    ]  # fmt: skip
    every.append(Table("saves", "Checkpoints", "When each was complete, and the seconds it took.",
                       [*head, "step", "complete", "seconds", "now"], saves))  # fmt: skip
    warned = [named(run, row) for run in runs for row in run.warnings]
    every.append(Table("warnings", "Warnings", "Slow ranks, numbers that are not finite, notes.",
                       [*head, "where", "what"], warned))  # fmt: skip
    for run in runs:
        of = f" of {run.name}" if several else ""
        rows = [(k, _text(v), run.places.get(k, "default")) for k, v in run.config.items()]
        note = "Every key of the run, and where its value was written."
        every.append(Table(f"config-{run.name}", f"Configuration{of}", note,
                           ["key", "value", "written at"], rows))  # fmt: skip
    return [table for table in every if table.rows]


def _start_rows(run: Run) -> list[list[str]]:
    rows = []
    for start in run.starts:
        last = "" if start.end_step is None else str(start.end_step)
        ended = "" if start.end_s is None else when(start.end_s)
        ranks = "" if start.num_ranks is None else str(start.num_ranks)
        rows.append([start.attempt, when(start.begin_s), ended, f"{start.step} to {last or '?'}",
                     ranks, start.place, start.word, start.cause])  # fmt: skip
    return rows


def _rank_rows(run: Run) -> list[list[str]]:
    """Return a row for each rank: its position, busy time and memory at the end."""
    if not run.ranks:
        return []
    last, hosts = run.ranks[-1], next((r["hosts"] for r in run.ranks if "hosts" in r), [])
    busy, peaks = busy_excess(last, run.mesh), last.get("peak_bytes")
    num = max(len(busy), len(peaks) if isinstance(peaks, list) else 0)
    rows = []
    for rank in range(min(num, _MOST_RANKS)):
        host, peak = _item(hosts, rank), number(_item(peaks, rank))
        excess = _item(busy, rank)
        rows.append([str(rank), run.coord_text(rank), "" if host is None else str(host),
                     "" if excess is None else f"{excess:+.1f} % of its peers",
                     "" if peak is None else size_text(peak)])  # fmt: skip
    return rows


def _item(values: Any, index: int) -> Any:
    return values[index] if isinstance(values, list) and index < len(values) else None


def _changes(run: Run) -> list[list[str]]:
    """Return the keys that a start set to another value than the previous start."""
    rows: list[list[str]] = []
    for earlier, now in zip(run.starts, run.starts[1:], strict=False):
        if not earlier.keys or not now.keys:
            continue
        shares = _changed_shares(earlier, now)
        for label, (old, new) in shares.items():
            sources = _set(now, _SOURCES)[1]
            key = f"{_SOURCES}: weight of {label}"
            rows.append([key, now.attempt, share_text(old), share_text(new), sources])
        for key in sorted({*earlier.keys, *now.keys}):
            was, became = _set(earlier, key), _set(now, key)
            if was[0] != became[0]:
                rows.append([key, now.attempt, was[0], became[0], became[1]])
    return rows


def _changed_shares(earlier: RunStart, now: RunStart) -> dict[str, tuple[float, float]]:
    """Return the shares of sources that a start changed; nothing if a record has no shares."""
    values = [x.keys.get(_SOURCES) for x in (earlier, now)]
    try:
        old_sources, new_sources = (
            [SourceSection.model_validate(x) for x in value[0]] for value in values
        )
    except (ValueError, TypeError, LookupError):  # ValidationError is a ValueError
        return {}
    return changed_shares(old_sources, new_sources)


def _set(start: RunStart, key: str) -> tuple[str, str]:
    value = start.keys.get(key)
    if not isinstance(value, list) or len(value) != 2:
        return "default", ""
    return _text(value[0]), str(value[1])


def _differences(runs: Sequence[Run]) -> list[list[str]]:
    keys = list(dict.fromkeys(key for run in runs for key in run.config))
    table = [[key, *(_text(run.config.get(key, "(no such key)")) for run in runs)] for key in keys]
    return [row for row in table if len(set(row[1:])) > 1]


def _end(start: RunStart) -> str:
    return f"{start.word} {start.cause}".strip()


def _text(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
