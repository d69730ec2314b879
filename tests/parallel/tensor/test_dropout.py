"""Dropout masks: equal over tensor ranks where activations are shared, different where cut."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torchdistpackage.comm.random import seed_rank
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.parallel.tensor.attention import attend
from torchdistpackage.parallel.tensor.dropout import Dropout
from torchdistpackage.parallel.tensor.linear import ParallelMlp

WORLD = [("data", 2), ("tensor", 2)]


def masks(split: bool) -> list[bool]:
    tpc.setup_process_groups(WORLD)
    seed_rank(3, tpc.topology.dense, tpc.rank)
    drop = Dropout(0.5, split=split)
    ones = torch.ones(64)
    first, second = drop(ones), drop(ones)
    assert not torch.equal(first, second), "the stream goes on"
    assert set(first.tolist()) == {0.0, 2.0}
    assert torch.equal(drop.eval()(ones), ones)
    return first.tolist()


@pytest.mark.parametrize("split", [False, True])
def test_masks_differ_over_tensor_ranks_only_where_the_input_is_cut(ranks, split):
    first, second, third, fourth = ranks(4).run(masks, split)
    assert (first != second) == split
    assert (third != fourth) == split
    assert first != third, "data ranks never share masks"


def attention_masks() -> list[float]:
    tpc.setup_process_groups(WORLD)
    seed_rank(3, tpc.topology.dense, tpc.rank)
    same = torch.zeros(1, 1, 8, 4)
    values = torch.eye(8).view(1, 1, 8, 8)
    return attend(same, same, values, False, 0.5, tpc.get_group("tensor")).flatten().tolist()


def test_each_rank_drops_other_attention_weights_of_its_heads(ranks):
    got = ranks(4).run(attention_masks)
    assert len({tuple(mask) for mask in got}) == 4
    assert all(0.0 in mask for mask in got)


class Stack(nn.Module):
    """A replicated and a cut dropout around products, as in a block."""

    def __init__(self, sequence_parallel: bool):
        super().__init__()
        self.mlp = ParallelMlp(8, 16, sequence_parallel=sequence_parallel, dtype=torch.float64)
        self.inner = Dropout(0.4, split=True)
        self.mlp.activation = nn.Sequential(nn.GELU(), self.inner)
        self.outer = Dropout(0.4, split=sequence_parallel)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(self.mlp(x))


def gradients(reentrant: bool | None, sequence_parallel: bool) -> list[Tensor]:
    seed_rank(3, tpc.topology.dense, tpc.rank)
    net = Stack(sequence_parallel)
    draw = torch.Generator().manual_seed(tpc.rank if sequence_parallel else 0)
    x = torch.randn(4, 2, 8, dtype=torch.float64, generator=draw).requires_grad_()
    if reentrant is None:
        y = net(net(x))
    else:
        y = checkpoint(net, x, use_reentrant=reentrant)
        y = checkpoint(net, y, use_reentrant=reentrant)
    y.square().sum().backward()
    # what is drawn after the step shows that the stream stands where it would have stood
    return [y.detach(), x.grad, *(p.grad for p in net.parameters()), torch.rand(3)]


def check_recompute(sequence_parallel: bool) -> None:
    tpc.setup_process_groups(WORLD)
    expected = gradients(None, sequence_parallel)
    for reentrant in (False, True):
        for got, wanted in zip(gradients(reentrant, sequence_parallel), expected, strict=True):
            assert torch.equal(got, wanted)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sequence"])
def test_recomputation_draws_the_same_masks(ranks, sequence_parallel):
    ranks(4).run(check_recompute, sequence_parallel)
