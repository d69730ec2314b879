"""Feed the rows of metrics.jsonl to trackers, each in a thread of rank 0, without ever ending a
run.

The thread reads the file as it grows. So training does not wait, rows that a tracker missed are
still available when it works again, and a start begins with the rows that the tracker lacks.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchdistpackage.launch.run_rows import Row, RowReader
from torchdistpackage.lazy import resolve
from torchdistpackage.run_files import METRICS, PICTURE, PLOT
from torchdistpackage.train.loop import Callback, Loop
from torchdistpackage.train.step_stats import PendingStep, StepResult
from torchdistpackage.train.trackers.tracker import TrackedRun, Tracker

TRACKERS = {
    "tensorboard": "torchdistpackage.train.trackers.tensorboard:TensorBoardTracker",
    "wandb": "torchdistpackage.train.trackers.wandb:WandbTracker",
    "mlflow": "torchdistpackage.train.trackers.mlflow:MLflowTracker",
}
"""Import path by name, so that a library is loaded only by a run that uses it."""
FOLDERS = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlruns"}
"""Folder that each service writes in the run folder."""
PICTURES = (PLOT, PICTURE)
_LOOK_S, _AGAIN_S = 1.0, 30.0
_END_S, _FAILED_END_S = 20.0, 5.0
"""Limits in seconds for trackers at the end of a start: a job may have little time left."""


class TrackerFeed:
    """The named tracker, and the thread that feeds it."""

    def __init__(self, name: str, run: TrackedRun):
        self.said: deque[str] = deque()
        """Lines for the log of the run."""
        self._name, self._run = name, run
        self._tracker: Tracker | None = None
        self._reader = RowReader(run.folder / METRICS)
        self._last, self._sent = 0, Row()
        self._failed = False
        self._end, self._word = threading.Event(), ""
        # the row of the step before, which may yet be amended with a validation
        self._reader.read_new()
        self._before = self._reader.rows.get(run.step, {})
        self._thread = threading.Thread(target=self._serve, name=f"tdp-{name}", daemon=True)
        self._thread.start()

    def finish(self, outcome: str) -> None:
        """Pass on the remaining rows, and end; does not wait."""
        self._word = outcome
        self._end.set()

    def join(self, until_s: float) -> None:
        """Wait for the end, until this time of the monotonic clock."""
        self._thread.join(max(until_s - time.monotonic(), 0.0))
        if self._thread.is_alive():
            self.said.append(
                f"note: {self._name} has not taken all rows in time; the next start sends them, "
                f"and {METRICS} has them"
            )

    def _serve(self) -> None:
        wait_s = 0.0
        # not a sleep: the end of the run ends the thread at once
        while not self._end.wait(wait_s):
            wait_s = _LOOK_S if self._attempt(self._feed) else _AGAIN_S
        if self._attempt(self._feed):
            self._attempt(self._close)

    def _attempt(self, action: Callable[[], None]) -> bool:
        """Call the tracker and return whether it succeeded; report the first failure until it
        succeeds again.
        """
        try:
            action()
        except (Exception, SystemExit) as error:
            self._tracker = None  # opened again, and then asked what it has
            if not self._failed:
                reason = str(error).strip().partition("\n")[0] or type(error).__name__
                self.said.append(
                    f"note: {self._name} failed: {reason[:300]}; tried again every "
                    f"{_AGAIN_S:g} s, and the training goes on"
                )
            self._failed = True
            return False
        self._failed = False
        return True

    def _feed(self) -> None:
        if self._tracker is None:
            tracker: Tracker = resolve(TRACKERS[self._name])()
            self._last = tracker.open(self._run)
            self._tracker = tracker
            self._sent = self._before if self._last == self._run.step else {}
            self._reader = RowReader(self._reader.path)
            self.said.append(f"{self._name}: {tracker.place}")
        self._reader.read_new()
        by_step = self._reader.rows
        rows = [by_step[step] for step in sorted(by_step) if step > self._last]
        if (again := by_step.get(self._last)) and self._sent:
            added = {k: v for k, v in again.items() if k not in self._sent}
            rows[:0] = [{"step": self._last, **added}] if added else []
            self._sent = again
        if rows:
            self._tracker.send(rows)
            self._last = max(self._last, rows[-1]["step"])
            self._sent = by_step.get(self._last, self._sent)
            # a file that is replaced is read anew, so its rows need not be kept
            by_step.clear()

    def _close(self) -> None:
        assert self._tracker is not None
        for name in PICTURES:
            if (path := self._run.folder / name).exists():
                self._tracker.add_picture(path, self._last)
        self._tracker.close(self._word)


class Trackers(Callback):
    """All trackers of a run: made on all ranks, fed by rank 0.

    names: of `TRACKERS`. config: every key by its dotted name. step: the last one that this start
    does not do again.
    """

    def __init__(
        self,
        names: Sequence[str],
        folder: Path,
        *,
        rank: int,
        name: str,
        config: Mapping[str, Any],
        step: int,
    ):
        self._names = names if rank == 0 else ()
        self._run = TrackedRun(folder, name, config, step)
        self._feeds: list[TrackerFeed] = []

    def __enter__(self) -> "Trackers":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None and self._feeds:
            self._finish("failed", _FAILED_END_S)

    def on_begin(self, loop: Loop) -> None:
        """Start a feed for each service. By now the rows that this start repeats have been
        dropped.
        """
        self._feeds = [TrackerFeed(x, self._run) for x in self._names]

    def on_step(self, loop: Loop, result: StepResult, issued: PendingStep) -> None:
        for feed in self._feeds:
            while feed.said:
                loop.log.note(feed.said.popleft())

    def on_end(self, loop: Loop) -> None:
        """Name the folders of the run for its summary."""
        at_server = bool(os.environ.get("MLFLOW_TRACKING_URI"))
        names = [x for x in self._names if x != "mlflow" or not at_server]
        loop.artifacts += tuple(f"{FOLDERS[name]}/" for name in names)

    def close(self, outcome: str) -> list[str]:
        """End all trackers, passing them the pictures of the run; return lines to print."""
        return self._finish(outcome, _END_S)

    def _finish(self, outcome: str, wait_s: float) -> list[str]:
        until_s = time.monotonic() + wait_s
        for feed in self._feeds:
            feed.finish(outcome)
        # all feeds send at once, so the limit is for all of them together
        for feed in self._feeds:
            feed.join(until_s)
        return [line for feed in self._feeds for line in feed.said]
