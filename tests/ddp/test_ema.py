"""Sharded averages are bit for bit those of one process, and go and come under plain names."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.tells import facts_pattern
from torchdistpackage.comm.groups import Groups
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.ddp.ema import ShardedEMA
from torchdistpackage.ddp.naive_ddp import NaiveDDP
from torchdistpackage.ddp.zero.optimizer import ZeroOptimizer
from torchdistpackage.errors import CheckpointError, CommError, LayoutError

DECAY = 0.9


class Net(nn.Module):
    """Large and small, tied, frozen, bf16 and integer parameters, and buffers of both kinds."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.norm = nn.BatchNorm1d(8)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(torch.bfloat16)
        self.frozen = nn.Linear(8, 4).requires_grad_(False)
        self.wide = nn.Parameter(torch.randn(3, dtype=torch.float64))
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.embed.weight
        self.table = nn.Parameter(torch.arange(5), requires_grad=False)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.embed(x)


def build(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def moved(net: nn.Module, step: int) -> None:
    """As an optimizer would: the same on all ranks; buffers as rank by rank."""
    draw = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for p in net.parameters():
            if p.is_floating_point():
                p.add_(torch.randn(p.shape, generator=draw).to(p))
        net.norm.running_mean.fill_(step + 10 * dist.get_rank())


class OneProcess:
    """The averages of a whole model, in a loop that anybody would write."""

    def __init__(self, net: nn.Module):
        self.averages = {
            n: p.detach().clone() if p.dtype != torch.bfloat16 else p.detach().float()
            for n, p in net.named_parameters()
        }

    def update(self, net: nn.Module, decay: float, only_trainable: bool) -> None:
        for n, p in net.named_parameters():
            if p.is_floating_point() and (p.requires_grad or not only_trainable):
                self.averages[n].mul_(decay).add_(p.detach(), alpha=1 - decay)


def members(size: int):
    """A group of `size` ranks that ends with the last one, and whether I am in it."""
    ranks = range(dist.get_world_size() - size, dist.get_world_size())
    if dist.get_rank() not in ranks:
        return None
    return Groups(dist.get_rank()).of(ranks)


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a
    )


def averaged(size: int, only_trainable: bool) -> dict[str, Tensor] | None:
    """What the group's first rank gathers after three steps; checks of every rank's own part."""
    group = members(size)
    if group is None:
        return None
    net = build()
    ema, truth = ShardedEMA(net, group), OneProcess(net)
    for step in range(3):
        moved(net, step)
        ema.update(net, DECAY, only_trainable)
        truth.update(net, DECAY, only_trainable)
    ema.verify_with_gt(truth.averages)
    shard = ema.state_dict_shard()
    assert all(torch.equal(x, truth.averages.get(n, x)) for n, x in shard.items())
    assert ("norm.running_mean" in shard) == (group.rank() == 0)  # the others' may differ
    mine = sum(x.nbytes for x in shard.values())
    largest = max(x.nbytes for x in truth.averages.values())
    whole = sum(x.nbytes for x in truth.averages.values())
    assert mine <= max(largest, whole / size * 4 / 3) + 1024  # and a few buffers

    held = ema.state_dict_cpu()
    assert equal(ema.state_dict_shard(), shard)
    if group.rank() > 0:
        assert held == {}
        return None
    assert held.keys() == net.state_dict().keys()
    assert torch.equal(held["norm.running_mean"], torch.full((8,), 2.0 + 10 * dist.get_rank()))
    assert torch.equal(held["head.weight"], held["embed.weight"])
    assert equal({n: held[n] for n in truth.averages}, truth.averages)
    shared = {x.untyped_storage().data_ptr() for x in shard.values()}
    assert shared.isdisjoint(x.untyped_storage().data_ptr() for x in held.values())
    build(1).load_state_dict(held)
    return held


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("only_trainable", [True, False])
def test_averages_are_those_of_one_process_on_any_group(ranks, size, only_trainable):
    """The group does not begin at rank 0, and the ranks outside are not needed."""
    ranks(3).run(averaged, size, only_trainable)


def resumed(folder, first: int) -> dict[str, Tensor]:
    """`first` steps without a break; then on from files, as shards and as a whole; all in one."""
    size = dist.get_world_size()
    net = build()
    straight = ShardedEMA(net)
    for step in range(first):
        moved(net, step)
        straight.update(net, DECAY)
    torch.save(straight.state_dict_shard(), folder / f"{size}-{dist.get_rank()}.pt")
    if held := straight.state_dict_cpu():
        torch.save(held, folder / f"{size}.pt")
    dist.barrier()
    by_shards, by_whole = ShardedEMA(build(5)), ShardedEMA(build(6))
    by_shards.load_state_dict(torch.load(folder / f"{size}-{dist.get_rank()}.pt"))
    by_whole.load_state_dict(torch.load(folder / "1.pt", mmap=True))
    for ema in (straight, by_shards, by_whole):
        again = copy.deepcopy(net)
        for step in range(first, first + 2):
            moved(again, step)
            ema.update(again, DECAY)
    assert equal(by_shards.state_dict_shard(), straight.state_dict_shard())
    assert equal(by_whole.state_dict_cpu(), straight.state_dict_cpu())
    return straight.state_dict_cpu()


def test_a_run_goes_on_from_shards_or_from_a_whole_of_another_size(ranks, tmp_path):
    (alone,) = ranks(1).run(resumed, tmp_path, 3)
    assert equal(ranks(3).run(resumed, tmp_path, 3)[0], alone)


