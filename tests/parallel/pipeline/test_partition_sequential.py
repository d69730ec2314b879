"""Models as sequences, and their cut over the pipe ranks, without processes."""

import pytest
import torch
from torch import nn

from torchdistpackage.comm.tpc import tpc
from torchdistpackage.errors import ScheduleError
from torchdistpackage.parallel.pipeline.partition.policies import (
    flat_and_partition,
    partition_balanced,
    partition_uniform,
)
from torchdistpackage.parallel.pipeline.partition.sequential import flatten_model, flatten_sequence
from torchdistpackage.topology.mesh import topology


def test_models_are_flattened_and_cut_without_processes():
    model = nn.ModuleDict(
        {
            "a": nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.ReLU())),
            "b": nn.Linear(2, 8),
        }
    )
    double = lambda x: x * 2  # noqa: E731
    flat = flatten_model(model, ["a", double, "b"])
    assert len(flat) == 4 and torch.equal(flat[2](torch.ones(1)), torch.full((1,), 2.0))
    assert [type(m).__name__ for m in flatten_sequence(list(flat), 1)] == [
        "Linear",
        "ReLU",
        "ReLU",
        "CallableModule",
        "Linear",
    ]
    with pytest.raises(ScheduleError, match="has no 'c'; its children are a, b"):
        flatten_model(model, ["c"])
    with pytest.raises(ScheduleError, match=r"layer_list is 'ab'; give a list of names: \['ab'\]"):
        flatten_model(model, "ab")
    seven = [nn.Linear(1, 1) for _ in range(7)]
    heavy = [nn.Linear(1, n) for n in (1, 1, 8, 1)]
    lengths, weights = [], []
    for rank in range(4):
        with tpc.using(topology([("pipe", 4)], 4), rank):
            lengths.append(len(partition_uniform(seven)))
            weights.append(len(partition_balanced(heavy)))
            assert len(
                flat_and_partition([nn.Sequential(*seven)], partition_policy="balanced")
            ) in (1, 2)
    assert lengths == [1, 2, 2, 2] and weights == [1, 1, 1, 1]
    with pytest.raises(ScheduleError, match="no partition policy 'random'"):
        flat_and_partition(seven, partition_policy="random")
