"""Leaves of nested containers, and copies in which some are replaced, as each caller opens them."""

from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from torch.fx.immutable_collections import immutable_list

from torchdistpackage.comm.nested import items_of, leaves_of, map_leaves, map_trees

Pair = namedtuple("Pair", ("b", "a"))


class Row(list):
    """A list of its own class."""


@dataclass(frozen=True)
class Frozen:
    x: object
    rest: object = ()


def is_number(x: object) -> bool:
    return isinstance(x, int)


NESTS = {
    "tuple": (1, (2, "x")),
    "list": [1, [2], None],
    "list of its own class": Row([1, 2]),
    "named tuple": Pair(1, [2]),
    "dict": {"b": 1, "a": (2,)},
    "dict of its own class": OrderedDict(b=1, a=2),
    "dataclass": Frozen(1, [2]),
}


@pytest.mark.parametrize("name", NESTS)
def test_what_is_replaced_is_a_copy_of_its_class_and_all_else_is_the_same_object(name):
    nest = NESTS[name]
    before = repr(nest)
    assert list(leaves_of(nest, is_number)) == [1, 2]
    made = map_leaves(lambda x: -x, nest, is_number)
    assert type(made) is type(nest) and list(leaves_of(made, is_number)) == [-1, -2]
    assert repr(nest) == before and repr(made) == before.replace("1", "-1").replace("2", "-2")
    assert map_leaves(lambda x: x, nest, is_number) is nest
    kept = {"same": nest, "other": 3}
    assert map_leaves(lambda x: -x if x == 3 else x, kept, is_number)["same"] is nest


def test_a_list_whose_class_refuses_other_parts_becomes_a_plain_one_where_asked():
    fixed = immutable_list([1, Row([2])])
    made = map_leaves(lambda x: -x, fixed, is_number, plain_lists=True)
    assert made == [-1, [-2]] and type(made) is type(made[1]) is list and fixed == [1, [2]]
    assert map_leaves(lambda x: x, fixed, is_number, plain_lists=True) is fixed


def test_a_caller_says_what_is_opened():
    seen = UserDict(k=1)
    assert items_of(seen) is None and list(items_of(seen, mapping=Mapping)) == [("k", 1)]
    assert items_of(Frozen(1), dataclasses=False) is None and items_of(Frozen) is None
    space = SimpleNamespace(x=1)
    assert items_of(space) is None
    made = map_leaves(lambda x: -x, space, is_number, namespaces=True)
    assert made == SimpleNamespace(x=-1) and space.x == 1
    assert list(leaves_of((Frozen(1), {"k": 2}, seen), dataclasses=False)) == [Frozen(1), 2, seen]


def test_mappings_are_read_by_key_where_ranks_must_agree():
    filled = {"b": 1, "a": 2}
    assert list(leaves_of(filled)) == [1, 2] and list(leaves_of(filled, by_key=True)) == [2, 1]
    mixed = {1: "int", "a": "text", 0: "zero"}
    assert list(leaves_of(mixed, by_key=True)) == ["zero", "int", "text"]
    assert list(map_leaves(lambda x: -x, filled, is_number, by_key=True)) == ["b", "a"]


def test_trees_that_are_alike_become_plain_ones():
    one, other = {"k": [1, (2,)]}, OrderedDict(k=(10, [20]))
    assert map_trees(lambda a, b: a + b, one, other) == {"k": (11, (22,))}
    with pytest.raises(ValueError):
        map_trees(lambda a, b: a + b, [1, 2], [1])
