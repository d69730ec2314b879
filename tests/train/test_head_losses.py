"""Heads under every layout are transformers' own models and losses in one process."""

import json

import numpy as np
import pytest
import torch

from tests.data.texts import save_lines
from tests.train import parity
from tests.train.encoders import DECODERS, ENCODERS
from tests.train.head_ranks import (
    ADAPTERS,
    BASE,
    ENDING,
    KEYS,
    NAMES,
    TARGETS,
    adapters_of,
    begun,
    data_keys,
    expected_values,
    initial,
    of_folder,
    of_transformers,
    rows_of,
    save_head,
    trained,
)
from tests.train.lora_ranks import quiet
from tests.train.test_preference import LAYOUTS
from tests.train.test_transformers import MODELS, NO_GRADIENT
from tests.train.transformers_ranks import expect_answers
from torchdistpackage.data.tokens.texts import wrong_texts
from torchdistpackage.errors import ConfigError
from torchdistpackage.plan.run_plan import make_plan
from torchdistpackage.train import head_metrics


def config_of(model: str) -> dict:
    changes = {"vocab_size": 300, "pad_token_id": 0, "classifier_dropout": 0.0}
    changes |= {"num_hidden_layers": 4} if model == "llama" else {}
    return {**({**MODELS, **ENCODERS, **DECODERS}[model]), **changes}


CONFIG = config_of("llama")

FULL = (pytest.mark.full,)


@pytest.fixture(scope="session")
def heads(ranks, tmp_path_factory):
    """(overrides, what transformers says) of a kind of task and a model, each made once."""
    made: dict[tuple[str, str, bool], tuple[list[str], tuple]] = {}

    def of(kind: str, model: str = "llama", adapted: bool = False) -> tuple[list[str], tuple]:
        if (kind, model, adapted) not in made:
            folder = tmp_path_factory.mktemp(kind)
            num = 1 if kind in ("regression", "reward") else len(NAMES)
            ending = ENDING.get(kind, "ForSequenceClassification")
            ranks(1).run(save_head, config_of(model), str(folder / "model"), ending, num)
            overrides = [*data_keys(kind, folder), f"model.hf={folder / 'model'}"]
            overrides += [adapters_of(model)] if adapted else []
            adapters = parity.whole(ranks(1).run(initial, overrides)) if adapted else None
            truth = ranks(1).run(of_transformers, kind, overrides, adapters)[0]
            made[kind, model, adapted] = overrides, truth
        return made[kind, model, adapted]

    return of


SMALL = [
    ("classification", "pipe2xtensor2"),
    ("weighted", "context2"),
    ("multi_label", "data2-zero2"),
    ("regression", "context2xpipe2"),
    ("token_classification", "data2-zero3"),
    ("reward", "context2"),
]
CASES = dict.fromkeys([*SMALL, *((kind, layout) for kind in KEYS for layout in LAYOUTS)])


@pytest.mark.parametrize(
    ("kind", "layout"), [pytest.param(*x, marks=() if x in SMALL else FULL) for x in CASES]
)
def test_three_steps_are_those_of_transformers(ranks, heads, kind, layout):
    found = expect_those_of_transformers(ranks, heads(kind), kind, layout)
    if kind != "token_classification":
        assert {x["tokens"] for x in found[0][1]} == {4}, "of weighted classes these, not weights"


def expect_those_of_transformers(ranks, case, kind, layout, least=1e-30):
    overrides, (truth, val, outputs, labels) = case
    values = expected_values(kind, outputs, labels)
    size, changes = LAYOUTS[layout]
    found = ranks(size).run(trained, [*overrides, *changes])
    expect_answers([mine for mine, *_ in found], truth, least=least)
    for _, logged, mine_val, mine_values in found:
        assert mine_val == pytest.approx(val, rel=1e-9)
        assert mine_values == pytest.approx(values, rel=1e-9)
        assert logged == found[0][1]
    return found


WITH_ADAPTERS = [
    (kind, layout)
    for kind in ("classification", "token_classification", "reward")
    for layout in ("pipe2xtensor2", "data2-zero3", "tensor2", "sequence2", "pipe2", "context2")
]


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        pytest.param(*x, marks=() if x == ("classification", "pipe2xtensor2") else FULL)
        for x in WITH_ADAPTERS
    ],
)
def test_a_head_beside_adapters_is_trained_as_by_peft(ranks, heads, kind, layout):
    found = expect_those_of_transformers(ranks, heads(kind, adapted=True), kind, layout)
    trained_ones = {name for mine, *_ in found for name, *_ in mine.gradients[0]}
    assert all(".lora_" in name or name.startswith("score.") for name in trained_ones)
    assert "score.weight" in trained_ones


