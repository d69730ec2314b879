"""`data.name: embedding`: in-batch negatives on every layout are those of one process."""

import json

import pytest

from tests.data.texts import save_lines
from tests.train import parity
from tests.train.embedding_ranks import data_keys, embedded, initial, of_transformers, row
from tests.train.encoders import ENCODERS
from tests.train.head_ranks import TARGETS, adapters_of, save_head
from tests.train.test_head_losses import UNSTAGED
from tests.train.test_preference import LAYOUTS
from tests.train.test_transformers import MODELS, NO_GRADIENT
from tests.train.transformers_ranks import expect_answers, save_model
from torchdistpackage.data.tokens.texts import wrong_texts
from torchdistpackage.errors import ConfigError
from torchdistpackage.plan.run_plan import make_plan

RANKS_IMPORT = ("peft",)
FULL = (pytest.mark.full,)
KINDS = {
    "mean": (1, "{pooling: mean, scale: 5.0}"),
    "last": (0, "{pooling: last, scale: 10.0}"),
    "matryoshka": (2, "{pooling: mean, matryoshka_dims: [16, 6], matryoshka_weights: [1.0, 0.5]}"),
    "tied": (1, "{pooling: mean}"),
}
"""(number of hard negatives, train.embedding)"""


@pytest.fixture(scope="session")
def embeddings(ranks, tmp_path_factory):
    """(overrides, what transformers says) of a kind, each made once."""
    made: dict[str, tuple[list[str], tuple]] = {}

    def of(kind: str) -> tuple[list[str], tuple]:
        if kind not in made:
            folder, (num_negatives, options) = tmp_path_factory.mktemp(kind), KINDS[kind]
            config = {**MODELS["llama"], "vocab_size": 300, "num_hidden_layers": 4}
            config["tie_word_embeddings"] = kind == "tied"
            ranks(1).run(save_model, config, str(folder / "model"))
            overrides = [*data_keys(folder, num_negatives), f"model.hf={folder / 'model'}"]
            overrides.append(f"train.embedding={options}")
            made[kind] = overrides, ranks(1).run(of_transformers, overrides)[0]
        return made[kind]

    return of


SMALL = [("matryoshka", "pipe2xtensor2"), ("matryoshka", "whole-batch-data2")]
MORE = {
    "whole-batch": (1, ["pipeline.microbatches=1"]),
    "whole-batch-data2": (2, ["parallel.data=2", "pipeline.microbatches=1"]),
    "whole-batch-context2": (2, ["parallel.context=2", "pipeline.microbatches=1"]),
    "data4": (4, ["parallel.data=4", "pipeline.microbatches=1"]),
}
EVERY = {name: (n, ["pipeline.microbatches=2", *x]) for name, (n, x) in LAYOUTS.items()} | MORE
CASES = dict.fromkeys([*SMALL, *((kind, layout) for kind in KINDS for layout in EVERY)])


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("kind", "layout"), [pytest.param(*x, marks=() if x in SMALL else FULL) for x in CASES]
)
def test_three_steps_are_those_of_transformers(ranks, embeddings, kind, layout):
    overrides, (truth, val) = embeddings(kind)
    size, changes = EVERY[layout]
    found = ranks(size).run(embedded, [*overrides, *changes])
    expect_answers([mine for mine, *_ in found], truth)
    for _, logged, mine_val, val_task in found:
        assert mine_val == pytest.approx(val, rel=1e-9)
        assert (logged, val_task) == (found[0][1], found[0][3])
        assert val_task.keys() == {"accuracy", "recall@1", "recall@10", "mrr@10", "ndcg@10"}


OF_ENCODERS = [
    (model, pooling, layout)
    for model, pooling in zip(
        ENCODERS, ("cls", "mean", "last", "mean", "cls", *["mean"] * 4), strict=True
    )
    for layout in ("data2", "data2-zero3", "tensor2", "pipe2", "whole-batch-data2")
    if layout != "pipe2" or model not in UNSTAGED
]
OF_ENCODERS += [("bert", "mean", "pipe2xtensor2"), ("roberta", "cls", "pipe2xtensor2")]
ONE = ("bert", "cls", "pipe2")


@pytest.mark.parametrize(
    ("model", "pooling", "layout"),
    [pytest.param(*x, marks=() if x == ONE else FULL) for x in OF_ENCODERS],
)
def test_encoders_are_compared_as_by_transformers(ranks, tmp_path, model, pooling, layout):
    """By their base class, whose tokens see no padding."""
    overrides = of_encoder(ranks, tmp_path, model, pooling)
    ((truth, val),) = ranks(1).run(of_transformers, overrides)
    expect_those(ranks, truth, val, overrides, layout)


OF_ADAPTED = [
    (model, layout)
    for model in TARGETS
    if model in ENCODERS
    for layout in ("data2", "data2-zero3", "tensor2", "pipe2", "pipe2xtensor2")
]


