"""States and convolutions that cross context ranks, against one process, in float64."""

import pytest
import torch
import torch.nn.functional as F

from tests.models.found_cases import FULL
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.parallel.context.model import ContextSequence
from torchdistpackage.parallel.context.order import SequenceOrder
from torchdistpackage.parallel.context.scan import (
    fold,
    states_before,
    takes_steps,
    unfold,
    with_halo,
)
from torchdistpackage.thread_ranks.run import run_ranks
from torchdistpackage.topology.mesh import topology

SIZES = [2, *(pytest.param(n, marks=FULL) for n in (3, 4)), 8]
ORDERS = ["zigzag", pytest.param("contiguous", marks=FULL)]


def on_ranks(body, size):
    run = run_ranks(body, topology([("context", size)], size), limit_s=60, queued=False)
    assert run.finding is None, run.finding
    return run.results


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("is_matrix", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_states_are_those_of_a_recurrence_over_the_whole_sequence(size, is_matrix, order):
    num, length, times = 2 * size, 3, torch.matmul if is_matrix else torch.mul
    torch.manual_seed(0)
    decays = torch.randn(2, num * length, *((2, 2) if is_matrix else (2, 1)), dtype=torch.float64)
    inputs = torch.randn(2, num * length, 2, 2, dtype=torch.float64)
    weights = torch.randn(2, num * length, 2, 2, dtype=torch.float64)

    def states(a, b, state):
        out = []
        for t in range(a.shape[1]):
            state = times(a[:, t], state) + b[:, t]
            out.append(state)
        return torch.stack(out, 1)

    a, b = decays.clone().requires_grad_(), inputs.clone().requires_grad_()
    expected = states(a, b, torch.zeros(2, 2, 2, dtype=torch.float64))
    (expected * weights).sum().backward()

    def body(rank):
        sequence = ContextSequence(tpc.get_group("context"), order=order)
        mine = [sequence.part(x) for x in (decays, inputs, weights)]
        parts = [x.clone().requires_grad_() for x in mine[:2]]
        segments = 2 if order == "zigzag" else 1
        a, b = (fold(x, 1, segments) for x in parts)
        total, zero = a[:, 0], torch.zeros_like(b[:, 0])
        for t in range(1, a.shape[1]):
            total = times(a[:, t], total)
        before = states_before(total, states(a, b, zero)[:, -1], times, sequence, segments)
        out = unfold(states(a, b, before), 1, segments)
        (out * mine[2]).sum().backward()
        wanted = [sequence.part(x) for x in (expected.detach(), decays_grad, inputs_grad)]
        return [
            float((x - y).detach().abs().max() / y.abs().max())
            for x, y in zip((out, parts[0].grad, parts[1].grad), wanted, strict=True)
        ]

    decays_grad, inputs_grad = a.grad, b.grad
    assert takes_steps(SequenceOrder(num, size)) == (size == 8)
    assert max(max(each) for each in on_ranks(body, size)) < 1e-12


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("size", SIZES)
def test_a_halo_may_be_wider_than_a_segment(size, order):
    torch.manual_seed(0)
    width, channels = 3, 5
    x = torch.randn(2, channels, 4 * size, dtype=torch.float64)  # segments of 2 in zigzag order
    weight = torch.randn(channels, 1, width + 1, dtype=torch.float64)
    given = x.clone().requires_grad_()
    expected = F.conv1d(F.pad(given, (width, 0)), weight, groups=channels)
    expected.square().sum().backward()

    def body(rank):
        sequence = ContextSequence(tpc.get_group("context"), order=order)
        part = sequence.part(x.mT).mT.clone().requires_grad_()
        segments = 2 if order == "zigzag" else 1
        out = F.conv1d(with_halo(part, width, sequence), weight, groups=channels)
        out = unfold(out, 2, segments)
        out.square().sum().backward()
        wanted = (sequence.part(each.mT).mT for each in (expected.detach(), given.grad))
        return [
            float((a - b).detach().abs().max())
            for a, b in zip((out, part.grad), wanted, strict=True)
        ]

    assert max(max(each) for each in on_ranks(body, size)) < 1e-12
