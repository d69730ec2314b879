"""Gradients of experts are the means over their replicas, whoever got how many tokens."""

import gc
import io
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.ddp.test_host_reads import DIM, NUM, Routed, places
from tests.host_reads import HostReads
from torchdistpackage.comm.groups import Groups
from torchdistpackage.compat.torchdistpackage import expert_grads
from torchdistpackage.compat.torchdistpackage.expert_grads import (
    ExpertReducer,
    create_moe_dp_hooks,
    moe_dp_iter_step,
)
from torchdistpackage.ddp.bucket_comm import AllReduceBucket
from torchdistpackage.errors import CommError

STEPS, MICROBATCHES = 4, 2


class Experts(nn.Module):
    """Three experts and a frozen one. In each microbatch `route` says which get tokens."""

    def __init__(self, nested: bool = False):
        super().__init__()
        self.each = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.nested = nested
        self.double()

    def expert(self, i: int, x: Tensor) -> Tensor:
        return torch.tanh(self.each[i](self.frozen(x)))

    def forward(self, x: Tensor, route: list[int]) -> Tensor:
        for i in route:
            # the first expert is used twice, in two backwards nested in that of the loss
            for _ in range(2 if i == 0 else 1):
                if self.nested:
                    x = x + checkpoint(self.expert, i, x, use_reentrant=True)
                else:
                    x = x + self.expert(i, x)
        return x


def route(rank: int, step: int, micro: int) -> list[int]:
    """Some experts get nothing, here or anywhere; the first is used as much as ever at first."""
    draw = torch.Generator().manual_seed(1000 * rank + 10 * step + micro)
    chosen = torch.rand(3, generator=draw) < 0.6
    chosen[0] |= step == 0
    return [i for i in range(3) if chosen[i] and not (i == 2 and step == 1)]


def loss_of(net: Experts, rank: int, step: int, micro: int) -> Tensor:
    draw = torch.Generator().manual_seed(31 * rank + 7 * step + micro)
    x = torch.randn(2, 3, dtype=torch.float64, generator=draw, requires_grad=True)
    return net(x, route(rank, step, micro)).square().sum()


def train(net: Experts, seen_by: list[int], weight: float, after=lambda: None) -> list[dict]:
    """Gradients after each step, for the tokens that these ranks see."""
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.002)
    history = []
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=step != 2)
        for micro in range(MICROBATCHES):
            for rank in seen_by:
                (loss_of(net, rank, step, micro) * weight).backward()
        after()
        history.append(
            {n: None if p.grad is None else p.grad.clone() for n, p in net.named_parameters()}
        )
        optimizer.step()
    return history


def as_one_process(options: dict, size: int, nested: bool) -> None:
    """Ranks with the same remainder hold the same experts; no group but the first has rank 0."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    ranks = range(rank % (world_size // size), world_size, world_size // size)
    group = Groups(rank).of(ranks)
    torch.manual_seed(ranks[0])
    alone, net = Experts(nested), Experts(nested)
    source = ranks[-1]
    torch.manual_seed(7 + source)
    for p in alone.parameters():
        nn.init.normal_(p)
    torch.manual_seed(7 + rank)
    for p in net.parameters():
        nn.init.normal_(p)  # that of the source counts
    halves = [dict(net.each[:1].named_parameters()), dict(net.each[1:].named_parameters())]
    halves[1].update(net.frozen.named_parameters(prefix="frozen"))
    made = [
        create_moe_dp_hooks(half, group, source, num_grad_acc_iter=MICROBATCHES, **options)
        for half in halves
    ]
    mean = options.get("reduce_op", "avg") == "avg"
    truth = train(alone, list(ranks), 1 / size if mean else 1.0)
    ours = train(net, [rank], 1.0, moe_dp_iter_step)
    for step, (mine, one) in enumerate(zip(ours, truth, strict=True)):
        for name, grad in one.items():
            if grad is None:
                assert mine[name] is None, f"step {step}: {name} was used by nobody"
            else:
                torch.testing.assert_close(mine[name], grad, rtol=0, atol=1e-12, msg=name)
    for each in made:
        each.remove()
    moe_dp_iter_step()
    assert expert_grads._reducers == []


@pytest.mark.few(2)
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlap_comm": False, "reduce_op": "SUM"},
        pytest.param({"sync": True}, marks=pytest.mark.full),
        pytest.param({"reduce_op": "sum"}, marks=pytest.mark.full),
    ],
    ids=str,
)
@pytest.mark.parametrize("nested", [False, True])
def test_gradients_are_those_of_one_process(ranks, options, size, nested):
    ranks(4).run(as_one_process, options, size, nested)


def what_left_when(overlap: bool) -> tuple[list[int], list[str]]:
    """Buckets that had left when each backward was over; and how one too many is refused."""
    sent: list[int] = []
    start = AllReduceBucket.launch

    def launch(bucket_comm: AllReduceBucket) -> None:
        sent.append(bucket_comm.gradients.flat.numel())
        start(bucket_comm)

    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    before, expert_grads.BUCKET_BYTES, AllReduceBucket.launch = (
        expert_grads.BUCKET_BYTES,
        700,
        launch,
    )
    try:
        made = create_moe_dp_hooks(
            net.named_parameters(), dist.group.WORLD, 0, overlap, num_grad_acc_iter=2
        )
        left = []
        for _ in range(2):
            for _ in range(2):
                net(torch.ones(1, 8)).sum().backward()
                left.append(len(sent))
            made.reduce_gradients()
            left.append(len(sent))
    finally:
        expert_grads.BUCKET_BYTES, AllReduceBucket.launch = before, start
    said = []
    if overlap:
        for _ in range(2):
            net(torch.ones(1, 8)).sum().backward()
        with pytest.raises(CommError) as error:
            net(torch.ones(1, 8)).sum().backward()
        said.append(str(error.value))
        made.reduce_gradients()
    made.remove()
    return left, said


@pytest.mark.own_transport(
    "refuses a mistake that is a write in flight, which the late transport names first"
)
def test_from_the_second_iteration_on_buckets_leave_in_the_last_backward(ranks):
    for left, (said,) in ranks(2).run(what_left_when, True):
        assert left == [0, 0, 2, 2, 4, 4]
        assert "got gradient 3 of this iteration after its bucket had left" in said
        assert "after every 2 backwards" in said
    assert ranks(2).run(what_left_when, False) == [([0, 0, 2, 2, 2, 4], [])] * 2


def ready_in_another_order() -> None:
    """Two sets: from the second iteration on each rank's tokens come to one of them only."""
    rank = dist.get_rank()
    weights = [nn.Parameter(torch.zeros(4)) for _ in range(2)]
    made = [create_moe_dp_hooks({"w": w}, dist.group.WORLD, 0) for w in weights]
    for step in range(3):
        for w in weights:
            w.grad = None
        for used in weights if step == 0 else weights[rank : rank + 1]:
            (used * (1.0 + rank)).sum().backward()
        moe_dp_iter_step()
    assert [w.grad.tolist() for w in weights] == [[0.5] * 4, [1.0] * 4]
    for each in made:
        each.remove()