OF_OTHERS = [
    (model, kind, layout)
    for model in TARGETS
    for kind in ("classification", "token_classification")
    for layout in ("data2-zero3", "tensor2", "pipe2")
    if model != "llama"
]


@pytest.mark.full
@pytest.mark.parametrize(("model", "kind", "layout"), OF_OTHERS)
def test_a_head_beside_adapters_without_a_table_is_trained_as_by_peft(
    ranks, heads, model, kind, layout
):
    case = heads(kind, model, adapted=True)
    found = expect_those_of_transformers(ranks, case, kind, layout)
    trained_ones = {name for mine, *_ in found for name, *_ in mine.gradients[0]}
    own = {x for x in trained_ones if ".lora_" not in x}
    assert own and all(x.startswith(("score.", "classifier.")) for x in own)


OF_FAMILIES = [
    (model, kind, layout)
    for model in MODELS
    for kind in ("classification", "token_classification")
    for layout in ("data2-zero3", "pipe2", "tensor2")
    if model != "llama" and (model, kind) != ("opt", "token_classification")
]
TWO = [("gpt2", "token_classification", "tensor2"), ("opt", "classification", "pipe2")]


@pytest.mark.parametrize(
    ("model", "kind", "layout"),
    [pytest.param(*x, marks=() if x in TWO else FULL) for x in OF_FAMILIES],
)
def test_heads_of_each_family_are_those_of_transformers(ranks, heads, model, kind, layout):
    expect_those_of_transformers(ranks, heads(kind, model), kind, layout, NO_GRADIENT)


UNSTAGED = ("deberta-v2", "albert", "mpnet")
"""Encoders whose blocks share more than activations, or that are one block many times."""
OF_ENCODERS = [
    (model, kind, layout)
    for model in ENCODERS
    for kind in ("classification", "token_classification", "regression")
    for layout in ("data2", "data2-zero3", "tensor2", "pipe2")
    if layout != "pipe2" or model not in UNSTAGED
]
OF_ENCODERS += [("bert", kind, "tensor2") for kind in ("weighted", "multi_label", "reward")]
OF_ENCODERS += [
    ("bert", kind, layout)
    for kind in ("classification", "token_classification")
    for layout in ("data2-zero1", "data2-zero2", "pipe2xtensor2")
]
OF_TWO = [
    ("bert", "classification", "data2-zero3"),
    ("modernbert", "token_classification", "tensor2"),
]


@pytest.mark.parametrize(
    ("model", "kind", "layout"),
    [pytest.param(*x, marks=() if x in OF_TWO else FULL) for x in OF_ENCODERS],
)
def test_heads_of_encoders_are_those_of_transformers(ranks, heads, model, kind, layout):
    """Whose tokens see their padding unless it is masked, and which pool by themselves."""
    expect_those_of_transformers(ranks, heads(kind, model), kind, layout, NO_GRADIENT)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["tensor2", "data2-zero3", "pipe2"])
def test_dropout_is_drawn_alike_by_ranks_that_have_the_same(ranks, tmp_path, layout):
    """Their replicas would drift apart otherwise; `parity.whole` holds them together bit by bit."""
    config, folder = config_of("bert"), tmp_path / "model"
    ranks(1).run(save_head, config, str(folder), "ForSequenceClassification", 3)
    keys = [*data_keys("classification", tmp_path), f"model.hf={folder}"]
    ((still, *_),) = ranks(1).run(trained, keys)
    settings = json.loads((folder / "config.json").read_text())
    rates = dict.fromkeys(
        ("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout"), 0.3
    )
    (folder / "config.json").write_text(json.dumps(settings | rates))
    size, changes = LAYOUTS[layout]
    found = ranks(size).run(trained, [*keys, *changes])
    losses = found[0][0].losses
    assert all(mine.losses == losses for mine, *_ in found)
    assert all(abs(x - y) > 1e-6 for x, y in zip(losses, still.losses, strict=True))
    assert parity.whole([mine.weights for mine, *_ in found])


OF_DECODERS = [
    (model, kind, layout)
    for model in DECODERS
    for kind in ("classification", "token_classification")
    for layout in ("data2-zero3", "tensor2", "pipe2")
]


