"""The front door: what it returns trains as one process does, whatever it chose, on all ranks."""

import logging

import pytest
import torch
from torch import nn

from tests.ddp.zero.beside_one_process import DIM, adamw, batches
from torchdistpackage.comm.creation import world
from torchdistpackage.ddp import auto as front
from torchdistpackage.ddp.auto import StepCost, data_parallel, measure
from torchdistpackage.ddp.naive_ddp import NaiveDDP
from torchdistpackage.ddp.zero.optimizer import ZeroOptimizer
from torchdistpackage.errors import LayoutError

WORK = StepCost(0.1, 0.2, 0.0, num_bytes=10**8, bucket_bytes=10**7)
SLOW, FAST = 1e8, 1e12


def net() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(DIM, 9), nn.Tanh(), nn.Linear(9, 3)).double()


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def train_as_one_process(mode: str, rates: list[float], want: type) -> None:
    """rates: what each rank has measured of its link; the first's counts."""
    me, size = world().rank(), world().size()
    plain, model = net(), net()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(me)
    steps = batches(4, size)
    truth, found = adamw(plain), front.measure
    if rates:
        front.measure = lambda *_: (WORK, rates[me])
    try:
        model, optimizer = data_parallel(
            model, adamw(model), lambda m: loss_of(m, steps[0].chunk(size)[me]), mode=mode
        )
    finally:
        front.measure = found
    assert want in (type(model), type(optimizer)), (type(model), type(optimizer))
    for x in steps:
        for one, steps_it, part in ((plain, truth, x), (model, optimizer, x.chunk(size)[me])):
            loss_of(one, part).backward()
            steps_it.step()
            steps_it.zero_grad()
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("mode", "rates", "want"),
    [
        ("auto", [SLOW, FAST], ZeroOptimizer),
        ("auto", [FAST, SLOW], NaiveDDP),
        ("ddp", [], NaiveDDP),
        ("zero", [], ZeroOptimizer),
    ],
)
def test_each_choice_is_everybodys_and_trains_as_one_process(ranks, mode, rates, want):
    ranks(2).run(train_as_one_process, mode, rates, want)


def test_alone_it_is_the_drop_in_and_measures_nothing(ranks):
    ranks(1).run(train_as_one_process, "auto", [], NaiveDDP)


def train_rounded(mode: str) -> None:
    me, size = world().rank(), world().size()
    plain, model, draw = net().float(), net().float(), batches(3, size).float()
    truth = adamw(plain)
    model, optimizer = data_parallel(
        model, adamw(model), lambda m: loss_of(m, draw[0]), mode=mode, wire_dtype=torch.bfloat16
    )
    for x in draw:
        for one, steps_it, part in ((plain, truth, x), (model, optimizer, x.chunk(size)[me])):
            loss_of(one, part).backward()
            steps_it.step()
            steps_it.zero_grad()
    near, exact = model.state_dict(), plain.state_dict()
    torch.testing.assert_close(near, exact, rtol=0.02, atol=0.02)
    assert not torch.allclose(near["0.weight"], exact["0.weight"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("mode", ["ddp", "zero"])
def test_both_travel_in_the_dtype_that_is_asked_for(ranks, mode):
    ranks(2).run(train_rounded, mode)


def measured_choice() -> tuple[bool, list[str]]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    log = logging.getLogger(front.__name__)
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    model = net()
    x = batches(1, 1)[0]
    try:
        _, optimizer = data_parallel(model, adamw(model), lambda m: loss_of(m, x))
    finally:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)
    return isinstance(optimizer, ZeroOptimizer), lines


@pytest.mark.late_in_full
def test_the_first_rank_says_in_one_line_what_was_chosen_and_why(ranks):
    (mine, lines), (theirs, others) = ranks(2).run(measured_choice)
    assert mine is theirs and not others
    assert len(lines) == 1
    expected = "ZeRO-1" if mine else "all-reduces"
    assert lines[0].startswith(f"data parallel: {expected} of 2 ranks; expected ms a step")


class Moody(nn.Module):
    """Draws, counts, and puts another tensor in a buffer's place."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(DIM)
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(DIM, 1)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + 1
        return self.last(self.drop(self.norm(x)))


def leave_as_it_was(*, fails: bool) -> None:
    torch.manual_seed(1)
    model, x = Moody(), torch.randn(8, DIM)
    kept = model.last.weight.grad = torch.ones(1, DIM)
    seen = model.seen
    before = {k: v.clone() for k, v in model.state_dict().items()}
    random = torch.get_rng_state()
    calls = []

    def loss(m: nn.Module) -> torch.Tensor:
        calls.append(m(x).mean())
        if fails:
            raise KeyError("a batch")
        return calls[-1]

    try:
        work, bytes_per_s = measure(model, loss, world())
    except KeyError:
        assert fails
    else:
        assert min(work.forward_s, work.backward_s, work.optimizer_s, bytes_per_s) > 0
        assert work.num_bytes == 4 * sum(p.numel() for p in model.parameters())
    assert len(calls) == (1 if fails else 1 + front.NUM_TRIALS)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert model.seen is seen
    assert torch.equal(torch.get_rng_state(), random)
    assert model.last.weight.grad is kept and bool((kept == 1).all())
    assert model.last.bias.grad is None


@pytest.mark.late_in_full
@pytest.mark.parametrize("fails", [False, True])
def test_a_trial_leaves_nothing_behind(ranks, fails):
    ranks(2).run(leave_as_it_was, fails=fails)


def not_shareable() -> None:
    found, front.measure = front.measure, lambda *_: (WORK, SLOW)
    rows = nn.Sequential(nn.Embedding(4, 3, sparse=True), nn.Linear(3, 1))
    lbfgs = torch.optim.LBFGS(net().parameters())
    try:
        for model, optimizer in ((net(), lbfgs), (rows, torch.optim.SGD(rows.parameters()))):
            wrapped, same = data_parallel(model, optimizer, loss_of)
            assert isinstance(wrapped, NaiveDDP) and same is optimizer
    finally:
        front.measure = found
    with pytest.raises(LayoutError, match="LBFGS cannot be sharded"):
        data_parallel(net(), lbfgs, loss_of, mode="zero")
    with pytest.raises(ValueError, match="mode is 'fsdp'; use"):
        data_parallel(net(), lbfgs, loss_of, mode="fsdp")
    with pytest.raises(ValueError, match="wire_dtype is torch\\.int8; use"):
        data_parallel(net(), lbfgs, loss_of, wire_dtype=torch.int8)


def test_what_cannot_be_shared_keeps_the_drop_in(ranks):
    ranks(2).run(not_shareable)
