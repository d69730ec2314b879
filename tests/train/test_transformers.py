"""`model.hf`: transformers' own modules under every layout train as transformers in one process."""

import json
import math

import pytest
import torch

from tests.tells import facts_pattern
from tests.train import parity
from tests.train.test_recompute import limit_gb
from tests.train.transformers_ranks import (
    RUN,
    VOCAB,
    Answer,
    initial,
    of_transformers,
    save_model,
    third_step,
    three_steps,
    two_steps_and_save,
)
from torchdistpackage.errors import ConfigError
from torchdistpackage.plan.run_plan import make_plan

SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 22,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
MODELS = {
    "llama": {**SMALL, "model_type": "llama", "num_key_value_heads": 2},
    "llama, tied": {
        **SMALL,
        "model_type": "llama",
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
        "head_dim": 6,
    },
    "mistral": {**SMALL, "model_type": "mistral", "num_key_value_heads": 2, "sliding_window": 5},
    "qwen2": {
        **SMALL,
        "model_type": "qwen2",
        "num_key_value_heads": 2,
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
    },
    "qwen3": {**SMALL, "model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 6},
    "gemma2": {
        **SMALL,
        "model_type": "gemma2",
        "num_key_value_heads": 2,
        "head_dim": 6,
        "query_pre_attn_scalar": 6,
        "sliding_window": 5,
    },
    "gpt_neox": {**SMALL, "model_type": "gpt_neox", "rotary_pct": 0.5},
    "falcon": {
        **SMALL,
        "model_type": "falcon",
        "num_kv_heads": 2,
        "new_decoder_architecture": True,
        "bias": True,
    },
    "falcon, alibi": {
        **SMALL,
        "model_type": "falcon",
        "alibi": True,
        "multi_query": False,
        "parallel_attn": False,
        "bias": True,
    },
    "opt": {
        **SMALL,
        "model_type": "opt",
        "ffn_dim": 22,
        "word_embed_proj_dim": 16,
        "dropout": 0.0,
    },
    "bloom": {
        "model_type": "bloom",
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "n_layer": 3,
        "n_head": 4,
    },
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": VOCAB,
        "n_embd": 16,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 32,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 1,
    },
}
LAYOUTS = {
    "data2": {"data": 2},
    "pipe2": {"pipe": 2},
    "tensor2": {"tensor": 2},
    "pipe2xtensor2": {"pipe": 2, "tensor": 2},
    "data2-zero1": {"data": 2, "zero": 1},
    "data2-zero2": {"data": 2, "zero": 2},
    "data2-zero3": {"data": 2, "zero": 3},
    "data2xtensor2-zero1": {"data": 2, "tensor": 2, "zero": 1},
    "tensor4": {"tensor": 4},
    "tensor2-sequence": {"tensor": 2, "sequence": 1},
    "tensor2-sequence-overlap": {"tensor": 2, "sequence": 2},
    "pipe2xtensor2-sequence": {"pipe": 2, "tensor": 2, "sequence": 1},
    "tensor4-sequence": {"tensor": 4, "sequence": 1},
    "data2xtensor2-zero3-sequence": {"data": 2, "tensor": 2, "zero": 3, "sequence": 2},
    "context2": {"context": 2},
    "context3": {"context": 3},
    "pipe2xcontext2-zero3": {"pipe": 2, "context": 2, "zero": 3},
    "context2xtensor2-sequence": {"context": 2, "tensor": 2, "sequence": 1},
}
NO_GRADIENT = 1e-6
"""Of a bias of keys, which no probability depends on, only rounding is left."""
FULL, BOTH = (pytest.mark.full,), "pipe2xtensor2"
BY_DEFAULT = ("data2", "pipe2", "tensor2", "pipe2xtensor2", "data2-zero2")
SEQUENCES = (
    ("llama", "tensor2-sequence-overlap"),
    ("gpt2", "pipe2xtensor2-sequence"),
    ("qwen3", "tensor4-sequence"),
    ("mistral", "context3"),
    ("gpt2", "pipe2xcontext2-zero3"),
)
FALCONS = ("falcon", "falcon, alibi")


