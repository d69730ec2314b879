"""NaiveDDP against one process on the whole batch, in float64.

Each case runs a few steps of SGD on every rank's part of a batch; weights and gradients must
be those of one process that sees all of it, whatever the graph does.
"""

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torchdistpackage.comm import primitives
from torchdistpackage.ddp.naive_ddp import NaiveDDP
from torchdistpackage.errors import CommError

DIM, PER_RANK, STEPS = 6, 3, 3
Forward = Callable[[nn.Module, Tensor], object]


class Net(nn.Module):
    """Two blocks, one of them used twice, a frozen layer, a norm with buffers, a spare layer."""

    def __init__(self, mode: str = "plain"):
        super().__init__()
        self.mode = mode
        self.first = nn.Linear(DIM, DIM)
        self.shared = nn.Linear(DIM, DIM)
        self.frozen = nn.Linear(DIM, DIM).requires_grad_(False)
        self.spare = nn.Linear(DIM, DIM)
        self.last = nn.Linear(DIM, DIM)

    def block(self, x: Tensor) -> Tensor:
        return torch.tanh(self.shared(self.frozen(x)))

    def two_checkpoints(self, x: Tensor) -> Tensor:
        with warnings.catch_warnings():
            # the outer one's first pass has no gradients, as torch remarks
            warnings.simplefilter("ignore")
            x = checkpoint(self.block, x, use_reentrant=True)
            return checkpoint(self.block, x, use_reentrant=True)

    def forward(self, x: Tensor):
        x = torch.tanh(self.first(x))
        if self.mode in ("reentrant", "non-reentrant"):
            kind = self.mode == "reentrant"
            x = checkpoint(self.block, x, use_reentrant=kind)
            x = checkpoint(self.block, x, use_reentrant=kind)
        elif self.mode == "nested":
            x = checkpoint(self.two_checkpoints, x, use_reentrant=True)
        else:
            x = self.block(self.block(x))
        x = self.shared(x)
        out = self.last(x)
        if self.mode == "two outputs":
            return {"out": out, "aux": [x * 2, "a label"]}
        return out


def loss_of(out: object) -> Tensor:
    if isinstance(out, dict):
        return out["out"].square().mean() + out["aux"][0].square().mean()
    return out.square().mean()


def build(mode: str) -> Net:
    torch.manual_seed(3)
    return Net(mode).double()


def batches(num_ranks: int) -> Tensor:
    draw = torch.Generator().manual_seed(7)
    shape = (STEPS, 2, num_ranks * PER_RANK, DIM)
    return torch.randn(shape, generator=draw, dtype=torch.float64)


def train(net: nn.Module, mine: Tensor, forward: Forward, **options) -> list[dict[str, Tensor]]:
    """Gradients after each step; two microbatches a step when `num_grad_acc_iter` is 2."""
    set_to_none = options.pop("set_to_none", True)
    between = options.pop("between", False)
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    history = []
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=set_to_none)
        for micro in range(2):
            out = forward(net, mine[step, micro])
            if between and micro == 0:
                optimizer.zero_grad(set_to_none=True)
            (loss_of(out) / 2).backward()
        grads = {n.removeprefix("module."): p.grad for n, p in net.named_parameters()}
        history.append({n: g.clone() if g is not None else None for n, g in grads.items()})
        optimizer.step()
    return history


def expect_same(ours: list[dict], truth: list[dict]) -> None:
    for mine, one in zip(ours, truth, strict=True):
        assert mine.keys() == one.keys()
        for name, grad in one.items():
            if grad is None:
                assert mine[name] is None, name
            else:
                torch.testing.assert_close(mine[name], grad, rtol=0, atol=1e-12, msg=name)


def plainly(net: nn.Module, x: Tensor) -> object:
    return net(x)


def under_checkpoint(net: nn.Module, x: Tensor) -> object:
    return checkpoint(net, x.requires_grad_(), use_reentrant=True)


