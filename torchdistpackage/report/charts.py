"""The charts of a report as plain plotly figures: their content, not the page's style.

A series keeps the smallest and the largest value of every interval of steps, so a spike stays
visible however many steps a run has.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torchdistpackage.launch.run_rows import Row, mapping, number, numbers
from torchdistpackage.report.run import Run, busy_excess

_MOST_POINTS = 4000
"""Largest number of points of a series; several runs share this number."""
_MOST_LINES = 16
"""Largest number of ranks with their own line; with more, the least, median and largest are
drawn.
"""
_MOST_COLUMNS = 400
_COMPUTE = ("forward", "backward", "optimizer")
_KNOWN = {"step", "steps", "tokens", "skipped", "unigram", "bigram"}

Point = tuple[float, float]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Chart:
    """A figure: `traces` and `layout` are plotly's. note: an explanation of the picture for
    readers.
    """

    key: str
    title: str
    note: str
    traces: list[dict[str, Any]]
    layout: dict[str, Any] = field(default_factory=dict[str, Any])


def charts(runs: Sequence[Run], peak_flops: float | None = None) -> list[Chart]:
    """Return all charts for which the runs have numbers.

    peak_flops: FLOP/s of one device, for the model FLOPs utilization.
    """
    figures = [_loss(runs)]
    counted = " and ".join(dict.fromkeys(run.unit for run in runs))
    for key, title, note, unit, log in _LINES:
        note, unit = note.format(counted.capitalize()), unit.format(counted)
        figures.append(_line_chart(runs, key, title, note, unit, log=log))
    figures.append(_utilization(runs, peak_flops))
    for run in runs:
        of = f" of {run.name}" if len(runs) > 1 else ""
        figures += [_spent(run, of), _memory(run, of), _slow(run, of)]
        figures += [_by_part(run, key, of) for key in _keys_of_parts(run)]
    figures += _others(runs)
    return [chart for chart in figures if chart is not None and chart.traces]


_LINES = (
    ("lr", "Learning rate", "Learning rate of each step.", "", False),
    ("grad_norm", "Gradient norm", "2-norm of the gradient before clipping.", "", True),
    ("tokens_per_s", "Throughput", "{} of a step over its time, all ranks.", "{}/s", False),
    ("time_s", "Step time", "Duration of each step, and the predicted one.", "s", False),
    ("bubble", "Bubble", "Share of a step in which ranks computed nothing.", "", False),
)
_OWN_CHART = {"loss", "val_loss", "flops_per_s", "predicted_s", *(line[0] for line in _LINES)}


def thin(points: Sequence[Point], most: int = _MOST_POINTS) -> list[Point]:
    """Return at most `most` points, in order, with the smallest and largest of every interval."""
    if len(points) <= most:
        return list(points)
    size = math.ceil(2 * len(points) / most)
    thinned: list[Point] = []
    for at in range(0, len(points), size):
        part = points[at : at + size]
        low, high = min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])
        thinned += sorted({low, high})
    return thinned


def series(rows: Iterable[Row], key: str) -> list[Point]:
    """Return the steps and finite numbers of a key."""
    points = ((row["step"], number(row.get(key))) for row in rows)
    return [(step, value) for step, value in points if value is not None]


def _line(points: Sequence[Point], name: str, most: int, **more: Any) -> dict[str, Any]:
    thinned = thin(points, most)
    x, y = [p[0] for p in thinned], [float(f"{p[1]:.6g}") for p in thinned]
    return {"type": "scatter", "mode": "lines", "name": name, "x": x, "y": y, **more}


def _share(runs: Sequence[Run]) -> int:
    return max(_MOST_POINTS // len(runs), 200)


def _loss(runs: Sequence[Run]) -> Chart:
    traces: list[dict[str, Any]] = []
    for index, run in enumerate(runs):
        prefix = f"{run.name} " if len(runs) > 1 else ""
        if points := series(run.rows, "loss"):
            colour = {"colour": index if len(runs) > 1 else 0}
            traces.append(_line(points, f"{prefix}training", _share(runs), **colour))
        if points := series(run.rows, "val_loss"):
            look = {"mode": "markers", "marker": {"size": 8, "symbol": "diamond"}}
            look["colour"] = index if len(runs) > 1 else 1
            traces.append({**_line(points, f"{prefix}validation", _share(runs)), **look})
    for key, dash in (("unigram", "dot"), ("bigram", "dash")):
        levels = [p for run in runs[:1] for p in series(run.rows, key)]
        if levels and traces:
            last = max(max(trace["x"]) for trace in traces)
            look = {"line": {"dash": dash, "width": 1}, "colour": 7}
            traces.append(
                _line([(1, levels[-1][1]), (last, levels[-1][1])], f"{key} table", 2, **look)
            )
    nats = "" if any(run.config.get("model.loss") is not None for run in runs) else "nats"
    return Chart("loss", "Loss", "Training and validation loss by step.", traces, _steps(nats))


def _line_chart(
    runs: Sequence[Run], key: str, title: str, note: str, unit: str, *, log: bool = False
) -> Chart:
    traces = [
        _line(points, run.name, _share(runs), colour=index)
        for index, run in enumerate(runs)
        if (points := series(run.rows, key))
    ]
    if key == "time_s":
        for index, run in enumerate(runs):
            if predicted := series(run.rows, "predicted_s"):
                ends = [(step, predicted[-1][1]) for step in (1, max(run.step, 1))]
                look = {"line": {"dash": "dash", "width": 1}, "colour": index}
                name = f"{run.name} predicted" if len(runs) > 1 else "predicted"
                traces.append(_line(ends, name, 2, **look))
    layout = _steps(unit)
    if log and all(min(trace["y"]) > 0 for trace in traces):
        layout["yaxis"]["type"] = "log"
    return Chart(key, title, note, traces, layout)


def _utilization(runs: Sequence[Run], peak_flops: float | None) -> Chart:
    """Return a chart of the model FLOPs utilization, or of the model's FLOP/s if the devices' peak
    is unknown.
    """
    traces: list[dict[str, Any]] = []
    has_peak = peak_flops is not None
    for index, run in enumerate(runs):
        ranks = next((s.num_ranks for s in reversed(run.starts) if s.num_ranks), None)
        scale = 1.0 if peak_flops is None else 1 / (peak_flops * (ranks or 1))
        if points := [(x, y * scale) for x, y in series(run.rows, "flops_per_s")]:
            traces.append(_line(points, run.name, _share(runs), colour=index))
    if has_peak:
        note = f"FLOPs of the model, over {peak_flops / 1e12:g} TFLOP/s for each device."
        return Chart("mfu", "Model FLOPs utilization", note, traces, _steps("share"))
    note = "FLOPs of the model in a second, all ranks. Give --peak-tflops for a utilization."
    return Chart("flops", "Model FLOP/s", note, traces, _steps("FLOP/s"))


def _spent(run: Run, of: str) -> Chart:
    """Return a chart of how a step's time was spent, as stacked means over ranks."""
    parts: dict[str, list[Point]] = {}
    for row in _columns(run.ranks):
        step, step_s = row["step"], _mean(row.get("time_s"))
        phases, waits = mapping(row, "phases"), mapping(row, "waits")
        if step_s is None or not phases:
            continue
        cost = {"compute": sum(_mean(phases.get(name)) or 0.0 for name in _COMPUTE)}
        for axis, waited in waits.items():
            name = "bubble and pipeline messages" if axis == "pipe" else f"exposed, {axis}"
            cost[name] = _mean(waited) or 0.0
        cost["data"] = _mean(phases.get("data")) or 0.0
        cost["host"] = max(step_s - sum(cost.values()), 0.0)
        for name, seconds in cost.items():
            parts.setdefault(name, []).append((step, seconds))
    traces = [
        _line(points, name, _MOST_COLUMNS, stackgroup="one", colour=i, mode="lines")
        for i, (name, points) in enumerate(parts.items())
    ]
    note = (
        "Seconds of a step, mean over ranks: computation, waiting for calls over each axis, data "
        "loading, and the rest of the host's time, such as waiting for a core."
    )
    return Chart(f"spent-{run.name}", f"What a step is spent on{of}", note, traces, _steps("s"))


