"""What a run says while it runs, and what stays of it: metrics, progress, the loss curve.

One rule: `metrics.jsonl` is the record. It has one object a step, each step once however often
the run was stopped and resumed, and the picture is drawn from it alone.
"""

import json
import logging
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from textwrap import fill, indent
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from torchdistpackage.errors import DataError
from torchdistpackage.launch.files import append_text, atomic_write
from torchdistpackage.launch.run_rows import METRICS, read_rows
from torchdistpackage.train.step_stats import StepResult

log = logging.getLogger(__name__)

PLOT = "loss.png"
SHARES = "sources"
"""The key of a row under which each of several sources has its part of the step's samples."""
_COLUMNS = 80
_LOOK_S = 1.0
"""How often it is looked whether the folder is still there, which is free but for old NFS."""
_MOST = 1e300
"""Of what is drawn: a whole number that is no float ends matplotlib."""


def print_line(line: str) -> None:
    """One line of output, at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


class MetricsLog(AbstractContextManager["MetricsLog"]):
    """Appends to `metrics.jsonl` in `folder`; only one rank of a run has one.

    resume_step: the last step that the resumed state has done; rows after it are dropped, as their
    steps are done again. A row is its `step` and what was measured: `loss`, and at validations
    `val_loss`, `unigram` and `bigram`, all in nats a token. name: of the file.
    """

    def __init__(self, folder: str | Path, resume_step: int = 0, name: str = METRICS):
        self.path = Path(folder) / name
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._looked_s = 0.0
        kept = [row for row in read_metrics(self.path) if row["step"] <= resume_step]
        self._last = kept[-1]["step"] if kept else 0
        self._replace(kept)

    def write(self, step: int, **values: object) -> None:
        """Add the row of a step and hand it to the system; not finite numbers become null.

        Raises:
            DataError: a row of this step or a later one is there, or the file is not any more.
        """
        if step <= self._last:
            raise DataError(
                f"{self.path} already goes up to step {self._last}, so step {step} cannot be "
                f"added; write once a step, or reopen it with resume_step={step - 1}"
            )
        self._last = step
        self._file.write(_line({"step": step, **values}))
        self._file.flush()
        if time.monotonic() - self._looked_s > _LOOK_S:
            self._check()

    def sync(self) -> None:
        """Have on the disk what was written so far; raises DataError as `write`."""
        os.fsync(self._file.fileno())
        self._check()

    def _check(self) -> None:
        """A file that was removed takes all that is written, and gives none of it back."""
        self._looked_s = time.monotonic()
        try:
            there = os.path.samestat(self.path.stat(), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            there = False
        if not there:
            raise DataError(
                f"{self.path} was removed or replaced while the run wrote to it, so its folder has "
                f"no rows, logs or checkpoints of this run; nothing more is written. Start it "
                f"again; if the folder was moved, move it back before"
            )

    def amend(self, step: int, **values: object) -> None:
        """Add values to the row of `step`, if it is the last one."""
        rows = read_metrics(self.path)
        if rows and rows[-1]["step"] == step:
            self._file.close()
            self._replace([*rows[:-1], {**rows[-1], **values}])

    def _replace(self, rows: list[dict[str, Any]]) -> None:
        atomic_write(self.path, "".join(map(_line, rows)))
        self._file = append_text(self.path)

    def close(self) -> None:
        self._file.close()

    def __exit__(self, *error: object) -> None:
        self.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Rows by ascending step, of a step the last written, without lines that are none.

    Raises:
        DataError: the name is that of a device, a pipe or the like, which is not opened.
    """
    return read_rows(path)[0]


def perplexity(loss: float) -> float:
    """Of a mean loss in nats a token."""
    return math.exp(loss) if not loss > 700 else math.inf


def evaluation_lines(loss: float, sets: Mapping[str, float], *, of_tokens: bool) -> list[str]:
    """The losses of a validation and of each set, with perplexities where they are of tokens."""
    every = {"val": loss, **sets}
    texts = [f"{n} {x:.4f}" + f" ({perplexity(x):.4g})" * of_tokens for n, x in every.items()]
    head = "evaluated, loss (perplexity): " if of_tokens else "evaluated, loss: "
    return [fill(head + ", ".join(texts), _COLUMNS, subsequent_indent="  ")]


def pair_text(pairs: Mapping[str, float]) -> str:
    """Of `PairSums.means` what a line has room for."""
    return f"margin {pairs['rewards/margins']:.4f}  accuracy {pairs['rewards/accuracies']:.0%}"


