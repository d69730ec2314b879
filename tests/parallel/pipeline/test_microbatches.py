"""A batch is cut into microbatches, whatever its tensors are nested in."""

from collections import UserDict, namedtuple
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from torchdistpackage.comm.nested import leaves_of
from torchdistpackage.parallel.pipeline.microbatches import cut

Pair = namedtuple("Pair", ("x", "rest"))


@dataclass
class Object:
    x: Tensor


def test_containers_stay_of_their_class_and_tensors_are_views():
    x, scalar = torch.ones(5, 2).cumsum(0), torch.tensor(3.0)
    other = Object(x)  # which is not looked into
    batch = (x, [x, {"a": x}], UserDict(x=x), Pair(x, (scalar, "text", other)))
    for m, part in enumerate(cut(batch, (3, 2))):
        mine = x.split((3, 2))[m]
        assert type(part) is tuple and type(part[1]) is list and type(part[1][1]) is dict
        assert type(part[2]) is UserDict and type(part[3]) is Pair
        for found in (part[0], part[1][0], part[1][1]["a"], part[2]["x"], part[3].x):
            assert torch.equal(found, mine) and found._base is x
        assert part[3].rest[0] is scalar and part[3].rest[1:] == ("text", other)
    assert batch[1][0] is batch[2]["x"] is x


def test_a_mapping_that_takes_no_items_becomes_a_dict():
    x = torch.arange(4)
    for m, part in enumerate(cut(MappingProxyType({"x": x, "n": 1}), (2, 2))):
        assert type(part) is dict and part["n"] == 1 and part["x"].tolist() == [2 * m, 2 * m + 1]


def test_what_has_no_samples_and_one_microbatch_are_as_they_are():
    value = {"n": [1, None], "scalar": torch.tensor(1.0)}
    assert all(part is value for part in cut(value, (2, 2)))
    whole = [torch.ones(3)]
    assert cut(whole, (3,))[0] is whole and not [*leaves_of(cut((), (1, 1))[0])]
