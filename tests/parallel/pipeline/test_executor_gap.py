"""A real run on two ranks, taken apart: stages that sleep for a known time, messages over gloo."""

import time
from operator import ge
from statistics import fmean

import pytest
import torch
import torch.distributed as dist

from torchdistpackage.parallel.pipeline.executor import Executor
from torchdistpackage.schedule.actions import Action, ActionKind, flatten
from torchdistpackage.schedule.engine import Span
from torchdistpackage.schedule.generators import build
from torchdistpackage.schedule.trace_costs import aligned, attribute_bubble, costs_of

FORWARD_S, BACKWARD_S = (0.004, 0.008), (0.008, 0.016)
NUM_MICROBATCHES = 6


class Slow(torch.autograd.Function):
    """The identity, which takes its time."""

    @staticmethod
    def forward(ctx, x, forward_s, backward_s):
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        time.sleep(ctx.backward_s)
        return grad, None, None


def recorded() -> list[Span]:
    rank = dist.get_rank()
    weight = torch.ones(4, requires_grad=True)

    def forward(stage, m, received):
        x = weight if stage == 0 else received
        out = Slow.apply(x, FORWARD_S[stage], BACKWARD_S[stage])
        return out.sum() if stage == 1 else out

    schedule = build("1f1b", 2, NUM_MICROBATCHES)
    executor = Executor(schedule, dist.group.WORLD, device=torch.device("cpu"), timeout_s=60)
    executor.run(forward)
    dist.barrier()
    executor.run(forward, record=True)
    clock_s = 100.0 * rank
    return [Span(a, start + clock_s, end + clock_s) for a, start, end in executor.spans]


@pytest.mark.late_in_full
def test_a_run_is_put_on_one_clock_and_taken_apart(ranks):
    """What is so however full the machine is: a sleep never ends early, nor does a message."""
    schedule = build("1f1b", 2, NUM_MICROBATCHES)
    spans = ranks(2).run(recorded)
    costs = costs_of(spans, 2)
    assert all(map(ge, costs.forward, FORWARD_S)) and all(map(ge, costs.backward, BACKWARD_S))
    rows = aligned(spans)
    at = {span.action: span for row in rows for span in row}
    computations = {a for program in schedule.programs for a in flatten(program)}
    assert at.keys() >= {a for a in computations if not a.kind.is_message}
    assert {a.kind for a in at} <= {
        ActionKind.F,
        ActionKind.B,
        ActionKind.RECV_F,
        ActionKind.RECV_B,
    }
    for m in range(NUM_MICROBATCHES):
        for sent, used in (
            ((0, ActionKind.F), (1, ActionKind.F)),
            ((1, ActionKind.B), (0, ActionKind.B)),
        ):
            assert at[Action(*sent, m)].end <= at[Action(*used, m)].start + 1e-9
    gap = attribute_bubble(schedule, spans)
    parts = zip(gap.alone, gap.imbalance, gap.message_wait, gap.host, strict=True)
    assert [sum(part) for part in parts] == pytest.approx(gap.measured.bubbles)
    assert fmean(gap.alone) == pytest.approx(1 / 7)


@pytest.mark.full
def test_the_measured_bubble_is_the_simulated_one_and_its_reason_is_found(ranks):
    """The second stage takes twice as long: that is the imbalance, and all else is small.

    The best of some runs: sleeps overshoot while the machine does something else.
    """
    schedule = build("1f1b", 2, NUM_MICROBATCHES)
    gaps = [attribute_bubble(schedule, ranks(2).run(recorded)) for _ in range(5)]
    best = min(gaps, key=lambda gap: abs(gap.measured.bubble - gap.predicted.bubble))
    assert best.measured.bubble == pytest.approx(best.predicted.bubble, abs=0.03), str(best)
    assert fmean(best.imbalance) > 0.05 > fmean(best.host)
