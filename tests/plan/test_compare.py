"""A run beside its prediction: the wrong term is named, and the number that explains it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.plan.test_measured import TINY, profile_of
from torchdistpackage.cli.main import main
from torchdistpackage.config.load import load
from torchdistpackage.errors import ConfigError
from torchdistpackage.harness.bench.profile import dumps
from torchdistpackage.plan.compare import compare_run
from torchdistpackage.plan.measured import measured_device, measured_fabric
from torchdistpackage.plan.run_plan import Plan, make_plan
from torchdistpackage.plan.step_time import StepPrediction, run_time


def prediction() -> tuple[Plan, StepPrediction]:
    plan, profile = make_plan(load(TINY, []), 4, TINY), profile_of()
    device = measured_device(profile, plan.config, Path("cluster.json"), 4)
    return plan, run_time(plan, device, None, measured_fabric(profile, device, None)).prediction


def write_run(folder: Path, terms: dict[str, float], ranks: int = 4) -> Path:
    """Write the rows of a run whose steps have these terms on every rank."""
    pipe = terms["bubble"] + terms["exposed pipe"]
    row: dict[str, Any] = {
        "time_s": [sum(terms.values())] * ranks,
        "phases": {
            "data": [0.0] * ranks,
            "forward": [terms["compute"] / 3] * ranks,
            "backward": [terms["compute"] * 2 / 3] * ranks,
            "optimizer": [terms["optimizer"]] * ranks,
        },
        "waits": {
            "data": [terms["exposed data"]] * ranks,
            "pipe": [pipe] * ranks,
            "several axes": [1e-9] * ranks,
        },
    }
    folder.mkdir()
    rows = [{"step": step, **row} for step in (10, 20, 30)]
    rows[0]["time_s"] = [9.0] * ranks  # ranks warm up
    (folder / "ranks.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    return folder


@pytest.mark.parametrize(
    ("term", "name", "factor"),
    [
        ("compute", "device.matmuls, operations/s", 1 / 3),
        ("optimizer", "device.bytes_per_s", 1 / 100),
        ("host and framework", "device.call_s", 5.0),
        ("exposed data", "lines, node: bus_bytes_per_s", 1 / 50),
    ],
)
def test_the_number_that_differs_is_found(
    tmp_path: Path, term: str, name: str, factor: float
) -> None:
    """The run is the prediction with another value of one number, which is to be found again."""
    plan, given = prediction()
    device, fabric = given.device, given.fabric
    slow = {x: tuple((n, s / factor) for n, s in p) for x, p in device.matmul_times.items()}
    lines = {k: replace(v, bytes_per_s=v.bytes_per_s * factor) for k, v in fabric.measured.items()}
    changed = {
        "compute": replace(given, device=replace(device, matmul_times=slow)),
        "optimizer": given,
        "host and framework": replace(
            given, device=replace(device, call_s=(device.call_s or 0.0) * factor)
        ),
        "exposed data": replace(given, fabric=replace(fabric, measured=lines)),
    }[term]
    terms = dict(changed.step().terms)
    if term == "optimizer":  # slower memory would slow a host's compute down by more
        terms[term] /= factor
    found = compare_run(plan, given, write_run(tmp_path / "run", terms))
    assert found.steps == (20, 30)
    assert found.step.measured_s == pytest.approx(sum(terms.values()))
    assert found.step.predicted_s == pytest.approx(given.step().total)
    assert found.wrong is not None and found.explanation is not None
    assert found.wrong.name == term
    assert found.explanation.name == name
    # all terms but this one are rounded, and memory has a share in the compute of a host
    assert found.explanation.after / found.explanation.before == pytest.approx(factor, rel=0.05)


def test_a_run_as_predicted_has_no_wrong_term(tmp_path: Path) -> None:
    plan, given = prediction()
    found = compare_run(plan, given, write_run(tmp_path / "run", dict(given.step().terms)))
    assert found.wrong is None and found.explanation is None
    assert sum(x.measured_s for x in found.terms) == pytest.approx(found.step.measured_s)


def test_waits_inside_of_phases_are_one_term_with_them(tmp_path: Path) -> None:
    plan, given = prediction()
    terms = dict(given.step().terms)
    folder = write_run(tmp_path / "run", terms)
    text = (folder / "ranks.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    for row in rows:
        row["waits"] = {axis: [0.0] * 4 for axis in row["waits"]}
    (folder / "ranks.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    found = compare_run(plan, given, folder)
    assert [x.name for x in found.terms] == [
        "compute and exposed",
        "optimizer",
        "host and framework",
    ]
    assert found.step.predicted_s == pytest.approx(given.step().total)


def test_what_cannot_be_compared_is_named(tmp_path: Path) -> None:
    plan, given = prediction()
    other = write_run(tmp_path / "other", dict(given.step().terms), ranks=2)
    with pytest.raises(ConfigError, match=r"ran on 2 ranks, but the plan has 4; plan the file"):
        compare_run(plan, given, other)
    (other / "ranks.jsonl").write_text('{"step": 1, "time_s": 3, "phases": {"forward": [1]}}\n')
    with pytest.raises(ConfigError, match=r"no numbers of its ranks .* has logged a step"):
        compare_run(plan, given, other)


def test_the_table_names_the_wrong_term(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, given = prediction()
    terms = dict(given.step().terms)
    folder = write_run(tmp_path / "run", terms | {"optimizer": 10 * sum(terms.values())})
    profile = tmp_path / "cluster.json"
    profile.write_text(dumps(profile_of()))
    asked = ["plan", TINY, "--compare", str(folder)]
    assert main([*asked, "--profile", str(profile)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "term predicted measured difference" in text
    assert "wrong optimizer takes" in text and "more than predicted" in text
    assert "number device.bytes_per_s of" in text or "no change of a single number" in text
    assert main(asked) == 2
    assert "--compare needs a device" in " ".join(capsys.readouterr().err.split())
