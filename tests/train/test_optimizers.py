"""SGD and Muon under the layouts that they can follow are as in one process, and torch's own."""

import math
import shutil
from pathlib import Path

import pytest
import torch

from tests.train import parity
from tests.train.test_parity import overrides
from torchdistpackage.config.load import loads
from torchdistpackage.train.log import read_metrics
from torchdistpackage.train.optimizers import MuonWithAdamW, make_optimizer

CONFIG = Path(__file__).parents[2] / "configs" / "gpt_tiny.yaml"
LAYOUTS = {
    "muon": [{"data": 2}, {"pipe": 2}],
    "sgd": [{"data": 2, "zero": 1}, {"tensor": 2}, {"data": 2, "zero": 3}],
}


def after_steps(extra: list[str]) -> tuple[parity.Held, float]:
    run = parity.trainer(extra)
    for step in range(1, 4):
        loss = run.train_step(step).wait().loss
    if hasattr(run.optimizer, "finish"):
        run.optimizer.finish()
    return parity.held(run, "data"), loss


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "layout"), [(n, x) for n, of in LAYOUTS.items() for x in of], ids=str
)
def test_three_steps_are_those_of_one_process(ranks, name, layout):
    axes = {"data": 1, "pipe": 1, "tensor": 1, **layout}
    size = axes["data"] * axes["pipe"] * axes["tensor"]
    base = [*overrides({**axes, "data": 2}, tied=False), f"optim.name={name}", "optim.lr=0.02"]
    mine = [*base, *(f"parallel.{key}={value}" for key, value in layout.items())]
    truth = ranks(1).run(after_steps, base)
    found = ranks(size).run(after_steps, mine)
    parity.expect_close([held for held, _ in found], [held for held, _ in truth])
    assert all(math.isclose(loss, truth[0][1], rel_tol=1e-9) for _, loss in found)


def test_muon_and_adamw_are_torchs_own_and_leave_a_broken_step_out():
    torch.manual_seed(0)
    section = loads("optim: {name: muon, lr: 0.1}").optim
    stage = torch.nn.ModuleDict({"embed": torch.nn.Embedding(9, 4), "a": torch.nn.Linear(4, 6)})
    twin = torch.nn.ModuleDict({"embed": torch.nn.Embedding(9, 4), "a": torch.nn.Linear(4, 6)})
    twin.load_state_dict(stage.state_dict())
    ours = make_optimizer(stage, section, vocab=9)
    assert isinstance(ours, MuonWithAdamW)
    muon = torch.optim.Muon(
        [twin["a"].weight], 0.1, 0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    groups = [
        {"params": [twin["embed"].weight], "weight_decay": 0.1},
        {"params": [twin["a"].bias], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=0.1, betas=(0.9, 0.95), eps=1e-8)
    for _ in range(3):
        for p, q in zip(stage.parameters(), twin.parameters(), strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        ours.step()
        muon.step()
        adamw.step()
    ours.found_inf = torch.ones(())
    ours.step()
    for (name, p), q in zip(stage.named_parameters(), twin.parameters(), strict=True):
        assert torch.allclose(p, q, atol=1e-6), name
    assert set(ours.state) == set(stage.parameters())


@pytest.mark.full
@pytest.mark.parametrize("name", ["muon", "sgd"])
def test_a_resumed_run_is_bitwise_the_run_that_never_stopped(tdp, tmp_path, name):
    command = [
        *("train", str(CONFIG), f"run.dir={tmp_path}", "run.name=a", f"optim.name={name}"),
        *("optim.schedule=cosine", "optim.warmup_steps=1", "train.steps=4", "train.eval_every=0"),
        *("train.generate_tokens=0", "checkpoint.save_every=2", "parallel.data=1"),
        *("parallel.pipe=2", "launch.local.procs=2", "model.dim=32", "model.layers=2"),
    ]
    assert tdp(command)[0] == 0
    whole = losses(tmp_path / "a")
    assert len(set(whole)) == 4
    shutil.rmtree(tmp_path / "a" / "checkpoints" / "step_000004")
    code, said = tdp(command)
    assert code == 0 and "resumed after step 2 of 4" in said
    assert losses(tmp_path / "a") == whole


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(run / "metrics.jsonl")]
