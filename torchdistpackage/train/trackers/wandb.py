"""Weights & Biases: one run for all starts; without a connection it is stored in `wandb/` to be
sent later.

It keeps every row it has received, so a step counts as delivered before it is: a kill may lose the
rows of the last second, and none arrives twice. A step that a resumed run repeats keeps its first
row.
"""

import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import wandb

from torchdistpackage.launch.run_rows import Row
from torchdistpackage.train.trackers.tracker import (
    PROJECT,
    TrackedRun,
    TrackerState,
    is_reachable,
    scalars,
    texts,
)

_SERVICE = "https://api.wandb.ai"


class WandbTracker:
    """Implements `Tracker`."""

    name = "wandb"

    def open(self, run: TrackedRun) -> int:
        self._state = TrackerState.of(run.folder, self.name)
        if "id" not in self._state.values:
            self._state.keep(id=uuid.uuid4().hex[:8])
        mode = os.environ.get("WANDB_MODE")
        if mode is None and not is_reachable(os.environ.get("WANDB_BASE_URL", _SERVICE)):
            mode = "offline"
        try:
            self._run = self._begin(run, mode or "online")
        except wandb.Error:
            # such as a key that is missing; offline everything is kept all the same
            if mode is not None:
                raise
            self._run = self._begin(run, "offline")
        # rows have their own step: one of the library's could not be amended
        self._run.define_metric("*", step_metric="step")
        return self._state.step

    def _begin(self, run: TrackedRun, mode: str) -> Any:
        return wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=self._state.values["id"],
            name=run.name,
            dir=str(run.folder),
            config=dict(run.config),
            mode=mode,
            resume="allow",
            allow_val_change=True,
            settings=wandb.Settings(
                console="off", silent=True, disable_git=True, disable_code=True, save_code=False
            ),
        )

    def send(self, rows: Sequence[Row]) -> None:
        self._state.keep(step=max(self._state.step, rows[-1]["step"]))
        for row in rows:
            self._run.log({"step": row["step"], **dict(scalars(row)), **dict(texts(row))})

    def add_picture(self, path: Path, step: int) -> None:
        is_svg = path.suffix == ".svg"
        shown = wandb.Html(path.read_text("utf-8")) if is_svg else wandb.Image(str(path))
        self._run.log({"step": step, path.stem: shown})

    def close(self, outcome: str) -> None:
        self._run.finish(exit_code=1 if outcome == "failed" else 0)

    @property
    def place(self) -> str:
        if self._run.settings.mode == "online":
            return str(self._run.url)
        folder = Path(self._run.dir).parents[1]
        return f"offline; send all starts with: wandb sync {folder}/offline-run-*"
