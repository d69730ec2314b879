"""`data.name: preference`: DPO under every layout is the formula in one process."""

import re

import pytest

from tests.train import parity
from tests.train.preference_ranks import (
    RUN,
    data_keys,
    initial_of,
    lines_of,
    of_formula,
    preferred,
    save_after,
    third_step,
)
from tests.train.test_transformers import MODELS
from tests.train.transformers_ranks import expect_answers, save_model
from torchdistpackage.config.preference_losses import PREFERENCE_LOSSES
from torchdistpackage.errors import ConfigError
from torchdistpackage.plan.run_plan import make_plan

RANKS_IMPORT = ("peft",)
FULL = (pytest.mark.full,)
LAYOUTS = {
    "one": (1, []),
    "data2": (2, ["parallel.data=2"]),
    "data2-zero1": (2, ["parallel.data=2", "parallel.zero=1"]),
    "data2-zero2": (2, ["parallel.data=2", "parallel.zero=2", "pipeline.microbatches=1"]),
    "data2-zero3": (2, ["parallel.data=2", "parallel.zero=3"]),
    "tensor2": (2, ["parallel.tensor=2"]),
    "sequence2": (2, ["parallel.tensor=2", "parallel.sequence_parallel=true"]),
    "pipe2": (2, ["parallel.pipe=2"]),
    "pipe2xtensor2": (4, ["parallel.pipe=2", "parallel.tensor=2"]),
    "interleaved": (2, ["parallel.pipe=2", "pipeline.schedule=zb-v"]),
    "context2": (2, ["parallel.context=2"]),
    "context2xpipe2": (4, ["parallel.context=2", "parallel.pipe=2"]),
    "context2-zero3": (2, ["parallel.context=2", "parallel.zero=3"]),
}
OPTIONS = {
    "sigmoid": "{beta: 0.7, label_smoothing: 0.1}",
    "sigmoid_norm": "{loss: sigmoid_norm, beta: 0.7, label_smoothing: 0.1}",
    "hinge": "{loss: hinge, beta: 0.7}",
    "ipo": "{loss: ipo, beta: 0.7}",
    "simpo": "{loss: simpo, beta: 0.7, gamma: 0.3, label_smoothing: 0.1}",
    "orpo": "{loss: orpo, beta: 0.7}",
}
LORA = {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj", "down_proj"]}
ADAPTERS = "model.lora={r: 3, alpha: 6, target: [q_proj, v_proj, down_proj]}"


@pytest.fixture(scope="session")
def answers(ranks, tmp_path_factory):
    """(overrides, what the formula says) with a copy and with adapters, each made once."""
    made: dict[str, tuple[list[str], tuple]] = {}

    def of(how: str) -> tuple[list[str], tuple]:
        if how not in made:
            folder = tmp_path_factory.mktemp("dpo")
            model = {**MODELS["llama"], "vocab_size": 300, "num_hidden_layers": 4}
            ranks(1).run(save_model, model, str(folder / "model"))
            overrides = [*data_keys(folder), f"model.hf={folder / 'model'}"]
            if how == "copy":
                truth = ranks(1).run(of_formula, overrides)[0]
            else:
                overrides.append(ADAPTERS)
                held = parity.whole(ranks(1).run(initial_of, overrides))
                truth = ranks(1).run(of_formula, overrides, LORA, held)[0]
            made[how] = overrides, truth
        return made[how]

    return of


def expect_pairs(found: list[dict[str, float]], truth: list[dict[str, float]]) -> None:
    """Of each step; before the first one margins are 0 up to last digits, and none is larger."""
    for step, (own, expected) in enumerate(zip(found, truth, strict=True)):
        names = [x for x in expected if step or x != "rewards/accuracies"]
        for name in names:
            assert own[name] == pytest.approx(expected[name], rel=1e-9, abs=1e-12), (step, name)
        assert own.keys() == expected.keys()


SMALL = {("copy", "data2-zero3"), ("adapters", "pipe2xtensor2"), ("copy", "tensor2")}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("how", "layout"),
    [
        pytest.param(how, layout, marks=() if (how, layout) in SMALL else FULL)
        for how in ("copy", "adapters")
        for layout in LAYOUTS
    ],
)
def test_three_steps_are_those_of_the_formula(ranks, answers, how, layout):
    overrides, (truth, logged, val, val_pairs) = answers(how)
    size, changes = LAYOUTS[layout]
    found = ranks(size).run(preferred, [*overrides, *changes])
    expect_answers([mine for mine, *_ in found], truth)
    for _, mine_logged, mine_val, mine_pairs in found:
        assert mine_val == pytest.approx(val, rel=1e-9)
        assert mine_pairs == pytest.approx(val_pairs, rel=1e-9, abs=1e-12)
        expect_pairs(mine_logged, logged)
    margins = [pairs["rewards/margins"] for pairs in logged]
    assert margins[0] == 0 and abs(margins[2]) > 1e-3, "a reference that follows shows no margin"