def same_as_one_process(mode: str, wrap: dict, options: dict) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    forward = under_checkpoint if mode == "outer checkpoint" else plainly
    data = batches(size)
    truth = train(build(mode), data, forward, **options)
    model = build(mode)
    with torch.no_grad():
        for p in model.parameters():
            p += rank  # broadcast must undo this
    ddp = NaiveDDP(model, num_grad_acc_iter=2, **wrap)
    mine = data[:, :, rank * PER_RANK : (rank + 1) * PER_RANK].clone()
    expect_same(train(ddp, mine, forward, **options), truth)
    bases = {p.grad._base.data_ptr() for p in model.parameters() if p.grad is not None}
    assert len(bases) <= ddp.reducer.num_buckets, "every gradient must be a view of its bucket"


MODES = ["plain", "reentrant", "non-reentrant", "nested", "two outputs", "outer checkpoint"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cap", [25, 0.0002])
def test_gradients_are_those_of_one_process(ranks, mode, cap):
    ranks(2).run(same_as_one_process, mode, {"bucket_cap_mb": cap}, {})


@pytest.mark.parametrize(
    ("wrap", "options"),
    [
        ({"sync": True}, {}),
        ({}, {"set_to_none": False}),
        ({}, {"between": True}),
        ({"gradient_as_bucket_view": True, "bucket_cap_mb": 0.001}, {"set_to_none": False}),
    ],
    ids=["sync", "zeroed in place", "set to none between forward and backward", "view"],
)
def test_every_way_of_zeroing_and_waiting_is_right(ranks, wrap, options):
    ranks(3).run(same_as_one_process, "plain", wrap, options)


def no_sync_accumulates(num_quiet: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    x = batches(size)[0, 0]
    one = build("plain")
    for _ in range(num_quiet + 1):
        one(x).square().mean().backward()
    ddp = NaiveDDP(build("plain"))
    mine = x[rank * PER_RANK : (rank + 1) * PER_RANK]
    for i in range(num_quiet + 1):
        with ddp.no_sync() if i < num_quiet else nullcontext():
            ddp(mine).square().mean().backward()
    ddp.reduce_gradients()
    ddp.reduce_gradients()
    for (name, p), q in zip(one.named_parameters(), ddp.module.parameters(), strict=True):
        if p.grad is None:
            assert q.grad is None, name
        else:
            torch.testing.assert_close(q.grad, p.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("num_quiet", [0, 1, 2])
def test_no_sync_accumulates_and_the_next_backward_reduces_once(ranks, num_quiet):
    ranks(2).run(no_sync_accumulates, num_quiet)


def two_forwards_one_backward() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    data = batches(size)[0]
    one = build("plain")
    (one(data[0]).square().mean() + one(data[1]).square().mean()).backward()
    ddp = NaiveDDP(build("plain"), bucket_cap_mb=0.0002)
    for _ in range(2):  # the second time buckets leave early
        ddp.zero_grad()
        part = data[:, rank * PER_RANK : (rank + 1) * PER_RANK]
        (ddp(part[0]).square().mean() + ddp(part[1]).square().mean()).backward()
    expect_same(
        [{n: p.grad for n, p in ddp.module.named_parameters()}],
        [{n: p.grad for n, p in one.named_parameters()}],
    )


def test_two_forwards_with_one_backward(ranks):
    ranks(2).run(two_forwards_one_backward)


class Choosy(nn.Module):
    """Uses the layers it is told to; with none, its output depends on no parameter."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x: Tensor, use: list[int]) -> Tensor:
        for i in use:
            x = x + torch.tanh(self.layers[i](x))
        return x


def unused_patterns(seed: int, rounds: int) -> None:
    """Each rank and microbatch uses its own layers: the mean counts zeros for the others."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    model = Choosy().double()
    one = copy.deepcopy(model)
    ddp = NaiveDDP(model, bucket_cap_mb=0.0004, num_grad_acc_iter=2)
    order: list[int] = []
    ddp.reducer.on_launch = order.append
    draw = torch.Generator().manual_seed(seed)
    for _ in range(rounds):
        ddp.zero_grad()
        one.zero_grad()
        chosen = (torch.rand(2, size, 4, generator=draw) < 0.4).tolist()
        x = torch.randn(2, size, PER_RANK, DIM, generator=draw, dtype=torch.float64)
        order.clear()
        for micro in range(2):
            for r in range(size):
                use = [i for i in range(4) if chosen[micro][r][i]]
                loss = one(x[micro, r], use).square().mean() / size
                if loss.requires_grad:
                    loss.backward()
                if r == rank:
                    ddp(x[micro, r], use).square().mean().backward()
        assert order == list(range(ddp.reducer.num_buckets))
        for (name, p), q in zip(one.named_parameters(), ddp.module.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            if p.grad is not None:
                torch.testing.assert_close(q.grad, p.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("seed", [0, 1])
def test_200_random_patterns_of_use_neither_hang_nor_differ(ranks, seed):
    ranks(3).run(unused_patterns, seed, 100)


def strict_names_the_unused() -> None:
    ddp = NaiveDDP(Choosy().double(), strict=True)
    x = torch.ones(2, DIM, dtype=torch.float64)
    ddp(x, [0, 1, 2, 3]).sum().backward()
    use = [0, 1, 3] if dist.get_rank() == 1 else [0, 1, 2, 3]
    with pytest.raises(CommError, match=r"2 of 8 parameters .*layers\.2\.bias, layers\.2\.weight"):
        ddp(x, use).sum().backward()


def test_strict_names_what_some_rank_did_not_use_on_every_rank(ranks):
    ranks(2).run(strict_names_the_unused)


class Fails(torch.autograd.Function):
    armed = True

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if Fails.armed:
            raise ArithmeticError("in the middle")
        return grad


def exception_then_good_step() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    x = batches(size)[0, 0]
    mine = x[rank * PER_RANK : (rank + 1) * PER_RANK]
    one = build("plain")
    one(x).square().mean().backward()
    ddp = NaiveDDP(build("plain"), bucket_cap_mb=0.0002)
    net = ddp.module
    ddp(mine).square().mean().backward()  # the first reduction learns, later ones leave early
    whole, net.block = net.block, lambda y: Fails.apply(whole(y))
    ddp.zero_grad()
    Fails.armed = True
    with pytest.raises(ArithmeticError, match="in the middle"):
        ddp(mine).square().mean().backward()
    Fails.armed = False
    ddp.zero_grad()
    ddp(mine).square().mean().backward()
    expect_same(
        [{n: p.grad for n, p in net.named_parameters()}],
        [{n: p.grad for n, p in one.named_parameters()}],
    )


def test_a_good_step_follows_an_exception_in_the_middle_of_backward(ranks):
    ranks(2).run(exception_then_good_step)


def sums_and_dtypes() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    model = nn.ModuleDict(
        {"a": nn.Linear(2, 2).double(), "b": nn.Linear(2, 2).bfloat16(), "skip": nn.Linear(2, 2)}
    )
    with torch.no_grad():
        model["skip"].weight.fill_(rank)
    model._ddp_params_and_buffers_to_ignore = ["skip.weight"]
    model.forward = lambda scale: sum((p * scale).float().sum() for p in model.parameters())
    ddp = NaiveDDP(model, reduce_op="SUM")
    for _ in range(2):
        ddp.zero_grad()
        ddp(rank + 1.0).backward()
    total = size * (size + 1) / 2
    for name, p in model.named_parameters():
        expected = rank + 1.0 if name == "skip.weight" else total
        assert torch.equal(p.grad, torch.full_like(p, expected)), name
        assert p.grad.dtype == p.dtype
    assert float(model["skip"].weight.detach()[0, 0]) == rank


def test_sum_is_honoured_dtypes_are_kept_and_ignored_names_left_alone(ranks):
    ranks(3).run(sums_and_dtypes)


def strides_are_kept() -> None:
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    ddp = NaiveDDP(model)
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(2):
        ddp(x).sum().backward()
        assert model.weight.grad.stride() == model.weight.stride()


def test_gradients_keep_the_strides_of_their_parameters(ranks):
    ranks(2).run(strides_are_kept)


def buffers_follow() -> None:
    rank = dist.get_rank()
    ddp = NaiveDDP(nn.BatchNorm1d(DIM))
    for step in range(3):
        ddp(torch.randn(4, DIM) + rank + step)
    means = primitives.gather_objects(ddp.module.running_mean)
    ddp.train()
    ddp(torch.zeros(4, DIM))
    after = primitives.gather_objects(ddp.module.running_mean)
    assert not torch.equal(means[0], means[1]), "each forward moves the buffers by its own data"
    assert torch.equal(after[0], means[0] * 0.9) and torch.equal(after[1], means[0] * 0.9)


def test_buffers_follow_the_first_rank_before_each_training_forward(ranks):
    ranks(2).run(buffers_follow)


def names_are_the_modules() -> None:
    plain = build("plain")
    ddp = NaiveDDP(copy.deepcopy(plain))
    assert ddp.state_dict().keys() == plain.state_dict().keys()
    outer = nn.ModuleDict({"net": ddp})
    state = outer.state_dict()
    assert set(state) == {f"net.{name}" for name in plain.state_dict()}
    changed = {name: torch.full_like(x, 2.0) for name, x in state.items()}
    outer.load_state_dict(changed)
    assert all(bool((p == 2).all()) for p in ddp.module.parameters())


def test_state_dict_has_the_names_of_the_module(ranks):
    ranks(1).run(names_are_the_modules)


def group_not_at_zero() -> None:
    """Two data groups of two, {0, 2} and {1, 3}: sources and means are those of the group."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group = groups[rank % 2]
    layer = nn.Linear(2, 1, bias=False).double()
    with torch.no_grad():
        layer.weight.fill_(rank)
    ddp = NaiveDDP(layer, process_group=group)
    assert float(layer.weight.detach()[0, 0]) == rank % 2
    ddp(torch.full((1, 2), float(rank), dtype=torch.float64)).sum().backward()
    assert torch.equal(layer.weight.grad, torch.full((1, 2), rank % 2 + 1.0, dtype=torch.float64))
    with pytest.raises(CommError, match="which is not in the group of ranks"):
        NaiveDDP(layer, process_group=group, dp_rank0=(rank + 1) % 2)


def test_groups_need_not_start_at_rank_0(ranks):
    ranks(4).run(group_not_at_zero)


def buckets_leave_early() -> None:
    """From the second step on the first bucket leaves before the last gradient is there."""
    model = nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(4)))
    ddp = NaiveDDP(model, bucket_cap_mb=0.0002)
    events: list[str] = []
    ddp.reducer.on_launch = lambda b: events.append(f"bucket {b}")
    for i, layer in enumerate(model):
        layer.weight.register_post_accumulate_grad_hook(lambda _, i=i: events.append(f"grad {i}"))
    for _ in range(2):
        events.clear()
        ddp.zero_grad()
        ddp(torch.ones(2, DIM)).sum().backward()
    assert events.index("bucket 0") < events.index("grad 0")
    assert [e for e in events if e.startswith("bucket")] == [
        f"bucket {b}" for b in range(ddp.reducer.num_buckets)
    ]


def test_buckets_leave_while_the_backward_runs(ranks):
    ranks(2).run(buckets_leave_early)


def test_an_unknown_reduction_is_refused():
    with pytest.raises(ValueError, match="use 'avg' or 'sum'"):
        NaiveDDP(nn.Linear(1, 1), reduce_op="mean")
