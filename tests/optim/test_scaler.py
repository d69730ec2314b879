"""One scale and one decision on all ranks: torch's own, if all saw what one of them sees."""

import copy
import logging

import pytest
import torch
import torch.distributed as dist
from torch import nn

from torchdistpackage.comm.tpc import tpc
from torchdistpackage.compat.torchdistpackage.mixed_precision import NativeScalerPP
from torchdistpackage.ddp.zero.optimizer import ZeroOptimizer
from torchdistpackage.optim.scaler import GradScaler

STEPS = 24
OPTIONS = {"init_scale": 2.0**126, "growth_interval": 2, "backoff_factor": 0.25}
"""The scale reaches the largest power of two in float32 and stays below infinity."""


def culprit(step: int, world_size: int) -> int:
    """Which rank has a gradient that is not finite in this step; none if there is no such rank."""
    draw = torch.Generator().manual_seed(step)
    return int(torch.randint(2 * world_size, (), generator=draw))


def bits(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    state = [x for held in optimizer.state.values() for x in held.values()]
    return [x.detach().clone() for x in (*net.parameters(), *state)]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def decided_together() -> list[float]:
    """Every rank has other parameters, the last none at all, as stages of a pipeline may."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    net = nn.Sequential(*[nn.Linear(3, 3)] * (rank < size - 1))
    spare = [nn.Parameter(torch.zeros(0))]
    optimizer = torch.optim.AdamW([*net.parameters(), *spare], lr=0.1)
    twin, truth = nn.Parameter(torch.ones(2)), torch.amp.GradScaler("cpu", **OPTIONS)
    follower = torch.optim.SGD([twin], lr=0.0)
    scaler, scales = GradScaler(**OPTIONS), []
    for step in range(STEPS):
        bad = culprit(step, size)
        before = bits(net, optimizer)
        for p in net.parameters():
            p.grad = torch.full_like(p, scaler.get_scale())
            if bad == rank:
                p.grad.view(-1)[-1] = (float("nan"), float("inf"))[step % 2]
        twin.grad = torch.full_like(twin, float("inf") if bad < size - 1 else 1.0)
        truth.scale(torch.ones(()))
        if step % 3 == 0:
            scaler.unscale_(optimizer)
            if bad >= size - 1:
                assert all(torch.equal(p.grad, torch.ones_like(p)) for p in net.parameters())
        scaler.step(optimizer)
        truth.step(follower)
        assert scaler.skipped == (bad < size - 1)
        assert equal(before, bits(net, optimizer)[: len(before)]) == (
            scaler.skipped or not list(net.parameters())
        )
        scaler.update()
        truth.update()
        scales.append(scaler.get_scale())
        assert scaler.state_dict() == truth.state_dict()
        if step == STEPS // 2:
            saved = scaler.state_dict()
            scaler = GradScaler()
            scaler.load_state_dict(saved)
    return scales


@pytest.mark.parametrize("world_size", [1, 3])
def test_one_bad_gradient_anywhere_is_as_if_all_had_it(ranks, world_size):
    """A stage that skipped alone would leave the model half stepped."""
    first, *others = ranks(world_size).run(decided_together)
    assert all(scales == first for scales in others)
    if world_size > 1:
        assert max(first) == 2.0**127 and min(first) < 2.0**126


def refusals() -> None:
    net = nn.Linear(2, 2)
    optimizer, scaler = torch.optim.SGD(net.parameters(), lr=1.0), GradScaler()
    with pytest.raises(RuntimeError, match=r"comes after step\(\)"):
        scaler.update()
    scaler.scale(net(torch.ones(1, 2)).sum()).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"unscale_\(\) was called twice"):
        scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="takes no closure"):
        scaler.step(optimizer, closure=lambda: 0.0)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"step\(\) was called twice"):
        scaler.step(optimizer)
    scaler.update(new_scale=8.0)
    assert scaler.get_scale() == 8.0
    half = torch.optim.SGD([("head.weight", nn.Parameter(torch.ones(2).half()))], lr=1.0)
    half.param_groups[0]["params"][0].grad = torch.ones(2).half()
    with pytest.raises(ValueError, match=r"gradient of head\.weight is float16"):
        scaler.step(half)
    with pytest.raises(ValueError, match="state is empty"):
        scaler.load_state_dict(GradScaler(enabled=False).state_dict())
    with pytest.raises(ValueError, match="growth_factor is 1 and"):
        GradScaler(growth_factor=1.0)
    # torch's takes the device first
    assert GradScaler("cpu", init_scale=8.0).get_scale() == 8.0
    with pytest.raises(ValueError, match="device is cuda, but the ranks communicate on cpu"):
        GradScaler("cuda")
    with pytest.raises(ValueError, match="clip_mode is 'agc'"):
        NativeScalerPP()(None, optimizer, clip_mode="agc")

    off, before = GradScaler(enabled=False), net.weight.detach().clone()
    loss = net(torch.ones(1, 2)).sum()
    assert off.scale(loss) is loss and off.get_scale() == 1.0
    optimizer.zero_grad()
    loss.backward()
    off.unscale_(optimizer)
    off.step(optimizer)
    off.update()
    assert torch.equal(net.weight, before - 1)


def test_calls_out_of_order_are_refused_and_one_that_is_off_does_nothing(ranks):
    ranks(2).run(refusals)


def float16() -> tuple[float, float]:
    """A gradient of 2^-30 is zero in float16 and arrives with a scale; a loss does not overflow."""
    torch.manual_seed(0)
    net = nn.Linear(4, 1)
    optimizer, scaler = torch.optim.SGD(net.parameters(), lr=2.0**24), GradScaler()
    x = torch.ones(1, 4)
    found = []
    for scale in (lambda loss: loss, scaler.scale):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            out = net(x)
        assert out.dtype == torch.float16
        loss = (out.float() * 2.0**-30).sum()
        scale(loss).backward()
        found.append(float(net.bias.grad))
    before = net.bias.detach().clone()
    scaler.step(optimizer)
    assert torch.equal(net.bias, before - 2.0**-6)
    big = scaler.scale([torch.tensor(3.0, dtype=torch.float16)])[0]
    assert big.dtype == torch.float32 and float(big) == 3 * 2.0**16
    return found[0], found[1]


def test_small_gradients_survive_float16(ranks):
    assert ranks(1).run(float16) == [(0.0, 2.0**-14)]


def told() -> list[str]:
    """The log of a step in which stage 1 of the second replica brings a NaN."""
    caught: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            caught.append(record.getMessage())

    tpc.setup_process_groups([("data", 2), ("pipe", 2)])
    log, keep = logging.getLogger("torchdistpackage.optim.scaler"), Keep()
    log.addHandler(keep)
    log.setLevel(logging.INFO)
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(net.named_parameters(), lr=1.0)
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    if dist.get_rank() == 3:
        net[1].weight.grad[0, 0] = float("nan")
    scaler = GradScaler()
    scaler.step(optimizer)
    scaler.update()
    log.removeHandler(keep)
    log.setLevel(logging.NOTSET)
    return caught


def test_the_log_names_rank_stage_and_parameter(ranks):
    first, *others = ranks(4).run(told)
    assert first == [
        "step skipped at scale 65536: gradients not finite: rank 3 (data 1 pipe 1): 1.weight"
    ]
    assert others == [[], [], []]


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        self.double()

    def forward(self, x):
        return self.body(x)


def data(step: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(step)
    return torch.randn(8, 5, dtype=torch.float64, generator=draw)


def one_process(mode: str, bad: int) -> list[torch.Tensor]:
    """What torch alone makes of all the data, without the bad step."""
    net = Toy()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        net(data(step)).square().mean().backward()
        if mode == "norm":
            nn.utils.clip_grad_norm_(net.parameters(), 0.05)
        else:
            nn.utils.clip_grad_value_(net.parameters(), 0.01)
        if step != bad:
            optimizer.step()
    return [p.detach() for p in net.parameters()]


def with_zero(mode: str, stage: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    net = Toy()
    optimizer = ZeroOptimizer(torch.optim.AdamW(net.named_parameters(), lr=0.1), net, stage=stage)
    scaler = NativeScalerPP(init_scale=2.0**10)
    for step in range(3):
        optimizer.zero_grad()
        loss = net(data(step).chunk(size)[rank]).square().mean()
        if step == 1 and rank == size - 1:
            loss = loss * float("inf")
        limit = 0.05 if mode == "norm" else 0.01
        scaler(loss, optimizer, clip_grad=limit, clip_mode=mode, parameters=net.parameters())
    optimizer.finish()
    for mine, truth in zip(net.parameters(), one_process(mode, bad=1), strict=True):
        torch.testing.assert_close(mine.detach(), truth, rtol=0, atol=1e-7)
    assert scaler.state_dict()["scale"] == 2.0**9


@pytest.mark.parametrize(
    ("mode", "stage"),
    [("norm", 1), ("value", 2), pytest.param("norm", 2, marks=pytest.mark.full)],
)
def test_shards_are_scaled_clipped_and_skipped_as_one_process_would(ranks, mode, stage):
    """The gradients of the bad step are those of one rank; its sum goes to all owners."""
    ranks(2).run(with_zero, mode, stage)


def stages() -> None:
    """A pipeline whose backwards somebody else ran, of a loss that only the last stage had."""
    tpc.setup_process_groups([("pipe", 2)])
    whole, rank = Toy(), dist.get_rank()
    mine = copy.deepcopy(whole.body[: 2 if rank == 0 else None][2 * rank :])
    scaler, loss_scale = NativeScalerPP(), 2.0**16
    optimizer = torch.optim.SGD(mine.parameters(), lr=1.0)
    whole(data(0)).square().mean().backward()
    twins = whole.body[2 * rank : 2 * rank + 1].parameters()
    for p, twin in zip(mine.parameters(), twins, strict=True):
        p.grad = twin.grad * loss_scale
    expected = torch.nn.utils.get_total_norm([p.grad for p in whole.parameters()])
    assert scaler(None, optimizer, need_update=False) is None
    norm = scaler(None, optimizer, clip_grad=0.01, parameters=mine.parameters())
    torch.testing.assert_close(norm, expected)
    twins = whole.body[2 * rank : 2 * rank + 1].parameters()
    for p, twin in zip(mine.parameters(), twins, strict=True):
        torch.testing.assert_close(p.detach(), (twin - 0.01 * twin.grad / expected).detach())


def test_stages_of_a_pipeline_clip_by_one_norm(ranks):
    ranks(2).run(stages)
