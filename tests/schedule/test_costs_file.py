"""Costs as a file: what is written is read, and what is not there follows from what is."""

import pytest

from tests.tells import facts_pattern
from torchdistpackage.errors import ScheduleError
from torchdistpackage.schedule.costs import PieceCosts, StageCosts, costs_text, read_costs

COSTS = StageCosts((1.0, 2.0), (2.0, 3.0), (1.5, 2.5), (1.0, 1.0), (0.25, 0.0))
PIECES = {"embed": PieceCosts(0.5, 1.0), "a": PieceCosts(0.5, 1.0), "head": PieceCosts(2.0, 3.0)}


@pytest.fixture
def file(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "c.yaml"
        path.write_text(text)
        return str(path)

    return write


def test_what_is_written_is_read(file):
    found = read_costs(file(costs_text(COSTS, PIECES, "seconds, of a run")))
    assert found.of(2) == COSTS and found.pieces == PIECES and found.num_stages == 2


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("forward: 1\nbackward: 3", ((1,) * 2, (3,) * 2, (1.5,) * 2, (1.5,) * 2, (0,) * 2)),
        ("forward: [1, 2]\ninput: 1\nweight: 1e-3",
         ((1, 2), (1.001,) * 2, (1,) * 2, (1e-3,) * 2, (0,) * 2)),
        ("forward: 1\nbackward: [3, 4]\ninput: 1\nmessage: 2",
         ((1, 1), (3, 4), (1, 1), (2, 3), (2, 2))),
        ('{"forward": [1, 1], "backward": [2, 2]}', ((1, 1), (2, 2), (1, 1), (1, 1), (0, 0))),
    ],
)  # fmt: skip
def test_what_is_left_out_follows_from_the_rest(file, text, rows):
    assert read_costs(file(text)).of(2) == StageCosts(*(tuple(map(float, r)) for r in rows))


def test_pieces_time_any_cut_and_split_as_the_stages_did(file):
    found = read_costs(file(costs_text(COSTS, PIECES)))
    costs = found.of_cut([("embed",), ("a",), ("head",), ()])
    assert costs.forward == (0.5, 0.5, 2.0, 0.0) and costs.backward == (1.0, 1.0, 3.0, 0.0)
    assert costs.message == (0.25,) * 4
    assert found.weights(("head", "embed")) == [5.0, 1.5]
    # halves of the file are 6 for backwards of 5, of which 4 are inputs
    assert costs.input == pytest.approx((0.8, 0.8, 2.4, 0.0))
    assert costs.weight == pytest.approx((0.4, 0.4, 1.2, 0.0))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("forward: [1, 2]", "has rows forward; it needs forward, and backward or both of input"),
        ("forward: [1, 2]\nbackward: [1, 2, 3]", "forward has 2 numbers for 3 stages; give one"),
        (
            "forward: yes\nbackward: 1",
            "c.yaml: forward holds True; write finite numbers of zero or more",
        ),
        ("forward: [1, -2]\nbackward: 1", "forward holds -2"),
        ("forward: [1, .inf]\nbackward: 1", "forward holds inf; write finite numbers"),
        ("forwards: 1", "has unknown keys forwards; use forward, backward"),
        ("- 1", "holds a list; costs are rows"),
        ("forward: [1", "is not YAML"),
        ("forward: 1\nbackward: 1\npieces: {a: 3}", "pieces.a has 1 numbers; write"),
    ],
)
def test_what_does_not_read_is_named(file, text, words):
    path = file(text)
    with pytest.raises(ScheduleError) as said:
        read_costs(path)
    assert str(said.value).startswith(path) and words in str(said.value)


def test_of_other_stages_and_pieces_nothing_is_guessed(file, tmp_path):
    found = read_costs(file(costs_text(COSTS, PIECES)))
    with pytest.raises(ScheduleError, match=facts_pattern("2 numbers", "3 stages")):
        found.of(3)
    with pytest.raises(ScheduleError, match="has no costs of 1 pieces: tail; it has embed, a"):
        found.of_cut([("embed", "tail")])
    with pytest.raises(ScheduleError, match="cannot be read"):
        read_costs(tmp_path / "none.yaml")
