"""ZeRO is an axis of the parity matrix: every layout trains as one process under every stage."""

import math

import pytest
import torch
import torch.distributed as dist

from tests.train import parity
from tests.train.test_parity import cases, overrides
from torchdistpackage.comm import primitives
from torchdistpackage.comm.tpc import tpc

STAGES = (1, 2, 3)
CASES = {param.id: param.values[0] for param in cases()}
SMALL_SET = (
    *("data2", "data2xtensor2-sp-tied", "data2xpipe2-tied"),
    *("data2xpipe2", "data2xpipe2xtensor2-sp-tied"),
)
REFERENCES: dict[tuple[str, ...], tuple] = {}


def matrix():
    for stage in STAGES:
        for case in CASES:
            marks = [] if case in SMALL_SET else [pytest.mark.full]
            yield pytest.param(case, stage, id=f"{case}-zero{stage}", marks=marks)


def two_steps(extra: list[str]) -> tuple[parity.Held, parity.Held, list[float]]:
    """(gradients of the second step, parameters after it, losses and norms, then of validation)."""
    run = parity.trainer(extra)
    numbers: list[float] = []
    for step in (1, 2):
        result = run.train_step(step).read()
        numbers += [result.loss, result.grad_norm]
    gradients = parity.held(run, "grad")
    numbers.append(run.evaluate())
    return gradients, parity.held(run, "data"), numbers


@pytest.mark.parametrize(("case", "stage"), list(matrix()))
def test_two_steps_are_those_of_one_process(ranks, case, stage):
    """In two rounds: from stage 2 on the first one's sums wait for the second's."""
    degrees, sequence_parallel, tied = CASES[case]
    base = [*overrides(degrees, tied), "train.accumulate=2", "train.eval_batches=1"]
    key = tuple(base)
    if key not in REFERENCES:
        REFERENCES[key] = ranks(1).run(two_steps, base)[0]
    mine = [*base, *(f"parallel.{axis}={size}" for axis, size in degrees.items())]
    mine += [f"parallel.sequence_parallel={str(sequence_parallel).lower()}"]
    mine += [f"parallel.zero={stage}"]
    results = ranks(math.prod(degrees.values())).run(two_steps, mine)
    for found in (0, 1):
        parity.expect_close([r[found] for r in results], [REFERENCES[key][found]])
    for _, _, numbers in results:
        assert numbers == pytest.approx(REFERENCES[key][2], rel=1e-9, abs=0)


def hundred_steps(extra: list[str]) -> tuple[parity.Held, list[float]]:
    """(parameters, losses); the tied weight is the same to the bit on all ranks all the way."""
    run = parity.trainer(extra)
    losses: list[float] = []
    tied = [p for n, p in run.stage.named_parameters() if run.layouts[n].name == "embed.weight"]
    for step in range(1, 101):
        losses.append(run.train_step(step).read().loss)
        if dist.get_world_size() > 1 and (step % 10 == 0 or step < 5):
            for parameter in tied:
                stacked = primitives.all_gather(parameter.detach()[None], tpc.get_group("global"))
                assert torch.equal(stacked, stacked[:1].expand_as(stacked)), f"step {step}"
    return parity.held(run, "data"), losses


@pytest.mark.parametrize(
    ("data", "stage"),
    [
        pytest.param(1, 1, marks=pytest.mark.full),
        pytest.param(2, 1, marks=pytest.mark.full),
        pytest.param(2, 2),
        pytest.param(2, 3, marks=pytest.mark.full),
    ],
)
def test_tied_weights_stay_equal_to_the_bit_for_100_steps(ranks, data, stage):
    """With clipping, weight decay and ZeRO, and they are those of one process."""
    base = [*overrides({"data": 2, "pipe": 2, "tensor": 1}, True), "train.steps=100"]
    base += ["optim.weight_decay=0.1", "optim.clip=0.1", "optim.lr=1e-2"]
    key = ("hundred", *base)
    if key not in REFERENCES:
        REFERENCES[key] = ranks(1).run(hundred_steps, base)[0]
    mine = [*base, "parallel.pipe=2", f"parallel.data={data}", f"parallel.zero={stage}"]
    results = ranks(2 * data).run(hundred_steps, mine)
    parity.expect_close([held for held, _ in results], [REFERENCES[key][0]])
    for _, losses in results:
        assert losses == pytest.approx(REFERENCES[key][1], rel=1e-9, abs=0)