@pytest.mark.full
@pytest.mark.parametrize(("model", "kind", "layout"), OF_DECODERS)
def test_heads_of_decoders_without_a_table_are_those_of_transformers(
    ranks, heads, model, kind, layout
):
    expect_those_of_transformers(ranks, heads(kind, model), kind, layout, NO_GRADIENT)


@pytest.mark.parametrize(
    "model", [pytest.param(x, marks=() if x == "gpt_neox" else FULL) for x in MODELS]
)
def test_a_head_begins_on_the_weights_of_each_language_model(ranks, tmp_path, model):
    ranks(1).run(save_head, config_of(model), str(tmp_path / "model"), None, 0)
    keys = [*data_keys("classification", tmp_path), f"model.hf={tmp_path}/model"]
    ((found, expected),) = ranks(1).run(begun, [*keys, "data.labels=[red, green, blue]"])
    assert found.keys() == expected.keys()
    head = found.pop("score.weight")
    assert head.shape == expected.pop("score.weight").shape and 0 < head.std() < 0.1
    assert all(torch.equal(found[name], x) for name, x in expected.items())


BASES = {
    "bert": ("ForMaskedLM", "ForPreTraining", ""),
    "roberta": ("ForMaskedLM", ""),
    "modernbert": ("ForMaskedLM", ""),
    "deberta-v2": ("ForMaskedLM", ""),
    "phi3": (None, ""),
}
"""Classes of which a folder may be."""
OF_BASES = [(model, ending) for model, endings in BASES.items() for ending in endings]


@pytest.mark.parametrize(
    ("model", "ending"),
    [pytest.param(*x, marks=() if x == ("bert", "ForMaskedLM") else FULL) for x in OF_BASES],
)
def test_a_head_begins_on_the_folder_of_another_class(ranks, tmp_path, model, ending):
    """transformers draws what that class lacks, and leaves out what it has beside."""
    ranks(1).run(save_head, config_of(model), str(tmp_path / "model"), ending, 0)
    keys = [*data_keys("classification", tmp_path), f"model.hf={tmp_path}/model"]
    ((found, expected),) = ranks(1).run(begun, [*keys, "data.labels=[red, green, blue]"])
    assert found.keys() == expected.keys()
    own = {name for name, x in expected.items() if not torch.equal(found[name], x)}
    assert all(x.startswith(("classifier.", "score.", "head.")) or "pooler." in x for x in own)
    assert any(x.startswith(("classifier.", "score.")) for x in own)
    for name in own:
        assert found[name].shape == expected[name].shape and found[name].std() < 0.1


@pytest.mark.parametrize(
    ("model", "lora"),
    [
        ("llama", [ADAPTERS]),
        *(pytest.param(x, [], marks=FULL) for x in ("llama", "bert", "modernbert", "phi3")),
        *(pytest.param(x, [adapters_of(x)], marks=FULL) for x in ("bert", "roberta")),
    ],
    ids=["adapters", "llama", "bert", "modernbert", "phi3", "bert-adapters", "roberta-adapters"],
)
def test_a_language_model_begins_with_a_new_head_and_comes_back_from_an_export(
    tdp, ranks, tmp_path, model, lora
):
    """It is the same on each layout; transformers makes of the export what `tdp eval` says."""
    # a pooler that begins anew beside adapters would stay as drawn, and be in no export
    ending = ("" if lora and model == "bert" else "ForMaskedLM") if model in ENCODERS else None
    ranks(1).run(save_head, config_of(model), str(tmp_path / "model"), ending, 0)
    keys = [*data_keys("classification", tmp_path), f"model.hf={tmp_path}/model", *lora]
    keys.append("data.labels=[red, green, blue]")
    ((alone, *_),) = ranks(1).run(trained, keys)
    shared = ranks(2).run(trained, [*keys, "parallel.tensor=2"])
    assert shared[0][0].losses == pytest.approx(alone.losses, rel=1e-9)
    (tmp_path / "run.yaml").write_text(f"run: {{dir: {tmp_path}/runs, name: r}}")
    words = [x for x in (*BASE, *keys) if not x.startswith(("train.dpo", "model.vocab"))]
    words += ["checkpoint.save_every=5", "log.plot=false", "log.report=false"]
    code, said = tdp(["train", str(tmp_path / "run.yaml"), *words, "parallel.data=2"])
    assert code == 0, said
    last = json.loads((tmp_path / "runs/r/metrics.jsonl").read_text().splitlines()[-1])
    assert last["tokens"] == 20 and {"accuracy", "eval_accuracy", "eval_f1_macro"} <= last.keys()
    path, run = tmp_path / "rows.jsonl", str(tmp_path / "runs/r")
    layout = [] if model in ENCODERS else ["--pipe", "2"]
    code, said = tdp(["eval", run, "--data", str(path), "--json", *layout])
    assert code == 0, said
    result = json.loads(said.splitlines()[-1])  # peft may write a warning before
    section = parity.config([*BASE, *keys])
    assert section.data.labels == NAMES
    base = str(tmp_path / "model")
    for how, base_of in [(["--merge"], None), ([], base)] if lora else [([], None)]:
        out = str(tmp_path / f"out{len(how)}")
        with quiet():
            code, said = tdp(["export", run, out, *how])
        assert code == 0, said
        found = ranks(1).run(of_folder, out, [*BASE, *keys], base_of)[0]
        assert result["loss"] == pytest.approx(found["loss"], rel=1e-6)
        assert result["accuracy"] == found["accuracy"] and result["tokens"] == 30
    code, said = tdp(["generate", run, "--prompt", "x"])
    assert code == 2 and "data.name=classification" in said


