"""SGD and Muon under the layouts that they can follow are as in one process, and torch's own."""

import math
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.train import parity
from tests.train.test_parity import overrides
from torchdistpackage.config.load import loads
from torchdistpackage.errors import ConfigError
from torchdistpackage.plan.memory import memory
from torchdistpackage.train.metric_rows import read_metrics
from torchdistpackage.train.optimizers import JointOptimizer, make_optimizer
from torchdistpackage.train.train_state import TrainState, save_state
from torchdistpackage.train.train_state import resume as resume_from

RANKS_IMPORT = ("bitsandbytes",)
CONFIG = Path(__file__).parents[2] / "configs" / "gpt_tiny.yaml"
LAYOUTS = {
    "adafactor": [{"data": 2, "pipe": 2}, {"data": 2, "zero": 3}, {"context": 2}],
    "adamw8bit": [{"data": 2, "pipe": 2, "zero": 1}, {"data": 2, "zero": 2}, {"pipe": 2}],
    "sgd": [{"data": 2, "zero": 1}, {"tensor": 2}, {"data": 2, "zero": 3}],
    "torch.optim:RAdam": [{"data": 2, "zero": 1}, {"data": 2, "pipe": 2}],
}


TOGETHER = {"muon_exchange": "together"}
MUON_LAYOUTS = [
    {"tensor": 2, **TOGETHER},
    {"data": 2, "tensor": 2, "zero": 1},
    {"tensor": 2, "muon_exchange": "gather"},
    {"data": 2},
    {"pipe": 2},
    {"data": 2, "zero": 1},
    {"data": 2, "tensor": 2, "zero": 2, **TOGETHER},
    {"data": 2, "tensor": 2, "zero": 3},
    {"data": 2, "tensor": 2, "zero": 3, **TOGETHER},
    {"context": 2},
    {"context": 2, "tensor": 2},
    {"context": 2, "tensor": 2, **TOGETHER},
    {"pipe": 2, "tensor": 2, **TOGETHER},
]
MUON_EXPERTS = [
    {"data": 2, "expert": 2, "tensor": 2, **TOGETHER},
    {"data": 2, "expert": 2, "tensor": 2},
    {"data": 2, "expert": 2},
    {"data": 2, "expert": 2, "zero": 1},
    {"data": 4, "expert": 2, "zero": 3},
    {"data": 2, "tensor": 2, "pipe": 2},
]


@dataclass
class Ended:
    """What a rank holds at the end, and bytes of the optimizer's state as planned and as found.

    num_special: parameters that have state in 8 bits, or Muon's.
    """

    weights: parity.Held
    loss: float
    num_special: int
    planned_bytes: int
    state_bytes: int


def after_steps(
    extra: list[str], save: str | None = None, resume: str | None = None, num_steps: int = 3
) -> Ended:
    """These steps, of which two were done before resume; save: a checkpoint after the second."""
    run = parity.trainer(extra)
    done = resume_from(run, Path(resume), "auto").step if resume else 0
    assert done == (2 if resume else 0)
    for step in range(done + 1, num_steps + 1):
        loss = run.train_step(step).wait().loss
        if step == 2 and save:
            save_state(run, TrainState(step=2), Path(save), keep_last=1)
    if hasattr(run.optimizer, "finish"):
        run.optimizer.finish()
    of = {"adamw8bit": ("state1", torch.uint8), "muon": ("momentum_buffer", torch.float64)}
    special, dtype = of.get(run.plan.config.optim.name, (None, None))
    states = [(k, x) for s in run.optimizer.state.values() for k, x in s.items()]
    kept = [x for k, x in states if isinstance(x, torch.Tensor) and k != "step"]
    planned = memory(run.plan.config, run.plan.topology, run.layouts.values(), run.rank)
    return Ended(
        parity.held(run, "data"),
        loss,
        sum(k == special and getattr(x, "dtype", None) == dtype for k, x in states),
        planned.optimizer_bytes,
        sum(x.nbytes for x in kept),
    )


def asked(name: str, layout: dict[str, int]) -> tuple[int, list[str], list[str]]:
    """(ranks, overrides of one process, of the layout)."""
    axes = {"data": 1, "pipe": 1, "tensor": 1, "context": 1, **layout}
    size = axes["data"] * axes["pipe"] * axes["tensor"] * axes["context"]
    key = "target" if ":" in name else "name"
    ways = [f"optim.{key}={axes.pop(key)}" for key in ("muon_exchange",) if key in axes]
    base = [*overrides({**axes, "data": 2}, tied=False), f"optim.{key}={name}", "optim.lr=0.02"]
    base += ["parallel.context=1"]
    if name in ("adamw8bit", "muon"):
        # matrices large enough for 8 bits, each with a side as long as the vocabulary
        length = next(x.partition("=")[2] for x in base if x.startswith("data.seq_len="))
        base += ["model.dim=64", "model.vocab=64", f"data.args={{seq_len: {length}, vocab: 64}}"]
    mine = [f"parallel.{key}={value}" for key, value in layout.items() if key in axes]
    return size, base, [*base, *ways, *mine]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "layout"), [(n, x) for n, of in LAYOUTS.items() for x in of], ids=str
)
def test_three_steps_are_those_of_one_process(ranks, name, layout):
    size, base, mine = asked(name, layout)
    truth = ranks(1).run(after_steps, base)
    found = ranks(size).run(after_steps, mine)
    parity.expect_close([x.weights for x in found], [x.weights for x in truth])
    matrices = 8 * (name in ("adamw8bit", "muon"))  # of two blocks, without embedding and head
    assert truth[0].num_special == matrices
    assert all((x.num_special > 0) == (matrices > 0) for x in found)
    for x in [*found, *truth]:
        assert math.isclose(x.loss, truth[0].loss, rel_tol=1e-9)
        if name in ("adafactor", "adamw8bit", "muon"):
            assert x.planned_bytes == x.state_bytes > 0


