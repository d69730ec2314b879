"""Layers over groups that tpc does not know, and layers whose wrapper came and went."""

import copy
import gc
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from torchdistpackage.checkpoint.save import save
from torchdistpackage.comm import primitives
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.ddp.ema import ShardedEMA
from torchdistpackage.ddp.naive_ddp import NaiveDDP
from torchdistpackage.ddp.zero.optimizer import ZeroOptimizer
from torchdistpackage.errors import CheckpointError, LayoutError
from torchdistpackage.layout.layout import Layout
from torchdistpackage.optim.clip import clip_grad_norm_
from torchdistpackage.parallel.tensor.linear import ColumnLinear, RowLinear
from torchdistpackage.parallel.tensor.norm import LayerNorm, RMSNorm
from torchdistpackage.topology.mesh import topology

CLOSE = {"rtol": 1e-10, "atol": 1e-12}


class Net(nn.Module):
    """Norm, column, row on rows of a sequence, with every parameter a number of its own."""

    def __init__(self, group):
        super().__init__()
        self.norm = LayerNorm(4, sequence_parallel=True, group=group)
        self.up = ColumnLinear(4, 6, sequence_parallel=True, group=group)
        self.down = RowLinear(6, 4, sequence_parallel=True, group=group)
        self.double()
        cuts, mine = group.size(), group.rank()
        with torch.no_grad():
            for i, p in enumerate((self.norm.weight, self.norm.bias, self.down.bias)):
                p.copy_(whole(4, seed=i))
            self.up.weight.copy_(whole(6, 4, seed=3).chunk(cuts)[mine])
            self.up.bias.copy_(whole(6, seed=4).chunk(cuts)[mine])
            self.down.weight.copy_(whole(4, 6, seed=5).chunk(cuts, 1)[mine])

    def forward(self, x):
        return self.down(self.up(self.norm(x)).tanh())


def whole(*shape: int, seed: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=draw)


def truth(num_batches: int) -> list[torch.Tensor]:
    """Gradients of one process: three that are whole, then up and down."""
    leaves = [whole(4, seed=i) for i in range(3)]
    leaves += [whole(6, 4, seed=3), whole(6, seed=4), whole(4, 6, seed=5)]
    scale, shift, bias, up, up_bias, down = (leaf.requires_grad_() for leaf in leaves)
    x = torch.cat([whole(4, 2, 4, seed=10 + i) for i in range(num_batches)], 1)
    hidden = nn.functional.linear(nn.functional.layer_norm(x, (4,), scale, shift), up, up_bias)
    loss = nn.functional.linear(hidden.tanh(), down, bias).square().sum() / num_batches
    loss.backward()
    return [leaf.grad for leaf in leaves]


def expect(net: Net, group, num_batches: int) -> float:
    """Gradients are those of one process, whose norm is returned."""
    found, cuts, mine = truth(num_batches), group.size(), group.rank()
    parts = [*found[:3], found[3].chunk(cuts)[mine], found[4].chunk(cuts)[mine]]
    parts.append(found[5].chunk(cuts, 1)[mine])
    own = (net.norm.weight, net.norm.bias, net.down.bias, net.up.weight, net.up.bias)
    for p, wanted in zip((*own, net.down.weight), parts, strict=True):
        torch.testing.assert_close(p.grad, wanted, **CLOSE)
    return math.sqrt(sum(float(g.square().sum()) for g in found))


def backward(run: nn.Module, group, batch: int) -> None:
    x = whole(4, 2, 4, seed=10 + batch).chunk(group.size())[group.rank()]
    run(x).square().sum().backward()