def _memory(run: Run, of: str) -> Chart:
    rows = [row for row in _columns(run.ranks) if numbers(row.get("peak_bytes"))]
    num = max((len(row["peak_bytes"]) for row in rows), default=0)
    gib = [(row["step"], [x / 2**30 for x in numbers(row["peak_bytes"])]) for row in rows]
    if num <= _MOST_LINES:
        lines: dict[str, Callable[[list[float]], float | None]] = {
            run.rank_text(rank): lambda table, rank=rank: _at(table, rank) for rank in range(num)
        }
    else:
        lines = {"least": min, "median": statistics.median, "most": max}
    traces = []
    for index, (name, pick) in enumerate(lines.items()):
        points = [(step, y) for step, table in gib if (y := pick(table)) is not None]
        traces.append(_line(points, name, _MOST_COLUMNS, colour=index))
    note = "The most that each rank has held so far: GPU memory, or without a GPU of its process."
    return Chart(f"memory-{run.name}", f"Peak memory by rank{of}", note, traces, _steps("GiB"))


def _slow(run: Run, of: str) -> Chart:
    """Return how much longer than its peers each rank was busy."""
    rows = [row for row in _columns(run.ranks) if mapping(row, "phases")]
    mesh = run.mesh
    table = [busy_excess(row, mesh) for row in rows]
    num = max(map(len, table), default=0)
    if num < 2:
        return Chart("slow", "", "", [])
    z = [[round(ratios[r], 1) if r < len(ratios) else None for ratios in table] for r in range(num)]
    largest = max((abs(x) for seconds in z for x in seconds if x is not None), default=0.0)
    bound = max(10.0, min(largest, 100.0))
    trace = {
        "type": "heatmap", "x": [row["step"] for row in rows], "z": z, "zmin": -bound,
        "zmax": bound, "colorscale": "RdBu", "colorbar": {"ticksuffix": " %"},
        "y": [f"rank {r}" for r in range(num)],
        "hovertemplate": "%{y}, step %{x}: %{z} %<extra></extra>",
    }  # fmt: skip
    note = (
        "Busy time of each rank against the median of the ranks that do the same work, waiting "
        "left out. Red ranks are slow."
    )
    layout = {"xaxis": {"title": {"text": "step"}}, "yaxis": {"autorange": "reversed"}}
    return Chart(f"slow-{run.name}", f"Ranks against each other{of}", note, [trace], layout)


