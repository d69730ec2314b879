"""ZeRO is an axis of the parity matrix: every layout trains as one process under every stage."""

import math

import pytest

from tests.train import parity
from tests.train.test_parity import cases, overrides
from torchdistpackage.train.replica_check import ReplicaCheck

STAGES = (1, 2, 3)
CASES = {param.id: param.values[0] for param in cases()}
SMALL_SET = ("data2", "data2xtensor2-sp-tied", "data2xpipe2-tied")
REFERENCES: dict[tuple[str, ...], tuple] = {}


def matrix():
    for stage in STAGES:
        for case in CASES:
            small = case in SMALL_SET or (case, stage) == ("data2xpipe2xtensor2-sp-tied", 3)
            marks = [] if small else [pytest.mark.full]
            yield pytest.param(case, stage, id=f"{case}-zero{stage}", marks=marks)


def two_steps(extra: list[str]) -> tuple[parity.Held, parity.Held, list[float]]:
    """(gradients of the second step, parameters after it, losses and norms, then of validation)."""
    run = parity.trainer(extra)
    numbers: list[float] = []
    for step in (1, 2):
        result = run.train_step(step).wait()
        numbers += [result.loss, result.grad_norm]
    gradients = parity.held(run, "grad")
    numbers.append(run.evaluate())
    return gradients, parity.held(run, "data"), numbers


@pytest.mark.few(1)
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


def many_steps(extra: list[str], num_steps: int) -> tuple[parity.Held, list[float]]:
    """(parameters, losses); all that holds a weight hold the same bits of it all the way."""
    run = parity.trainer(extra)
    losses: list[float] = []
    check = ReplicaCheck(run)
    for step in range(1, num_steps + 1):
        losses.append(run.train_step(step).wait().loss)
        if step % 10 == 0 or step < 5:
            check()
    return parity.held(run, "data"), losses


HUNDRED = [(1, 1, "1f1b"), (2, 1, "1f1b"), (2, 2, "1f1b"), (2, 3, "1f1b")]
HUNDRED += [(2, 2, name) for name in ("interleaved", "zb-v", "interleaved-zb", "dualpipe-v")]


@pytest.mark.full
@pytest.mark.parametrize(
    ("data", "stage", "schedule", "num_steps"),
    [(2, 2, "zb-v", 20), *(pytest.param(*c, 100, marks=pytest.mark.full) for c in HUNDRED)],
)
def test_tied_weights_stay_equal_to_the_bit(ranks, data, stage, schedule, num_steps):
    """With clipping, weight decay and ZeRO, and they are those of one process.

    Under a schedule that goes there and back embedding and head are one Parameter on one rank.
    """
    base = [*overrides({"data": 2, "pipe": 2, "tensor": 1}, True), "train.steps=100"]
    base += ["optim.weight_decay=0.1", "optim.clip=0.1", "optim.lr=1e-2"]
    key = (f"{num_steps}", *base)
    if key not in REFERENCES:
        REFERENCES[key] = ranks(1).run(many_steps, base, num_steps, timeout_s=300)[0]
    mine = [*base, "parallel.pipe=2", f"parallel.data={data}", f"parallel.zero={stage}"]
    mine.append(f"pipeline.schedule={schedule}")
    results = ranks(2 * data).run(many_steps, mine, num_steps, timeout_s=300)
    parity.expect_close([held for held, _ in results], [REFERENCES[key][0]])
    for _, losses in results:
        assert losses == pytest.approx(REFERENCES[key][1], rel=1e-9, abs=0)
