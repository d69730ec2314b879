"""MLflow: one run for all starts, on the server of MLFLOW_TRACKING_URI or in `mlruns/`.

It keeps every row it has received, and is asked for its last step: each row has its step as a
metric, written first. A step that a resumed run repeats keeps its first row.
"""

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException

from torchdistpackage.launch.run_rows import Row
from torchdistpackage.train.trackers.tracker import (
    PROJECT,
    TrackedRun,
    TrackerState,
    is_reachable,
    scalars,
    texts,
)

_MOST_PARAMS, _MOST_METRICS, _MOST_LETTERS = 100, 1000, 6000
"""Limits of MLflow for one request or value."""


class MLflowTracker:
    """Implements `Tracker`."""

    name = "mlflow"

    def open(self, run: TrackedRun) -> int:
        state = TrackerState.of(run.folder, self.name)
        uri = os.environ.get("MLFLOW_TRACKING_URI", "")
        if not uri or (uri.startswith("http") and not is_reachable(uri)):
            uri = (run.folder / "mlruns").resolve().as_uri()
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self._uri, self._client = uri, MlflowClient(tracking_uri=uri)
        if state.values.get("uri") == uri:
            self._id = str(state.values["id"])
            self._client.update_run(self._id, status="RUNNING")
        else:
            self._id = self._create(run)
            state.keep(uri=uri, id=self._id)
        data = self._client.get_run(self._id).data
        values = {k: str(v)[:_MOST_LETTERS] for k, v in run.config.items()}
        params = [Param(k, v) for k, v in values.items() if k not in data.params]
        for some in batches(params, _MOST_PARAMS):
            self._client.log_batch(self._id, params=some)
        for key, value in values.items():
            if data.params.get(key, value) != value:  # a parameter keeps its first value
                self._client.set_tag(self._id, f"changed.{key}", value)
        return int(data.metrics.get("step", 0))

    def _create(self, run: TrackedRun) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        existing = self._client.get_experiment_by_name(name)
        try:
            experiment = (
                existing.experiment_id if existing else self._client.create_experiment(name)
            )
        except MlflowException:  # another run has just made it
            experiment = self._client.get_experiment_by_name(name).experiment_id
        return self._client.create_run(experiment, run_name=run.name).info.run_id

    def send(self, rows: Sequence[Row]) -> None:
        now_ms = int(time.time() * 1000)
        for row in rows:
            values = [("step", float(row["step"])), *scalars(row)]
            metrics = [Metric(key, value, now_ms, row["step"]) for key, value in values]
            for some in batches(metrics, _MOST_METRICS):
                self._client.log_batch(self._id, metrics=some)
            for key, text in texts(row):
                self._client.set_tag(self._id, key, f"step {row['step']}: {text}"[:_MOST_LETTERS])

    def add_picture(self, path: Path, step: int) -> None:
        self._client.log_artifact(self._id, str(path))

    def close(self, outcome: str) -> None:
        status = {"finished": "FINISHED", "failed": "FAILED"}.get(outcome, "SCHEDULED")
        self._client.set_terminated(self._id, status)

    @property
    def place(self) -> str:
        return f"run {self._id} in {self._uri}"


def batches(values: Sequence[Any], most: int) -> Iterator[list[Any]]:
    """Yield lists of at most `most` of the values, in order."""
    return (list(values[i : i + most]) for i in range(0, len(values), most))