WRONG = [
    ("classification", {"text": "a", "label": "pink"}, ("'pink'", "3 classes", "red, green, blue")),
    ("classification", {"text": "a", "label": 3}, ("label is 3", "3 classes")),
    ("classification", {"text": "a"}, ("no field 'label'", "data.label_field")),
    ("classification", {"text": "", "label": "red"}, ("'text' is empty",)),
    ("multi_label", {"text": "a", "label": "red"}, ("a str", "list")),
    ("regression", {"text": "a", "label": "red"}, ("'red'", "finite number")),
    ("token_classification", {"text": ["a", "b"], "label": ["red"]}, ("2 words", "1 labels")),
    ("token_classification", {"text": "a b", "label": ["red"]}, ("text is a str", "list")),
    ("reward", {"prompt": "a", "chosen": "b", "rejected": "c", "margin": "x"}, ("margin", "'x'")),
]


@pytest.mark.parametrize(("kind", "row", "facts"), WRONG)
def test_a_wrong_row_is_named_by_file_and_line(tmp_path, kind, row, facts):
    keys = [*data_keys(kind, tmp_path), "data.val_fraction=0.05"]
    keys += [] if kind in ("regression", "reward") else ["data.labels=[red, green, blue]"]
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    keys.append(f"model.hf={tmp_path}/config.json")
    config = parity.config([*BASE, *keys])
    path = save_lines(tmp_path / "rows.jsonl", [*rows_of(kind, 2), row])
    (problem,) = wrong_texts(config)
    assert str(problem).startswith("data.path") or "data.path" in str(problem)
    assert f"{path}:3: " in str(problem)
    for fact in facts:
        assert fact in str(problem)


LABELS = [
    ("classification", "/red", "/green"),
    ("multi_label", "/none", "/red+green"),
    ("regression", "/-1\n", "/2.14286\n"),
    ("reward", "/0.25", "/0.5"),
]


@pytest.mark.parametrize(("kind", "first", "second"), LABELS)
def test_samples_are_shown_with_their_labels(tdp, tmp_path, kind, first, second):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "run.yaml").write_text("data: {seq_len: 32}")
    labels = ["data.labels=[red, green, blue]"] * (kind in ("classification", "multi_label"))
    keys = [x for x in data_keys(kind, tmp_path) if x not in ("train.dpo={}", "model.vocab=300")]
    keys += [f"model.hf={tmp_path}/config.json", "data.global_batch=16", *labels]
    code, said = tdp(["data", "show", str(tmp_path / "run.yaml"), *keys, "--number", "16"])
    assert code == 0 and first in said and second in said, said
    assert "data.document_masks" not in said, "a sample has one text"


OTHERS = [
    ("...ForTokenClassification", 3, [], ("ForTokenClassification", "each token")),
    ("...ForSequenceClassification", 5, [], ("5 outputs", "3 data.labels")),
    ("...ForSequenceClassification", 3, ["data.class_weights=[1, 2]"], ("2", "3")),
    ("...ForCausalLM", 0, ["data.labels=[]"], ("data.labels", "no class")),
    (
        "...ForSequenceClassification",
        63,
        ["data.labels=[]", "data.multi_label=true"],
        ("data.multi_label", "63 classes", "62"),
    ),
]