def refusals() -> None:
    net = build()
    ema = ShardedEMA(net)
    before = {n: x.clone() for n, x in ema.state_dict_shard().items()}
    whole = {**net.state_dict()}
    name = next(iter(before))
    for wrong, text in (
        ({n: x for n, x in whole.items() if n != name}, f"1 of the .* missing .{name}."),
        ({**whole, "no.such": whole["wide"]}, "1 of the .* another model .no.such."),
        ({**whole, name: torch.zeros(1)}, f"{name} was saved in shape .1,."),
    ):
        with pytest.raises(CheckpointError, match=text):
            ema.load_state_dict(wrong)
    parameter = dict(net.named_parameters())[name]
    parameter.data, kept = parameter.data.new_empty(0), parameter.data
    with pytest.raises(LayoutError, match=r"shape \(0,\) .* finish\(\)"):
        ema.update(net)
    with pytest.raises(LayoutError, match="has shape"), ema.applied_to(net):
        pass
    parameter.data = kept
    with pytest.raises(LayoutError, match="which this model lacks"):
        ema.update(nn.Linear(2, 2))
    assert equal(before, ema.state_dict_shard())

    truth = {n: p.detach().to(torch.float64) for n, p in net.named_parameters()}
    truth["embed.weight"][3, 3] += 1e-3  # one rank keeps it, all hear of it
    with pytest.raises(AssertionError, match=r"1 of 11 averages differ: embed.weight on rank \d"):
        ema.verify_with_gt(truth)


def test_what_does_not_fit_is_refused_by_name_and_changes_nothing(ranks):
    ranks(2).run(refusals)


def wrapped() -> None:
    net = build()
    plain = ShardedEMA(net)
    ddp = NaiveDDP(net)
    compiled = torch.compile(torch.nn.parallel.DistributedDataParallel(net), backend="eager")
    around = [ShardedEMA(ddp), ShardedEMA(compiled)]
    moved(net, 1)
    plain.update(ddp)
    for ema in around:
        ema.update(net)
        assert equal(ema.state_dict_shard(), plain.state_dict_shard())
    around[0].verify_with_gt(ddp_of(plain))

    here = {n: p.detach().clone() for n, p in net.named_parameters()}
    whole = [plain.state_dict_cpu()]
    dist.broadcast_object_list(whole)
    with pytest.raises(ZeroDivisionError), plain.applied_to(compiled):
        inside = {n: p.detach().clone() for n, p in net.named_parameters()}
        assert all(torch.equal(x, whole[0][n].to(x)) for n, x in inside.items())
        assert not torch.equal(inside["embed.weight"], here["embed.weight"])
        1 / 0  # noqa: B018
    assert equal({n: p.detach() for n, p in net.named_parameters()}, here)

    net.wide = nn.Parameter(torch.ones(3, dtype=torch.float64))  # replaced, not changed in place
    plain.update(net, decay=0.0)
    if "wide" in plain.state_dict_shard():
        assert torch.equal(plain.state_dict_shard()["wide"], net.wide.detach())


def ddp_of(ema: ShardedEMA) -> nn.Module:
    """A wrapped module in float32 and float64 whose parameters are the averages."""
    held = [ema.state_dict_cpu()]
    dist.broadcast_object_list(held)
    net = build()
    net.body.float()
    net.load_state_dict(held[0])
    return NaiveDDP(net)


@pytest.mark.late_in_full
def test_wrappers_change_no_name_and_averages_can_be_tried_out(ranks):
    ranks(2).run(wrapped)


def changed_module() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    ema = ShardedEMA(net)
    ema.update(net, decay=0.5)
    net[1] = nn.Linear(2, 2)
    ema.update(net, decay=0.0)
    ema.verify_with_gt(net)
    net.append(nn.Linear(2, 3))
    with pytest.raises(LayoutError, match=facts_pattern("2.weight", "shape (3, 2)")):
        ema.update(net)


def test_replaced_layers_are_followed_and_new_ones_refused_by_name(ranks):
    ranks(2).run(changed_module)


def with_zero(stage: int) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).double()
    alone = copy.deepcopy(net)
    optimizer = ZeroOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net, stage=stage)
    optimizer.finish()
    ema, truth = ShardedEMA(net), OneProcess(alone)
    for _ in range(2):
        x = torch.ones(2, 6, dtype=torch.float64)
        optimizer.zero_grad()
        net(x).square().sum().backward()
        if stage == 3:
            with pytest.raises(CommError, match=r"finish\(\) on all of these"):
                ema.update(net, DECAY)
        optimizer.step()
        if stage == 3:
            optimizer.finish()
        ema.update(net, DECAY)
        alone.zero_grad()
        alone(x).square().sum().backward()
        with torch.no_grad():
            for p in alone.parameters():
                p -= 0.1 * p.grad
        truth.update(alone, DECAY, True)
    for name, average in ema.state_dict_shard().items():
        torch.testing.assert_close(average, truth.averages[name], rtol=0, atol=1e-12)


@pytest.mark.parametrize("stage", [1, 3])
def test_parameters_that_zero_sends_around_are_waited_for_or_refused(ranks, stage):
    ranks(2).run(with_zero, stage)


def by_topology() -> list[str]:
    tpc.setup_process_groups([("data", 2), ("tensor", 2)])
    torch.manual_seed(tpc.get_tp_rank())  # tensor ranks hold different shards
    net = nn.Linear(4, 4)
    ema = ShardedEMA(net)
    held = ema.state_dict_cpu()
    assert bool(held) == (tpc.get_dp_rank() == 0)
    assert all(torch.equal(x, held.get(n, x)) for n, x in net.state_dict().items())
    return list(ema.state_dict_shard())


def test_by_default_the_data_ranks_share_the_averages(ranks):
    """Along data there are replicas, along tensor other parameters of the same names."""
    assert ranks(4).run(by_topology) == [["weight"], ["weight"], ["bias"], ["bias"]]
