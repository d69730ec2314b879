"""`tdp eval` gives the loss of each token once, the same on every layout."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from tests.data.texts import save_lines, save_tokenizer, sentences
from tests.models import hugging_face_folders as folders
from tests.models.coverage import settings
from tests.models.coverage_ranks import make_folder
from tests.models.hugging_face_ranks import VOCAB, save_run
from tests.train import parity
from tests.train.embedding_ranks import pooled as pooled_by
from tests.train.embedding_ranks import ranking_loss
from tests.train.embedding_ranks import row as embedding_row
from tests.train.inference_ranks import run_in
from tests.train.test_transformers import MODELS
from tests.train.transformers_ranks import everywhere_float64, save_model
from torchdistpackage.cli import _inference
from torchdistpackage.cli.main import main
from torchdistpackage.data.tokens.prompts import TokenizerCodec
from torchdistpackage.models.sentence_transformers_folder import add_sentence_transformers
from torchdistpackage.models.transformers_meta import build_options
from torchdistpackage.train.retrieval_metrics import retrieval_metrics

LAYOUTS = {
    "one": [],
    "data2xpipe2": ["--pipe", "2", "parallel.data=2"],
    "pipe2xtensor2": ["--pipe", "2", "--tensor", "2"],
    "data3": ["parallel.data=3"],
    "context2": ["parallel.context=2"],
    "data2xcontext2": ["parallel.data=2", "parallel.context=2"],
    "tensor4, interleaved": ["--tensor", "2", "--pipe", "2", "pipeline.schedule=interleaved"],
    "sequence": ["--tensor", "2", "parallel.sequence_parallel=true"],
}
SMALL_SET = ("one", "data2xpipe2", "context2")
EACH = [n if n in SMALL_SET else pytest.param(n, marks=pytest.mark.full) for n in LAYOUTS]
CHANGES = ["precision.dtype=float64", "data.seq_len=8"]


@pytest.fixture(autouse=True)
def pooled(ranks, monkeypatch):
    monkeypatch.setattr(_inference, "run_local", run_in(ranks))


def evaluated(capsys, *args: object) -> dict:
    assert main(["eval", *map(str, args), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def expected(name: str, tokens: list[int], counts: list[bool]) -> tuple[float, int]:
    """(mean loss, number) of windows of 8 by transformers; counts: of each token as a target."""
    total, number = 0.0, 0
    for at in range(0, len(tokens) - 1, 8):
        window = tokens[at : at + 9]
        logits = folders.in_float64(name, torch.tensor([window[:-1]]))[0]
        losses = F.cross_entropy(logits, torch.tensor(window[1:]), reduction="none")
        kept = torch.tensor(counts[at + 1 : at + len(window)])
        total, number = total + losses[kept].sum().item(), number + int(kept.sum())
    return total / number, number


@pytest.mark.parametrize("layout", EACH)
def test_ids_have_the_loss_of_transformers(tmp_path, capsys, layout):
    """29 tokens: three full windows, and one of four targets."""
    source = folders.save("llama", tmp_path / "source")
    ids = np.random.default_rng(3).integers(0, VOCAB, 29, np.uint16)
    ids.tofile(tmp_path / "ids.bin")
    truth, number = expected("llama", ids.tolist(), [True] * 29)
    command = [source, "--data", tmp_path / "ids.bin", *CHANGES, *LAYOUTS[layout]]
    found = evaluated(capsys, *command)
    assert found["loss"] == pytest.approx(truth, rel=1e-9)
    assert (found["tokens"], found["windows"], number) == (28, 4, 28)
    assert found["perplexity"] == pytest.approx(np.exp(truth), rel=1e-9)


def test_ids_of_a_class_without_a_table_have_the_loss_of_transformers(ranks, tmp_path, capsys):
    """A mixture, whose folder is all that is given."""
    source = tmp_path / "source"
    ranks(1).run(make_folder, settings("mixtral"), str(source))
    ids = np.random.default_rng(3).integers(0, 67, 29, np.uint16)
    ids.tofile(tmp_path / "ids.bin")
    options = build_options(torch.float64)
    model = AutoModelForCausalLM.from_pretrained(source, **options).eval()
    losses = list[float]()
    for at in range(0, 28, 8):
        window = torch.tensor(ids[at : at + 9].astype(np.int64))
        with torch.no_grad():
            logits = model(input_ids=window[None, :-1]).logits[0]
        losses += F.cross_entropy(logits, window[1:], reduction="none").tolist()
    found = evaluated(capsys, source, "--data", tmp_path / "ids.bin", *CHANGES)
    assert (found["loss"], found["tokens"]) == (pytest.approx(np.mean(losses), rel=1e-6), 28)


@pytest.mark.parametrize(
    ("field", "bos"),
    [
        ("text", False),
        ("text", True),
        pytest.param("prompt+completion", False, marks=pytest.mark.full),
        pytest.param("prompt+completion", True, marks=pytest.mark.full),
    ],
)
def test_documents_have_the_masks_of_training(tmp_path, capsys, field, bos):
    """Neither what begins a document counts, nor a prompt."""
    source = save_tokenizer(folders.save("llama", tmp_path / "source"), VOCAB, bos=bos)
    codec = TokenizerCodec(source)
    texts = [(x[:6], x[6:20]) for x in sentences(5)]
    names = ("text",) if field == "text" else ("prompt", "completion")
    rows = [dict(zip(names, x if len(names) > 1 else x[1:], strict=True)) for x in texts]
    file = save_lines(tmp_path / "data.jsonl", rows)
    tokens, counts = list[int](), list[bool]()
    for prompt, text in texts:
        before = [*[2] * bos, *(codec.encode(prompt) if len(names) > 1 else [])]
        ids = [*before, *codec.encode(text), 1]
        tokens += ids
        counts += [i >= len(before) and i > 0 for i in range(len(ids))]
    truth, number = expected("llama", tokens, counts)
    changes = [*CHANGES, f"data.field={field}", f"run.dir={tmp_path}"]
    # documents with prompts would be packed whole, and windows follow one another here
    changes.append("data.packing=wrapped")
    command = [source, "--data", file, *changes, "--pipe", "2", "--tensor", "2"]
    found = evaluated(capsys, *command)
    assert (found["loss"], found["tokens"]) == (pytest.approx(truth, rel=1e-9), number)


def a_run(ranks, folder: Path, *changes: str) -> Path:
    """Of a text file of bytes, the last part of which is for validation."""
    (folder / "all.txt").write_text("".join(sentences(40)))
    data = ["data.name=text", f"data.path={folder / 'all.txt'}", "data.val_fraction=0.1"]
    mine = ["parallel.pipe=2", "parallel.zero=1", f"run.dir={folder}", "run.name=mine"]
    ranks(2).run(save_run, [*data, *mine, *changes])
    return folder / "mine"


def test_a_run_is_evaluated_on_what_it_holds_for_validation(ranks, tmp_path, capsys):
    run = a_run(ranks, tmp_path)
    content = (tmp_path / "all.txt").read_bytes()
    (tmp_path / "end.txt").write_bytes(content[len(content) - round(len(content) * 0.1) :])
    own = evaluated(capsys, run)
    given = evaluated(capsys, run, "--data", tmp_path / "end.txt", "--pipe", 1)
    assert own["tokens"] == given["tokens"] == (tmp_path / "end.txt").stat().st_size - 1
    assert own["loss"] == pytest.approx(given["loss"], rel=1e-9)
    assert (own["step"], own["data"], given["data"][-7:]) == (1, "validation data", "end.txt")
    assert main(["eval", str(run), "--tensor", "2"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"loss {own['loss']:.6f} nats per token, perplexity ")
    assert f", {own['tokens']:,} tokens of validation data, step 1" in said


@pytest.mark.full
@pytest.mark.parametrize("layout", [["--pipe", "1"], ["parallel.data=2"]], ids=" ".join)
def test_a_model_and_data_of_your_own(ranks, tmp_path, capsys, layout):
    own = ["model.name=null", "model.target=tests.train.sources:build", "data.name=null"]
    own += ["model.args={width: 3}", "data.target=tests.train.sources:Line"]
    own += ["model.loss=tests.train.sources:squared_error", "train.eval_batches=3"]
    mine = ["parallel.pipe=2", f"run.dir={tmp_path}", "run.name=mine"]
    losses = ranks(2).run(validated, [*own, *mine])
    found = evaluated(capsys, tmp_path / "mine", *layout)
    assert found["loss"] == pytest.approx(losses[0], rel=1e-9)
    assert (found["tokens"], found["perplexity"]) == (12, None)


def validated(changes: list[str]) -> float | None:
    from tests.models.hugging_face_ranks import START
    from tests.train import parity

    save_run(changes)
    return parity.trainer([*START, *changes]).evaluate()


def embedded_by_transformers(folder: Path, rows: list[dict], section) -> tuple[float, dict]:
    """(loss of batches of 4 lines, metrics of all lines) by transformers and the formula."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = [x for row in rows for x in (row["anchor"], row["positive"], *row["negatives"])]
    encoded = [[*tokenizer.encode(x, add_special_tokens=False).ids, 1] for x in texts]
    width = max(map(len, encoded))
    ids = torch.tensor([[*x, *[0] * (width - len(x))] for x in encoded])
    mask = torch.tensor([[1] * len(x) + [0] * (width - len(x)) for x in encoded])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    with everywhere_float64(), torch.no_grad():
        base = model.model(input_ids=ids, attention_mask=mask, use_cache=False)
        vectors = pooled_by(base.last_hidden_state, mask, section.train.embedding.pooling)
    size, total = 4 * section.data.rows_per_sample, 0.0
    for part, own in zip(vectors.split(size), ids.split(size), strict=True):
        number = len(part) // section.data.rows_per_sample
        total += number * ranking_loss(part, own, section).item()
    numbers = torch.unique(ids, dim=0, return_inverse=True)[1].numpy()
    metrics = retrieval_metrics(vectors.numpy(), numbers, section.data.rows_per_sample)
    return total / len(rows), metrics


