"""`tdp export` writes what transformers loads, from a checkpoint of any layout."""

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors import SafetensorError
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.data.texts import save_tokenizer
from tests.models import hugging_face_folders as folders
from tests.models.hugging_face_ranks import VOCAB, save_run
from tests.tells import tells
from tests.train.inference_ranks import run_in
from tests.train.test_generate import greedy, on_layout
from torchdistpackage.cli import _inference
from torchdistpackage.cli._inference import source_of
from torchdistpackage.cli.main import main
from torchdistpackage.config.load import load
from torchdistpackage.data.tokens.prompts import TokenizerCodec
from torchdistpackage.plan.run_plan import make_plan
from torchdistpackage.train.export import export_run

LAYOUTS = {
    "one": {},
    "pipe2xtensor2": {"pipe": 2, "tensor": 2},
    "data2xtensor2-zero3": {"data": 2, "tensor": 2, "zero": 3},
    "tensor4-zero1": {"tensor": 4, "zero": 1},
}
SMALL_SET = ("pipe2xtensor2",)


def saved_run(ranks, tmp_path: Path, layout: dict[str, int], *changes: str) -> Path:
    degrees = {"data": 1, **layout}
    mine = [*changes, *(f"parallel.{axis}={size}" for axis, size in degrees.items())]
    mine += [f"run.dir={tmp_path}", "run.name=mine"]
    size = degrees["data"] * layout.get("pipe", 1) * layout.get("tensor", 1)
    ranks(size).run(save_run, mine)
    return tmp_path / "mine"


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "layout", [n if n in SMALL_SET else pytest.param(n, marks=pytest.mark.full) for n in LAYOUTS]
)
@pytest.mark.parametrize("name", ["llama", pytest.param("gpt2", marks=pytest.mark.full)])
@pytest.mark.parametrize("key", ["weights", "hf"])
def test_a_run_that_did_not_train_gives_its_folder_back(ranks, tmp_path, capsys, layout, name, key):
    source = folders.save(name, tmp_path / "source")
    (source / "tokenizer.json").write_text("{}")
    run = saved_run(ranks, tmp_path, LAYOUTS[layout], f"model.{key}={source}")
    out = tmp_path / "out"
    assert main(["export", str(run), str(out), "--to", "hf", "--shard-size", "40KB"]) == 0
    files = sorted(x.name for x in out.glob("*.safetensors"))
    assert len(files) > 1 and f"-> {out}: {len(files)} files" in capsys.readouterr().out
    assert (out / "tokenizer.json").read_text() == "{}"
    before, after = folders.tensors(source), folders.tensors(out)
    assert before.keys() == after.keys()
    assert all(torch.equal(x, after[name]) for name, x in before.items())
    settings = [json.loads((x / "config.json").read_text()) for x in (source, out)]
    for found in settings if name == "gpt2" else ():
        found["n_inner"] = found["n_inner"] or 4 * found["n_embd"]  # what null says
    assert {key: settings[1].get(key) for key in settings[0]} == settings[0]


def test_another_type_is_written_and_no_folder_is_overwritten(ranks, tmp_path, capsys):
    source = folders.save("gpt2", tmp_path / "source")
    run = saved_run(ranks, tmp_path, {}, f"model.weights={source}")
    (source / "config.json").rename(tmp_path / "moved")  # the run is enough
    command = ["export", str(run), str(tmp_path / "out"), "--dtype", "bfloat16"]
    assert main(command) == 0
    after = folders.tensors(tmp_path / "out")
    assert {x.dtype for x in after.values()} == {torch.bfloat16}
    assert main(command) == 2
    assert "exists and is not empty" in capsys.readouterr().err
    # the type of the folder that the run began with: config.json's, else that of its weights
    of_folder = ["export", str(run), "--dtype", "folder"]
    assert main([*of_folder, str(tmp_path / "gone")]) == 2
    assert "--dtype folder: " in capsys.readouterr().err
    settings = json.loads((tmp_path / "moved").read_text())
    for name, dtype in (("said", "float16"), ("held", None)):
        (source / "config.json").write_text(json.dumps({**settings, "dtype": dtype}))
        assert main([*of_folder, str(tmp_path / name)]) == 0
    types = {name: folders.tensors(tmp_path / name).values() for name in ("said", "held")}
    assert {x.dtype for x in types["said"]} == {torch.float16}
    assert {x.dtype for x in types["held"]} == {x.dtype for x in folders.tensors(source).values()}