def pairs() -> tuple:
    """(the layers' group, the group of batches) of ranks 0 to 3: neighbours, and every second."""
    rank = dist.get_rank()
    cut = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    batches = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return cut[rank // 2], batches[rank % 2]


def own_groups(axes) -> None:
    cut, batches = pairs()
    rank = dist.get_rank()
    if axes:
        tpc.setup(topology(axes, 4), rank)
    net = Net(cut)
    ddp = NaiveDDP(net, process_group=batches)
    backward(ddp, cut, rank // 2)
    norm = expect(net, cut, 2)
    if not axes:
        assert float(clip_grad_norm_(net.parameters(), 1e9)) == pytest.approx(norm, rel=1e-12)
    copied = copy.deepcopy(net)
    backward(copied, cut, 0)
    expect(copied, cut, 1)
    del ddp
    gc.collect()
    net.zero_grad()
    zero = ZeroOptimizer(torch.optim.SGD(net.parameters(), lr=1.0), net, group=batches)
    backward(net, cut, rank // 2)
    assert float(clip_grad_norm_(zero, 1e9)) == pytest.approx(norm, rel=1e-12)
    zero.remove()

    for make in (
        lambda: NaiveDDP(Net(cut), process_group=cut),
        lambda: NaiveDDP(Net(cut), process_group=dist.group.WORLD),
        lambda: ZeroOptimizer(torch.optim.SGD(Net(cut).parameters(), lr=1.0), group=cut),
        lambda: ShardedEMA(Net(cut), group=cut),
    ):
        with pytest.raises(LayoutError, match=r"cut over ranks"):
            make()
    if axes:
        with pytest.raises(CheckpointError, match=r"save under a topology with the axis"):
            save("unused", step=1, tokens=0, params=net, topology=tpc.topology, rank=rank)


@pytest.mark.parametrize("axes", [(), (("data", 4),)], ids=["no tpc", "no such axis"])
def test_a_group_that_cuts_is_refused_and_one_beside_it_is_right(ranks, axes):
    ranks(4).run(own_groups, axes)


def comes_and_goes() -> None:
    """The layer sums whenever no reducer does, and never beside one."""
    tpc.setup_process_groups([("tensor", 2)])
    group = tpc.get_group("tensor")
    net = Net(group)
    for _ in range(2):
        net.zero_grad()
        backward(net, group, 0)
        expect(net, group, 1)
        net.zero_grad()
        ddp = NaiveDDP(net)
        backward(ddp, group, 0)
        expect(net, group, 1)
        twin = copy.deepcopy(net)
        twin.zero_grad()
        backward(twin, group, 0)
        expect(twin, group, 1)
        ddp.zero_grad()
        ddp.refresh()
        backward(ddp, group, 0)
        expect(net, group, 1)
        # given layouts win: this one sums nothing, so the layers do
        given = NaiveDDP(copy.deepcopy(net), layouts={"up.weight": Layout("up.weight", (6, 4))})
        given.zero_grad()
        backward(given, group, 0)
        expect(given.module, group, 1)
        del ddp
        gc.collect()


def test_a_layer_sums_whenever_no_reducer_does(ranks):
    ranks(2).run(comes_and_goes)


def functional() -> None:
    tpc.setup_process_groups([("tensor", 2)])
    group = tpc.get_group("tensor")
    net = Net(group)
    leaves = {n: p.detach().clone().requires_grad_() for n, p in net.named_parameters()}
    x = whole(4, 2, 4, seed=10).chunk(2)[group.rank()]
    loss = torch.func.functional_call(net, leaves, (x,)).square().sum()
    for p, grad in zip(
        net.parameters(), torch.autograd.grad(loss, list(leaves.values())), strict=True
    ):
        assert p.grad is None
        p.grad = grad
    expect(net, group, 1)
    x = torch.full((2, 4), tpc.rank + 1.0)
    norm = RMSNorm(4, sequence_parallel=True)
    (once,) = torch.autograd.grad(norm(x).sum(), norm.weight)
    other = torch.nn.functional.rms_norm(x, (4,), eps=norm.eps).sum(0)
    torch.testing.assert_close(once, primitives.all_reduce(other.clone(), group))


def test_functional_calls_sum_too(ranks):
    ranks(2).run(functional)