@pytest.mark.parametrize(
    ("name", "first", "then"),
    [
        ("adamw8bit", {"data": 2, "zero": 1}, {"pipe": 2}),
        pytest.param("adamw8bit", {"pipe": 2}, {"data": 2, "zero": 3}, marks=pytest.mark.full),
        ("adafactor", {"pipe": 2}, {"data": 2, "zero": 2}),
        pytest.param("adafactor", {"data": 2, "zero": 3}, {"data": 2}, marks=pytest.mark.full),
        pytest.param("muon", {"data": 2, "zero": 1}, {"pipe": 2}, marks=pytest.mark.full),
        pytest.param("muon", {"data": 2, "zero": 1}, {"tensor": 2}, marks=pytest.mark.full),
        pytest.param("muon", {"tensor": 2}, {"data": 2, "zero": 3}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_a_checkpoint_goes_on_bit_for_bit_and_under_another_layout(
    ranks, tmp_path, name, first, then
):
    size, _, mine = asked(name, first)
    whole = ranks(size).run(after_steps, mine, str(tmp_path))
    again = ranks(size).run(after_steps, mine, None, str(tmp_path))
    for one, other in zip(whole, again, strict=True):
        assert one.loss == other.loss
        for a, b in zip(one.weights, other.weights, strict=True):
            assert torch.equal(a[-1], b[-1]), a[0]
    size, _, other = asked(name, then)
    moved = ranks(size).run(after_steps, other, None, str(tmp_path))
    parity.expect_close([x.weights for x in moved], [x.weights for x in whole])
    assert all(x.planned_bytes == x.state_bytes for x in moved)


@pytest.mark.few(2)
@pytest.mark.parametrize("layout", MUON_LAYOUTS, ids=str)
def test_ten_steps_of_muon_are_those_of_one_process(ranks, layout):
    size, base, mine = asked("muon", layout)
    expect_ten_steps(ranks, size, base, mine, num_matrices=2 * 4)


@pytest.mark.few(1)
@pytest.mark.parametrize("layout", MUON_EXPERTS, ids=str)
def test_ten_steps_of_muon_on_experts_are_those_of_one_process(ranks, layout):
    size, base, mine = asked("muon", {"data": 1, "pipe": 1, "tensor": 1, **layout})
    moe = ["model.moe.num_experts=4", "model.moe.top_k=2"]
    # of each block: q, k and v in one, out, the router, and two stacks of experts
    expect_ten_steps(ranks, size, [*base, *moe, "parallel.data=1"], [*mine, *moe], 2 * 5)


def expect_ten_steps(ranks, size: int, base: list[str], mine: list[str], num_matrices: int):
    truth = ranks(1).run(after_steps, base, num_steps=10)
    found = ranks(size).run(after_steps, mine, num_steps=10)
    parity.expect_close([x.weights for x in found], [x.weights for x in truth])
    assert truth[0].num_special == num_matrices
    assert all(x.num_special > 0 for x in found)
    assert all(math.isclose(x.loss, truth[0].loss, rel_tol=1e-9) for x in found)


def no_optimizer(groups, lr):
    return groups


def test_an_optimizer_of_the_user_gets_the_groups_and_its_arguments():
    stage = torch.nn.Linear(3, 2)
    text = "optim: {target: 'torch.optim:RAdam', lr: 0.1, args: {betas: [0.5, 0.6]}}"
    optimizer = make_optimizer(stage, loads(text).optim, tables=())
    assert isinstance(optimizer, JointOptimizer) and type(optimizer.parts[0]) is torch.optim.RAdam
    assert [(g["weight_decay"], g["betas"], g["lr"]) for g in optimizer.param_groups] == [
        (0.1, [0.5, 0.6], 0.1),
        (0.0, [0.5, 0.6], 0.1),
    ]
    optimizer.found_inf = torch.ones(())
    before = stage.weight.clone()
    stage(torch.ones(3)).sum().backward()
    optimizer.step()
    assert torch.equal(stage.weight, before), "a step that is not finite is left out"
    wrong = loads(f"optim: {{target: '{__name__}:no_optimizer'}}").optim
    with pytest.raises(ConfigError, match="no_optimizer returned a list"):
        make_optimizer(stage, wrong, tables=())


def test_muon_and_adamw_are_torchs_own_and_leave_a_broken_step_out():
    torch.manual_seed(0)
    section = loads("optim: {name: muon, lr: 0.1}").optim
    stage = torch.nn.ModuleDict({"embed": torch.nn.Embedding(9, 4), "a": torch.nn.Linear(4, 9)})
    twin = torch.nn.ModuleDict({"embed": torch.nn.Embedding(9, 4), "a": torch.nn.Linear(4, 9)})
    twin.load_state_dict(stage.state_dict())
    ours = make_optimizer(stage, section, tables={"embed.weight"})
    assert isinstance(ours, JointOptimizer)
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
@pytest.mark.parametrize("name", ["muon", "sgd", "adafactor"])
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
    (tmp_path / "a" / "events.jsonl").unlink()  # or the start waits for what it says was saved
    code, said = tdp(command)
    assert code == 0 and "resumed after step 2 of 4" in said
    assert losses(tmp_path / "a") == whole


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(run / "metrics.jsonl")]
