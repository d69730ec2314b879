"""`log.to`: each step once over starts that are killed and rewind, and services that fail."""

import json
import struct
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.train import stand_in_services
from tests.train.forked import until
from tests.train.test_run_folder import alone_under_a_launcher
from torchdistpackage.cli.main import main
from torchdistpackage.launch.run_rows import read_rows
from torchdistpackage.train.metric_rows import MetricsLog
from torchdistpackage.train.trackers import feed
from torchdistpackage.train.trackers.feed import TrackerFeed
from torchdistpackage.train.trackers.tracker import TrackedRun, TrackerState

CONFIG = {"run.name": "run", "optim.lr": 0.1, "train.profile.steps": None}
PNG = b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sIIBBBBB", 13, b"IHDR", 1, 1, 8, 0, 0, 0, 0)
END_S = 60.0


@pytest.fixture(autouse=True)
def quick(monkeypatch) -> None:
    monkeypatch.setattr(feed, "_LOOK_S", 0.02)
    monkeypatch.setattr(feed, "_AGAIN_S", 0.05)
    for name in ("WANDB_MODE", "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_BASE_URL", "http://localhost:9")  # no node reaches it
    for name in ("wandb", "mlflow"):  # each test has its own, or the real one
        sys.modules.pop(f"torchdistpackage.train.trackers.{name}", None)


def row_of(step: int, start: int) -> dict[str, Any]:
    row: dict[str, Any] = {"loss": start + 1 / step, "lr": 0.5, "bubble": None, "tokens": 8 * step}
    if step % 5 == 0:
        row |= {"experts": {"block1": 1.5}, "dead_experts": "block1: 3"}
    return row


def write_steps(folder: Path, start: int, steps: range) -> MetricsLog:
    """As start number `start` does: it resumes, which drops later rows, and writes its own."""
    log = MetricsLog(folder, resume_step=steps.start - 1)
    for step in steps:
        log.write(step, **row_of(step, start))
    return log


def fed(name: str, folder: Path, step: int, config: Any = CONFIG) -> TrackerFeed:
    return TrackerFeed(name, TrackedRun(folder, "run", config, step))


def until_sent(folder: Path, name: str, step: int) -> None:
    until(lambda: TrackerState.of(folder, name).step == step, f"step {step} of {name}")


def end(one: TrackerFeed, word: str = "finished") -> list[str]:
    one.finish(word)
    one.join(time.monotonic() + END_S)
    return list(one.said)


def kill(one: TrackerFeed) -> None:
    """As near as a test comes to it: the thread ends, and nothing is handed over or closed."""
    one._feed = one._close = lambda: None
    end(one)


def events_of(folder: Path) -> EventAccumulator:
    found = EventAccumulator(str(folder / "tensorboard"))
    return found.Reload()


def test_tensorboard_has_each_step_once_and_of_the_last_start(tmp_path: Path):
    (tmp_path / "loss.png").write_bytes(PNG)
    write_steps(tmp_path, 0, range(1, 31)).close()
    first = fed("tensorboard", tmp_path, 0)
    until_sent(tmp_path, "tensorboard", 30)
    kill(first)
    # written after a save at step 34, and killed before TensorBoard had it
    write_steps(tmp_path, 0, range(31, 35)).close()
    second = fed("tensorboard", tmp_path, 34)
    until_sent(tmp_path, "tensorboard", 34)
    kill(second)
    # resumed from an earlier checkpoint, that of step 20
    write_steps(tmp_path, 2, range(21, 26)).close()
    assert end(fed("tensorboard", tmp_path, 20))[0].startswith("tensorboard: tensorboard --logdir")
    found = events_of(tmp_path)
    rows, _ = read_rows(tmp_path / "metrics.jsonl")
    for key in ("loss", "lr", "tokens"):
        said = [(x.step, x.value) for x in found.Scalars(key)]
        assert [step for step, _ in said] == list(range(1, 26))
        assert [value for _, value in said] == pytest.approx([row[key] for row in rows])
    assert "bubble" not in found.Tags()["scalars"]
    assert [x.step for x in found.Scalars("experts/block1")] == [5, 10, 15, 20, 25]
    texts = found.Tensors("dead_experts/text_summary")
    assert texts[0].tensor_proto.string_val[0] == b"block1: 3"
    config = found.Tensors("config/text_summary")
    assert len(config) == 1 and b"optim.lr: 0.1" in config[0].tensor_proto.string_val[0]
    assert found.Images("loss")[0].width == 1


def test_a_validation_that_the_next_start_adds_reaches_its_step(tmp_path: Path):
    write_steps(tmp_path, 0, range(1, 5)).close()
    end(fed("tensorboard", tmp_path, 0), "requeue")
    log = MetricsLog(tmp_path, resume_step=4)
    one = fed("tensorboard", tmp_path, 4)
    log.amend(4, val_loss=2.5)
    log.write(5, loss=0.25)
    log.close()
    until_sent(tmp_path, "tensorboard", 5)
    end(one)
    found = events_of(tmp_path)
    assert [(x.step, x.value) for x in found.Scalars("val_loss")] == [(4, 2.5)]
    assert [x.step for x in found.Scalars("loss")] == [1, 2, 3, 4, 5]


