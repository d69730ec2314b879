"""Runs of mixtures of experts go on under any expert degree, and say what experts do."""

import types
from pathlib import Path

import pytest
import torch

from tests.parallel.expert.one_process import DIM, HIDDEN, OPTIONS, drawn, whole_weights
from tests.train import parity
from tests.train.test_experts import BASE, KINDS
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.config.load import loads
from torchdistpackage.ddp.ema import ShardedEMA
from torchdistpackage.errors import LayoutError
from torchdistpackage.layout.moe import MoEShape
from torchdistpackage.parallel import MoELayer
from torchdistpackage.parallel.expert.balance import ExpertLoad
from torchdistpackage.plan.run_plan import make_plan
from torchdistpackage.train.callbacks import DeadExperts
from torchdistpackage.train.step_stats import StepResult
from torchdistpackage.train.train_state import TrainState, resume, save_state

FULL = pytest.mark.full
LAYOUTS = {
    "one": (1, []),
    "expert2-zero3": (2, ["parallel.data=2", "parallel.expert=2", "parallel.zero=3"]),
    "expert1": (2, ["parallel.data=2"]),
    "expert4": (4, ["parallel.data=4", "parallel.expert=4", "pipeline.microbatches=1"]),
    "expert2-tensor2": (4, ["parallel.data=2", "parallel.expert=2", "parallel.tensor=2"]),
    "expert2-pipe2": (4, ["parallel.data=2", "parallel.expert=2", "parallel.pipe=2"]),
}
SMALL = [("bias", "expert2-zero3", "expert4")]


def first_half(kind: str, layout: str, folder: str) -> None:
    run = parity.trainer([*BASE, *KINDS[kind], *LAYOUTS[layout][1]])
    tokens = sum(run.train_step(step).wait().tokens for step in (1, 2))
    save_state(run, TrainState(2, tokens), Path(folder), keep_last=1)


def second_half(kind: str, layout: str, folder: str) -> tuple[parity.Held, list[float]]:
    run = parity.trainer([*BASE, *KINDS[kind], *LAYOUTS[layout][1]])
    if folder:
        run.train_step(4)  # weights, biases and state that must be overwritten
        assert resume(run, Path(folder), "auto").step == 2
    steps = (3, 4) if folder else (1, 2, 3, 4)
    losses = [run.train_step(step).wait().loss for step in steps]
    return parity.held(run, "data"), losses[-2:]


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        pytest.param(kind, a, b, marks=[] if (kind, a, b) in SMALL else FULL)
        for kind in ("bias", "sequence")
        for a in LAYOUTS
        for b in LAYOUTS
        if a != b
    ],
)
def test_a_run_goes_on_under_any_expert_degree(ranks, tmp_path, kind, before, after):
    """Weights, biases that balance, and the optimizer's state of uneven experts come along."""
    folder = str(tmp_path)
    ranks(LAYOUTS[before][0]).run(first_half, kind, before, folder)
    results = ranks(LAYOUTS[after][0]).run(second_half, kind, after, folder)
    truth = ranks(1).run(second_half, kind, "one", "")
    parity.expect_close([held for held, _ in results], [held for held, _ in truth])
    for _, losses in results:
        assert losses == pytest.approx(truth[0][1], rel=1e-9, abs=0)


def averaged() -> None:
    tpc.setup_process_groups([("data", 4)], expert=2)
    options = {**OPTIONS["uneven"], "hidden": HIDDEN}
    weights = whole_weights(MoEShape(**options), 11)
    layer = MoELayer(DIM, dtype=torch.float64, **options).from_full(weights)
    with pytest.raises(LayoutError, match="experts"):
        ShardedEMA(layer)
    ema = ShardedEMA(layer, group=tpc.get_group("expert_data"))
    expected = {name: w.clone() for name, w in weights.items()}
    for step in range(3):
        weights = {name: w + drawn(step, *w.shape) for name, w in weights.items()}
        layer.from_full(weights)
        ema.update(layer, decay=0.9)
        for name, w in weights.items():
            expected[name] = 0.9 * expected[name] + 0.1 * w
    with ema.applied_to(layer):
        found = layer.to_full()
    for name, w in expected.items():
        torch.testing.assert_close(found[name], w, rtol=1e-9, atol=1e-11)


def test_averages_of_experts_are_those_of_one_process(ranks):
    """Over ranks that hold the same experts; over all of the data axis they are refused."""
    ranks(4).run(averaged)


def result(step: int, *loads: ExpertLoad) -> StepResult:
    numbers = dict.fromkeys(("loss", "grad_norm", "time_s", "lr"), 1.0)
    experts = {f"blocks.{i}.mlp": load for i, load in enumerate(loads)}
    return StepResult(step=step, tokens=8, experts=experts, bubble=None, **numbers)


def test_experts_that_no_token_chose_are_named():
    said: list[str] = []
    log = types.SimpleNamespace(note=lambda text, **_: said.append(text))
    loop, watch = types.SimpleNamespace(log=log), DeadExperts(2)
    for step in (1, 2, 3, 4):
        late = 1 if step == 3 else 0
        loads = ExpertLoad((4, late, 0)), ExpertLoad((2, 1, 1))
        watch.on_step(loop, result(step, *loads), None)  # type: ignore[arg-type]
    assert said == [
        "experts that no token chose in the last 2 steps: blocks.0.mlp 1, 2",
        "experts that no token chose in the last 2 steps: blocks.0.mlp 2",
    ]


def test_the_load_and_what_was_dropped_are_logged_by_layer():
    found = result(1, ExpertLoad((6, 1, 1), dropped=2), ExpertLoad((2, 3, 3)))
    assert found.expert_imbalance == 2.25
    row = found.logged()
    assert row["experts"] == {"blocks.0.mlp": 2.25, "blocks.1.mlp": 1.125}
    assert row["experts_dropped"] == {"blocks.0.mlp": 0.25, "blocks.1.mlp": 0.0}
    assert "experts_dropped" not in result(1, ExpertLoad((2, 3, 3))).logged()


def test_operations_are_those_of_the_experts_that_a_token_meets():
    """By which MFU is counted: more experts cost a wider router, more of them a token its part."""

    def flops(**moe: int) -> float:
        sizes = {"num_experts": 8, "top_k": 2, "hidden": 64} | moe
        text = "{" + ", ".join(f"{k}: {v}" for k, v in sizes.items()) + "}"
        run = loads("", overrides=["model.mlp=swiglu", "model.mlp_bias=false", f"model.moe={text}"])
        model = make_plan(run, 1).model
        assert model is not None
        return model.flops_per_token()

    section = loads("").model
    both, dim = 3 * 2.0 * section.layers, section.dim  # forward and backward, a product and a sum
    assert flops(num_experts=9) - flops() == pytest.approx(both * dim)
    assert flops(top_k=3) - flops() == pytest.approx(both * 3 * dim * 64)
