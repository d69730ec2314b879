"""Weights of transformers' GPT-2 and Llama: the same logits under every layout, and back."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.each import each
from tests.models import hugging_face_folders as folders
from tests.models.hugging_face_folders import CONFIGS
from tests.models.hugging_face_ranks import (
    START,
    check_logits,
    elements_read,
    first_step,
    ids,
    refusal,
    rewrite,
)
from tests.tells import tells
from torchdistpackage.errors import CheckpointError, RankError
from torchdistpackage.models import hugging_face
from torchdistpackage.topology.mesh import Mesh

SMALL_SET, FULL = ("gpt2", "llama"), pytest.mark.full
ONE, TENSOR, PIPE = (("tensor", 1),), (("tensor", 2),), (("pipe", 2), ("tensor", 1))
BOTH, WIDE = (("pipe", 2), ("tensor", 2)), (("tensor", 4),)
WORLDS = {"one": ONE, "tensor2": TENSOR, "pipe2": PIPE, "pipe2xtensor2": BOTH, "tensor4": WIDE}


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """(folder, logits) by name of a configuration, made once."""
    made: dict[str, tuple[str, Tensor]] = {}

    def of(name: str) -> tuple[str, Tensor]:
        if name not in made:
            folder = folders.save(name, tmp_path_factory.mktemp("hf") / "model")
            logits = folders.in_float64(name, ids()[:, :-1])
            made[name] = str(folder), logits.transpose(0, 1)
        return made[name]

    return of


@pytest.mark.few(3)
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    "name", [n if n in SMALL_SET else pytest.param(n, marks=FULL) for n in CONFIGS]
)
def test_logits_are_those_of_transformers(ranks, saved, name, world):
    world = WORLDS[world]
    tensor = dict(world)["tensor"]
    cases = [(world, *saved(name), sequence) for sequence in (False, True)[: min(tensor, 2)]]
    ranks(Mesh(world).size).run(each, check_logits, cases)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    equal = all(torch.equal(one[key], other[key]) for key in one)
    return one.keys() == other.keys() and equal


@pytest.mark.few(2)
@pytest.mark.parametrize("world", ["one", "pipe2xtensor2", pytest.param("tensor4", marks=FULL)])
@pytest.mark.parametrize(
    "name", [n if n in SMALL_SET else pytest.param(n, marks=FULL) for n in CONFIGS]
)
def test_a_round_trip_is_bit_identical(ranks, saved, tmp_path, name, world):
    """In files of the asked size, and tied names as transformers saves them."""
    source, target = Path(saved(name)[0]), tmp_path / "again"
    world = WORLDS[world]
    how = {"shard_bytes": 40_000, "like": str(source)}
    ranks(Mesh(world).size).run(rewrite, world, str(source), str(target), torch.float64, **how)
    assert same(folders.tensors(source), folders.tensors(target))
    files = sorted(target.glob("*.safetensors"))
    assert len(files) > 1 and files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    assert all(file.stat().st_size < 42_000 for file in files)
    index = json.loads((target / "model.safetensors.index.json").read_text())
    written = {key: load_file(file)[key].shape for file in files for key in load_file(file)}
    assert written == {k: x.shape for k, x in load_file(source / "model.safetensors").items()}
    assert index["weight_map"].keys() == written.keys()
    before, after = (json.loads((x / "config.json").read_text()) for x in (source, target))
    kept = {k: after.get(k) for k in before} | {"n_inner": before.get("n_inner")}
    assert kept == before | {"n_inner": before.get("n_inner")}


def test_a_checkpoint_of_another_type_is_converted(ranks, tmp_path):
    """bfloat16 is read into float32 exactly, and written as what is asked for."""
    source = folders.save("llama", tmp_path / "bf16", torch.bfloat16, max_shard_size="4KB")
    assert len(list(source.glob("*.safetensors"))) > 1
    rewrite_all = ranks(2).run
    rewrite_all(rewrite, TENSOR, str(source), str(tmp_path / "32"), torch.float32)
    narrow, wide = folders.tensors(source), folders.tensors(tmp_path / "32")
    assert {x.dtype for x in wide.values()} == {torch.float32}
    assert same({key: x.float() for key, x in narrow.items()}, wide)
    as_bf16 = {"dtype": torch.bfloat16}
    rewrite_all(
        rewrite, TENSOR, str(tmp_path / "32"), str(tmp_path / "16"), torch.float32, **as_bf16
    )
    assert same(narrow, folders.tensors(tmp_path / "16"))


@pytest.mark.parametrize(
    "layout",
    [
        {"pipe": 2, "tensor": 2},
        pytest.param({"tensor": 4}, marks=FULL),
        pytest.param({"pipe": 2, "zero": 0}, marks=FULL),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "name", ["llama, tied, biases, one kv head", pytest.param("gpt2", marks=FULL)]
)
def test_a_run_begins_with_the_weights_of_a_folder(ranks, saved, name, layout):
    changes = [*START, f"model.weights={saved(name)[0]}"]
    changes += [f"parallel.{axis}={size}" for axis, size in layout.items()]
    size = layout.get("pipe", 1) * layout.get("tensor", 1)
    results = ranks(size).run(first_step, changes)
    _, inputs, targets = results[0]
    logits = folders.in_float64(name, inputs)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    for loss, *_ in results:
        assert loss == pytest.approx(expected.item(), rel=1e-9)


@pytest.mark.parametrize("name", SMALL_SET)
def test_a_rank_reads_what_it_holds_and_no_more(ranks, saved, name):
    for read, held in ranks(4).run(elements_read, BOTH, saved(name)[0]):
        assert read == held


def test_what_a_folder_lacks_is_said_on_every_rank(ranks, saved, tmp_path):
    source, folder = Path(saved("llama")[0]), tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text((source / "config.json").read_text())
    assert all("has no weights" in text for text in ranks(2).run(refusal, str(folder)))
    held = load_file(source / "model.safetensors")
    held["model.norm.bias"] = held.pop("model.norm.weight")
    save_file(held, folder / "model.safetensors")
    for text in ranks(2).run(refusal, str(folder)):
        assert tells(text, "2", "21 tensors", "model.norm.weight", "model.norm.bias")


def test_a_folder_without_weights_is_refused_before_a_model_is_made(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')  # of 7B, by default
    monkeypatch.setattr(hugging_face, "GPT", lambda *_, **__: pytest.fail("made a model"))
    with pytest.raises(CheckpointError, match="safetensors"):
        hugging_face.from_pretrained(tmp_path)


def test_a_folder_is_not_written_over(ranks, saved, tmp_path):
    source = saved("gpt2")[0]
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RankError, match="exists and is not empty") as caught:
        ranks(2).run(rewrite, TENSOR, source, str(tmp_path), torch.float32)
    assert str(caught.value).count("CheckpointError: ") >= 2
    assert [x.name for x in tmp_path.iterdir()] == ["notes.txt"]
