"""A rank killed at a random moment of a run that saves every step costs steps and nothing else.

A failure names its seed, from which the moment and the rank follow.
"""

import os
import random
import signal
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.train import parity
from torchdistpackage.checkpoint.commit import latest
from torchdistpackage.errors import RankError
from torchdistpackage.train.build import make_loop
from torchdistpackage.train.log import read_metrics
from torchdistpackage.train.train_state import resume

BASE = [
    *("model.layers=2", "model.dim=16", "model.heads=2", "data.seq_len=16", "data.global_batch=8"),
    *("model.dropout=0.2", "pipeline.microbatches=2", "train.generate_tokens=0", "log.every=100"),
    *("train.steps=12", "train.eval_every=0", "train.eval_batches=1", "checkpoint.save_every=1"),
    *("log.plot=false", "data.name=null", "parallel.zero=1", "checkpoint.async_mode=async"),
    "data.target=tests.train.sources:UnevenTokens", "data.args={seq_len: 16, vocab: 256}",
]  # fmt: skip
LONGEST_S = 0.5
"""After the first step; a run takes about as long."""


def train(folder: Path, victim: int = -1, after_s: float = 0.0) -> int:
    """Go on to the last step; the step it began after. The victim dies on the way."""
    run = parity.trainer(BASE)
    state = resume(run, folder, "auto")
    began = state.step
    loop = make_loop(run, state, folder)
    if dist.get_rank() == victim:
        end = threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGKILL))
        end.daemon = True
        end.start()
    loop.run()
    return began


def losses(folder: Path) -> list[tuple[int, float, float]]:
    return [
        (row["step"], row["loss"], row["grad_norm"])
        for row in read_metrics(folder / "metrics.jsonl")
    ]


@pytest.fixture(scope="module")
def undisturbed(ranks, tmp_path_factory) -> list[tuple[int, float, float]]:
    folder = tmp_path_factory.mktemp("whole")
    ranks(2).run(train, folder)
    return losses(folder)


@pytest.mark.few(1)
@pytest.mark.parametrize("number", [2, pytest.param(100, marks=pytest.mark.full)])
def test_a_run_that_is_killed_at_random_goes_on_exactly(ranks, tmp_path, undisturbed, number):
    for seed in range(number):
        draw, folder = random.Random(seed), tmp_path / f"seed{seed}"
        folder.mkdir()
        victim, after_s = draw.randrange(2), draw.uniform(0, LONGEST_S)
        try:
            ranks(2).run(train, folder, victim, after_s)
        except RankError as error:
            assert "SIGKILL" in str(error), f"seed {seed}: {error}"
        found = latest(folder / "checkpoints", checksums=True)
        began = ranks(2).run(train, folder)
        saved = 0 if found is None else int(found.name.removeprefix("step_"))
        assert began == [saved] * 2, f"seed {seed}"
        assert losses(folder) == undisturbed, f"seed {seed}: killed rank {victim} after {after_s} s"
        names = [path.name for path in (folder / "checkpoints").iterdir()]
        assert all("." not in name for name in names), f"seed {seed}: leftovers {names}"
