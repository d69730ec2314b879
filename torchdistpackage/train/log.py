"""The output of a run while it trains, and its records: metrics, progress, the loss curve.

`metrics.jsonl` is the only record. It has one object per step, each step once however often the run
was stopped and resumed, and the picture is drawn from it.
"""

import logging
import math
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from textwrap import fill, indent
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from torchdistpackage.plan.logged_values import line_texts
from torchdistpackage.run_files import PLOT
from torchdistpackage.train.metric_rows import MetricsLog, read_metrics
from torchdistpackage.train.step_stats import StepResult

log = logging.getLogger(__name__)

SHARES = "sources"
"""Key of a row with the shares of a step's samples by source."""
_COLUMNS = 80
_MOST = 1e300
"""Largest value plotted. matplotlib crashes on integers that do not fit a float."""


def print_line(line: str) -> None:
    """Print one line and flush it."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def perplexity(loss: float) -> float:
    """Return the perplexity of a mean loss in nats a token."""
    return math.exp(loss) if not loss > 700 else math.inf


def evaluation_lines(loss: float, sets: Mapping[str, float], *, of_tokens: bool) -> list[str]:
    """Return lines with the losses of a validation and of each set, and perplexities if the losses
    are of tokens.
    """
    every = {"val": loss, **sets}
    texts = [f"{n} {x:.4f}" + f" ({perplexity(x):.4g})" * of_tokens for n, x in every.items()]
    head = "evaluated, loss (perplexity): " if of_tokens else "evaluated, loss: "
    return [fill(head + ", ".join(texts), _COLUMNS, subsequent_indent="  ")]


class ProgressDisplay(AbstractContextManager["ProgressDisplay"]):
    """A display of the progress of a run: a bar on a terminal, else one plain line every `every`
    steps.

    done: steps completed by earlier starts of the run. unit: what the loss is a mean over.
    """

    def __init__(
        self, total: int, *, every: int, stream: TextIO, done: int = 0, unit: str = "tokens"
    ):
        self._total, self._every, self._stream, self.unit = total, every, stream, unit
        self._bar: Bar | None = None
        if stream.isatty() and os.environ.get("TERM") != "dumb":
            self._bar = Bar(
                TextColumn("step {task.completed}/{task.total}"),
                BarColumn(),
                TextColumn("{task.description}"),
                TimeRemainingColumn(),
                console=Console(file=stream),
            )
            self._task = self._bar.add_task("", total=total, completed=done)
            self._bar.start()

    def update(
        self,
        step: int,
        *,
        loss: float,
        tokens_per_s: float,
        bubble: float | None = None,
        predicted_bubble: float | None = None,
        predicted_per_s: float | None = None,
        shares: Any = None,
        task: str = "",
        texts: Iterable[str] = (),
    ) -> None:
        """Show a completed step.

        Bubbles are fractions of the step time; None without a pipeline. predicted_per_s: predicted
        tokens per second. shares: of the step's samples by source, if there are several. task: text
        of a task's means. texts: texts of other values (plan/logged_values.py).
        """
        if self._bar is None and step % self._every and step != self._total:
            return
        text = f"loss {loss:.4f}  {_thousands(tokens_per_s)} {self.unit}/s"
        # in the bar's 80 columns there is no room for what does not change
        says_predicted = predicted_per_s is not None and self._bar is None
        speed = "" if predicted_per_s is None else f"predicted {_thousands(predicted_per_s)}"
        if says_predicted and bubble is None:
            text += f" ({speed})"
        if task:
            text += f"  {task}"
        if bubble is not None:
            text += f"  bubble {bubble:.1%}"
            if predicted_bubble is not None and self._bar is None:
                text += f" (predicted {predicted_bubble:.1%})"
        text = "  ".join([text, *texts])
        if self._bar is not None:
            self._bar.update(self._task, completed=step, description=text)
            return
        line = f"step {step}/{self._total}  {text}"
        named = "  ".join(f"{name} {share:.0%}" for name, share in (shares or {}).items())
        fits = len(line) + len(named) + 2 <= _COLUMNS
        if says_predicted and bubble is not None:  # one line of 80 columns does not hold both
            named, fits = f"{speed} {self.unit}/s  {named}".rstrip(), False
        self.say(f"{line}  {named}" if named and fits else line)
        if named and not fits:
            self.say(fill(named, _COLUMNS, initial_indent="  ", subsequent_indent="  "))

    def say(self, line: str) -> None:
        """Print one line, above the bar if there is one."""
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False)
        else:
            self._stream.write(line + "\n")
            self._stream.flush()

    def close(self) -> None:
        """End the bar in its current state."""
        if self._bar is not None:
            self._bar.stop()

    def __exit__(self, *error: object) -> None:
        self.close()


class StepLog:
    """The rows and lines of a run's steps; it does nothing on ranks other than 0.

    every: steps between lines where there is no bar, and between measurements of a device. unit:
    what the loss is a mean over. samples: of a step, where the loss, or model and data, are a
    user's own: a loss that is a mean over no more is one over samples. is_cross_entropy: the loss
    is that of tokens, in nats, and no loss of a user. flops_per_token: None where it is unknown.
    predicted_s: of a step. predicted_bubble: of a pipeline. verbose: causes of its bubble are shown
    too; the rows always have them. goes_on: rows that cannot be written are said and held, and end
    no run.
    """

    def __init__(
        self,
        folder: Path,
        total: int,
        *,
        rank: int,
        every: int = 1,
        unit: str = "tokens",
        samples: int | None = None,
        is_cross_entropy: bool = True,
        flops_per_token: float | None = None,
        predicted_s: float | None = None,
        predicted_bubble: float | None = None,
        verbose: bool = False,
        goes_on: bool = False,
    ):
        self.every, self.unit, self._verbose = every, unit, verbose
        self.goes_on = goes_on
        self._samples, self._is_cross_entropy = samples, is_cross_entropy
        self._folder, self._total, self._is_main = folder, total, rank == 0
        self._flops_per_token, self._predicted_bubble = flops_per_token, predicted_bubble
        self._metrics: MetricsLog | None = None
        self._lines: list[str] = []
        self._predicted_s = predicted_s
        # once a start is enough for what does not change
        self._values: dict[str, float | str | Mapping[str, float]] = (
            {} if predicted_s is None else {"predicted_s": predicted_s}
        )

    @contextmanager
    def opened(self, steps_done: int) -> Iterator[None]:
        """Open the files. steps_done: steps that earlier starts of the run completed."""
        if not self._is_main:
            yield
            return
        total = self._total
        self._bar = ProgressDisplay(
            total, every=self.every, stream=sys.stdout, done=steps_done, unit=self.unit
        )
        rows = MetricsLog(self._folder, resume_step=steps_done)
        with self._bar, rows as self._metrics:
            rows.say = self._bar.say if self.goes_on else None
            if steps_done:
                remaining = (
                    f"{total - steps_done} to go" if steps_done < total else "nothing left to train"
                )
                self._bar.say(f"resumed after step {steps_done} of {total}; {remaining}")
            if rows.missing:
                note = f"note: {rows.path.name} has no row of {rows.missing}: it was cut or removed"
                self._bar.say(fill(f"{note}, or the checkpoint comes from elsewhere", _COLUMNS))
            yield
            for line in self._lines:  # noted after the last step
                self._bar.say(line)
            self._lines = []

    @property
    def in_nats(self) -> bool:
        """Return whether the loss is the cross entropy of tokens, which can be compared with other
        losses.
        """
        return self._is_cross_entropy and self.unit == "tokens"

    def see(self, num_terms: int) -> None:
        """Record the number of terms in a step's mean loss, before it is logged."""
        if self._samples is not None and num_terms <= self._samples:
            self.unit = "samples"
            if self._metrics is not None:
                self._bar.unit = self.unit

    def note(self, *lines: str, **values: float | str | Mapping[str, float]) -> None:
        """Print these lines, and add these values to the row, with the next logged step."""
        self._lines += lines
        self._values |= values

    def write(self, result: StepResult, tokens: int, values: Mapping[str, Any]) -> None:
        """Log a step, once. tokens: of the run so far; values: further ones of its row."""
        lines, noted = self._lines, self._values
        self._lines, self._values = [], {}
        if self._metrics is None:
            return
        for line in lines:
            self._bar.say(line)
        speed = result.tokens_per_s
        per_token = self._flops_per_token if self.unit == "tokens" else None
        flops_per_s = per_token and per_token * speed
        self._metrics.write(
            result.step,
            **result.logged(),
            tokens=tokens,
            flops_per_s=flops_per_s,
            **values,
            **noted,
        )
        self._bar.update(
            result.step,
            loss=result.loss,
            tokens_per_s=speed,
            bubble=None if self._predicted_bubble is None else result.bubble,
            predicted_bubble=self._predicted_bubble,
            predicted_per_s=self._predicted_s and speed * result.time_s / self._predicted_s,
            shares=noted.get(SHARES),
            task=result.task_text,
            texts=line_texts(result),
        )
        if self._verbose and "pipeline" in noted:
            width = shutil.get_terminal_size().columns - 2
            self._bar.say(indent(fill(str(noted["pipeline"]), width), "  "))

    def amend(self, step: int, values: Mapping[str, Any]) -> None:
        """Add values to the row of `step`, the last one, that an earlier start left out."""
        if self._metrics is not None:
            self._metrics.amend(step, **values)

    def sync(self) -> None:
        """Flush the rows to the disk."""
        if self._metrics is not None:
            self._metrics.sync()