EMBEDDING_LAYOUTS = {
    "data2xpipe2": ["parallel.data=2", "--pipe", "2"],
    "tensor2": ["--tensor", "2"],
    "context2": ["parallel.context=2"],
    "data2xcontext2": ["parallel.data=2", "parallel.context=2"],
}


def test_an_embedding_has_the_metrics_of_transformers_on_every_layout(
    ranks, tmp_path, capsys, monkeypatch
):
    """Of a run, a folder of transformers, and one as sentence-transformers has it: 11 lines in
    batches of 4.
    """
    monkeypatch.setattr(_inference, "run_local", run_in(ranks, wide=True))
    source = str(tmp_path / "source")
    config = {**MODELS["llama"], "vocab_size": 300, "tie_word_embeddings": True}
    ranks(1).run(save_model, config, source)
    rows = [embedding_row(i) for i in range(11)]
    path = save_lines(tmp_path / "rows.jsonl", rows)
    save_tokenizer(tmp_path / "source")
    keys = [f"data.path={path}", f"data.tokenizer={source}", f"data.cache={tmp_path}/cache"]
    keys += ["data.name=embedding", "data.num_negatives=1", "data.seq_len=24", f"model.hf={source}"]
    keys += ["data.global_batch=8", "train.accumulate=2", "train.embedding={scale: 5.0}"]
    ranks(1).run(save_run, [*keys, f"run.dir={tmp_path}", "run.name=mine"])
    section = parity.config([*keys, "train.accumulate=1"])
    loss, metrics = embedded_by_transformers(tmp_path / "source", rows, section)
    assert 0 < metrics["ndcg@10"] < 1
    command = [tmp_path / "mine", "--data", path]
    layouts = [[], *EMBEDDING_LAYOUTS.values()]
    found = [evaluated(capsys, *command, *layout) for layout in layouts]
    folder = [source, "--data", path, "data.num_negatives=1", "data.global_batch=4"]
    folder += ["train.embedding.scale=5", "precision.dtype=float64", f"run.dir={tmp_path}"]
    found.append(evaluated(capsys, *folder, "data.name=embedding", "data.seq_len=24"))
    add_sentence_transformers(tmp_path / "source", section, 16)
    found.append(evaluated(capsys, *folder))
    for values in found:
        assert values["loss"] == pytest.approx(loss, rel=1e-9)
        assert {k: values[k] for k in metrics} == pytest.approx(metrics, rel=1e-9)
        assert (values["tokens"], values["perplexity"]) == (11, None)
    assert main(["eval", *map(str, command), "parallel.data=3"]) == 2
    text = capsys.readouterr().err
    assert "data.global_batch=4" in text and "parallel.data=3" in text


