"""Communication hooks given to NaiveDDP: training goes on, only less exactly."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.ddp.against_reference import both, descend, follow, part, squares
from torchdistpackage.comm import primitives
from torchdistpackage.ddp.comm_hooks import PowerSGD, bf16_compress, fp16_compress
from torchdistpackage.ddp.naive_ddp import NaiveDDP

WIDTH = 32


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())


def last_loss(hook: object | None, steps: int = 30) -> float:
    """Ranks fit one teacher on data of their own; the mean loss at the end."""
    torch.manual_seed(0)
    teacher, net = layers(), layers()
    ddp = NaiveDDP(net, **({} if hook is None else {"comm_hook": hook}))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5, momentum=0.9)
    for step in range(steps):
        x = part(step, rows=32).float()
        optimizer.zero_grad()
        loss = (ddp(x) - teacher(x).detach()).square().mean()
        loss.backward()
        optimizer.step()
    weights = torch.cat([p.detach().flatten() for p in net.parameters()])
    for other in primitives.gather_objects(weights):
        assert torch.equal(weights, other), "ranks stay equal to the bit"
    return primitives.all_reduce(loss.detach().clone(), dist.group.WORLD).item() / 2


def learns(make: object, within: float) -> None:
    hook = make() if isinstance(make, type) else make
    first, exact, mine = last_loss(None, steps=1), last_loss(None), last_loss(hook)
    assert exact < 0.2 * first, "the task must be one that is learned"
    assert mine != exact, "the hook must have been used"
    assert mine < within * exact


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("hook", "within"),
    [(bf16_compress, 1.05), (fp16_compress, 1.05), (PowerSGD, 2.0)],
    ids=["bf16", "fp16", "PowerSGD"],
)
def test_a_model_learns_under_compression_and_ranks_stay_equal(ranks, hook, within):
    ranks(2).run(learns, hook, within)


class Recording:
    """A user's own hook: plain all-reduce that counts."""

    def __init__(self):
        self.num_started = self.num_waited = 0

    def __call__(self, flat: torch.Tensor, group: object, op: object) -> "Recording":
        self.num_started += 1
        self.pending = primitives.start_all_reduce(flat, group, op)
        return self

    def wait(self) -> None:
        self.num_waited += 1
        self.pending.wait()


def own_hook() -> None:
    hook = Recording()
    ddp, reference = both(lambda: layers().double(), comm_hook=hook)
    follow(ddp, reference, squares)
    assert hook.num_started == hook.num_waited == 3 * ddp.reducer.num_buckets


def test_a_hook_of_ones_own_is_a_function_of_bucket_group_and_operation(ranks):
    ranks(2).run(own_hook)


def one_rank() -> None:
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    torch.manual_seed(dist.get_rank())
    net = layers()
    plain = copy.deepcopy(net)
    ddp = NaiveDDP(net, process_group=alone, comm_hook=PowerSGD())
    for step in range(2):
        ddp.zero_grad(), plain.zero_grad()
        x = part(step).float()
        squares(ddp, x).backward()
        squares(plain, x).backward()
        for p, q in zip(net.parameters(), plain.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)
        descend(net), descend(plain)


def test_one_rank_compresses_nothing(ranks):
    ranks(2).run(one_rank)