def plot_loss(
    metrics: str | Path, out: str | Path | None = None, *, in_nats: bool = True
) -> Path | None:
    """Draw the losses of a metrics file over steps, as `loss.png` next to it; return its path.

    It returns None and logs one line if matplotlib is missing or there is nothing to draw.
    """
    metrics = Path(metrics)
    rows = read_metrics(metrics)
    train, val = list(_points(rows, "loss")), list(_points(rows, "val_loss"))
    if not train and not val:
        log.warning("no loss curve: %s has no losses", metrics)
        return None
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        log.warning("no loss curve: matplotlib is not installed (the extra `plot` brings it)")
        return None
    # Figure and canvas by hand: pyplot would choose a back end for the entire process.
    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if train:
        axes.plot(*zip(*train, strict=True), color="tab:blue", linewidth=1.5, label="training")
    if val:
        axes.plot(*zip(*val, strict=True), "o", color="tab:red", label="validation")
    for key, style in (("unigram", ":"), ("bigram", "--")):
        if levels := [level for _, level in _points(rows, key)]:
            label = f"{key} entropy {levels[-1]:.2f}"
            axes.axhline(levels[-1], color="gray", linestyle=style, label=label)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss (nats per token)" if in_nats else "loss")
    axes.grid(alpha=0.3)
    axes.legend()
    path = metrics.with_name(PLOT) if out is None else Path(out)
    canvas.print_png(path)
    return path


def _points(rows: list[dict[str, Any]], key: str) -> Iterator[tuple[int, float]]:
    values = ((row["step"], row.get(key)) for row in rows)
    return ((s, x) for s, x in values if isinstance(x, int | float) and abs(x) < _MOST)


def _thousands(number: float) -> str:
    return f"{number / 1000:.1f}k" if number >= 1000 else f"{number:.0f}"