def test_two_sets_may_be_ready_in_another_order_on_each_rank(ranks):
    ranks(2).run(ready_in_another_order)


def in_bf16() -> None:
    """Of 64 microbatches on each of two ranks; the exact sum of these very gradients beside it."""
    for wide in (True, False):
        weight = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
        made = create_moe_dp_hooks(
            {"w": weight}, dist.group.WORLD, 0, num_grad_acc_iter=64, fp32_grads=wide
        )
        draw = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(2):
            weight.grad, exact = None, torch.zeros(8, dtype=torch.float64)
            for _ in range(64):
                x = torch.rand(8, generator=draw).bfloat16()
                (weight * x).sum().backward()
                exact += x.double()
            made.reduce_gradients()
            dist.all_reduce(exact)
            assert weight.grad.dtype == (torch.float32 if wide else torch.bfloat16)
            tolerance = 1e-5 if wide else 2.0**-8
            torch.testing.assert_close(weight.grad.double(), exact / 2, rtol=tolerance, atol=0)
        made.remove()


def test_gradients_of_bf16_experts_are_added_up_in_fp32(ranks):
    ranks(2).run(in_bf16)


def refusals() -> None:
    net = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="reduce_op is 'mean'"):
        create_moe_dp_hooks(dict(net.named_parameters()), dist.group.WORLD, 0, reduce_op="mean")
    with pytest.raises(CommError, match="broadcast from rank 5, which is not in the group"):
        create_moe_dp_hooks(dict(net.named_parameters()), dist.group.WORLD, 5)
    moe_dp_iter_step()


def test_what_makes_no_sense_is_refused(ranks):
    ranks(2).run(refusals)


def forgotten() -> None:
    """Made and never removed: the ranks of the next run are others."""
    create_moe_dp_hooks(nn.Linear(2, 2).named_parameters(), dist.group.WORLD, None)
    moe_dp_iter_step()


def test_what_belongs_to_ranks_that_are_gone_is_dropped(ranks):
    ranks(2).run(forgotten)
    ranks(2).run(refusals)
    assert ranks(2).run(num_made) == [0, 0]


def num_made() -> int:
    moe_dp_iter_step()
    return len(expert_grads._reducers)


def dropped() -> None:
    """One rank has collected its garbage when the other model goes on, and the other has not."""
    nets = [nn.Linear(2, 2) for _ in range(2)]
    for net in nets:
        create_moe_dp_hooks(net.named_parameters(), dist.group.WORLD, None)
    # what a user keeps of one parameter keeps them all
    bias, gone = nets[0].bias, ref(nets[1].weight)
    del net, nets
    gc.collect()
    assert len(expert_grads._reducers) == 2
    gc.disable()
    try:
        if dist.get_rank() == 0:
            gc.collect()
        for number in range(3):
            bias.grad = None
            (bias * (1.0 + dist.get_rank())).sum().backward()
            moe_dp_iter_step()
            assert len(expert_grads._reducers) == 1, f"after iteration {number}"
            assert bias.grad.tolist() == [1.5, 1.5]
    finally:
        gc.enable()
    assert gone() is None
    saved = io.BytesIO()
    torch.save(bias, saved)
    saved.seek(0)
    assert torch.equal(torch.load(saved), bias)
    again = create_moe_dp_hooks({"bias": bias}, dist.group.WORLD, None)
    again.remove()
    expert_grads._reducers[0].remove()
    assert vars(bias) == {}


def test_a_model_that_is_dropped_is_freed_in_the_same_call_on_all_ranks(ranks):
    ranks(2).run(dropped)


def experts_reads() -> list[dict[str, int]]:
    """Nobody uses half of the experts."""
    net = Routed()
    made = ExpertReducer(dict(net.named_parameters()), dist.group.WORLD)
    found = []
    for num_used in (NUM, 2):
        for p in net.parameters():
            p.grad = None
        net(torch.ones(2, DIM), num_used).sum().backward()
        with HostReads() as reads:
            made.reduce_gradients()
        found.append(dict(reads.found))
    assert [p.grad is None for p in net.parameters()] == [False] * 4 + [True] * 2 * (NUM - 2)
    made.remove()
    return found


def test_experts_without_tokens_cost_one_read(ranks):
    for all_used, some_used in ranks(2).run(experts_reads):
        assert all_used == {} and places(some_used) == ["ddp/bucket_comm.py"]
