"""Stand-ins for wandb and mlflow, as far as `log.to` calls them: what they are told is kept.

They hold the contract of the real ones, against which the same tests run where these are installed:
what is logged stays, and mlflow's parameters cannot be changed.
"""

import types
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple


class Metric(NamedTuple):
    key: str
    value: float
    timestamp: int
    step: int


class Param(NamedTuple):
    key: str
    value: str


class MlflowException(Exception):
    pass


class StandInStore:
    """Of one tracking URI."""

    def __init__(self) -> None:
        self.experiments: dict[str, Any] = {}
        self.metrics: dict[str, list[Metric]] = defaultdict(list)
        self.params: dict[str, dict[str, str]] = defaultdict(dict)
        self.tags: dict[str, dict[str, str]] = defaultdict(dict)
        self.artifacts: dict[str, list[str]] = defaultdict(list)
        self.status: dict[str, str] = {}


def mlflow() -> dict[str, types.ModuleType]:
    """By name the modules, with stores of their own."""
    stores: dict[str, StandInStore] = defaultdict(StandInStore)

    class MlflowClient:
        def __init__(self, tracking_uri: str):
            self.store = stores[tracking_uri]

        def get_experiment_by_name(self, name: str) -> Any:
            return self.store.experiments.get(name)

        def create_experiment(self, name: str) -> str:
            self.store.experiments[name] = types.SimpleNamespace(experiment_id=name)
            return name

        def create_run(self, experiment_id: str, run_name: str) -> Any:
            name = f"run{len(self.store.status)}"
            self.store.status[name] = "RUNNING"
            return types.SimpleNamespace(info=types.SimpleNamespace(run_id=name))

        def update_run(self, run_id: str, status: str) -> None:
            self.store.status[run_id] = status

        set_terminated = update_run

        def get_run(self, run_id: str) -> Any:
            latest = {m.key: m.value for m in sorted(self.store.metrics[run_id], key=_step)}
            params = dict(self.store.params[run_id])
            data = types.SimpleNamespace(
                metrics=latest, params=params, tags=self.store.tags[run_id]
            )
            info = types.SimpleNamespace(status=self.store.status[run_id])
            return types.SimpleNamespace(data=data, info=info)

        def get_metric_history(self, run_id: str, key: str) -> list[Metric]:
            return [m for m in self.store.metrics[run_id] if m.key == key]

        def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
            known = self.store.params[run_id]
            for param in params:
                if known.setdefault(param.key, param.value) != param.value:
                    raise MlflowException(f"{param.key} has another value")
            self.store.metrics[run_id] += metrics

        def set_tag(self, run_id: str, key: str, value: str) -> None:
            self.store.tags[run_id][key] = value

        def log_artifact(self, run_id: str, local_path: str) -> None:
            self.store.artifacts[run_id].append(Path(local_path).name)

        def list_artifacts(self, run_id: str) -> list[Any]:
            return [types.SimpleNamespace(path=x) for x in self.store.artifacts[run_id]]

    main = types.ModuleType("mlflow")
    entities, exceptions = (types.ModuleType(f"mlflow.{x}") for x in ("entities", "exceptions"))
    main.__dict__.update(MlflowClient=MlflowClient)
    entities.__dict__.update(Metric=Metric, Param=Param)
    exceptions.__dict__.update(MlflowException=MlflowException)
    return {x.__name__: x for x in (main, entities, exceptions)}


def _step(metric: Metric) -> int:
    return metric.step


class StandInError(Exception):
    pass


def wandb(begun: list[dict[str, Any]]) -> types.ModuleType:
    """The module. begun: gets a mapping for each `init`, with what was logged and how it ended."""

    class Run:
        def __init__(self, told: dict[str, Any]):
            self.told = told
            folder = Path(told["dir"]) / "wandb" / f"offline-run-{len(begun)}-{told['id']}"
            self.dir, self.url = str(folder / "files"), f"https://host/{told['id']}"
            self.settings = types.SimpleNamespace(mode=told["mode"])

        def define_metric(self, name: str, step_metric: str) -> None:
            self.told["step_metric"] = name, step_metric

        def log(self, row: dict[str, Any]) -> None:
            self.told["rows"].append(row)

        def finish(self, exit_code: int) -> None:
            self.told["exit_code"] = exit_code

    def init(*, mode: str, **told: Any) -> Run:
        if mode == "online":
            raise StandInError("api_key not configured")
        begun.append({**told, "mode": mode, "rows": []})
        return Run(begun[-1])

    module = types.ModuleType("wandb")
    module.__dict__.update(
        init=init, Error=StandInError, Settings=dict, Image=lambda path: ("image", Path(path).name),
        Html=lambda text: ("html", text[:4]),
    )  # fmt: skip
    return module
