"""`tdp generate` continues prompts, and refuses what it cannot before a rank starts."""

import json
import shutil
from dataclasses import replace

import pytest

from tests.data.texts import save_tokenizer
from tests.models import hugging_face_folders as folders
from tests.models.hugging_face_ranks import VOCAB, save_run
from tests.train.inference_ranks import run_in
from tests.train.test_generate import of_transformers
from torchdistpackage.checkpoint.manifest import read_manifest
from torchdistpackage.cli import _inference
from torchdistpackage.cli.main import main
from torchdistpackage.config.load import loads
from torchdistpackage.data.tokens.prompts import TokenizerCodec
from torchdistpackage.data.tokens.texts import text_source
from torchdistpackage.data.tokens.token_cache import tokenized
from torchdistpackage.train.inference_request import GenerateRequest

FLOAT64 = "precision.dtype=float64"


@pytest.fixture
def pooled(ranks, monkeypatch):
    monkeypatch.setattr(_inference, "run_local", run_in(ranks))


@pytest.fixture
def run(ranks, tmp_path):
    """A run folder with a checkpoint, of a model of bytes that sees 8 of them."""
    ranks(2).run(save_run, ["parallel.pipe=2", f"run.dir={tmp_path}", "run.name=mine"])
    return tmp_path / "mine"


def test_a_folder_writes_what_transformers_does_until_its_text_ends(pooled, tmp_path, capsys):
    source = save_tokenizer(folders.save("llama", tmp_path / "source"), VOCAB)
    codec = TokenizerCodec(source)
    prompt = "alpha beta"
    truth = of_transformers("llama", codec.encode(prompt), 10)
    options = ["--prompt", prompt, "--max-new-tokens", "10", FLOAT64]
    command = ["generate", str(source), *options, "--pipe", "2", "--tensor", "2"]
    assert main(command) == 0
    assert capsys.readouterr().out == f"{prompt}{codec.decode(truth)}\n"
    # with one of these as the end of text
    at = next(i for i in range(1, 10) if truth[i] not in truth[:i])
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, truth[at]]}))
    assert main(["generate", str(source), *options]) == 0
    assert capsys.readouterr().out == f"{prompt}{codec.decode(truth[:at])}\n"


@pytest.mark.parametrize("bos", [True, False])
def test_a_prompt_begins_as_documents_do_in_training(tmp_path, monkeypatch, bos):
    """Of a run and of a folder, with each choice."""
    asked: list[GenerateRequest] = []
    monkeypatch.setattr(_inference, "on_ranks", lambda *args: asked.append(args[-1]))
    folder = save_tokenizer(folders.save("llama", tmp_path / "source"), VOCAB, bos=bos)
    (tmp_path / "text.txt").write_text("alpha beta")
    data = {"name": "text", "path": str(tmp_path / "text.txt"), "tokenizer": str(folder)}
    for choice in ("auto", "off"):
        text = json.dumps({"model": {"vocab": VOCAB}, "data": {**data, "bos": choice}})
        config = loads(text)
        (tmp_path / "resolved.yaml").write_text(config.to_yaml())
        prompt = ["--prompt", "alpha beta"]
        assert main(["generate", str(tmp_path), *prompt, "--checkpoint", str(tmp_path)]) == 0
        assert main(["generate", str(folder), *prompt, f"data.bos={choice}"]) == 0
        of_run, of_folder = asked[-2:]
        document = tokenized(text_source(config, config.data), tmp_path / "cache").tokens.tolist()
        assert of_run.prompts == of_folder.prompts == (tuple(document[:-1]),)
        assert (of_run.prompts[0][0] == 2) == (bos and choice == "auto")
    assert main(["generate", str(folder), *prompt, "data.bos=on"]) == (0 if bos else 2)


def test_several_prompts_of_a_run_one_of_them_in_a_file(pooled, run, tmp_path, capsys):
    (tmp_path / "prompt.txt").write_text("to\n")
    texts = ["--prompt", "from", "--prompt-file", str(tmp_path / "prompt.txt")]
    sampled = ["--temperature", "1", "--top-k", "50", "--top-p", "0.9", "--seed", "5"]
    command = ["generate", str(run), *texts, *sampled, "--max-new-tokens", "9"]
    assert main(command) == 0
    first = capsys.readouterr().out
    assert first.startswith("[1/2] from") and "\n[2/2] to" in first
    assert main([*command, "--pipe", "1", "--tensor", "2"]) == 0
    assert capsys.readouterr().out == first
    assert main([*command[:-4], "--max-new-tokens", "9", "--seed", "6"]) == 0
    assert capsys.readouterr().out != first


