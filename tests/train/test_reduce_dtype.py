"""`precision.reduce_dtype: bf16` in training: gradients of ranks, rounded as one process can."""

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.train import parity
from tests.train.sources import UnevenTokens
from torchdistpackage.plan.run_plan import make_plan
from torchdistpackage.train.build import build
from torchdistpackage.train.step import Trainer

SEQ_LEN, BATCH = 8, 16
RUN = [
    *("model.layers=2", "model.dim=16", "model.heads=4", "model.vocab=257", "model.tied=false"),
    *(f"data.seq_len={SEQ_LEN}", f"data.args={{seq_len: {SEQ_LEN}, vocab: 257}}"),
    *("data.target=tests.train.sources:UnevenTokens", f"data.global_batch={BATCH}"),
    *("pipeline.microbatches=2", "train.steps=5", "optim.warmup_steps=0", "optim.clip=0"),
]
"""All targets count, so sums of gradients are divided by a power of 2, and never clipped."""
BF16 = "precision.reduce_dtype=bf16"


class EvenTokens(UnevenTokens):
    """All targets count."""

    def _row(self, split, seed, step, i) -> tuple[Tensor, Tensor]:
        inputs, targets = super()._row(split, seed, step, i)
        return inputs, torch.where(targets < 0, inputs, targets)


class OneRanks(EvenTokens):
    """What one of several data ranks reads in some rounds of a step, as if that were all."""

    def __init__(self, index: int, num: int, first_round: int = 0):
        super().__init__(SEQ_LEN, 257)
        self.where = index, num, first_round

    def batch(self, split, seed, step, data_index, num_data, per_rank, *, first=0):
        index, num, first_round = self.where
        first = (first + first_round * per_rank) * num
        return super().batch(split, seed, step, index, num, per_rank, first=first)


def trainer(overrides: list[str], data: EvenTokens) -> Trainer:
    plan = make_plan(parity.config([*RUN, *overrides]), dist.get_world_size())
    return build(plan, dist.get_rank(), torch.device("cpu"), data)


def gradients(overrides: list[str]) -> tuple[int, parity.Held]:
    """(index along data, gradients after a step)."""
    run = trainer(overrides, EvenTokens(SEQ_LEN, 257))
    run.train_step(1).wait()
    index = run.plan.topology.dense.coord(run.rank)["data"]
    return index, parity.held(run, "grad")


def alone(overrides: list[str], index: int, num: int, rounds: int, first_round: int) -> parity.Held:
    """What one data rank adds to the gradients of the step's sum, as one process computes it."""
    batch = BATCH // num // 2 * rounds
    accumulates = [f"train.accumulate={rounds}", f"data.global_batch={batch}"]
    run = trainer([*overrides, *accumulates], OneRanks(index, num, first_round))
    run.train_step(1).wait()
    return [
        (name, shape, at, x * (batch / BATCH)) for name, shape, at, x in parity.held(run, "grad")
    ]


def references(overrides: list[str], num: int) -> list[list[dict[str, Tensor]]]:
    """Of both rounds together, of the first and of the second: what each data rank adds."""
    asked = ((2, 0), (1, 0), (1, 1))
    return [
        [parity.whole([alone(overrides, i, num, *rounds)]) for i in range(num)] for rounds in asked
    ]


def rounded(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def expect_bits(
    found: Sequence[tuple[int, parity.Held]], parts: list[list[dict[str, Tensor]]], zero: int
) -> None:
    """Of two data ranks. Without ZeRO the sum is rounded; an owner adds what comes to its own, from
    stage 2 on in each round."""
    both, *each_round = parts
    for index, held in found:
        for name, _, at, x in held:
            sums = []
            for by_rank in each_round if zero >= 2 else [both]:
                mine, other = by_rank[index][name], by_rank[1 - index][name]
                total = rounded(rounded(mine) + rounded(other)) if not zero else None
                sums.append(mine + rounded(other) if total is None else total)
            expected = sum(sums[1:], sums[0])[at]
            assert torch.equal(x, expected), f"{name}: off by {(x - expected).abs().max():.2e}"


NEAR = [
    ("parallel.tensor=2", "parallel.sequence_parallel=true", "model.tied=true"),
    ("parallel.pipe=2", "model.tied=true", "optim.clip=0.5"),
    ("parallel.context=2", "precision.dtype=bf16"),
]
"""Four ranks or stages add to one gradient, so that a process knows no longer what each rounds."""


def both_dtypes(zero: int) -> list[tuple[parity.Held, parity.Held]]:
    """Of each of `NEAR` the gradients of sums in float32, and of rounded ones."""
    asked = [[*more, "parallel.data=2", f"parallel.zero={zero}"] for more in NEAR]
    return [(gradients(each)[1], gradients([*each, BF16])[1]) for each in asked]


@pytest.mark.full
@pytest.mark.parametrize("zero", range(4))
def test_sums_over_several_axes_are_as_near_as_their_roundings(ranks, zero):
    """At most 4 numbers and 3 sums are rounded, each by 2**-8 of the largest of them at most; one
    is at most twice the largest element of the sum here."""
    results = ranks(4).run(both_dtypes, zero)
    for found in zip(*results, strict=True):
        exact, mine = (parity.whole([pair[i] for pair in found]) for i in range(2))
        for name, truth in exact.items():
            error = (mine[name] - truth).abs().max()
            assert 0 < error <= 7 * 2.0**-8 * 2 * truth.abs().max(), name


CASES = [(2, zero, ()) for zero in range(4)] + [
    (4, 0, ("parallel.pipe=2",)),
    (4, 3, ("parallel.pipe=2", "pipeline.schedule=zb-h1")),
    (4, 1, ("parallel.pipe=2", "pipeline.schedule=interleaved")),
]


def every(cases: list[tuple[int, int, tuple[str, ...]]]) -> list[tuple[int, parity.Held]]:
    found = []
    for _, zero, more in cases:
        asked = [*more, "parallel.data=2", f"parallel.zero={zero}", "train.accumulate=2", BF16]
        found.append(gradients(asked))
    return found


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.full)])
def test_a_step_has_the_bits_of_one_process_that_rounds_alike(ranks, size):
    """In two rounds of two microbatches, which add up in float32."""
    (parts,) = ranks(1).run(references, [], 2)
    cases = [case for case in CASES if case[0] == size]
    results = ranks(size).run(every, cases)
    for (_, zero, _), found in zip(cases, zip(*results, strict=True), strict=True):
        expect_bits(found, parts, zero)
