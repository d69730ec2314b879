"""A single text is cut in two for validation; a side too short for a sample is refused."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.data.texts import json_lines, pairs, save_tokenizer, sentences
from tests.train import parity
from torchdistpackage.cli.main import main
from torchdistpackage.config.data_split import split_at_end, too_few_tokens
from torchdistpackage.data.packing import PackedDataset
from torchdistpackage.data.tokens.documents import TextSource
from torchdistpackage.data.tokens.split import split_documents
from torchdistpackage.data.tokens.token_cache import TokenizedText, tokenized
from torchdistpackage.errors import DataError
from torchdistpackage.train import job
from torchdistpackage.train.evaluation import DocumentWindows

OPTIONS = {"vocab": 300, "seq_len": 16, "global_batch": 8, "val_fraction": 0.1}


def one_file(folder: Path, words: int = 600) -> TextSource:
    text = " ".join(sentences(40))
    (folder / "text.txt").write_text(" ".join(text.split()[:words]))
    return TextSource("text", f"{folder}/text.txt", str(save_tokenizer(folder / "tokenizer")))


def tokens_of(data: PackedDataset, split: str) -> list[int]:
    """Return all tokens of an epoch; its samples, except the last one, share none."""
    found, number = list[int](), data.num_samples[split]
    for n in range(number):
        step, place = divmod(n, 8)
        ids, targets = data.batch(split, 1, step + (split == "train"), 0, 1, 1, first=place)[:2]
        found += ids[0].tolist()
        kept = targets[0] >= 0
        kept[-1] = False  # the next sample has it
        assert torch.equal(targets[0][kept], ids[0].roll(-1)[kept])
    return found


@pytest.mark.parametrize("copies", [1, 3])
@pytest.mark.parametrize("masks", [False, True])
def test_the_end_of_a_single_text_is_for_validation(tmp_path, copies, masks):
    """Check that copies are cut the same, so that training sees nothing of validation."""
    source = one_file(tmp_path)
    if copies > 1:
        source = json_lines(tmp_path, [Path(source.path).read_text()] * copies)
    text = tokenized(source, tmp_path / "cache")
    document = text.tokens[: text.ends[0]].tolist()
    data = PackedDataset(text, **OPTIONS, document_masks=masks)
    num_val = round(len(document) * 0.1)
    for split, piece in (("train", document[:-num_val]), ("val", document[-num_val:])):
        whole = piece * copies
        assert data.num_samples[split] == -(-(len(whole) - 1) // 16)
        found = tokens_of(data, split)
        # the last token may be a target alone
        assert found[: len(whole)] == whole[: len(found)] and len(found) >= len(whole) - 1
        first = data.batch(split, 1, int(split == "train"), 0, 1, 1)
        again = PackedDataset(text, **OPTIONS, document_masks=masks)
        for mine, other in zip(
            first, again.batch(split, 1, int(split == "train"), 0, 1, 1), strict=True
        ):
            assert torch.equal(mine, other)
    assert f"its last {num_val * copies} of {len(document) * copies:,} tokens" in data.split.note
    whole = PackedDataset(text, **{**OPTIONS, "val_fraction": 1.0})
    assert whole.split.note is None and DocumentWindows(whole).number == whole.num_samples["val"]
    assert tokens_of(whole, "val")[: len(document)] == document


def test_documents_of_two_texts_are_never_cut(tmp_path):
    text = tokenized(json_lines(tmp_path, sentences(2)), tmp_path / "cache")
    split = split_documents(text, 0.1)
    assert split.note is None
    for part in split.parts.values():
        assert len(part.documents) == 1
        assert np.array_equal(part.starts, text.starts)
        assert np.array_equal(part.lengths, text.ends - text.starts)


def test_a_single_document_that_is_too_short_is_refused_with_what_would_do(tmp_path):
    text = tokenized(one_file(tmp_path, words=60), tmp_path / "cache")
    total = len(text.tokens)

    def refused(text: TokenizedText, **changes) -> str:
        with pytest.raises(DataError) as caught:
            PackedDataset(text, **{**OPTIONS, **changes})
        return str(caught.value)

    said = refused(text)
    number = round(total * 0.1)
    assert (
        f"the val split has {number} tokens, the end of the only document, but one sample takes 17 "
        f"(data.seq_len=16 and the next token); use more text, or set data.seq_len to {number - 1} "
        f"or less, or raise data.val_fraction to "
    ) in said
    fraction = float(said.rpartition("val_fraction to ")[2].split()[0])
    PackedDataset(text, **{**OPTIONS, "val_fraction": fraction})
    PackedDataset(text, **{**OPTIONS, "seq_len": number - 1})
    for worse in ({"val_fraction": fraction - 0.01}, {"seq_len": number}):
        assert "the val split has" in refused(text, **worse)
    said = refused(text, seq_len=500)
    assert "the train split has" in said and "val_fraction" not in said
    prompts = tokenized(pairs(tmp_path, [("alpha", "beta " * 90)]), tmp_path / "cache")
    assert "the val split has no document: there is only one, and with prompts it is not cut" in (
        refused(prompts)
    )


def test_a_fraction_that_is_named_is_enough():
    for total in range(1, 400):
        text = too_few_tokens("val", 1, 16, total=total)
        assert text is not None
        _, _, named = text.partition("raise data.val_fraction to ")
        if named:
            fraction = float(named.split()[0])
            assert min(split_at_end(total, fraction)) >= 17 and fraction <= 0.5
        else:
            assert total < 35, "two samples, and half a thousandth"


RUN = [
    *("model.layers=2", "model.dim=16", "model.heads=2", "model.vocab=300", "data.seq_len=16"),
    *("data.global_batch=8", "pipeline.microbatches=2", "train.steps=3", "optim.warmup_steps=1"),
    *("train.eval_batches=1", "precision.dtype=float64", "data.name=text"),
]


def trained(overrides: list[str]) -> list[float]:
    run = parity.trainer([*RUN, *overrides])
    losses = [run.train_step(step).wait().loss for step in (1, 2)]
    losses.append(run.evaluate() or 0.0)
    run.close()
    return losses


def test_one_text_file_trains_alike_on_every_layout(ranks, tmp_path):
    source = one_file(tmp_path)
    where = [f"data.path={source.path}", f"data.tokenizer={source.tokenizer}"]
    where += [f"data.cache={tmp_path}/cache", "train.eval_every=0"]
    (alone,) = ranks(1).run(trained, where)
    for losses in ranks(2).run(trained, [*where, "parallel.data=2"]):
        assert losses == pytest.approx(alone, rel=1e-12)


def test_too_little_text_is_refused_before_ranks_start(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(job, "run_local", None)
    source = one_file(tmp_path, words=40)
    config = tmp_path / "run.yaml"
    config.write_text(f"run: {{dir: {tmp_path}/runs}}\ndata: {{name: text, path: {source.path}}}\n")
    size = Path(source.path).stat().st_size

    def refused(*changes: str) -> str:
        assert main(["train", str(config), *changes]) == 2
        return capsys.readouterr().err

    said = refused()
    number = round(size * 0.05)
    assert f"data.path: {source.path}: the val split has {number} tokens, but one sample" in said
    assert "takes 129" in said
    assert main(["plan", str(config)]) == 2
    tokens = [f"data.tokenizer={source.tokenizer}", "model.vocab=300"]
    said = refused(*tokens, "data.seq_len=32")
    assert "data.path: the val split has" in said and "the end of the only document" in said
    assert main(["data", "tokenize", str(config), *tokens]) == 0
    assert "note: the data are one document, so it is cut: its last" in capsys.readouterr().out
    ids = tmp_path / "ids.bin"
    np.zeros(100, np.uint32).tofile(ids)
    said = refused("data.name=tokens", f"data.path={ids}", "data.dtype=uint32")
    assert "the train split has 95 tokens" in said and "the val split has 5 tokens" in said
    lines = replace(json_lines(tmp_path, sentences(20)), kind="jsonl")
    Path(lines.path).write_text("no\n")
    assert f"{lines.path}:1: not JSON" in refused(
        "data.name=jsonl", f"data.path={lines.path}", *tokens
    )
