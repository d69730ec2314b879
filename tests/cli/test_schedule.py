"""A schedule in numbers, as a table and as files that other programs read. No torch."""

import doctest
import json
import re
import struct
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.tells import tells
from torchdistpackage.cli.main import main
from torchdistpackage.schedule.actions import ActionKind
from torchdistpackage.schedule.autoschedule import synthesize
from torchdistpackage.schedule.costs import StageCosts, read_costs
from torchdistpackage.schedule.draw import table
from torchdistpackage.schedule.engine import simulate
from torchdistpackage.schedule.generators import GENERATORS, build
from torchdistpackage.schedule.resolve import from_csv, to_csv

PAGE = Path(__file__).parents[2] / "docs" / "pipeline_schedules.md"
UNEVEN = StageCosts((1, 2, 1.5), (2, 4, 3), (1, 2, 1.5), (1, 2, 1.5), (0.5, 0.5, 0.5))


def sized(name: str, stages: int, microbatches: int) -> list[str]:
    return ["schedule", name, "--stages", str(stages), "--microbatches", str(microbatches)]


def test_the_numbers_of_1f1b(capsys):
    assert main(sized("1f1b", 4, 8)) == 0
    shown = capsys.readouterr().out
    assert "total              33 units" in shown
    assert "bubble             27.3%" in shown
    assert "by pipe rank       27.3% 27.3% 27.3% 27.3%\n" in shown
    assert "(p-1)/(m+p-1)      3/11 = 27.3%" in shown
    assert "live microbatches  4 3 2 1 " in shown


@pytest.mark.parametrize("name", GENERATORS)
def test_the_table_is_that_of_the_simulation_at_these_costs(name, capsys):
    assert main([*sized(name, 3, 5), "--forward-cost", "3", "--backward-cost", "4"]) == 0
    timeline = simulate(build(name, 3, 5), {ActionKind.F: 3.0, ActionKind.B: 4.0})
    shown = capsys.readouterr().out
    assert table(timeline) in shown
    assert f"total              {timeline.total:g} units" in shown


def test_stages_are_pipe_ranks_and_chunks_the_stages_of_each(capsys):
    assert main([*sized("interleaved", 2, 4), "--chunks", "3"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("interleaved, 6 stages on 2 pipe ranks, 4 microbatches;")
    timeline = simulate(build("interleaved", 2, 4, 3))
    assert f"live microbatches  {' '.join(map(str, timeline.peak_live))} " in shown
    by_rank = " ".join(map(str, timeline.peak_live_of_rank))
    assert f"{by_rank}   (at most, by pipe rank)" in shown
    assert main(["schedule", "--help"]) == 0
    assert "P x V in all" in " ".join(capsys.readouterr().out.split())


@pytest.mark.full
def test_a_terminal_gets_the_drawing_in_blocks_of_its_width(monkeypatch, capsys):
    whole = table(simulate(build("zb-v", 4, 8))).splitlines()
    assert len(whole[0]) > 200
    monkeypatch.setenv("COLUMNS", "80")
    assert main(sized("zb-v", 4, 8)) == 0
    shown = capsys.readouterr().out.splitlines()
    assert max(map(len, shown)) <= 80
    for index, row in enumerate(whole):
        parts = [line.partition(" | ")[2] for line in shown if line.startswith(f"  {index} | ")]
        assert len(parts) == 3 and f"  {index} | {' '.join(parts)}" == row
    assert main(sized("zb-v", 40, 80)) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_two_steps_run_back_to_back(capsys):
    assert main([*sized("zb-h2", 4, 8), "--steps", "2"]) == 0
    shown = capsys.readouterr().out
    assert "8 microbatches, 2 steps;" in shown
    assert f"total              {simulate(build('zb-h2', 4, 8), steps=2).total:g} units" in shown
    assert "F15" in shown


@pytest.mark.parametrize("kind", ["yaml", "json"])
def test_costs_come_stage_by_stage_from_a_file(kind, tmp_path, capsys):
    rows = {"forward": [1, 2, 1.5], "input": [1, 2, 1.5], "weight": [1, 2, 1.5], "message": 0.5}
    path = tmp_path / f"costs.{kind}"
    path.write_text(json.dumps(rows))
    assert main([*sized("zb-h1", 3, 5), "--costs", str(path)]) == 0
    timeline = simulate(build("zb-h1", 3, 5), UNEVEN)
    shown = capsys.readouterr().out
    assert f"costs of {path}" in " ".join(shown.split())
    assert f"total              {timeline.total:g} units" in shown
    assert f"bubble             {timeline.bubble:.1%}" in shown
    assert table(timeline, unit=0.5) in shown


def test_tiny_times_still_make_a_table(tmp_path, capsys):
    """Seconds, as a run writes them: a cell is never wider than half the shortest action."""
    path = tmp_path / "costs.yaml"
    path.write_text("forward: [2.0e-4, 2.0e-4]\nbackward: 4.0e-4\n")
    assert main([*sized("1f1b", 2, 2), "--costs", str(path)]) == 0
    assert "  1 | .. .. F0 -- B0 -- -- -- F1 -- B1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("forward: [1, 2]\nbackward: 2\n", "forward has 2 numbers for 3 stages"),
        ("forward: 1\nbackwards: 2\n", "unknown keys backwards"),
        ("forward: [1, -2, 1]\nbackward: 2\n", "forward holds -2"),
        ("forward: 1\n", "it needs forward, and backward"),
        ("forward: [1, 2", "is not YAML"),
    ],
)
def test_costs_that_do_not_fit_are_refused_by_file_and_key(text, said, tmp_path, capsys):
    path = tmp_path / "costs.yaml"
    path.write_text(text)
    assert main([*sized("1f1b", 3, 5), "--costs", str(path)]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"tdp: {path}") and said in shown


