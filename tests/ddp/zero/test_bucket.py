"""Several buckets in one call of the optimizer: few calls, none too late, the same bits."""

import copy
import itertools
from contextlib import nullcontext

import pytest
import torch
from torch import nn, optim

from tests.ddp.zero.beside_one_process import DIM, adamw, compare
from torchdistpackage.comm.creation import world
from torchdistpackage.ddp.zero import bucket
from torchdistpackage.ddp.zero.bucket import PartialStep
from torchdistpackage.ddp.zero.optimizer import ZeroOptimizer
from torchdistpackage.ddp.zero.shard_bounds import ELEMENTWISE, MATRIXWISE
from torchdistpackage.optim.clip import clip_grad_norm_


def parts_of(num: int, sizes: tuple[int, ...] = (3, 2)) -> list[list[nn.Parameter]]:
    torch.manual_seed(0)
    return [[nn.Parameter(torch.randn(size, 4)) for size in sizes] for _ in range(num)]


def built(name: str, parts: list[list[nn.Parameter]], **options: bool) -> optim.Optimizer:
    """Two groups, across the parts."""
    first, second = [[members[i] for members in parts] for i in range(2)]
    groups = [{"params": first, "lr": 3e-2}, {"params": second}]
    return getattr(optim, name)(groups, lr=1e-2, **options)


class Calls(list[int]):
    """How many parameters with gradients each call of `optimizer.step` was given."""

    def __init__(self, optimizer: optim.Optimizer):
        super().__init__()
        plain = optimizer.step

        def step() -> None:
            held = [p for group in optimizer.param_groups for p in group["params"]]
            self.append(sum(p.grad is not None for p in held))
            plain()

        optimizer.step = step


HOW = [
    *((name, {}) for name in sorted(ELEMENTWISE | MATRIXWISE)),
    *((name, {"foreach": True}) for name in sorted(ELEMENTWISE | {"Adafactor"})),
    *((name, {"fused": True}) for name in ("Adagrad", "Adam", "AdamW", "SGD")),
]


@pytest.mark.few(8)
@pytest.mark.parametrize(("name", "options"), HOW, ids=str)
def test_every_class_steps_several_parts_to_the_same_bit(name: str, options: dict):
    together = parts_of(11)
    alone = copy.deepcopy(together)
    for parts, one_by_one in ((together, False), (alone, True)):
        optimizer = built(name, parts, **options)
        steps = PartialStep(optimizer, parts, one_by_one=one_by_one)
        draw = torch.Generator().manual_seed(1)
        calls = Calls(optimizer)
        for number in range(4):
            for p in (p for members in parts for p in members):
                p.grad = torch.randn(p.shape, generator=draw)
            parts[number][0].grad = None
            with steps.once():
                if number % 2:
                    for part in range(len(parts)):
                        steps.landed(part)
                else:
                    assert list(steps.in_turn(range(len(parts)))) == list(range(len(parts)))
        assert len(calls) == (44 if one_by_one else 5 + 4 + 5 + 4)
        assert sum(calls) == 4 * 21
    for mine, theirs in zip(together, alone, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def calls_of(num: int, how: str) -> list[list[int]]:
    """The parts that each call stepped."""
    parts, stepped = parts_of(num, (8, 8)), list[int]()
    inner = built("SGD", parts)
    around = lambda some: stepped.extend(some) or nullcontext()  # noqa: E731
    steps = PartialStep(inner, parts, one_by_one=False, around=around)
    found: list[list[int]] = []
    with steps.once():
        for part in range(num) if how == "landed" else steps.in_turn(range(num)):
            if how == "landed":
                steps.landed(part)
            if stepped:
                found.append(stepped[:])
                stepped.clear()
    return found


@pytest.mark.parametrize("num", [1, 2, 3, 10, 1000])
def test_calls_halve_what_is_left_and_double_what_is_done(num: int):
    landed, in_turn = calls_of(num, "landed"), calls_of(num, "in turn")
    for calls in (landed, in_turn):
        assert [part for some in calls for part in some] == list(range(num))
        assert len(calls) <= num.bit_length() + 1
    assert len(landed[-1]) == 1, "the call before it did not wait for the last sum"
    left = num
    for some in landed:
        assert len(some) == -(-left // 2), "the first call does not wait for the last sums"
        left -= len(some)
    assert [some[0] for some in in_turn] == [0, *(2**i for i in range(len(in_turn) - 1))]


def test_a_call_is_made_once_enough_bytes_wait(monkeypatch):
    monkeypatch.setattr(bucket, "AT_ONCE_BYTES", 5 * 2 * 8 * 4 * 4)
    assert max(map(len, calls_of(100, "landed"))) == 5
    assert max(map(len, calls_of(100, "in turn"))) == 5


def deep() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(24))).double()


def few_calls(stage: int) -> list[tuple[int, float]]:
    """Numbers of buckets and of calls a step, not clipped and clipped."""
    compare(deep, world(), stage=stage, steps=1)
    return [calls_of_a_step(stage, clipped) for clipped in (False, True)]


def calls_of_a_step(stage: int, clipped: bool) -> tuple[int, float]:
    net = deep()
    inner = adamw(net)
    zero = ZeroOptimizer(inner, net, stage=stage, bucket_cap_mb=0.0004)
    calls = Calls(inner)
    for _ in range(3):
        net(torch.ones(1, DIM, dtype=torch.float64)).square().mean().backward()
        if clipped:
            clip_grad_norm_(zero, 1.0, group=world())
        zero.step()
        zero.zero_grad()
    zero.finish()
    return len(zero._buckets), len(calls) / 3


@pytest.mark.few(1)
@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.full), 3])
def test_on_a_queue_a_step_is_few_calls(pool, stage: int):
    for num_buckets, num_calls in itertools.chain(*pool(2).run(few_calls, stage, transport="late")):
        assert num_buckets >= 24
        assert num_calls <= num_buckets.bit_length() + 1
