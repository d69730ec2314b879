"""One scale and one decision on all ranks: torch's own, if all saw what one of them sees."""

import logging

import pytest
import torch
import torch.distributed as dist
from torch import nn

from torchdistpackage.comm.tpc import tpc
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
    with pytest.raises(RuntimeError, match=r"call step\(\) first"):
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
