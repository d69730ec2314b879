"""`optim.groups`: under every layout the steps are those of torch's parameter groups."""

import pytest
import torch

from tests.train import parity
from torchdistpackage.config.load import loads
from torchdistpackage.errors import ConfigError
from torchdistpackage.plan.run_plan import make_plan
from torchdistpackage.train.learning_rate import learning_rate
from torchdistpackage.train.optimizers import make_optimizer

RUN = ["model.layers=4", "model.dim=16", "model.heads=2", "data.seq_len=16", "data.global_batch=8"]
RUN += ["pipeline.microbatches=2", "precision.dtype=float64", "optim.lr=0.02", "optim.clip=0"]
RUN += ["optim.schedule=cosine", "optim.warmup_steps=1", "train.steps=6"]
GROUPS = (
    "optim.groups=[{params: ['*embed*', '*head*'], lr: 0.001, weight_decay: 0.5},"
    " {params: ['*.bias'], lr: 0.05}, {params: ['*mlp*'], weight_decay: 0.0}]"
)
LAYOUTS = {
    "data2-zero3": ["parallel.data=2", "parallel.zero=3"],
    "pipe2xtensor2": ["parallel.pipe=2", "parallel.tensor=2"],
    "data2-zero1": ["parallel.data=2", "parallel.zero=1"],
    "data2-zero2": ["parallel.data=2", "parallel.zero=2", "train.accumulate=2"],
    "data2": ["parallel.data=2", "pipeline.microbatches=1"],
}


def steps_of(overrides: list[str]) -> parity.Held:
    run = parity.trainer(overrides)
    for step in range(1, 4):
        run.train_step(step).wait()
    return parity.held(run, "data")


def steps_of_torch(overrides: list[str]) -> parity.Held:
    """The same steps, with parameter groups and a schedule of torch alone."""
    run = parity.trainer(overrides)
    optim = run.plan.config.optim
    rate, kinds = learning_rate(optim, 6), {}
    for name, p in run.stage.named_parameters():
        full = run.layouts[name].name
        lr, decay = 0.02, 0.1
        if "embed" in full or "head" in full:
            lr, decay = 0.001, 0.5
        elif full.endswith(".bias"):
            lr = 0.05
        elif "mlp" in full:
            decay = 0.0
        is_matrix = p.dim() > 1 and not full.endswith("bias")
        kinds.setdefault((lr, decay if is_matrix else 0.0), []).append(p)
    assert len(kinds) >= 5
    groups = [{"params": ps, "lr": lr, "weight_decay": wd} for (lr, wd), ps in kinds.items()]
    truth = torch.optim.AdamW(groups, lr=0.02, betas=optim.betas, eps=optim.eps)
    schedule = torch.optim.lr_scheduler.LambdaLR(truth, lambda step: rate(step) / 0.02)
    for step in range(1, 4):
        run.update.zero_grad()
        totals = run.accumulate(step)
        for p in run.stage.parameters():
            p.grad /= totals[1]
        truth.step()
        schedule.step()
    return parity.held(run, "data")


@pytest.fixture(scope="module")
def truth(ranks):
    return ranks(1).run(steps_of_torch, [*RUN, GROUPS])


@pytest.mark.parametrize(
    "layout",
    [pytest.param(x, marks=() if i < 2 else pytest.mark.full) for i, x in enumerate(LAYOUTS)],
)
def test_steps_are_those_of_torchs_parameter_groups(ranks, truth, layout):
    changes = LAYOUTS[layout]
    size = 4 if "x" in layout else 2
    parity.expect_close(ranks(size).run(steps_of, [*RUN, GROUPS, *changes]), truth)


def test_groups_without_a_parameter_are_refused_before_ranks_start():
    def refused(groups: str) -> str:
        text = f"model: {{layers: 2}}\noptim:\n  groups: {groups}\n"
        with pytest.raises(ConfigError) as error:
            make_plan(loads(text, "run.yaml"), 1, "run.yaml")
        return str(error.value)

    said = refused(
        "[{params: [embde*], lr: 1}, {params: ['*'], lr: 1}, {params: ['*mlp*'], lr: 2}]"
    )
    assert "run.yaml:3" in said and "optim.groups[0] (params embde*) matches none" in said
    assert "optim.groups[2] (params *mlp*)" in said and "is in an earlier group" in said
    for groups, words in {
        "[{params: ['*mlp*']}]": "neither lr nor weight_decay",
        "[{lr: 0.1}]": "has no params",
        "[{params: ['a'], lr: -1}]": "optim.groups[0].lr",
        "[{parms: ['a']}]": "params",
    }.items():
        assert words in refused(groups), groups


def own_chain() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))


def test_every_optimizer_gets_the_rates():
    for name in ("adamw", "sgd", "muon", "adafactor"):
        groups = "[{params: ['1.*'], lr: 0.5, weight_decay: 0.25}]"
        section = loads(f"optim: {{name: {name}, lr: 0.1, groups: {groups}}}").optim
        model = own_chain()
        optimizer = make_optimizer(model, section, tables=())
        assert optimizer is not None
        of = {id(p): g for g in optimizer.param_groups for p in g["params"]}
        settings = {
            n: (of[id(p)]["lr"], of[id(p)]["weight_decay"]) for n, p in model.named_parameters()
        }
        assert settings == {
            "0.weight": (0.1, 0.1),
            "0.bias": (0.1, 0.0),
            "1.weight": (0.5, 0.25),
            "1.bias": (0.5, 0.0),
        }
