"""State actions, rules and what they report, on tensors and names alone."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from tests.tells import facts_pattern, tells
from torchdistpackage.compat.tensor_parallel.engine.actions import (
    FirstOnly,
    FunctionAction,
    Scale,
    Split,
    SplitInChunks,
    SplitInGroupedChunks,
    TakeChunks,
)
from torchdistpackage.compat.tensor_parallel.engine.heads import deal_heads
from torchdistpackage.compat.tensor_parallel.engine.rules import (
    Config,
    find_matching_actions,
    get_parameter_name_mapping,
    match_report,
)
from torchdistpackage.errors import LayoutError


@pytest.mark.parametrize(
    ("action", "length", "lengths"),
    [
        (Split(3, 0), 15, [5, 5, 5]),
        (Split(3, 0), 7, [3, 2, 2]),
        (Split(4, 0), 3, [1, 1, 1, 0]),
        (SplitInChunks(3, 0, 3), 15, [6, 6, 3]),
        (SplitInChunks(4, 0, 1), 3, [1, 1, 1, 0]),
        (SplitInGroupedChunks(3, 0, 3, 2), 30, [12, 12, 6]),
        (TakeChunks(0, 2, [[0, 1], [1], [2]]), 6, [4, 2, 2]),
    ],
)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_parts_have_their_lengths_and_join_to_the_whole(action, length, lengths, dim):
    action.dim = dim
    shape = [4, 4]
    shape[dim] = length
    whole = torch.arange(4 * length).reshape(shape)
    parts = [action(whole, rank=rank) for rank in range(len(lengths))]
    assert [part.shape[dim] for part in parts] == lengths
    assert torch.equal(action.undo(parts), whole)


def test_chunks_and_groups_keep_their_order():
    letters = torch.tensor([list(b"AABBCCDDEE" * 3)])
    parts = [SplitInGroupedChunks(3, 1, 3, 2)(letters, rank)[0].tolist() for rank in range(3)]
    assert [bytes(part) for part in parts] == [b"AABB" * 3, b"CCDD" * 3, b"EE" * 3]
    parts = [SplitInChunks(3, 1, 3)(letters[:, :9], rank)[0].tolist() for rank in range(3)]
    assert [bytes(part) for part in parts] == [b"AAB", b"BCC", b"DDE"]


def test_what_is_added_before_a_sum():
    bias = torch.tensor([3.0, 6.0])
    for action in (Scale(3), FirstOnly()):
        parts = [action(bias, rank=rank) for rank in range(3)]
        assert torch.equal(torch.stack(parts).sum(0), bias)
        assert torch.equal(action.undo(parts), bias)
    assert FirstOnly().local_gradient(bias, 1).tolist() == [0, 0]
    assert Scale(3).local_gradient(bias, 1).tolist() == [1, 2]


def test_shared_chunks_add_up_their_gradients():
    action = TakeChunks(0, 1, [[0, 1], [1, 1]])
    assert action.is_shared and not TakeChunks(0, 1, [[0], [1]]).is_shared
    total = action.spread(torch.tensor([1.0, 2.0]), 0) + action.spread(torch.tensor([4.0, 8.0]), 1)
    assert total.tolist() == [1, 14]
    assert action.collect(total, 1).tolist() == [14, 14]


def test_earlier_forms_of_an_action(caplog):
    split, join = (lambda x, rank: x[rank : rank + 1]), torch.cat
    config = Config({"a": split, "b": (split, join), "c": Split(2, 0)}, {}, {}, {})
    actions = {pattern.pattern: action for pattern, action in config.state_rules.items()}
    assert caplog.text.count("is a function, which cannot join shards again") == 2
    x = torch.arange(2)
    assert actions["b"].undo([actions["b"](x, rank) for rank in range(2)]).tolist() == [0, 1]
    with pytest.raises(LayoutError, match="no reverse action was given"):
        actions["a"].undo([x])
    assert FunctionAction(split)(x, rank=1).tolist() == [1]


def test_all_rules_that_say_no_action_are_refused_at_once():
    with pytest.raises(LayoutError) as caught:
        Config(
            {"w": "split 0"},
            {"i": {0: "spilt -1"}},
            {"o": {0: "gather"}, "p": {0: "sum 1"}},
            {"a": {"n": 1}},
        )
    assert re.findall(r"(?:: |; )(\w): ", str(caught.value)) == ["w", "i", "p", "a"]


def test_given_rules_are_left_as_they_are():
    given = {"w": lambda x, rank: x}
    before = dict(given)
    Config(given, {}, {}, {})
    assert given == before


@pytest.mark.parametrize(
    ("action", "shape"),
    [
        (SplitInChunks(2, 0, 4), (6,)),
        (SplitInGroupedChunks(2, 0, 3, 2), (8,)),
        (TakeChunks(0, 2, [[0], [1]]), (5,)),
    ],
)
def test_a_cut_that_does_not_fit_says_the_numbers(action, shape):
    with pytest.raises(LayoutError, match=str(shape[0])):
        action(torch.zeros(shape), rank=0)


def test_rules_that_match_nothing_or_twice_are_reported(caplog):
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    config = Config(
        {r"0\.weight$": Split(2, 0), r"weight$": Split(2, 1), "absent": Split(2, 0)},
        {"5": {0: "copy"}},
        {},
        {},
    )
    report = match_report(config, module)
    assert report.unmatched == (("state", "absent"), ("input", "5"))
    assert report.repeated == {"0.weight": (r"0\.weight$", r"weight$")}
    report.log()
    assert "match nothing in this module: state 'absent', input '5'" in caplog.text
    assert tells(caplog.text, "0.weight", "2 different")


def test_two_rules_for_one_input_are_refused_and_digits_are_positions():
    rules = Config({}, {"a": {"0": "copy"}, "ab": {1: "sum"}}, {}, {}).input_rules
    assert find_matching_actions("input", "ab", rules) == {0: "copy", 1: "sum"}
    rules = Config({}, {"a": {"0": "copy"}, "ab": {0: "sum"}}, {}, {}).input_rules
    with pytest.raises(ValueError, match="two input rules match 0 of module 'ab'"):
        find_matching_actions("input", "ab", rules)


def test_names_within_wrapped_modules():
    config = Config({}, {r"^a$": {0: "copy"}}, {r"^a$": {0: "sum"}, r"b$": {0: "sum"}}, {})
    names = get_parameter_name_mapping(["a.b.weight", "a.c.weight", "ab.weight", "d.bias"], config)
    assert names == {
        "a.b.weight": "a.tp_wrapped_module.b.tp_wrapped_module.weight",
        "a.c.weight": "a.tp_wrapped_module.c.weight",
        "ab.weight": "ab.tp_wrapped_module.weight",
        "d.bias": "d.bias",
    }


def test_heads_are_dealt_with_the_key_heads_that_they_read():
    heads = deal_heads("llama", 8, 2, 4, num_key_heads=2)
    assert heads.queries == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert heads.keys == ((0,), (0,), (1,), (1,))
    uneven = deal_heads("llama", 4, 2, 3, num_key_heads=2)
    assert uneven.keys == ((0,), (1,), (1,))
    mixed = deal_heads("llama", 6, 2, 2, num_key_heads=4 // 2)
    assert mixed.keys == ((0,), (1,))
    across = deal_heads("llama", 6, 2, 4, num_key_heads=2)
    assert across.queries == ((0, 1), (2, 3), (4,), (5,))
    assert across.keys == ((0,), (0, 1), (1,), (1,))
    assert across.num_groups(rank=1) == 1
    with pytest.raises(LayoutError, match=facts_pattern("8 attention", "9 shards")):
        deal_heads("llama", 8, 2, 9)