@pytest.mark.parametrize(("ending", "num", "changes", "facts"), OTHERS)
def test_a_folder_of_another_kind_is_refused(tmp_path, ending, num, changes, facts):
    transformers = pytest.importorskip("transformers")
    ids = {str(i): f"LABEL_{i}" for i in range(num)}
    made = transformers.CONFIG_MAPPING["llama"].from_dict({**CONFIG, "id2label": ids})
    made.architectures = [ending.replace("...", "Llama")]
    made.save_pretrained(tmp_path / "model")
    keys = [*data_keys("classification", tmp_path), f"model.hf={tmp_path}/model/config.json"]
    given = [*BASE, *keys, "data.labels=[red, green, blue]", *changes]
    with pytest.raises(ConfigError) as error:
        make_plan(parity.config(given), 1)
    for fact in facts:
        assert fact in str(error.value)


_FNET = {"model_type": "fnet", "vocab_size": 300, "hidden_size": 16, "num_hidden_layers": 2}
_FNET |= {"intermediate_size": 24, "max_position_embeddings": 40, "pad_token_id": 0}
UNFIT = [
    ("bert", ["data.seq_len=41"], ("data.seq_len=41", "positions", "40")),
    ("bert", ["parallel.context=2"], ("parallel.context", "bert")),
    ("bert", ["data.name=text"], ("BertLMHeadModel", "both directions", "is_decoder")),
    ("distilbert", ["data.name=text"], ("distilbert", "causal", "classification", "embedding")),
    ("fnet", [], ("FNetForSequenceClassification", "padding", "attention_mask")),
    ("olmoe", [], ("olmoe", "...ForSequenceClassification", "data.name=classification")),
]


@pytest.mark.parametrize(
    ("model", "changes", "facts"),
    [pytest.param(*x, marks=FULL if i in (2, 4) else ()) for i, x in enumerate(UNFIT)],
)
def test_what_a_class_cannot_do_is_refused_before_ranks_start(tmp_path, model, changes, facts):
    known = {**ENCODERS, "fnet": _FNET, "olmoe": {**CONFIG, "model_type": "olmoe"}}
    (tmp_path / "config.json").write_text(json.dumps(known[model]))
    keys = [*data_keys("classification", tmp_path), f"model.hf={tmp_path}/config.json"]
    keys += [] if "data.name=text" in changes else ["data.labels=[red, green, blue]"]
    num = 2 if "parallel.context=2" in changes else 1
    with pytest.raises(ConfigError) as error:
        make_plan(parity.config([*BASE, *keys, *changes]), num)
    for fact in facts:
        assert fact in str(error.value)


@pytest.mark.full
def test_what_adapters_would_leave_as_it_was_drawn_is_refused(ranks, tmp_path):
    """peft saves no pooler, so that no export could tell which one the head was trained on."""
    ranks(1).run(save_head, config_of("bert"), str(tmp_path / "model"), "ForMaskedLM", 0)
    keys = [*data_keys("classification", tmp_path), f"model.hf={tmp_path}/model"]
    given = [*BASE, *keys, "data.labels=[red, green, blue]", adapters_of("bert")]
    with pytest.raises(ConfigError, match=r"bert\.pooler\.dense\.bias.*model\.lora"):
        make_plan(parity.config(given), 1)


@pytest.mark.full
def test_metrics_are_those_of_scikit_learn():
    sklearn = pytest.importorskip("sklearn.metrics", reason="scikit-learn is no dependency")
    drawn = np.random.default_rng(0)
    for num, size in ((2, 6), (3, 40), (7, 300)):
        logits = drawn.normal(size=(size, num)).round(1)
        classes, sets = drawn.integers(0, num, size), drawn.integers(0, 2, (size, num))
        found = head_metrics.of_classes(logits.argmax(1), classes, num)
        found |= head_metrics.areas(logits, classes)
        shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        scores = shares[:, 1] if num == 2 else shares
        expected = {
            "accuracy": sklearn.accuracy_score(classes, logits.argmax(1)),
            "f1_macro": sklearn.f1_score(classes, logits.argmax(1), average="macro"),
            "auc": sklearn.roc_auc_score(classes, scores, multi_class="ovr"),
        }
        if num == 2:
            expected["f1"] = sklearn.f1_score(classes, logits.argmax(1))
        assert found == pytest.approx(expected)
        assert head_metrics.of_label_sets(logits, sets) == pytest.approx(
            {
                "accuracy": sklearn.accuracy_score(sets, logits > 0),
                "f1": sklearn.f1_score(sets, logits > 0, average="micro"),
                "f1_macro": sklearn.f1_score(sets, logits > 0, average="macro"),
                "auc": sklearn.roc_auc_score(sets, logits),
            }
        )