def test_mistakes_are_listed_at_once(ranks, tmp_path, capsys):
    options = ["--to", "gguf", "--dtype", "int3", "--shard-size", "much"]
    assert main(["export", str(tmp_path), str(tmp_path / "out"), *options]) == 2
    said = capsys.readouterr().err
    for text in ("--to gguf", "--dtype int3", "--shard-size much", "there is no resolved.yaml"):
        assert text in said
    run = saved_run(ranks, tmp_path, {})
    assert main(["export", str(run), str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "for gpt2: position=learned" in said and "for llama: norm=rms, mlp=swiglu" in said
    assert not (tmp_path / "out").exists()
    for folder in (run / "checkpoints").iterdir():
        folder.rename(tmp_path / folder.name)
    paths = [str(run), str(tmp_path), "--like", str(tmp_path / "none")]
    assert main(["export", *paths, "--dtype", "int3"]) == 2
    said = capsys.readouterr().err
    for text in (
        "4 problems in tdp export:",
        "--dtype int3",
        f"{tmp_path} exists and is not empty",
        f"{tmp_path / 'none'}: there is no such folder",
        f"{run} has no complete checkpoint",
    ):
        assert text in said, said
    assert main(["export", *paths[:2], "--checkpoint", str(tmp_path / "none")]) == 2
    assert "none: there is no such folder" in capsys.readouterr().err


def test_a_run_that_ends_exports_its_newest_checkpoint_anew(ranks, tmp_path):
    source = folders.save("llama", tmp_path / "source")
    (source / "tokenizer.json").write_text("{}")
    run = saved_run(ranks, tmp_path, {}, f"model.hf={source}", "checkpoint.export=hf")
    plan = make_plan(load(run / "resolved.yaml"), 1)
    (run / "hf").mkdir()
    (run / "hf" / "model-00001-of-00009.safetensors").touch()  # of an earlier end
    files = {x.name for x in export_run(run, plan.model, plan.config, str(source)).iterdir()}
    assert files == {
        *("config.json", "model.safetensors", "generation_config.json", "tokenizer.json"),
    }
    before, after = folders.tensors(source), folders.tensors(run / "hf")
    assert before.keys() == after.keys()
    assert all(torch.equal(x, after[name]) for name, x in before.items())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ([], "for gpt2: position=learned"),
        (["model={target: m.py:Net}"], "is not possible for model.target=m.py:Net"),
    ],
)
def test_what_cannot_be_exported_at_the_end_is_refused_before_the_run(capsys, changes, said):
    tiny = str(Path(__file__).parents[2] / "configs" / "gpt_tiny.yaml")
    assert main(["plan", tiny, "checkpoint.export=hf", *changes]) == 2
    assert "checkpoint.export" in (text := " ".join(capsys.readouterr().err.split()))
    assert said in text


def test_a_full_disk_leaves_nothing(ranks, tmp_path, monkeypatch, capsys):
    source = folders.save("gpt2", tmp_path / "source")
    run = saved_run(ranks, tmp_path, {}, f"model.weights={source}")

    def full(*_: object, **__: object) -> None:
        raise SafetensorError("Error while serializing: no space left on device")

    monkeypatch.setattr("torchdistpackage.models.hugging_face_folder.save_file", full)
    assert main(["export", str(run), str(tmp_path / "out")]) == 1
    assert "cannot be written: Error while serializing" in capsys.readouterr().err
    assert not [x for x in tmp_path.iterdir() if "out" in x.name]


