"""`tdp plan --picture`: every rank on its node, in the colour of its group."""

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.tells import tells
from torchdistpackage.cli.main import main
from torchdistpackage.report.placement import placement_svg
from torchdistpackage.report.svg import colour_of
from torchdistpackage.topology.mesh import Mesh

SVG = "{http://www.w3.org/2000/svg}"
MESH = Mesh((("data", 2), ("pipe", 2), ("tensor", 4)))


def ranks(text: str, axis: str) -> dict[int, tuple[int, str]]:
    """Of each rank its group and colour."""
    (panel,) = [g for g in ET.fromstring(text).iter(f"{SVG}g") if g.get("data-axis") == axis]
    boxes = [one for one in panel.iter(f"{SVG}rect") if "data-rank" in one.attrib]
    return {
        int(one.attrib["data-rank"]): (int(one.attrib["data-group"]), one.attrib["fill"])
        for one in boxes
    }


def labels(text: str, axis: str) -> dict[int, tuple[float, float]]:
    """Of each rank where its number stands, from the corner of its box."""
    (panel,) = [g for g in ET.fromstring(text).iter(f"{SVG}g") if g.get("data-axis") == axis]
    boxes = {x.attrib["data-rank"]: x for x in panel.iter(f"{SVG}rect") if "data-rank" in x.attrib}
    numbers = {str(x.text): x for x in panel.iter(f"{SVG}text") if str(x.text) in boxes}
    return {
        int(rank): (
            float(numbers[rank].attrib["x"]) - float(box.attrib["x"]),
            float(numbers[rank].attrib["y"]) - float(box.attrib["y"]),
        )
        for rank, box in boxes.items()
    }


@pytest.mark.parametrize("axis", ["data", "pipe", "tensor"])
def test_a_group_has_one_colour(axis: str):
    text = placement_svg("run", [(axis, MESH)], 8)
    found = ranks(text, axis)
    assert sorted(found) == list(range(16))
    for number, group in enumerate(MESH.groups((axis,))):
        assert {found[rank] for rank in group} == {(number, colour_of(number))}
    assert text.count("data-node") == 2
    assert labels(text, axis) == dict.fromkeys(range(16), (15.0, 19.0))
    where = {"data": "over 2 nodes", "pipe": "each inside a node", "tensor": "each inside a node"}
    assert f"of {MESH.axis_size(axis)}, {where[axis]}" in text


def test_groups_across_nodes_are_said_and_many_ranks_are_cut():
    text = placement_svg("run", [("tensor", Mesh((("data", 600), ("tensor", 4))))], 6)
    assert tells(text, "600 groups", "4", "2 nodes")
    assert len(ranks(text, "tensor")) == 510 and "... and 1890 more ranks" in text
    assert "every rank is alone" in placement_svg("run", [("data", Mesh((("data", 1),)))], 1)


def test_the_command_writes_the_axes_of_the_run(tmp_path: Path, capsys):
    path = tmp_path / "ranks.svg"
    words = ["plan", "configs/gpt_tiny.yaml", "--procs", "16", "--ranks-per-node", "4"]
    words += ["parallel.tensor=2", "parallel.data=auto"]
    assert main([*words, "--picture", str(path)]) == 0
    assert f"wrote {path}" in capsys.readouterr().out
    text = path.read_text()
    axes = [g.get("data-axis") for g in ET.fromstring(text).iter(f"{SVG}g")]
    assert axes == ["pipe", "data", "tensor"] and text.count("data-node") == 12


@pytest.mark.parametrize("folder", ["file", "missing"])
def test_a_folder_that_takes_nothing_is_named_and_none_is_made(tmp_path: Path, capsys, folder):
    (tmp_path / "file").write_text("")
    words = ["plan", "configs/gpt_tiny.yaml", "--picture", str(tmp_path / folder / "x.svg")]
    assert main(words) == 2
    assert "--picture" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