class ProgressDisplay(AbstractContextManager["ProgressDisplay"]):
    """How far the run is: a bar on a terminal, else one plain line every `every` steps.

    done: steps that an earlier start of the run has done. unit: what the loss is a mean over.
    """

    def __init__(
        self, total: int, *, every: int, stream: TextIO, done: int = 0, unit: str = "tokens"
    ):
        self._total, self._every, self._stream, self._unit = total, every, stream, unit
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
        expert_imbalance: float | None = None,
        shares: Any = None,
        pairs: Mapping[str, float] | None = None,
    ) -> None:
        """Show a step that is done. Bubbles are fractions of the step time; None without a
        pipeline. expert_imbalance: the busiest expert over the mean; None without experts. shares:
        of the step's samples, by source of several. pairs: `PairSums.means` of answers."""
        if self._bar is None and step % self._every and step != self._total:
            return
        text = f"loss {loss:.4f}  {_thousands(tokens_per_s)} {self._unit}/s"
        if pairs:
            text += f"  {pair_text(pairs)}"
        if bubble is not None:
            text += f"  bubble {bubble:.1%}"
        if expert_imbalance is not None:
            text += f"  experts {expert_imbalance:.1f}x"
        if self._bar is not None:  # in 80 columns there is no room for what does not change
            self._bar.update(self._task, completed=step, description=text)
            return
        if predicted_bubble is not None:
            text += f" (predicted {predicted_bubble:.1%})"
        line = f"step {step}/{self._total}  {text}"
        named = "  ".join(f"{name} {share:.0%}" for name, share in (shares or {}).items())
        fits = len(line) + len(named) + 2 <= _COLUMNS
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
        """Leave the bar as it stands."""
        if self._bar is not None:
            self._bar.stop()

    def __exit__(self, *error: object) -> None:
        self.close()


class StepLog:
    """The rows and lines of a run's steps: of rank 0, on all others nothing.

    every: steps between lines where there is no bar, and between measurements of a device. unit:
    what the loss is a mean over. flops_per_token: of the model, None where it is unknown.
    predicted_bubble: of a pipeline. verbose: causes of its bubble are shown too; the rows always
    have them.
    """

    def __init__(
        self,
        folder: Path,
        total: int,
        *,
        rank: int,
        every: int = 1,
        unit: str = "tokens",
        flops_per_token: float | None = None,
        predicted_bubble: float | None = None,
        verbose: bool = False,
    ):
        self.every, self.unit, self._verbose = every, unit, verbose
        self._folder, self._total, self._is_main = folder, total, rank == 0
        self._flops_per_token, self._predicted_bubble = flops_per_token, predicted_bubble
        self._metrics: MetricsLog | None = None
        self._lines: list[str] = []
        self._values: dict[str, float | str | Mapping[str, float]] = {}

    @contextmanager
    def opened(self, done: int) -> Iterator[None]:
        """done: steps that earlier starts of the run have done."""
        if not self._is_main:
            yield
            return
        total = self._total
        self._bar = ProgressDisplay(
            total, every=self.every, stream=sys.stdout, done=done, unit=self.unit
        )
        with MetricsLog(self._folder, resume_step=done) as self._metrics, self._bar:
            if done:
                left = f"{total - done} to go" if done < total else "nothing left to train"
                self._bar.say(f"resumed after step {done} of {total}; {left}")
            yield
            for line in self._lines:  # noted after the last step
                self._bar.say(line)
            self._lines = []

    def note(self, *lines: str, **values: float | str | Mapping[str, float]) -> None:
        """Say these lines, and add these values to the row, with the step that is logged next."""
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
        flops_per_s = self._flops_per_token and self._flops_per_token * speed
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
            expert_imbalance=result.expert_imbalance,
            shares=noted.get(SHARES),
            pairs=result.pairs,
        )
        if self._verbose and "pipeline" in noted:
            width = shutil.get_terminal_size().columns - 2
            self._bar.say(indent(fill(str(noted["pipeline"]), width), "  "))

    def amend(self, step: int, values: Mapping[str, Any]) -> None:
        """Add to the row of `step`, the last one, what an earlier start did not come to."""
        if self._metrics is not None:
            self._metrics.amend(step, **values)

    def sync(self) -> None:
        """Have the rows on the disk."""
        if self._metrics is not None:
            self._metrics.sync()


def plot_loss(metrics: str | Path, out: str | Path | None = None) -> Path | None:
    """Draw the losses of a metrics file over steps, as `loss.png` next to it; returns its path.

    None, with one line logged, where matplotlib is missing or there is nothing to draw.
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
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    path = metrics.with_name(PLOT) if out is None else Path(out)
    canvas.print_png(path)
    return path


def _points(rows: list[dict[str, Any]], key: str) -> Iterator[tuple[int, float]]:
    found = ((row["step"], row.get(key)) for row in rows)
    return ((s, x) for s, x in found if isinstance(x, int | float) and abs(x) < _MOST)


_to_json = json.JSONEncoder(allow_nan=False).encode


def _line(row: Mapping[str, Any]) -> str:
    try:
        return _to_json(row) + "\n"
    except ValueError:  # rare, and the look for it costs more than the line
        return _to_json(_finite(row)) + "\n"


def _finite(value: Any) -> Any:
    """The same with None for numbers that JSON has no word for."""
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _thousands(number: float) -> str:
    return f"{number / 1000:.1f}k" if number >= 1000 else f"{number:.0f}"