@pytest.mark.full
def test_merged_adapters_are_the_bits_of_peft(ranks, tmp_path, capsys):
    """Of a run whose ranks had parts of the adapters, which are not as they begin."""
    source = folders.save("llama", tmp_path / "source")
    adapted = "model.lora={r: 3, alpha: 7, target: [q_proj, down_proj]}"
    run = saved_run(ranks, tmp_path, {"tensor": 2}, f"model.hf={source}", adapted)
    (source / "tokenizer.json").write_text("{}")
    out, adapters = tmp_path / "out", tmp_path / "adapters"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers by an earlier name
        assert main(["export", str(run), str(out), "--merge"]) == 0
        assert main(["export", str(run), str(adapters)]) == 0
        base = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
        before = {name: x.clone() for name, x in base.state_dict().items()}
        truth = PeftModel.from_pretrained(base, str(adapters)).merge_and_unload().state_dict()
    found = AutoModelForCausalLM.from_pretrained(out, dtype="auto").state_dict()
    assert found.keys() == truth.keys() == before.keys()
    assert all(torch.equal(found[name], x) for name, x in truth.items())
    changed = {name for name, x in before.items() if not torch.equal(found[name], x)}
    assert {name.split(".")[-2] for name in changed} == {"q_proj", "down_proj"}
    assert (out / "tokenizer.json").is_file()
    assert not (out / "adapter_config.json").exists()
    (source / "config.json").unlink()
    assert main(["export", str(run), str(tmp_path / "again"), "--merge"]) == 2
    assert f"{source}: it has no config.json" in capsys.readouterr().err


def losses_of(model: PreTrainedModel, ids: list[int]) -> list[float]:
    """Of each token of windows of 8 but the first."""
    found: list[float] = []
    for at in range(0, len(ids) - 1, 8):
        window = torch.tensor([ids[at : at + 9]])
        with folders.everywhere_float64(), torch.no_grad():
            logits = model(window[:, :-1]).logits[0]
        found += cross_entropy(logits, window[0, 1:], reduction="none").tolist()
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["llama", "gpt2", "llama, tied, biases, one kv head"])
def test_a_merged_export_writes_and_scores_what_transformers_does(
    ranks, tmp_path, monkeypatch, capsys, name
):
    monkeypatch.setattr(_inference, "run_local", run_in(ranks))
    source = save_tokenizer(folders.save(name, tmp_path / "source"), VOCAB)
    target = "[c_attn, c_proj]" if name == "gpt2" else "[all-linear]"
    adapted = f"model.lora={{r: 3, alpha: 7, target: {target}}}"
    run = saved_run(ranks, tmp_path, {"tensor": 2}, f"model.hf={source}", adapted)
    out = tmp_path / "out"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        assert main(["export", str(run), str(out), "--merge"]) == 0
        assert main(["export", str(run), str(tmp_path / "apart")]) == 0
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float64).eval()
    prompt = "alpha beta"
    given = TokenizerCodec(out).encode(prompt)
    # behind the learned positions of GPT-2 transformers' own generate ends in an IndexError
    num = min(8, model.config.max_position_embeddings - len(given))
    truth = greedy(model, given, num)
    told = on_layout(ranks, source_of(out, None), {"pipe": 2}, prompt=given)
    assert [x[:num] for x in told] == [truth] * 2
    assert truth != greedy(folders.model(name), given, num), "the adapters change nothing"
    ids = np.random.default_rng(3).integers(0, VOCAB, 29, np.uint16)
    ids.tofile(tmp_path / "ids.bin")
    capsys.readouterr()
    command = [str(out), "--data", str(tmp_path / "ids.bin"), "--json", "precision.dtype=float64"]
    assert main(["eval", *command, "data.seq_len=8"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["loss"] == pytest.approx(np.mean(losses_of(model, ids.tolist())), rel=1e-9)
    # adapters without their model, and a tokenizer of another one, before any rank starts
    monkeypatch.setattr(_inference, "run_local", None)
    save_tokenizer(out, VOCAB + 39)
    (tmp_path / "text.txt").write_text(prompt)
    for name, options in (
        ("generate", ["--prompt", prompt]),
        ("eval", ["--data", str(tmp_path / "text.txt")]),
    ):
        assert main([name, str(tmp_path / "apart"), *options]) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert "of adapters without their model; write both with tdp export --merge" in said
        assert main([name, str(out), *options]) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert tells(said, "300 ids", "261")


def test_a_run_without_adapters_is_not_merged(ranks, tmp_path, capsys):
    run = saved_run(ranks, tmp_path, {})
    assert main(["export", str(run), str(tmp_path / "out"), "--merge"]) == 2
    assert "has no adapters (model.lora)" in capsys.readouterr().err