LOSSES = [("ipo", "tensor2"), ("orpo", "context2"), ("simpo", "pipe2"), ("hinge", "data2-zero3")]
LOSSES += [(name, x) for name in OPTIONS for x in ("context2", "pipe2xtensor2", "data2-zero2")]
"""The first ones of each layout that differs for a loss; the others are for the whole set."""


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(*x, marks=() if i in (1, 2) else FULL)
        for i, x in enumerate(dict.fromkeys(LOSSES))
    ],
)
def test_three_steps_of_each_loss_are_those_of_its_formula(ranks, answers, name, layout):
    overrides = [*answers("copy")[0], f"train.dpo={OPTIONS[name]}"]
    truth, logged, val, val_pairs = ranks(1).run(of_formula, overrides)[0]
    size, changes = LAYOUTS[layout]
    found = ranks(size).run(preferred, [*overrides, *changes])
    for step, expected in enumerate(truth.gradients):
        parity.expect_close([mine.gradients[step] for mine, *_ in found], [expected])
    for mine, mine_logged, mine_val, mine_pairs in found:
        assert mine.losses == pytest.approx(truth.losses, rel=1e-9)
        assert mine_val == pytest.approx(val, rel=1e-9)
        assert mine_pairs == pytest.approx(val_pairs, rel=1e-9, abs=1e-12)
        expect_pairs(mine_logged, logged)


def test_every_loss_of_pairs_is_compared():
    of_pairs = {x.name for x in PREFERENCE_LOSSES.values() if not x.is_unpaired}
    assert {*OPTIONS} == of_pairs == {name for name, _ in LOSSES}


GPT = ["model.layers=4", "model.dim=16", "model.heads=2"]


@pytest.mark.full
@pytest.mark.parametrize(
    "layout",
    [pytest.param(x, marks=() if x == "sequence2" else FULL) for x in LAYOUTS if x != "one"],
)
def test_our_gpt_prefers_alike_on_every_layout(ranks, tmp_path, layout):
    overrides, (size, changes) = [*data_keys(tmp_path), *GPT], LAYOUTS[layout]
    ((truth, logged, val, val_pairs),) = ranks(1).run(preferred, overrides)
    for mine, mine_logged, mine_val, mine_pairs in (
        found := ranks(size).run(preferred, [*overrides, *changes])
    ):
        assert mine.losses == pytest.approx(truth.losses, rel=1e-9)
        assert mine_val == pytest.approx(val, rel=1e-9)
        assert mine_pairs == pytest.approx(val_pairs, rel=1e-9, abs=1e-12)
        expect_pairs(mine_logged, logged)
    parity.expect_close([mine.weights for mine, *_ in found], [truth.weights])
    assert abs(logged[2]["rewards/margins"]) > 1e-5


@pytest.mark.full
@pytest.mark.parametrize(
    ("how", "first", "then"),
    [("copy", "data2-zero3", "tensor2"), pytest.param("adapters", "pipe2", "data2", marks=FULL)],
)
def test_a_run_goes_on_with_its_first_reference(ranks, answers, tmp_path, how, first, then):
    overrides, (truth, logged, *_) = answers(how)
    size, changes = LAYOUTS[first]
    before = ranks(size).run(save_after, [*overrides, *changes], str(tmp_path), 2)
    size, changes = LAYOUTS[then]
    found = ranks(size).run(third_step, [*overrides, *changes], str(tmp_path))
    parity.expect_close([mine.gradients[0] for mine, _ in found], [truth.gradients[2]])
    parity.expect_close([mine.weights for mine, _ in found], [truth.weights])
    assert [*before[0], *found[0][0].losses] == pytest.approx(truth.losses, rel=1e-9)
    assert found[0][1] == pytest.approx(logged[2], rel=1e-9, abs=1e-12)


@pytest.mark.full
@pytest.mark.parametrize("changes", [[], ["data.name=embedding", "train.dpo={}"]])
def test_a_model_with_a_loss_of_its_routers_is_refused(tmp_path, changes):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    sizes |= {"intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 300}
    made = transformers.MixtralConfig(**sizes, num_local_experts=2, output_router_logits=True)
    made.save_pretrained(tmp_path / "model")
    given = [*RUN, *data_keys(tmp_path), f"model.hf={tmp_path}/model/config.json", *changes]
    with pytest.raises(ConfigError, match="adds the loss of its routers to that of tokens"):
        make_plan(parity.config(given), 1)


def test_a_run_logs_its_pairs_by_the_names_of_trl(tdp, tmp_path):
    (tmp_path / "run.yaml").write_text(f"run: {{dir: {tmp_path}/runs, name: r}}")
    words = [
        "train",
        str(tmp_path / "run.yaml"),
        *data_keys(tmp_path),
        "log.plot=false",
        "log.report=false",
    ]
    words += [x for x in RUN if "batches=" not in x]
    words += [
        "model.layers=2",
        "model.dim=16",
        "model.heads=2",
        "log.every=1",
        "train.eval_every=2",
    ]
    words += ["checkpoint.save_every=2", "parallel.data=2", "parallel.zero=2"]
    code, said = tdp([*words, "pipeline.microbatches=1", "train.eval_batches=2"])
    assert code == 0, said
    rows = lines_of(tmp_path / "runs" / "r" / "metrics.jsonl")
    names = {f"rewards/{x}" for x in ("chosen", "rejected", "accuracies", "margins")}
    names |= {"logps/chosen", "logps/rejected"}
    assert len(rows) == 5 and all(row.keys() >= names for row in rows)
    assert rows[0]["tokens"] == 4 and rows[-1]["tokens"] == 20
    assert [f"eval_{x}" in row for row in rows for x in names] == [
        bool(row["step"] % 2 == 0 or row["step"] == 5) for row in rows for _ in names
    ]
    assert re.search(r"step 1/5  loss 0\.6931  \d+ pairs/s  margin 0\.0000  accuracy 0%", said)
    assert "validated: loss " in said and all(
        len(x) <= 80 for x in said.splitlines() if "step" in x
    )
    code, said = tdp(["eval", str(tmp_path / "runs" / "r")])
    assert code == 2 and "preference pairs" in said and "--data FILE" in said
