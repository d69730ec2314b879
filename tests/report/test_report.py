"""What a report says of a run folder: complete, torn, half there, of an older version, several."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.report.folders import BEGAN_S, write_run
from torchdistpackage.cli.main import main
from torchdistpackage.cli.watch import RunView
from torchdistpackage.launch.run_rows import RowReader
from torchdistpackage.report.charts import busy_excess, charts, thin
from torchdistpackage.report.page import html
from torchdistpackage.report.peaks import peak_flops_of
from torchdistpackage.report.run import Run
from torchdistpackage.report.status import status_of
from torchdistpackage.report.story import life, tables


def chart(runs: list[Run], key: str) -> Any:
    found = {x.key: x for x in charts(runs, 1e15)}
    return found[key] if key in found else found[f"{key}-{runs[0].name}"]


def test_a_run_is_read_with_its_starts_places_and_warnings(tmp_path: Path):
    data = Run(write_run(tmp_path / "a"))
    assert data.notes == [] and len(data.rows) == 200 and len(data.ranks) == 20
    assert [(s.attempt, s.step, s.end_step, s.word) for s in data.starts] == [
        ("7.0", 0, 100, "requeue"),
        ("7.1", 100, 200, "finished"),
    ]
    assert data.starts[0].cause == "after step 100: USR1"
    assert [(s.step, s.took_s, s.kept) for s in data.saves] == [
        (100, 1.5, False),
        (200, 1.25, True),
    ]
    assert data.places["optim.lr"] == "command line: optim.lr"
    assert [place for place, _ in data.warnings] == ["step 40", "rank0.restart0.log"]
    held = {table.key: table for table in tables([data])}
    assert held["changed"].rows == [
        ["optim.lr", "7.1", "0.005", "0.01", "command line: optim.lr"],
    ]
    assert ("model.dim", "64", "default") in held["config-a"].rows


def test_changed_weights_of_sources_are_a_row_each(tmp_path: Path):
    folder = write_run(tmp_path / "a")
    path = folder / "events.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row, weights in zip((rows[0], rows[3]), ((3, 1), (1, 1)), strict=True):
        sources = [{"path": f"{x}.txt", "weight": w} for x, w in zip("ab", weights, strict=True)]
        row["keys"] = {"data.sources": [sources, "run.yaml:7"]}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (changed,) = (x.rows for x in tables([Run(folder)]) if x.key == "changed")
    assert [row[1:] for row in changed if row[0] == "data.sources: weight of a"] == [
        ["7.1", "75.0% of the samples", "50.0% of the samples", "run.yaml:7"]
    ]


def test_what_a_step_is_spent_on_adds_up_to_its_time(tmp_path: Path):
    data = Run(write_run(tmp_path / "a"))
    parts = {x["name"]: x["y"][0] for x in chart([data], "spent").traces}
    assert sum(parts.values()) == pytest.approx(0.2)
    assert parts["compute"] == pytest.approx(0.09 * 4.5 / 4)
    assert parts["bubble and pipeline messages"] == pytest.approx(0.04)
    assert parts["exposed, data"] == pytest.approx(0.02)


def test_the_predicted_step_lies_beside_the_measured_ones(tmp_path: Path):
    folder = write_run(tmp_path / "a")
    path = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[0]["predicted_s"] = 0.15
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = Run(folder)
    measured, predicted = chart([run], "time_s").traces
    assert (predicted["name"], predicted["y"]) == ("predicted", [0.15, 0.15])
    assert predicted["x"] == [1, max(measured["x"])]
    assert "predicted_s" not in {each.key for each in charts([run])}
    assert status_of(run, 0.0).facts["step time"] == "0.2 s (predicted 0.15 s)"


def test_a_rank_is_compared_with_the_peers_of_its_stage(tmp_path: Path):
    data = Run(write_run(tmp_path / "a"))
    excess = busy_excess(data.ranks[0], data.mesh)
    assert excess == pytest.approx([0, -20, 0, 20])
    heat = chart([data], "slow").traces[0]
    assert [row[0] for row in heat["z"]] == pytest.approx([0, -20, 0, 20])


def test_the_load_of_experts_has_a_line_for_each_layer(tmp_path: Path):
    folder = write_run(tmp_path / "a")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    loads = [row | {"experts": {"blocks.0": 1.5, "blocks.1": row["step"]}} for row in rows]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in loads))
    traces = chart([Run(folder)], "experts").traces
    assert [x["name"] for x in traces] == ["blocks.0", "blocks.1"]
    assert set(traces[0]["y"]) == {1.5} and traces[1]["y"] == traces[1]["x"]


def test_ranks_are_listed_with_their_coordinates(tmp_path: Path):
    folder = write_run(tmp_path / "a")
    path = folder / "ranks.jsonl"
    path.write_text(path.read_text().replace('"pipe", 2', '"pipe", 1').replace(
        '"context", 1', '"context", 2'))  # fmt: skip
    (held,) = [table for table in tables([Run(folder)]) if table.key == "ranks"]
    assert [(row[0], row[1], row[2]) for row in held.rows] == [
        ("0", "data 0 context 0", "n1"), ("1", "data 0 context 1", "n1"),
        ("2", "data 1 context 0", "n2"), ("3", "data 1 context 1", "n2"),
    ]  # fmt: skip
    assert held.rows[3][3:] == ["+50.0 % of its peers", "2 GiB"]
    names = [x["name"] for x in chart([Run(folder)], "memory-a").traces]
    assert names[3] == "rank 3 (data 1 context 1)"


def test_spikes_survive_thinning():
    points = [(float(step), 1.0) for step in range(100_000)]
    points[54_321] = (54_321.0, 99.0)
    points[77_777] = (77_777.0, -99.0)
    kept = thin(points)
    assert len(kept) <= 4000 and kept == sorted(kept)
    assert {(54_321.0, 99.0), (77_777.0, -99.0)} <= set(kept)


def test_utilization_is_of_all_devices(tmp_path: Path):
    data = Run(write_run(tmp_path / "a"))
    assert chart([data], "mfu").traces[0]["y"][0] == pytest.approx(2e12 / 4e15)
    assert peak_flops_of("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops_of("NVIDIA H100 PCIe") == 756e12 and peak_flops_of("cpu") is None


def test_starts_lie_on_one_axis_of_time(tmp_path: Path):
    data = Run(write_run(tmp_path / "a"))
    bars = [x for x in life([data], BEGAN_S).traces if x["mode"] == "lines"]
    assert [bar["name"] for bar in bars] == ["requeue", "finished"]
    assert bars[0]["x"][0] < bars[0]["x"][1] < bars[1]["x"][0] < bars[1]["x"][1]


def test_several_runs_are_overlaid_and_their_keys_compared(tmp_path: Path):
    runs = [Run(write_run(tmp_path / n, lr=lr)) for n, lr in (("a", 0.01), ("b", 0.02))]
    assert {x["name"] for x in chart(runs, "loss").traces} >= {"a training", "b training"}
    held = {table.key: table for table in tables(runs)}
    assert held["differs"].rows == [["run.name", "a", "b"], ["optim.lr", "0.01", "0.02"]]


def test_ten_thousand_steps_stay_below_six_megabytes_and_load_nothing(tmp_path: Path, capsys):
    folder = write_run(tmp_path / "long", steps=10_000)
    assert main(["report", str(folder)]) == 0
    path = folder / "report.html"
    assert path.stat().st_size < 6e6
    assert "wrote" in capsys.readouterr().out
    text = path.read_text()
    assert "default-src 'none'" in text
    assert not re.search(r"<(?:script|img|link)[^>]+(?:src|href)=\"(?!data:)", text)
    assert "<b>mind</b>" not in text and "&lt;b&gt;mind&lt;/b&gt; the gap" in text


def tear(folder: Path) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 201, "los')


def no_events(folder: Path) -> None:
    """As an older version leaves it."""
    (folder / "events.jsonl").unlink()
    (folder / "ranks.jsonl").unlink()


def only_config(folder: Path) -> None:
    for path in (*folder.glob("*.jsonl"), folder / "pipeline.svg"):
        path.unlink()


def wrong_kinds(folder: Path) -> None:
    """Rows of a later version, with other kinds of values than those of today."""
    row = {"step": 201, "loss": "low", "lr": [1, None], "time_s": {}, "bubble": 10**400}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n[1]\nnull\n")
    rows = [
        {"step": 1, "phases": 3, "waits": None, "time_s": "x"},
        {"step": 2, "phases": {"data": [None, 1]}, "time_s": [0.1], "peak_bytes": "much"},
    ]
    (folder / "ranks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "events.jsonl").write_text(
        '{"event": "start"}\n{"event": "start", "step": 0, "at_s": 1, "keys": 3}\n'
    )
    (folder / "resolved.yaml").write_text("- no mapping\n")


def no_times(folder: Path) -> None:
    """Times that are none, counts without a bound, and a layout of another shape."""
    lines = (folder / "events.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    rows[0] |= {"at_s": float("nan")}
    rows[1] |= {"took_s": 10**400}
    rows[3] |= {"num_ranks": 10**400, "job_end_s": 10**400}
    rows[4] |= {"at_s": 1e300}
    (folder / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ranks = json.dumps({"step": 1, "layout": [["data"], 3], "at_s": 1e300, "hosts": 3})
    (folder / "ranks.jsonl").write_text(ranks + "\n")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 201, "loss": 1e308}\n{"step": 202, "loss": -1e308}\n')


def a_circle(folder: Path) -> None:
    (folder / "ranks.jsonl").unlink()
    (folder / "ranks.jsonl").symlink_to("ranks.jsonl")


def a_pipe(folder: Path) -> None:
    (folder / "metrics.jsonl").unlink()
    os.mkfifo(folder / "metrics.jsonl")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (tear, "metrics.jsonl: a line is cut off or invalid"),
        (no_events, "events.jsonl has no events: an older version"),
        (only_config, "metrics.jsonl has no rows: it has taken no step yet"),
        (wrong_kinds, "metrics.jsonl: 2 lines are cut off or invalid"),
        (no_times, "events.jsonl: 2 lines are cut off or invalid"),
        (a_circle, "Too many levels of symbolic links"),
        (a_pipe, "is a pipe"),
    ],
)
def test_a_damaged_folder_is_shown_as_far_as_it_goes(tmp_path: Path, capsys, damage, said):
    folder = write_run(tmp_path / "a")
    damage(folder)
    assert main(["report", str(folder), "-o", str(tmp_path / "out.html")]) == 0
    assert said in capsys.readouterr().err
    assert said in (tmp_path / "out.html").read_text()
    view = RunView(folder)
    assert said in " ".join(view.text(*view.look()).split())


def test_all_that_is_wrong_is_said_at_once(tmp_path: Path, capsys):
    (tmp_path / "empty").mkdir()
    words = [
        "report",
        str(tmp_path / "none"),
        str(tmp_path / "empty"),
        "-o",
        f"{tmp_path}/x/y.html",
    ]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "there is no such folder" in said and "so it is not a run folder" in said
    assert "y.html cannot be written" in said and not list(tmp_path.glob("*.html"))


def test_a_missing_library_is_named_with_its_extra(tmp_path: Path, monkeypatch, capsys):
    def missing(package: str) -> Path:
        raise ModuleNotFoundError(f"No module named {package!r}")

    monkeypatch.setattr("torchdistpackage.report.page.files", missing)
    assert main(["report", str(write_run(tmp_path / "a"))]) == 2
    assert 'pip install "torchdistpackage[report]"' in " ".join(capsys.readouterr().err.split())


def test_rows_are_read_once_also_when_a_run_replaces_its_file(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2')
    reader = RowReader(path)
    assert reader.read_new() and sorted(reader.rows) == [1]
    with path.open("a") as file:
        file.write('}\n{"step": 3}\n')
    assert reader.read_new() and sorted(reader.rows) == [1, 2, 3]
    assert not reader.read_new()
    draft = tmp_path / "new"
    draft.write_text('{"step": 1}\n{"step": 2}\n{"step": 2, "again": 1}\n')
    draft.replace(path)
    assert reader.read_new() and sorted(reader.rows) == [1, 2] and reader.rows[2]["again"] == 1


def test_a_page_escapes_what_a_run_wrote(tmp_path: Path):
    folder = write_run(tmp_path / "<script>x\u202ey\x1b[31m")
    text = html([Run(folder)], BEGAN_S)
    assert "<script>x" not in text
    assert not {"\u202e", "\x1b"} & set(text) and "\\\\u202ey" in text, "also in the data of charts"
