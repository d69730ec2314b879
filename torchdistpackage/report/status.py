"""The status of a run that `tdp watch` shows: facts, and a curve of block characters."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torchdistpackage.launch.run_rows import Row, number
from torchdistpackage.launch.slurm.runs import RUNNING
from torchdistpackage.report.charts import series
from torchdistpackage.report.run import Run, busy_excess, last_sign_s
from torchdistpackage.text import duration, size_text

_RECENT = 20
"""Number of steps over which a rate is the median."""
_LAGS_PERCENT = 10.0
_BLOCKS = " ▁▂▃▄▅▆▇█"
_QUIET_STEPS = 20
"""Number of usual steps without a row, but at least 30 s, after which a run is called quiet."""


@dataclass(frozen=True, slots=True)
class RunStatus:
    """The status of a run: step of num_steps; loss: the last one. facts: name and text pairs, in
    order. ended: the run does not continue, according to its files."""

    step: int
    num_steps: int | None
    loss: float | None
    facts: dict[str, str] = field(default_factory=dict[str, str])
    ended: bool = False

    @property
    def line(self) -> str:
        """The entire status in one line."""
        shown = ("state", "loss", "throughput", "bubble", "lagging", "ends in about")
        words = [f"{name} {self.facts[name]}" for name in shown if name in self.facts]
        return "  ".join([f"step {self.step}/{self.num_steps or '?'}", *words])


def status_of(data: Run, now_s: float, queue: str = "", *, queue_ended: bool = False) -> RunStatus:
    """Return the status of a run. now_s: seconds since 1970. queue: Slurm's information about its
    job. queue_ended: the job is over for good; a job that never began leaves no other trace.
    """
    last = data.rows[-1] if data.rows else {}
    step = int(last.get("step", 0))
    start = data.starts[-1] if data.starts else None
    step_s = _median(data.rows, "time_s")
    facts: dict[str, str] = {}
    state = data.state.word
    ended = start is not None and state != RUNNING and start.end_s is not None
    ended = ended or (queue_ended and state != RUNNING)
    if step_s and state == RUNNING and (quiet := _quiet_s(data, step_s, now_s)):
        state += f", quiet for {duration(quiet)}"
    facts["state"] = str(replace(data.state, word=state))
    facts["queue"] = queue
    if len(data.starts) > 1:
        facts["restarts"] = f"{len(data.starts) - 1}, the last from step {data.starts[-1].step}"
    loss = series(data.rows[-1:], "loss")
    validated = series(data.rows, "val_loss")
    facts["loss"] = f"{loss[0][1]:.4f}" if loss else ""
    if validated:
        facts["validation loss"] = f"{validated[-1][1]:.4f} at step {validated[-1][0]}"
    if (speed := _median(data.rows, "tokens_per_s")) is not None:
        facts["throughput"] = f"{_short(speed)} {data.unit}/s"
    if step_s and (predicted := series(data.rows, "predicted_s")):
        facts["step time"] = f"{step_s:.3g} s (predicted {predicted[-1][1]:.3g} s)"
    if (flops := _median(data.rows, "flops_per_s")) is not None:
        facts["model FLOP/s"] = f"{flops / 1e12:.3g} TFLOP/s"
    if (bubble := _median(data.rows, "bubble")) is not None:
        facts["bubble"] = f"{bubble:.1%}"
    if data.ranks:
        facts |= _of_ranks(data)
    facts |= _times(data, step, step_s, now_s, ended)
    facts = {name: text for name, text in facts.items() if text}
    return RunStatus(step, data.num_steps, loss[0][1] if loss else None, facts, ended)


def _of_ranks(data: Run) -> dict[str, str]:
    """Return the fractions of a step, memory and slow ranks from the last row of ranks.jsonl."""
    facts: dict[str, str] = {}
    row = data.ranks[-1]
    step_s = _mean(row.get("time_s"))
    waits = row.get("waits")
    if step_s and isinstance(waits, dict):
        shares = {axis: (_mean(wait_s) or 0.0) / step_s for axis, wait_s in waits.items()}
        facts["exposed"] = ", ".join(f"{axis} {share:.1%}" for axis, share in shares.items())
    peaks = row.get("peak_bytes")
    numbers_of = [x for x in peaks if number(x) is not None] if isinstance(peaks, list) else []
    if numbers_of:
        most = max(numbers_of)
        facts["memory"] = f"{size_text(most)} at most, on {data.rank_text(peaks.index(most))}"
    if isinstance(row.get("phases"), dict):
        excess = busy_excess(row, data.mesh)
        late = sorted(((x, r) for r, x in enumerate(excess) if x > _LAGS_PERCENT), reverse=True)
        facts["lagging"] = ", ".join(f"{data.rank_text(r)} +{x:.0f} %" for x, r in late[:4])
    return facts


def _times(data: Run, step: int, step_s: float | None, now_s: float, ended: bool) -> dict[str, str]:
    """Return the time until the last step, the next checkpoint and the end of the job."""
    facts: dict[str, str] = {}
    if ended or not step_s:
        return facts
    if data.num_steps is not None:
        facts["ends in about"] = duration((data.num_steps - step) * step_s)
    every, minutes = (
        data.config.get("checkpoint.save_every"),
        data.config.get("checkpoint.save_every_min"),
    )
    waits = []
    if isinstance(every, int) and every > 0:
        waits.append((every - step % every) * step_s)
    if isinstance(minutes, int | float):
        since = [data.starts[-1].begin_s] if data.starts else []
        since += [save.at_s for save in data.saves[-1:]]
        waits.append(max(max(since, default=now_s) + 60 * minutes - now_s, 0.0))
    if waits:
        facts["next checkpoint in"] = duration(min(waits))
    end_s = data.starts[-1].job_end_s if data.starts else None
    if end_s is not None:
        facts["job ends in"] = duration(max(end_s - now_s, 0.0))
    return facts


def _quiet_s(data: Run, step_s: float, now_s: float) -> float | None:
    """Return how long a running run has written nothing, if that is unusual."""
    sign_s = last_sign_s(data)
    since = 0.0 if sign_s is None else now_s - sign_s
    return since if since > max(_QUIET_STEPS * step_s, 30.0) else None


def curve(values: Sequence[float], columns: int, rows: int) -> list[str]:
    """Return a curve of block characters: `rows` lines of at most `columns`; [] without values."""
    if not values:
        return []
    size = max(len(values) / columns, 1.0)
    num = min(columns, len(values))
    parts = [
        values[int(i * size) : max(int((i + 1) * size), int(i * size) + 1)] for i in range(num)
    ]
    # of the largest one, as a sum of numbers near 1e308 is none
    scale = max(map(abs, values)) or 1.0
    means = [sum(x / scale for x in part) / len(part) for part in parts if part]
    low, high = min(means), max(means)
    eighths = [round((x - low) / (high - low or 1.0) * (8 * rows - 1)) + 1 for x in means]
    return [
        "".join(_BLOCKS[min(max(n - 8 * row, 0), 8)] for n in eighths)
        for row in reversed(range(rows))
    ]


def _median(rows: Sequence[Row], key: str) -> float | None:
    values = [value for _, value in series(rows[-_RECENT:], key)]
    return statistics.median(values) if values else None


def _mean(value: Any) -> float | None:
    numbers_of = [x for x in value if number(x) is not None] if isinstance(value, list) else []
    return sum(numbers_of) / len(numbers_of) if numbers_of else None


def _short(value: float) -> str:
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.1f}{unit}"
    return f"{value:.0f}"
