"""The loss of a step is the mean over its samples, whatever the losses are and in which order."""

import pytest
import torch
from torch import nn

from tests.parallel.pipeline.whole_model import batch, chain, same, same_gradients, squares
from torchdistpackage import Pipeline
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.parallel.pipeline.losses import Losses, mean_of
from torchdistpackage.parallel.pipeline.microbatches import joined

OUT_OF_ORDER = """\
0F2,0F0,0F1,0B2,0B0,0B1
1F2,1B2,1F0,1B0,1F1,1B1
"""


def out_of_order() -> None:
    tpc.setup_process_groups([("pipe", 2)])
    rank = tpc.get_pp_rank()
    x, y = batch(7)
    truth, mine = chain(2), chain(2)
    expected = truth(x)
    squares(expected, y).backward()
    stage = {rank: mine[rank]}
    pipe = Pipeline(stage, loss=squares, schedule=OUT_OF_ORDER, num_microbatches=3)
    for _ in range(2):
        mine.zero_grad()
        same(pipe.step(x, targets=y, keep_outputs=True), squares(expected, y).detach())
        same_gradients(stage, truth)
        if rank == 1:
            same(pipe.outputs, expected.detach())


def test_microbatches_may_come_in_any_order(ranks):
    ranks(2).run(out_of_order)


def hits() -> None:
    tpc.setup_process_groups([("pipe", 2)])
    stage = nn.Identity()
    x, y = batch(7)
    for found in (lambda o, t: (o > t).sum(), lambda o, t: (o > t).any()):
        pipe = Pipeline(stage, loss=found, num_microbatches=3)
        sizes = (3, 2, 2)
        each = [found(*part).item() for part in zip(x.split(sizes), y.split(sizes), strict=True)]
        expected = sum(value * n for value, n in zip(each, sizes, strict=True)) / 7
        assert pipe.eval_step(x, targets=y).item() == pytest.approx(expected, rel=1e-6)


def test_a_loss_may_be_a_count(ranks):
    ranks(2).run(hits)


def test_the_mean_is_at_least_in_float32():
    ones = [torch.ones((), dtype=torch.bfloat16)] * 16
    found = joined(ones, [4] * 13 + [3] * 3)
    assert found.dtype == torch.float32 and abs(found.item() - 1) < 1e-6
    parts = torch.tensor(1.0), torch.tensor(1 + 2**-40, dtype=torch.float64)
    losses = Losses([1, 1])
    for m in (1, 0):
        losses.put(m, parts[m])
    assert losses.totals is not None
    for wider in (mean_of(losses.totals, losses.dtype, False), joined(parts, [1, 1])):
        assert wider.item() == 1 + 2**-41