@pytest.mark.parametrize(
    ("model", "layout"),
    [pytest.param(*x, marks=() if x == ("bert", "pipe2") else FULL) for x in OF_ADAPTED],
)
def test_adapters_of_encoders_are_trained_as_by_peft(ranks, tmp_path, model, layout):
    overrides = [*of_encoder(ranks, tmp_path, model, "mean"), adapters_of(model)]
    adapters = parity.whole(ranks(1).run(initial, overrides))
    ((truth, val),) = ranks(1).run(of_transformers, overrides, adapters)
    found = expect_those(ranks, truth, val, overrides, layout)
    assert all(".lora_" in name for mine, *_ in found for name, *_ in mine.gradients[0])


def of_encoder(ranks, folder, model: str, pooling: str) -> list[str]:
    """The overrides of a run on the base class of a small encoder."""
    ranks(1).run(save_head, ENCODERS[model], str(folder / "model"), "", 0)
    options = f"train.embedding={{pooling: {pooling}, scale: 5.0}}"
    return [*data_keys(folder), f"model.hf={folder / 'model'}", options]


def expect_those(ranks, truth, val: float, overrides: list[str], layout: str) -> list:
    """A layout has the gradients, losses and weights of one process."""
    size, changes = EVERY[layout]
    found = ranks(size).run(embedded, [*overrides, *changes])
    expect_answers([mine for mine, *_ in found], truth, least=NO_GRADIENT)
    for _, _, mine_val, _ in found:
        assert mine_val == pytest.approx(val, rel=1e-9)
    return found


OF_LORA = ("pipe2xtensor2", "data2-zero3", "context2", "whole-batch-data2", "whole-batch-context2")
LORA = "model.lora={r: 3, alpha: 6, target: [q_proj, down_proj]}"


@pytest.mark.parametrize(
    "layout", [pytest.param(x, marks=FULL if i else ()) for i, x in enumerate(OF_LORA)]
)
def test_adapters_train_as_in_one_process(ranks, embeddings, layout):
    """Their B is 0 at first, so that only a later step moves A."""
    overrides = [*embeddings("matryoshka")[0], LORA]
    ((truth, _, val, _),) = ranks(1).run(embedded, [*overrides, "pipeline.microbatches=1"])
    size, changes = EVERY[layout]
    found = ranks(size).run(embedded, [*overrides, *changes])
    for step in range(3):
        expected = parity.whole([truth.gradients[step]])
        assert expected and all(".lora_" in name for name in expected)
        assert step == 0 or all(x.abs().max() > 0 for x in expected.values())
        parity.expect_close([x.gradients[step] for x, *_ in found], [truth.gradients[step]])
    parity.expect_close([mine.weights for mine, *_ in found], [truth.weights])
    for mine, _, mine_val, _ in found:
        assert mine.losses == pytest.approx(truth.losses, rel=1e-9)
        assert mine_val == pytest.approx(val, rel=1e-9)


@pytest.mark.full
def test_the_first_token_is_pooled_alike(ranks, embeddings):
    """It attends to itself alone, so queries have gradients of rounding only: no steps follow."""
    overrides = [*embeddings("mean")[0], "train.embedding={pooling: cls}"]
    ((truth, _),) = ranks(1).run(of_transformers, overrides)
    found = ranks(2).run(embedded, [*overrides, "parallel.context=2", "pipeline.microbatches=2"])
    assert found[0][0].losses[0] == pytest.approx(truth.losses[0], rel=1e-9)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"negatives": ["one"]}, ["1 negatives", "data.num_negatives is 2"]),
        ({"negatives": None}, ["0 negatives", "data.num_negatives is 2"]),
        ({"negatives": ["one", ""]}, ["negatives[1] is empty"]),
        ({"positive": 3}, ["positive is a int"]),
    ],
)
def test_a_wrong_line_is_refused_with_its_file_and_number(tmp_path, change, words):
    rows = [row(i, 2) for i in range(6)]
    rows[3] |= change
    path = save_lines(tmp_path / "wrong.jsonl", rows)
    given = [*data_keys(tmp_path, 2), f"data.path={path}"]
    (tmp_path / "config.json").write_text(json.dumps({**MODELS["llama"], "vocab_size": 300}))
    (problem,) = wrong_texts(parity.config([*given, f"model.hf={tmp_path}/config.json"]))
    assert problem.path == "data.path" and f"{path}:4:" in problem.text
    assert all(x in problem.text for x in words), problem.text


def test_a_dimension_beyond_the_model_is_refused(embeddings):
    overrides, _ = embeddings("matryoshka")
    with pytest.raises(ConfigError, match=r"matryoshka_dims.*32 is more than the 16"):
        make_plan(parity.config([*overrides, "train.embedding={matryoshka_dims: [32]}"]), 1)


def test_a_group_of_the_frozen_output_layer_is_refused(embeddings):
    """Tied, its weight is that of the embedding, which trains."""
    groups = "optim.groups=[{params: ['lm_head*'], lr: 0.1}]"
    with pytest.raises(ConfigError, match=r"optim\.groups\[0\].*lm_head"):
        make_plan(parity.config([*embeddings("mean")[0], groups]), 1)
    table = "optim.groups=[{params: ['model.embed_tokens*'], lr: 0.1}]"
    make_plan(parity.config([*embeddings("tied")[0], table]), 1)