def test_costs_come_from_a_file_or_from_options(tmp_path, capsys):
    path = tmp_path / "costs.yaml"
    path.write_text("forward: 1\nbackward: 2\n")
    assert main([*sized("1f1b", 3, 5), "--costs", str(path), "--forward-cost", "2"]) == 2
    assert "remove --forward-cost" in capsys.readouterr().err


def boxes(path: Path) -> list[str]:
    return sorted(filter(None, (e.get("data-action") for e in ET.parse(path).iter())))


def test_the_picture_has_a_box_for_each_action(tmp_path, capsys):
    path = tmp_path / "a.svg"
    assert main([*sized("gpipe", 2, 3), "--svg", str(path)]) == 0
    assert boxes(path) == sorted(f"{s}{k}{m}" for s in range(2) for k in "FB" for m in range(3))
    assert f"wrote {path}" in capsys.readouterr().out


def test_all_files_are_of_one_timeline(tmp_path):
    paths = {kind: tmp_path / f"a.{kind}" for kind in ("svg", "png", "trace", "csv")}
    options = [text for kind, path in paths.items() for text in (f"--{kind}", str(path))]
    assert main([*sized("zb-v", 2, 4), *options]) == 0
    events = json.loads(paths["trace"].read_text())["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    assert sorted(e["name"] for e in slices) == boxes(paths["svg"])
    assert {e["tid"] for e in slices} == {0, 1}
    png = paths["png"].read_bytes()
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", png[16:24])
    assert width == 1400 and height > 80
    assert from_csv(paths["csv"].read_text(), "zb-v") == build("zb-v", 2, 4)


def test_a_png_without_matplotlib_is_refused_with_the_way_to_get_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main([*sized("1f1b", 2, 2), "--png", str(tmp_path / "a.png")]) == 2
    assert 'pip install "torchdistpackage[plot]"' in capsys.readouterr().err


def test_the_csv_has_a_row_for_each_rank_and_is_read_back(tmp_path, capsys):
    path = tmp_path / "own.csv"
    assert main([*sized("interleaved", 3, 6), "--csv", str(path)]) == 0
    assert path.read_text() == to_csv(build("interleaved", 3, 6))
    first = capsys.readouterr().out
    assert main(["schedule", str(path)]) == 0
    again = capsys.readouterr().out
    assert again.startswith("own, 6 stages on 3 pipe ranks, 6 microbatches;")
    shown = [text.partition("\n\n")[2].splitlines() for text in (again, first)]
    assert shown[0] == shown[1][:-1]


def test_a_csv_of_other_sizes_than_asked_is_refused(tmp_path, capsys):
    path = tmp_path / "own.csv"
    path.write_text(to_csv(build("1f1b", 3, 6)))
    for option, asked, found in (
        ("--stages", 2, "3 pipe ranks"),
        ("--microbatches", 4, "6 microbatches"),
        ("--chunks", 2, "1 stages on each"),
    ):
        assert main(["schedule", str(path), option, str(asked)]) == 2
        said = capsys.readouterr().err
        assert f"{path} has {found}, not {asked}; remove {option}" in said
    assert main(["schedule", str(path), "--stages", "3", "--microbatches", "6"]) == 0


def test_a_csv_that_cannot_be_read_is_named(tmp_path, capsys):
    path = tmp_path / "none.csv"
    assert main(["schedule", str(path)]) == 2
    assert f"tdp: {path} cannot be read" in capsys.readouterr().err
    path.symlink_to("/dev/zero")
    assert main(["schedule", str(path)]) == 2
    assert f"tdp: {path} cannot be read: is a device" in capsys.readouterr().err
    path.unlink()
    path.write_text("0F0,0B0\n1F0,1Z0\n")
    assert main(["schedule", str(path)]) == 2
    assert f"{path}: line 2, cell 2: '1Z0' is not an action" in capsys.readouterr().err


def test_a_name_needs_its_sizes(capsys):
    assert main(["schedule", "1f1b", "--stages", "4"]) == 2
    assert "give --stages P and --microbatches M" in capsys.readouterr().err


def test_an_unknown_name_is_answered_with_the_valid_ones(capsys):
    assert main(sized("2f2b", 2, 2)) == 2
    said = capsys.readouterr().err
    assert said.startswith("tdp: no schedule '2f2b'")
    assert all(name in said for name in GENERATORS)


def test_a_schedule_that_would_take_minutes_is_refused_as_in_a_file(capsys):
    assert main(sized("interleaved", 1000, 1000)) == 2
    assert tells(capsys.readouterr().err, "2,000,000 passes", "32,768 allowed")
    assert main(sized("auto", 100, 100)) == 2
    assert tells(capsys.readouterr().err, "10,000 passes", "4,096 allowed")


def test_counts_below_one_are_refused_with_the_numbers(capsys):
    assert main(sized("1f1b", 0, 8)) == 2
    assert "0 ranks, 8 microbatches" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_named_and_nothing_is_shown(tmp_path, capsys):
    for path, said in (
        (tmp_path / "none" / "a.svg", "No such file or directory; name a file in a folder that"),
        (tmp_path, "Is a directory; name a file in it"),
    ):
        assert main([*sized("1f1b", 2, 2), "--svg", str(path)]) == 2
        shown = capsys.readouterr()
        assert f"tdp: {path} cannot be written: {said}" in shown.err and not shown.out


@pytest.mark.parametrize("chunks", [1, 2])
def test_auto_solves_again_for_the_costs_of_a_file(chunks, tmp_path, capsys):
    path, stages = tmp_path / "costs.yaml", 2 * chunks
    path.write_text(f"forward: {[1.0, 3.0] * chunks}\ninput: 1\nweight: {[2.0, 1.0] * chunks}\n")
    options = ["--costs", str(path), "--chunks", str(chunks), "--csv", str(tmp_path / "a.csv")]
    assert main([*sized("auto", 2, 5), *options]) == 0
    costs = read_costs(path).of(stages)
    best = synthesize(2, 5, costs, chunks=chunks)
    assert f"total              {simulate(best, costs).total:g} units" in capsys.readouterr().out
    assert (tmp_path / "a.csv").read_text() == to_csv(best)
    assert main([*sized("auto", 2, 5)[:-1], "0"]) == 2
    assert "0 microbatches" in capsys.readouterr().err


def test_the_page_is_right(capsys):
    failed, tried = doctest.testfile(str(PAGE), module_relative=False)
    assert tried >= 7 and not failed
    text = PAGE.read_text(encoding="utf-8")
    assert set(GENERATORS) <= set(re.findall(r"[a-z0-9-]+", text))
    assert main(["schedule", "--help"]) == 0
    offered = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out)) - {"--help"}
    assert offered == set(re.findall(r"--[a-z][a-z-]+", text))


def test_a_name_that_is_none_is_said_before_what_else_is_missing(capsys):
    assert main(["schedule", "foo"]) == 2
    assert "no schedule 'foo'" in capsys.readouterr().err
