"""A mean is divided before it is summed, each gradient once, whatever way it came in."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torchdistpackage.ddp.bucket_comm import SMALL_BYTES
from torchdistpackage.ddp.naive_ddp import NaiveDDP
from torchdistpackage.ddp.zero.optimizer import ZeroOptimizer
from torchdistpackage.errors import CommError

WIDE = SMALL_BYTES // 4 + 1
"""Elements of a gradient that is copied by itself; a shorter one waits for others."""
LARGE = 3e38
"""A float32 of which two have no float32 sum."""


def fresh_and_kept(num_elements: int, set_to_none: bool) -> None:
    """Each step's gradient is LARGE on every rank, and so is the mean; in float32 no sum of it is.

    From the second step on gradients are divided as they come; kept ones when they leave.
    """
    net = nn.Linear(num_elements, 1)
    ddp = NaiveDDP(net)
    for _ in range(3):
        ddp.zero_grad(set_to_none=set_to_none)
        ddp(torch.full((1, num_elements), LARGE)).sum().backward()
        torch.testing.assert_close(net.weight.grad, torch.full((1, num_elements), LARGE))
        assert net.bias.grad.item() == 1


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("num_elements", [3, WIDE])
def test_a_mean_arrives_whose_sum_overflows(ranks, num_elements, set_to_none):
    ranks(2).run(fresh_and_kept, num_elements, set_to_none)


def sharded() -> None:
    net = nn.Linear(WIDE, 1)
    optimizer = ZeroOptimizer(torch.optim.SGD(net.parameters(), lr=1 / LARGE), net)
    net.weight.data.zero_()
    optimizer.refresh_masters()
    for _ in range(3):
        net(torch.full((1, WIDE), LARGE)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(net.weight.detach(), torch.full((1, WIDE), -3.0))


def test_so_does_a_sharded_one(ranks):
    ranks(2).run(sharded)


def added_up() -> None:
    """Three microbatches, of which the last is final and finds those before it undivided."""
    net = nn.Linear(WIDE, 1).double()
    ddp = NaiveDDP(net, num_grad_acc_iter=3)
    size = dist.get_world_size()
    mean = sum(range(1, size + 1)) / size
    for _ in range(3):
        ddp.zero_grad()
        for micro in (1, 10, 100):
            x = torch.full((1, WIDE), micro * (dist.get_rank() + 1.0), dtype=torch.float64)
            ddp(x).sum().backward()
        truth = torch.full((1, WIDE), 111 * mean, dtype=torch.float64)
        torch.testing.assert_close(net.weight.grad, truth, rtol=0, atol=1e-12)


def test_what_microbatches_left_is_divided_once(ranks):
    ranks(3).run(added_up)


class AtTimes(nn.Module):
    """A layer used plainly and, on request, before that under reentrant checkpointing."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDE, WIDE, bias=False)
        self.again = False

    def forward(self, x: Tensor) -> Tensor:
        if self.again:
            x = checkpoint(self.layer, x, use_reentrant=True)
        return self.layer(x)


def comes_again() -> None:
    model = AtTimes()
    ddp = NaiveDDP(model)
    for _ in range(2):
        ddp(torch.ones(1, WIDE, requires_grad=True)).sum().backward()
        ddp.zero_grad()
    model.again = True
    with pytest.raises(CommError, match="use_reentrant=False"):
        ddp(torch.ones(1, WIDE, requires_grad=True)).sum().backward()


@pytest.mark.own_transport(
    "refuses a mistake that is a write in flight, which the late transport names first"
)
def test_what_would_be_added_to_a_divided_gradient_is_an_error(ranks):
    ranks(2).run(comes_again)


def fails_half_way() -> None:
    """One bucket, of which the second layer's part was divided when the first layer failed."""
    layers = nn.Sequential(nn.Linear(WIDE, 1), nn.Linear(1, WIDE, bias=False))
    ddp = NaiveDDP(layers)
    for _ in range(2):
        ddp(torch.ones(1, WIDE)).sum().backward()
        ddp.zero_grad()

    def fail(grad: Tensor) -> None:
        raise ZeroDivisionError

    handle = layers[0].weight.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        ddp(torch.ones(1, WIDE)).sum().backward()
    handle.remove()
    hidden = layers[0](torch.ones(1, WIDE))
    ddp(torch.ones(1, WIDE))
    mine = hidden.detach().expand(WIDE, 1)
    torch.testing.assert_close(layers[1].weight.grad, mine)


def test_a_failed_backward_leaves_its_own_gradients(ranks):
    ranks(2).run(fails_half_way)


def sharded_fails_half_way(stage: int, dropped: bool) -> None:
    """As above; the user may drop what there is before the next forward."""
    layers = nn.Sequential(nn.Linear(WIDE, 1), nn.Linear(1, WIDE, bias=False))
    optimizer = ZeroOptimizer(torch.optim.SGD(layers.parameters(), lr=0.0), layers, stage=stage)
    x = torch.ones(1, WIDE)
    for _ in range(2):
        layers(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def fail(grad: Tensor) -> None:
        raise ZeroDivisionError

    optimizer.finish()
    handle = layers[0].weight.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        layers(x).sum().backward()
    handle.remove()
    if dropped:
        optimizer.zero_grad()
    mine = layers[0](x).detach().expand(WIDE, 1)
    loss = layers(x).sum()
    grad = layers[1].weight.grad
    assert (grad is None) == dropped
    if grad is not None:
        torch.testing.assert_close(grad, mine)
    loss.backward()
    optimizer.reducer.finish()
    mine = mine[:, 0] if dropped else 2 * mine[:, 0]
    for shard in optimizer.shards:
        if shard.name == "1.weight":
            torch.testing.assert_close(shard.tensor.grad, mine[shard.start : shard.stop])


@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("stage", [1, 2])
def test_a_failed_backward_leaves_no_division_behind_in_zero(ranks, stage, dropped):
    ranks(2).run(sharded_fails_half_way, stage, dropped)