def fits(name: str, layout: str) -> bool:
    """Whether a layout is one of this family; others are refused by name."""
    if name == "falcon" and layout.startswith("tensor4"):  # more ranks than its fused keys
        return False
    # its attention gets the tokens of all context ranks
    gathers = name in (*FALCONS, "bloom")
    return not (gathers and "context" in layout and "sequence" in layout)


def asked(layout: dict[str, int]) -> tuple[int, list[str]]:
    """(ranks, overrides) of a layout. sequence: 1 splits it along tensor, 2 overlaps that too."""
    axes = {axis: layout.get(axis, 1) for axis in ("data", "pipe", "context", "tensor")}
    changes = [f"parallel.{axis}={size}" for axis, size in axes.items()]
    switches = ("parallel.sequence_parallel", "parallel.tp_comm_overlap")
    changes += [f"{key}=true" for key in switches[: layout.get("sequence", 0)]]
    return math.prod(axes.values()), [*changes, f"parallel.zero={layout.get('zero', 0)}"]


@pytest.fixture(scope="session")
def saved(ranks, tmp_path_factory):
    """(folder, what transformers makes of it in one process) by name, made once."""
    made: dict[str, tuple[str, Answer]] = {}

    def of(name: str) -> tuple[str, Answer]:
        if name not in made:
            folder = str(tmp_path_factory.mktemp("hf") / "model")
            ranks(1).run(save_model, MODELS[name], folder)
            made[name] = folder, ranks(1).run(of_transformers, folder)[0]
        return made[name]

    return of


def cases():
    for name in MODELS:
        for layout in (x for x in LAYOUTS if fits(name, x)):
            small = name in ("llama", "gpt2") and layout in BY_DEFAULT
            small |= (name, layout) in SEQUENCES
            yield pytest.param(name, layout, marks=() if small else FULL)


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "layout"), list(cases()))
def test_three_steps_are_those_of_transformers(ranks, saved, name, layout):
    """Losses, the gradient of every parameter in each step, and the weights after them."""
    folder, truth = saved(name)
    size, changes = asked(LAYOUTS[layout])
    results = ranks(size).run(three_steps, [f"model.hf={folder}", *changes])
    expect_same(results, truth)


def test_a_family_that_needs_the_whole_sequence_is_refused_by_name(tmp_path):
    settings = MODELS["llama"] | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    changes = [*RUN, f"model.hf={tmp_path}/config.json", "parallel.context=2"]
    expected = f"{settings['model_type']} cannot attend over parts of a sequence"
    with pytest.raises(ConfigError, match=expected):
        make_plan(parity.config(changes), 2)


@pytest.mark.parametrize("name", FALCONS)
def test_a_sequence_gathered_inside_of_slices_is_refused_by_name(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps(MODELS[name]))
    size, changes = asked({"context": 2, "tensor": 2, "sequence": 1})
    pattern = facts_pattern("parallel.sequence_parallel", "FalconAttention", "set it to false")
    with pytest.raises(ConfigError, match=pattern):
        make_plan(parity.config([*RUN, f"model.hf={tmp_path}/config.json", *changes]), size)


@pytest.mark.parametrize("name", ["llama", pytest.param("gemma2", marks=FULL)])
def test_a_loss_of_your_own_gets_all_logits(ranks, saved, name):
    folder, truth = saved(name)
    size, changes = asked(LAYOUTS[BOTH])
    changes.append("model.loss=tests.train.sources:token_losses")
    expect_same(ranks(size).run(three_steps, [f"model.hf={folder}", *changes]), truth)