def test_a_message_is_answered_by_the_chat_template_until_the_turn_ends(pooled, tmp_path, capsys):
    source = save_tokenizer(folders.save("llama", tmp_path / "source"), VOCAB)
    (source / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role[0] + m.content + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'a' }}{% endif %}"
    )
    (source / "generation_config.json").write_text("{}")
    codec = TokenizerCodec(source)
    ids = codec.encode("umu nu</s>a")
    wide = ["--max-new-tokens", "5", FLOAT64, "--prompt", "mu nu", "--prompt", "xi", "--batch", "2"]
    truth = of_transformers("llama", ids, 5)
    assert main(["generate", str(source), "--chat", *wide]) == 0
    assert capsys.readouterr().out.startswith(f"[1/2] mu nu\n{codec.decode(truth)}\n[2/2] xi\n")
    asked: list[GenerateRequest] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_inference, "on_ranks", lambda *args: asked.append(args[-1]))
        assert main(["generate", str(source), "--chat", *wide, "--stop", "a"]) == 0
    (end,), (a,) = (codec._tokenizer.encode(text).ids for text in ("</s>", "a"))
    assert asked[0].stops[-2:] == (a, end)
    assert asked[0].prompts[0] == tuple(ids)


def test_a_damaged_newest_checkpoint_is_passed_over(pooled, run, capsys):
    newest = run / "checkpoints" / "step_000002"
    good = shutil.copytree(run / "checkpoints" / "step_000001", newest).with_name("step_000001")
    manifest = replace(read_manifest(good), step=2)
    (newest / "manifest.json").write_text(manifest.to_json())
    for file in newest.glob("*.safetensors"):
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    assert main(["generate", str(run), "--prompt", "a", "--max-new-tokens", "2"]) == 0
    named = ["--checkpoint", str(newest)]
    capsys.readouterr()
    assert main(["generate", str(run), "--prompt", "a", *named]) == 1
    assert "is damaged" in capsys.readouterr().err


def test_mistakes_are_listed_at_once_and_no_rank_starts(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(_inference, "run_local", None)

    def refused(*args: str) -> str:
        assert main(["generate", *args]) == 2
        return capsys.readouterr().err

    none = str(tmp_path / "none")
    said = refused(none, "optim.lrr=1", "--prompt-file", none, "--temperature", "-2")
    for text in (
        "4 problems in tdp generate:",
        f"{none}: there is no such folder; name the folder of a run",
        "optim.lrr=1: unknown key; did you mean optim.lr?",
        f"--prompt-file {none} cannot be read",
        "--temperature -2.0: use a finite number, 0 or more",
    ):
        assert text in said, said
    tokenizer = save_tokenizer(tmp_path / "tokenizer", 300)
    said = refused(
        *(str(run), "optim.lrr=1", "--tensor", "8"),
        *("--prompt", "alpha beta gamma delta", "--prompt", ""),
        *("--tokenizer", str(tokenizer), "--top-k", "5", "--top-p", "1.5"),
        *("--prompt-file", str(tmp_path / "none"), "--checkpoint", str(tmp_path / "none")),
    )
    for text in (
        "has 300 ids, but the model has a vocabulary of 256",
        "prompt 2 is empty",
        "--top-k 5 has no effect with --temperature 0",
        "--top-p 1.5: use a probability",
        f"--prompt-file {tmp_path / 'none'} cannot be read",
        f"--checkpoint {tmp_path / 'none'}: there is no such folder",
        "optim.lrr=1: unknown key",
        "cannot be shared by parallel.tensor=8",
    ):
        assert text in said, said
    assert "prompt 1 has 11 tokens, but the model takes at most 8; shorten it by 3" in refused(
        str(run), "--prompt", "hello world"
    )
    assert "give --prompt TEXT or --prompt-file FILE" in refused(str(run))
    assert r"'caf\udce9' is not valid UTF-8" in refused(str(run), "--prompt", "caf\udce9")
    assert "use a finite number" in refused(str(run), "--prompt", "a", "--temperature", "inf")
    said = refused(str(run), "--prompt", "a", "--tokenizer", str(tmp_path))
    assert "tokenizer.json is not a file" in said
    assert "neither resolved.yaml nor config.json" in refused(str(tmp_path), "--prompt", "a")
    assert "cannot be shared by parallel.tensor=8" in refused(
        str(run), "--prompt", "a", "--tensor", "8"
    )
    said = refused(str(run), "--prompt", "a", "--chat", "--stop", "ab")
    assert "--chat needs" in said and "--stop 'ab' is not a single token" in said
    plain = save_tokenizer(folders.save("llama", tmp_path / "plain"), VOCAB)
    said = refused(str(plain), "--prompt", "a", "--chat")
    assert f"{plain} has none, neither as chat_template.jinja" in said
    source = folders.save("gpt2", tmp_path / "source")
    assert f"{source} has no tokenizer" in refused(str(source), "--prompt", "a")
    (run / "checkpoints").rename(tmp_path / "moved")
    assert "has no complete checkpoint" in refused(str(run), "--prompt", "a")


@pytest.mark.full
def test_on_processes_of_its_own(run, capfd):
    assert main(["generate", str(run), "--prompt", "a", "--max-new-tokens", "3"]) == 0
    assert capfd.readouterr().out.startswith("a")
