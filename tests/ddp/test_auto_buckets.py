"""Buckets follow what the first steps show, alike on all ranks, and gradients stay the same."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchdistpackage.ddp import bucket_tuning
from torchdistpackage.ddp.bucket_plan import MIB, BucketPlan
from torchdistpackage.ddp.naive_ddp import NaiveDDP

DIM, STEPS = 8, 6


class Backwards(nn.Module):
    """Layers registered in the order in which the backward comes to them."""

    def __init__(self, num: int = 4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(num))
        self.odd = nn.Linear(DIM, DIM).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        for layer in reversed(self.layers):
            x = torch.tanh(layer(x))
        return x + self.odd(x.bfloat16())


def batch(step: int) -> Tensor:
    draw = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(3, DIM, generator=draw)


def members(ddp: NaiveDDP) -> list[list[str]]:
    specs = ddp.reducer.specs
    return [[specs[i].name for i in b.members] for b in ddp.reducer.grad_buckets.buckets]


def follows_gradients(set_to_none: bool, keep_order: bool) -> None:
    torch.manual_seed(1)
    net = Backwards()
    fixed = NaiveDDP(copy.deepcopy(net), keep_order=True, fp32_grads=True)
    ddp = NaiveDDP(net, bucket_cap_mb=0.0006, keep_order=keep_order, fp32_grads=True)
    registered = members(ddp)
    for step in range(STEPS):
        for model in (fixed, ddp):
            model.zero_grad(set_to_none=set_to_none)
            model(batch(step)).float().square().sum().backward()
        for p, q in zip(ddp.parameters(), fixed.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)
    order = [name for bucket in members(ddp) for name in bucket if name.startswith("layers")]
    assert (members(ddp) == registered) == keep_order
    if not keep_order:
        assert [name.split(".")[1] for name in order] == [str(i) for i in range(4) for _ in "wb"]


@pytest.mark.late_in_full
@pytest.mark.parametrize("set_to_none", [True, pytest.param(False, marks=pytest.mark.full)])
def test_after_the_first_step_buckets_follow_the_gradients(ranks, set_to_none):
    ranks(2).run(follows_gradients, set_to_none, False)


@pytest.mark.late_in_full
def test_order_and_size_stay_as_registered_where_that_is_asked_for(ranks):
    ranks(2).run(follows_gradients, True, True)


def one_decides() -> None:
    """Each rank would choose sizes and an order of its own; those of the first rank are taken."""
    rank, came = dist.get_rank(), bucket_tuning.BucketTuner.came
    mine = BucketPlan((rank + 1) * MIB, 330 + 300 * rank)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bucket_tuning, "choose_plan", lambda *_: mine)
        patch.setattr(
            bucket_tuning.BucketTuner, "came", lambda self, i: came(self, i if rank == 0 else 7 - i)
        )
        ddp = NaiveDDP(nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(4))))
        for step in range(STEPS):
            ddp.zero_grad()
            ddp(batch(step)).sum().backward()
    seen: list[object] = [None, None]
    dist.all_gather_object(seen, members(ddp))
    assert seen[0] == seen[1]
    assert len(seen[0]) == 2 and len(seen[0][0]) == 2, "a small first bucket, then the rest"


def test_the_first_rank_decides_for_all(ranks):
    ranks(2).run(one_decides)


def disturbed_steps() -> None:
    """Something else on the machine holds up another half of two of the steps that are watched."""
    seen: list[list[float]] = []
    delay_s = {0: (0.0, 5.0), 1: (0.0, 0.0), 2: (5.0, 5.0)}
    came: list[int] = []

    def note(self, index: int) -> None:
        step, place = divmod(len(came), 8)
        came.append(index)
        self._came[index] = place + delay_s[step][place // 4] * (place > 0)

    def choose(entries, ready_s, order, link, sizes) -> BucketPlan:
        seen.append(sorted(ready_s.values()))
        return BucketPlan(MIB)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bucket_tuning, "choose_plan", choose)
        patch.setattr(bucket_tuning.BucketTuner, "came", note)
        ddp = NaiveDDP(nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(4))))
        for step in range(3):
            ddp.zero_grad()
            ddp(batch(step)).sum().backward()
    assert seen == ([[float(i) for i in range(8)]] if dist.get_rank() == 0 else [])


def test_sizes_are_chosen_by_when_gradients_come_at_the_soonest(ranks):
    ranks(2).run(disturbed_steps)


def groups_in_a_chain() -> None:
    """Rank 1 shares layers with 0, others with 2: none of its groups has both, so nobody decides,
    and the order stays that of registration on all three."""
    rank = dist.get_rank()
    pair = [dist.new_group([0, 1]), dist.new_group([1, 2])]

    class ByLayer(NaiveDDP):
        def _get_group(self, name, parameter):
            return pair[0 if rank == 0 else 1 if rank == 2 else int("layers.1" in name)]

    net = Backwards()
    if rank != 1:
        net.layers[int(rank == 0)] = nn.Identity()
    net._ddp_params_and_buffers_to_ignore = [
        name for name, _ in net.named_parameters() if name[:8] not in ("layers.0", "layers.1")
    ]
    ddp = ByLayer(net, process_group=pair[rank // 2])
    before = members(ddp)
    for step in range(STEPS):
        ddp(batch(step)).float().sum().backward()
    assert members(ddp) == before


@pytest.mark.late_in_full
def test_without_a_group_that_holds_all_others_nobody_decides(ranks):
    ranks(3).run(groups_in_a_chain)


def experts() -> None:
    """Experts over two ranks, the rest over four: the wide group holds all, and decides."""
    rank = dist.get_rank()
    halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]

    class ByLayer(NaiveDDP):
        def _get_group(self, name, parameter):
            return halves[rank % 2] if "layers.1" in name else self.group

    torch.manual_seed(0)
    ddp = ByLayer(Backwards(), fp32_grads=True)
    for step in range(STEPS):
        ddp.zero_grad()
        ddp(batch(step)).float().sum().backward()
    # the wide group's first bucket ends with the last of its layers to come, 3
    names = members(ddp)
    assert any(bucket[0].startswith("layers.0") for bucket in names)
    for name, p in ddp.module.named_parameters():
        group = halves[rank % 2] if "layers.1" in name else dist.group.WORLD
        theirs = [torch.empty_like(p.grad) for _ in range(group.size())]
        dist.all_gather(theirs, p.grad, group=group)
        assert all(torch.equal(t, p.grad) for t in theirs), name


@pytest.mark.late_in_full
def test_with_experts_the_widest_group_decides(ranks):
    ranks(4).run(experts)