def test_mistakes(ranks, tmp_path, capsys):
    source = folders.save("llama", tmp_path / "source")

    def refused(code: int, *args: object) -> str:
        assert main(["eval", *map(str, args)]) == code
        return capsys.readouterr().err

    said = refused(2, tmp_path / "none", "--data", tmp_path / "none.txt", "optim.lrr=1")
    assert "tdp: 3 problems in tdp eval:" in said and "none.txt does not exist" in said
    assert "none: there is no such folder" in said and "optim.lrr=1: unknown key" in said
    said = refused(2, source, "--tensor", "7", "optim.lrr=1")
    assert "give --data FILE" in said and "optim.lrr=1: unknown key" in said
    assert "none.txt does not exist" in refused(2, source, "--data", tmp_path / "none.txt")
    text = tmp_path / "a.txt"
    text.write_text("alpha beta")
    assert "has no tokenizer" in refused(2, source, "--data", text)
    save_tokenizer(source, VOCAB)
    lines = tmp_path / "a.jsonl"
    lines.write_text('{"text": "alpha"}\nbeta\n{"text": 3}\n')
    said = refused(2, source, "--data", lines, f"run.dir={tmp_path}")
    assert [x.split(" ")[2] for x in said.splitlines()[1:]] == [f"{lines}:2:", f"{lines}:3:"]
    np.array([1, VOCAB, 2], np.uint16).tofile(tmp_path / "ids.bin")
    said = refused(1, source, "--data", tmp_path / "ids.bin")
    assert f"token id {VOCAB} at position 1, outside the vocabulary of {VOCAB}" in said
    np.array([1], np.uint16).tofile(tmp_path / "ids.bin")
    assert "1 tokens to evaluate on" in refused(1, source, "--data", tmp_path / "ids.bin")
    save_tokenizer(source, 300)
    said = refused(2, source, "--data", text, f"run.dir={tmp_path}")
    assert f"has 300 ids, but the model has a vocabulary of {VOCAB}" in said
    assert "is not a run" in refused(2, source, "--data", text, "--checkpoint", tmp_path)
