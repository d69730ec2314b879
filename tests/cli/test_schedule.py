"""A schedule in numbers, as a table and as files that other programs read."""

import xml.etree.ElementTree as ET

import pytest

from torchdistpackage.cli.main import main
from torchdistpackage.schedule.actions import Kind, to_csv
from torchdistpackage.schedule.draw import table
from torchdistpackage.schedule.generate import GENERATORS, build
from torchdistpackage.schedule.simulate import simulate


def sized(name: str, stages: int, microbatches: int) -> list[str]:
    return ["schedule", name, "--stages", str(stages), "--microbatches", str(microbatches)]


def test_the_numbers_of_1f1b(capsys):
    assert main(sized("1f1b", 4, 8)) == 0
    shown = capsys.readouterr().out
    assert "total              33 units" in shown
    assert "bubble             27.3%" in shown
    assert "(p-1)/(m+p-1)      3/11 = 27.3%" in shown
    assert "live microbatches  4 3 2 1 " in shown


@pytest.mark.parametrize("name", GENERATORS)
def test_the_table_is_that_of_the_simulation_at_these_costs(name, capsys):
    assert main([*sized(name, 3, 5), "--forward-cost", "2", "--backward-cost", "3"]) == 0
    timeline = simulate(build(name, 3, 5), {Kind.F: 2.0, Kind.B: 3.0})
    shown = capsys.readouterr().out
    assert table(timeline) in shown
    assert f"total              {timeline.total:g} units" in shown


def test_the_picture_has_a_box_for_each_action(tmp_path, capsys):
    path = tmp_path / "a.svg"
    assert main([*sized("gpipe", 2, 3), "--svg", str(path)]) == 0
    boxes = [e.get("data-action") for e in ET.parse(path).iter() if e.get("data-action")]
    assert sorted(boxes) == sorted(f"{s}{k}{m}" for s in range(2) for k in "FB" for m in range(3))
    assert f"wrote {path}" in capsys.readouterr().out


def test_the_csv_has_a_row_for_each_rank(tmp_path):
    path = tmp_path / "a.csv"
    assert main([*sized("1f1b", 3, 4), "--csv", str(path)]) == 0
    assert path.read_text() == to_csv(build("1f1b", 3, 4)) + "\n"


def test_an_unknown_name_is_answered_with_the_valid_ones(capsys):
    assert main(sized("2f2b", 2, 2)) == 2
    said = capsys.readouterr().err
    assert said.startswith("tdp: no schedule '2f2b'")
    assert all(name in said for name in GENERATORS)


def test_counts_below_one_are_refused_with_the_numbers(capsys):
    assert main(sized("1f1b", 0, 8)) == 2
    assert "0 stages, 8 microbatches" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_named(tmp_path, capsys):
    path = tmp_path / "none" / "a.svg"
    assert main([*sized("1f1b", 2, 2), "--svg", str(path)]) == 2
    assert f"tdp: {path} cannot be written: No such file" in capsys.readouterr().err
