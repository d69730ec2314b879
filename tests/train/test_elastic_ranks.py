"""A run that goes on with half of its nodes, or twice as many, has the losses of one that does not.

With other degrees sums are made in another order, so float64 and 1e-9.
"""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.train import parity
from torchdistpackage.plan.elastic import elastic_plan
from torchdistpackage.train.build import build, make_loop
from torchdistpackage.train.metric_rows import read_metrics
from torchdistpackage.train.stop import StopController
from torchdistpackage.train.train_state import resume

BASE = [
    *("model.layers=2", "model.dim=16", "model.heads=2", "data.seq_len=16", "data.global_batch=8"),
    *("pipeline.microbatches=2", "train.generate_tokens=0", "log.every=100", "log.plot=false"),
    *("train.steps=6", "train.eval_every=3", "train.eval_batches=1", "checkpoint.save_every=0"),
    *("data.name=null", "precision.dtype=float64", "optim.warmup_steps=4"),
    *("launch.elastic.nodes=[1, 4]", "launch.slurm.ntasks-per-node=2"),
    "data.target=tests.train.sources:UnevenTokens", "data.args={seq_len: 16, vocab: 256}",
]  # fmt: skip
LAYOUTS = [
    ["parallel.data=2", "parallel.pipe=2"],
    ["parallel.data=4", "parallel.zero=1"],
    ["parallel.data=2", "parallel.tensor=2", "parallel.zero=3"],
    ["parallel.data=2", "parallel.context=2"],
]


class Ends(StopController):
    """Wishes for the end in the step before `at`."""

    at: int = 0
    asked: int = 0

    def should_stop(self) -> bool:
        self.asked += 1
        return self.asked == self.at


def train(folder: Path, layout: list[str], until: int) -> tuple[int, int, int]:
    """Go on until step `until`; (data, pipe, accumulation) of these ranks."""
    plan = elastic_plan(parity.config([*BASE, *layout]), dist.get_world_size())
    run = build(plan, dist.get_rank(), torch.device("cpu"))
    life = Ends()
    state = resume(run, folder, "auto")
    life.at = until - state.step if until < 6 else 0
    make_loop(run, state, folder, life).run()
    found = plan.config
    assert isinstance(found.parallel.data, int)
    return found.parallel.data, found.parallel.pipe, found.train.accumulate


def rows(folder: Path) -> list[tuple[float, ...]]:
    keys = ("step", "loss", "grad_norm", "lr", "tokens", "val_loss")
    found = read_metrics(folder / "metrics.jsonl")
    return [tuple(float(row[key]) for key in keys if key in row) for row in found]


@pytest.mark.few(1)
@pytest.mark.parametrize("layout", LAYOUTS, ids=" ".join)
def test_the_loss_curve_is_that_of_a_run_whose_nodes_stay(ranks, tmp_path, layout):
    whole, changed = tmp_path / "whole", tmp_path / "changed"
    for folder in (whole, changed):
        folder.mkdir()
    first = ranks(4).run(train, whole, layout, 6)[0]
    assert ranks(4).run(train, changed, layout, 2)[0] == first
    fewer = ranks(2).run(train, changed, layout, 4)[0]
    assert fewer[0] * fewer[1] < first[0] * first[1] and fewer[2] > first[2]
    assert ranks(4).run(train, changed, layout, 6)[0] == first, "and takes them back"
    expected = rows(whole)
    assert [row[0] for row in expected] == [1, 2, 3, 4, 5, 6] and len(expected[2]) == 6
    for mine, theirs in zip(rows(changed), expected, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-9)