def sources(package: str) -> list[str]:
    return ["stand-in", *(["installed"] if find_spec(package) else [])]


def offline_records(folder: Path) -> Iterator[Any]:
    """Records of the file that wandb keeps offline: chunks of blocks, as in LevelDB's logs."""
    from wandb.proto.wandb_internal_pb2 import Record

    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        data, at, parts = path.read_bytes(), 7, b""
        while at + 7 <= len(data):
            if (left := -at % 32768) < 7 and left:
                at += left
                continue
            checksum, size, kind = struct.unpack("<IHB", data[at : at + 7])
            chunk = data[at + 7 : at + 7 + size]
            assert zlib.crc32(chunk, zlib.crc32(bytes([kind]))) == checksum
            parts, at = parts + chunk, at + 7 + size
            if kind in (1, 4):  # whole, or the last part
                yield Record.FromString(parts)
                parts = b""


def wandb_rows(folder: Path, begun: list[dict[str, Any]]) -> tuple[set[str], list[dict[str, Any]]]:
    """Ids of the runs, and all rows over all starts."""
    if begun:
        return {x["id"] for x in begun}, [row for x in begun for row in x["rows"]]
    records = list(offline_records(folder))
    ids = {r.run.run_id for r in records if r.WhichOneof("record_type") == "run"}
    rows = [
        {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in r.history.item}
        for r in records
        if r.WhichOneof("record_type") == "history"
    ]
    return ids, rows


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("source", sources("wandb"))
def test_wandb_keeps_one_run_offline_with_each_step_once(tmp_path: Path, monkeypatch, source: str):
    begun: list[dict[str, Any]] = []
    if source == "stand-in":
        monkeypatch.setitem(sys.modules, "wandb", stand_in_services.wandb(begun))
    (tmp_path / "pipeline.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
    write_steps(tmp_path, 0, range(1, 11)).close()
    first = fed("wandb", tmp_path, 0)
    until_sent(tmp_path, "wandb", 10)
    end(first, "requeue")
    write_steps(tmp_path, 1, range(7, 14)).close()
    said = end(fed("wandb", tmp_path, 6, {**CONFIG, "optim.lr": 0.2}))
    assert "wandb: offline; send all starts with: wandb sync" in said[0]
    ids, rows = wandb_rows(tmp_path, begun)
    assert len(ids) == 1
    told = [row for row in rows if "loss" in row and "lr" in row]
    assert [row["step"] for row in told] == list(range(1, 14))
    assert told[9]["loss"] == pytest.approx(0.1) and told[12]["loss"] == pytest.approx(1 + 1 / 13)
    assert told[4]["experts/block1"] == 1.5 and "bubble" not in told[4]
    assert any(key.startswith("pipeline") for row in rows for key in row)
    if begun:
        assert [x["exit_code"] for x in begun] == [0, 0] and begun[1]["config"]["optim.lr"] == 0.2
        assert begun[0]["step_metric"] == ("*", "step") and begun[0]["allow_val_change"]


def test_wandb_without_a_key_goes_offline(tmp_path: Path, monkeypatch):
    begun: list[dict[str, Any]] = []
    monkeypatch.setitem(sys.modules, "wandb", stand_in_services.wandb(begun))
    monkeypatch.setattr("torchdistpackage.train.trackers.tracker.is_reachable", lambda url: True)
    write_steps(tmp_path, 0, range(1, 3)).close()
    end(fed("wandb", tmp_path, 0))
    assert [x["mode"] for x in begun] == ["offline"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("source", sources("mlflow"))
def test_mlflow_keeps_one_run_with_each_step_once(tmp_path: Path, monkeypatch, source: str):
    if source == "stand-in":
        for module, stand_in in stand_in_services.mlflow().items():
            monkeypatch.setitem(sys.modules, module, stand_in)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://localhost:9")  # away, so it is kept here
    (tmp_path / "loss.png").write_bytes(PNG)
    many = CONFIG | {f"key{i}": i for i in range(150)}
    write_steps(tmp_path, 0, range(1, 11)).close()
    first = fed("mlflow", tmp_path, 0, many)
    until(lambda: first._last == 10, "step 10")
    kill(first)
    write_steps(tmp_path, 1, range(7, 14)).close()
    said = end(fed("mlflow", tmp_path, 6, {**many, "optim.lr": 0.2}))
    assert said[0].startswith("mlflow: run ") and "mlruns" in said[0]
    from mlflow import MlflowClient

    state = TrackerState.of(tmp_path, "mlflow").values
    client, run = MlflowClient(tracking_uri=state["uri"]), state["id"]
    for key in ("step", "loss", "lr"):
        assert [x.step for x in client.get_metric_history(run, key)] == list(range(1, 14))
    assert [x.step for x in client.get_metric_history(run, "experts/block1")] == [5, 10]
    found = client.get_run(run)
    assert found.info.status == "FINISHED" and len(found.data.params) == len(many)
    assert found.data.params["optim.lr"] == "0.1"
    assert found.data.tags["changed.optim.lr"] == "0.2"
    assert found.data.tags["dead_experts"] == "step 10: block1: 3"
    assert [x.path for x in client.list_artifacts(run)] == ["loss.png"]


class Failing:
    """A service that is down at first, then drops a connection, and works from then on."""

    name, place = "failing", "there"
    calls: list[str]
    got: list[int]

    def open(self, run: TrackedRun) -> int:
        self.calls.append("open")
        if len(self.calls) == 1:
            raise SystemExit("no such host")
        return max(self.got, default=0)

    def send(self, rows: Any) -> None:
        self.calls.append("send")
        if self.calls.count("send") == 1:
            raise ConnectionError("reset by peer\nand more")
        self.got += [row["step"] for row in rows]

    def add_picture(self, path: Path, step: int) -> None: ...

    def close(self, word: str) -> None:
        self.calls.append(word)


def test_a_service_that_fails_is_said_and_gets_all_rows_later(tmp_path: Path, monkeypatch):
    Failing.calls, Failing.got = [], []
    monkeypatch.setitem(feed.TRACKERS, "failing", f"{__name__}:Failing")
    log = write_steps(tmp_path, 0, range(1, 4))
    one = fed("failing", tmp_path, 0)
    until(lambda: Failing.got == [1, 2, 3], "the rows")
    log.write(4, loss=1.0)
    log.close()
    said = end(one)
    assert Failing.got == [1, 2, 3, 4] and Failing.calls[-1] == "finished"
    failed = [line for line in said if "failed" in line]
    assert failed == [
        "note: failing failed: no such host; tried again every 0.05 s, and the training goes on"
    ]


class Stuck(Failing):
    def open(self, run: TrackedRun) -> int:
        threading.Event().wait(30)
        return 0


def test_the_end_does_not_wait_for_a_service_that_is_stuck(tmp_path: Path, monkeypatch):
    monkeypatch.setitem(feed.TRACKERS, "stuck", f"{__name__}:Stuck")
    write_steps(tmp_path, 0, range(1, 4)).close()
    one = fed("stuck", tmp_path, 0)
    one.finish("finished")
    began = time.monotonic()
    one.join(began + 0.1)
    assert time.monotonic() - began < 5
    assert "stuck has not taken all rows in time" in one.said[-1]


@pytest.mark.parametrize("starts", [(4,), pytest.param((4, 7), marks=pytest.mark.full)])
def test_a_run_that_is_resumed_is_one_run_of_tensorboard(tmp_path: Path, pool, starts):
    for steps in starts:
        process = alone_under_a_launcher(
            pool, tmp_path, f"train.steps={steps}", "log.to=[tensorboard]", "log.plot=true",
            "train.eval_every=2", "checkpoint.save_every=4",
        )  # fmt: skip
        out, _ = process.communicate(timeout=180)
        assert process.returncode == 0, out
        assert "failed" not in out and "tensorboard --logdir" in out, out
        assert "tensorboard/" in out.partition("run folder")[2], out
    found, (rows, _) = events_of(tmp_path / "run"), read_rows(tmp_path / "run" / "metrics.jsonl")
    assert {*found.Tags()["scalars"]} >= {"loss", "grad_norm", "lr", "tokens_per_s", "val_loss"}
    for key in ("loss", "val_loss"):
        known = [(row["step"], row[key]) for row in rows if key in row]
        assert [(x.step, x.value) for x in found.Scalars(key)] == [
            (step, pytest.approx(value)) for step, value in known
        ]
    assert len(found.Images("loss")) == len(starts) and found.Images("loss")[0].width > 100
    # train.steps has changed between them
    assert len(found.Tensors("config/text_summary")) == len(starts)


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_service_that_is_not_installed_is_refused_with_its_extra(
    tmp_path: Path, monkeypatch, capsys, name: str
):
    monkeypatch.setattr(
        "torchdistpackage.config.check.find_spec", lambda package: None if package == name else 1
    )
    file = tmp_path / "run.yaml"
    file.write_text(f"run: {{dir: {tmp_path}/runs}}\nlog:\n  to: [{name}]\n")
    assert main(["train", str(file)]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"{file}:3: log.to: needs {name}, which is not installed" in said
    assert f'pip install "torchdistpackage[{name}]"' in said and not (tmp_path / "runs").exists()


def test_another_service_is_refused_with_those_that_there_are(tmp_path: Path, capsys):
    file = tmp_path / "run.yaml"
    file.write_text("log: {to: [tensorbord]}\n")
    assert main(["plan", str(file)]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "tensorboard, wandb, mlflow" in said
