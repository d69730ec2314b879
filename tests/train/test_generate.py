"""Tokens that a trained model writes: those of transformers, and the same on every layout."""

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.models import hugging_face_folders as folders
from tests.models.coverage import settings
from tests.models.coverage_ranks import make_folder
from tests.models.hugging_face_ranks import save_run
from tests.train.inference_ranks import batch_tokens, tokens
from tests.train.test_transformers import MODELS
from tests.train.transformers_ranks import save_model
from torchdistpackage.cli._inference import ModelSource, source_of
from torchdistpackage.models.transformers_meta import build_options
from torchdistpackage.train.generate import next_token
from torchdistpackage.train.inference_request import Sampling

LAYOUTS = {
    "one": {},
    "pipe2xtensor2": {"pipe": 2, "tensor": 2},
    "pipe2": {"pipe": 2},
    "tensor4": {"tensor": 4},
    "pipe4": {"pipe": 4},
    "context2": {"context": 2},
    "pipe2xcontext2": {"pipe": 2, "context": 2},
}
PROMPT = [197, 197, 197]
SMALL_SET = ("one", "pipe2xtensor2", "context2")
EACH = [n if n in SMALL_SET else pytest.param(n, marks=pytest.mark.full) for n in LAYOUTS]


def on_layout(ranks, source: ModelSource, layout: dict[str, int], *changes: str, **how) -> list:
    """Of every rank what follows the prompt."""
    ones = {"data": 1, "pipe": 1, "context": 1, "tensor": 1}
    degrees = {f"parallel.{axis}": size for axis, size in {**ones, **layout}.items()}
    keys = {**degrees, "pipeline.microbatches": 1, "data.global_batch": 1}
    config = source.config(keys, ["precision.dtype=float64", *changes])
    number = math.prod(layout.values())
    prompt = how.get("prompt", PROMPT)
    sampling, window = how.get("sampling", Sampling()), how.get("window", source.window)
    return ranks(number).run(tokens, config, source.weights, prompt, sampling, window, 8)


def of_transformers(name: str, prompt: list[int], length: int) -> list[int]:
    return greedy(folders.model(name), prompt, length)


def greedy(model: PreTrainedModel, prompt: list[int], length: int) -> list[int]:
    with folders.everywhere_float64():
        found = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=length,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return found[0, len(prompt) :].tolist()


@pytest.mark.few(2)
@pytest.mark.parametrize("layout", EACH)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_greedy_tokens_of_a_folder_are_those_of_transformers(ranks, tmp_path, name, layout):
    source = source_of(folders.save(name, tmp_path / "source"), None)
    truth = of_transformers(name, PROMPT, 8)
    assert len(set(truth)) > 3, "too few kinds of tokens to tell right from wrong"
    told = on_layout(ranks, source, LAYOUTS[layout])
    assert told == [truth] * len(told)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["one", "pipe2xtensor2"])
@pytest.mark.parametrize("name", [n for n in MODELS if n[:5] not in ("llama", "gpt2")])
def test_greedy_tokens_of_other_families(ranks, tmp_path, name, layout):
    folder = save_model(MODELS[name], str(tmp_path / "source"))
    truth = greedy(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64), [9, 9, 9], 8)
    source = source_of(Path(folder), None)
    told = on_layout(ranks, source, LAYOUTS[layout], prompt=[9, 9, 9])
    assert told == [truth] * len(told)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("mixtral", "one"),
        ("olmo2", "pipe2xtensor2"),
        *((x, "one") for x in ("gemma3", "mamba", "jamba", "falcon_h1", "gpt_oss", "bert", "phi3")),
        *((x, "pipe2") for x in ("mixtral", "jamba", "falcon_h1", "gemma3_text")),
    ],
)
def test_greedy_tokens_of_classes_without_a_table(ranks, tmp_path, family, layout):
    """Of any class that trains: mixtures, windows, states in the place of keys and values."""
    folder = str(tmp_path / "source")
    ranks(1).run(make_folder, settings(family), folder)
    options = build_options(torch.float64)
    model = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    truth = greedy(model, [9, 5, 3], 8)
    told = on_layout(ranks, source_of(Path(folder), None), LAYOUTS[layout], prompt=[9, 5, 3])
    assert told == [truth] * len(told)


PROMPTS = [[9, 5, 3, 7, 8], [9], [4, 5, 6]]


def batch_on(ranks, source: ModelSource, layout: dict[str, int], use_cache: bool = True) -> list:
    """Of every rank what follows PROMPTS, and the columns of its forwards."""
    ones = {"data": 1, "pipe": 1, "tensor": 1}
    degrees = {f"parallel.{axis}": size for axis, size in {**ones, **layout}.items()}
    keys = {**degrees, "pipeline.microbatches": 1, "data.global_batch": layout.get("data", 1)}
    config = source.config(keys, ["precision.dtype=float64"])
    number = math.prod(layout.values())
    return ranks(number).run(batch_tokens, config, source.weights, PROMPTS, 6, use_cache)


BATCH_LAYOUTS = [{"data": 2}, {"tensor": 2}, {"pipe": 2}, {"pipe": 2, "tensor": 2}]