def expect_same(results: list[Answer], truth: Answer) -> None:
    """Of as many last steps as the results have."""
    parity.expect_close([mine.weights for mine in results], [truth.weights])
    num_steps = len(results[0].losses)
    for index in range(-num_steps, 0):
        mine = [answer.gradients[index] for answer in results]
        parity.expect_close(mine, [truth.gradients[index]], least=NO_GRADIENT)
    for answer in results:
        assert answer.losses == pytest.approx(truth.losses[-num_steps:], rel=1e-9)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(
            name, layout, marks=FULL * ((name, layout) not in (("gpt2", BOTH), ("llama", BOTH)))
        )
        for name in MODELS
        for layout in (BOTH, "tensor2")
    ],
)
def test_initial_weights_are_the_same_under_every_layout(ranks, saved, name, layout):
    config = f"model.hf={saved(name)[0]}/config.json"
    size, changes = asked(LAYOUTS[layout])
    found = parity.whole(ranks(size).run(initial, [config, *changes]), rtol=0, atol=0)
    alone = parity.whole(ranks(1).run(initial, [config]), rtol=0, atol=0)
    assert found.keys() == alone.keys()
    assert all(torch.equal(found[key], x) for key, x in alone.items())


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "first", "then"),
    [
        ("gpt2", BOTH, "data2-zero2"),
        pytest.param("llama", "data2-zero3", BOTH, marks=FULL),
        pytest.param("llama, tied", "tensor4", "pipe2", marks=FULL),
        pytest.param("qwen3", "tensor2", "data2-zero1", marks=FULL),
    ],
)
def test_a_run_goes_on_under_another_layout(ranks, saved, tmp_path, name, first, then):
    folder, truth = saved(name)
    size, changes = asked(LAYOUTS[first])
    hf = f"model.hf={folder}"
    before = ranks(size).run(two_steps_and_save, [hf, *changes], str(tmp_path))
    size, changes = asked(LAYOUTS[then])
    results = ranks(size).run(third_step, [hf, *changes], str(tmp_path))
    expect_same(results, truth)
    assert before[0] == pytest.approx(truth.losses[:2], rel=1e-9)


DROPS = {"resid_pdrop": 0.3, "embd_pdrop": 0.2, "attn_pdrop": 0.2}


@pytest.mark.full
@pytest.mark.parametrize(
    "layout", ["pipe2xtensor2", pytest.param("data2-zero3", marks=pytest.mark.full)]
)
def test_recomputed_blocks_change_nothing(ranks, tmp_path, layout):
    """With dropout, whose draws are made again, alike where the tensor ranks are alike."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**MODELS["gpt2"], **DROPS}))
    size, changes = asked(LAYOUTS[layout])
    plain, *others = (
        ranks(size).run(three_steps, [f"model.hf={config}", *changes, f"train.recompute={how}"])
        for how in ("none", "blocks", "offload")
    )
    expected = parity.whole([mine.weights for mine in plain])
    for again in others:
        assert [mine.losses for mine in plain] == [mine.losses for mine in again]
        weights = parity.whole([mine.weights for mine in again])
        assert all(torch.equal(x, weights[name]) for name, x in expected.items())


@pytest.mark.full
@pytest.mark.parametrize(
    "layout", ["tensor2", *(pytest.param(x, marks=FULL) for x in ("data2-zero3", BOTH))]
)
def test_what_memory_asks_for_is_recomputed(ranks, tmp_path, layout):
    """`auto`: some modules of the family, of which tensor ranks choose the same."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**MODELS["llama"], "attention_dropout": 0.2}))
    size, changes = asked(LAYOUTS[layout])
    run = [f"model.hf={config}", *changes]
    plain = ranks(size).run(three_steps, run)
    limit = max(ranks(size).run(limit_gb, run, 0.8, RUN))
    again = ranks(size).run(three_steps, [*run, "train.recompute=auto", f"train.memory_gb={limit}"])
    assert any(mine.recomputed for mine in again)
    for mine, other in zip(again, plain, strict=True):
        assert mine.losses == other.losses and not other.recomputed
        for (name, _, _, x), (same, _, _, y) in zip(mine.weights, other.weights, strict=True):
            assert name == same and torch.equal(x, y), name
    if layout == "tensor2":
        assert again[0].recomputed == again[1].recomputed