def _keys_of_parts(run: Run) -> list[str]:
    """Return the keys of metrics.jsonl whose values are lists of, or mappings to, numbers."""
    return sorted({k for row in run.rows[-1000:] for k, v in row.items() if _parts(v)})


def _parts(value: Any) -> dict[str, float]:
    """Return the numbers of a mapping by name, or of a list by index; {} for anything else."""
    if isinstance(value, list):
        value = {str(index): item for index, item in enumerate(value)}
    pairs = value.items() if isinstance(value, dict) else ()
    return {name: x for name, item in pairs if (x := number(item)) is not None}


def _by_part(run: Run, key: str, of: str) -> Chart:
    """Return a line for each part of a key, such as the experts' load by layer; a heat map if there
    are many.
    """
    rows = [(row["step"], parts) for row in run.rows if (parts := _parts(row.get(key)))]
    columns = _columns(rows)
    names = list(dict.fromkeys(name for _, parts in columns for name in parts))
    if len(names) > _MOST_LINES:
        z = [[parts.get(name) for _, parts in columns] for name in names]
        trace = {
            "type": "heatmap", "x": [step for step, _ in columns], "y": names, "z": z,
            "colorscale": "Viridis",
        }  # fmt: skip
        traces = [trace]
    else:
        lines = ([(step, p[name]) for step, p in columns if name in p] for name in names)
        traces = [
            _line(points, name, _MOST_COLUMNS, colour=index)
            for index, (name, points) in enumerate(zip(names, lines, strict=True))
        ]
    note = f"{key} by step, of each of its {len(names)} parts."
    return Chart(f"{key}-{run.name}", f"{_MAPPED.get(key, key)}{of}", note, traces, _steps(""))


_MAPPED = {
    "experts": "Busiest expert over the mean",
    "experts_dropped": "Choices without a place",
    "eval_loss": "Loss of each evaluation set",
    "perplexity": "Perplexity of each evaluation set",
    "sources": "Part of each source in a step",
    "epochs": "Passes over each source",
}


def _others(runs: Sequence[Run]) -> list[Chart]:
    """Return a chart of each further number that a run logs."""
    keys = {
        k for run in runs for row in run.rows[-1000:] for k in row if number(row[k]) is not None
    }
    other_keys = sorted(keys - _OWN_CHART - _KNOWN)
    return [_line_chart(runs, key, key, f"{key} by step.", "") for key in other_keys]


def _columns(rows: Sequence[T]) -> Sequence[T]:
    """Return evenly spaced rows, as many as fit in a chart, including the last one."""
    every = math.ceil(len(rows) / _MOST_COLUMNS) if rows else 1
    return rows[::-1][::every][::-1]


def _steps(unit: str) -> dict[str, Any]:
    return {"xaxis": {"title": {"text": "step"}}, "yaxis": {"title": {"text": unit}}}


def _mean(value: Any) -> float | None:
    values = numbers(value)
    return sum(values) / len(values) if values else None


def _at(values: Sequence[float], index: int) -> float | None:
    return values[index] if index < len(values) else None