@pytest.mark.few(2)
@pytest.mark.parametrize("layout", BATCH_LAYOUTS, ids=str)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_batch_with_padding_and_a_cache_gives_each_prompt_its_own(ranks, tmp_path, name, layout):
    """Prompts of 5, 1 and 3 tokens, and after them one column for each token."""
    source = source_of(folders.save(name, tmp_path / "source"), None)
    truth = [of_transformers(name, prompt, 6) for prompt in PROMPTS]
    for told, columns in batch_on(ranks, source, layout):
        assert (told, columns) == (truth, [5, 1, 1, 1, 1, 1])
    ((told, columns),) = batch_on(ranks, source, {}, use_cache=False)
    assert told == truth and len(columns) == 18


@pytest.mark.full
@pytest.mark.parametrize("layout", BATCH_LAYOUTS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_batch_of_other_families_too(ranks, tmp_path, name, layout):
    folder = save_model(MODELS[name], str(tmp_path / "source"))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    source = source_of(Path(folder), None)
    truth = [greedy(model, prompt, 6) for prompt in PROMPTS]
    # transformers' eager attention gives no numbers to padding in float64: a batch for each length
    is_eager = model.config._attn_implementation == "eager"
    expected = [5, 1, 3, *[1] * 15] if is_eager else [5, 1, 1, 1, 1, 1]
    for told, columns in batch_on(ranks, source, layout):
        assert (told, columns) == (truth, expected)


def a_run(ranks, folder: Path, *changes: str) -> ModelSource:
    """A run whose pipe and tensor ranks are two each, with large random weights."""
    mine = ["parallel.pipe=2", "parallel.tensor=2", f"run.dir={folder}", "run.name=mine"]
    ranks(4).run(save_run, [*mine, "model.layers=2", "model.dim=16", *changes])
    return source_of(folder / "mine", None)


@pytest.mark.parametrize(
    "changes",
    [
        ["parallel.sequence_parallel=true"],
        pytest.param([], marks=pytest.mark.full),
        pytest.param(["pipeline.schedule=interleaved"], marks=pytest.mark.full),
        pytest.param(["pipeline.schedule=zb-v", "parallel.zero=3"], marks=pytest.mark.full),
    ],
    ids=" ".join,
)
def test_sampled_tokens_of_a_run_are_the_same_on_every_layout(ranks, tmp_path, changes):
    """Also where the sequence grows out of the window, and is no multiple of the ranks."""
    source = a_run(ranks, tmp_path)
    how = {"sampling": Sampling(1.0, 100, 0.9, seed=3), "window": 6}
    (truth,) = on_layout(ranks, source, {}, **how)
    assert len(set(truth)) > 3
    told = on_layout(ranks, source, {"pipe": 2, "tensor": 2}, *changes, **how)
    assert told == [truth] * 4
    other = on_layout(ranks, source, {}, **{**how, "sampling": Sampling(1.0, 100, 0.9, seed=4)})
    assert other != [truth]


@pytest.mark.parametrize("name", ["llama", pytest.param("gpt2", marks=pytest.mark.full)])
def test_a_run_of_transformers_own_modules_writes_the_same(ranks, tmp_path, name):
    folder = folders.save(name, tmp_path / "source")
    mine = ["parallel.tensor=2", f"run.dir={tmp_path}", "run.name=mine", f"model.hf={folder}"]
    ranks(2).run(save_run, mine)
    (folder / "model.safetensors").unlink()  # the run has its own weights
    source = source_of(tmp_path / "mine", None)
    told = on_layout(ranks, source, {"pipe": 2, "tensor": 2})
    assert told == [of_transformers(name, PROMPT, 8)] * 4


def test_sampling_keeps_what_is_asked_and_follows_the_chances():
    chances = torch.tensor([0.1, 0.4, 0.05, 0.25, 0.2], dtype=torch.float64)
    draw = torch.Generator().manual_seed(0)

    def shares(how: Sampling) -> list[float]:
        found = [next_token(chances.log(), how, draw) for _ in range(700)]
        return [found.count(token) / len(found) for token in range(5)]

    def close_to(*weights: float):
        return pytest.approx([w / sum(weights) for w in weights], abs=0.06)

    assert shares(Sampling(1.0)) == close_to(0.1, 0.4, 0.05, 0.25, 0.2)
    assert shares(Sampling(0.5)) == close_to(0.01, 0.16, 0.0025, 0.0625, 0.04)
    assert shares(Sampling(1.0, top_k=2)) == close_to(0, 0.4, 0, 0.25, 0)
    assert shares(Sampling(1.0, top_p=0.7)) == close_to(0, 0.4, 0, 0.25, 0.2)
    assert shares(Sampling(1.0, top_k=1)) == [0, 1, 0, 0, 0]
    assert shares(Sampling(1.0, top_p=1e-9)) == [0, 1, 0, 0, 0]
    assert next_token(chances.log(), Sampling(), draw) == 1
    assert next_token(torch.tensor([0.0, float("nan")]), Sampling(), draw) == -1
