"""Packing of tokenized documents: each token of an epoch occurs once, in any layout."""

import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.data.texts import json_lines, pairs, save_lines, save_tokenizer, sentences
from tests.tells import facts_pattern
from tests.train import parity
from torchdistpackage.cli.main import main
from torchdistpackage.data.packing import PackedDataset
from torchdistpackage.data.source import IGNORE, DataSource
from torchdistpackage.data.tokens.documents import TextSource
from torchdistpackage.data.tokens.token_cache import tokenized
from torchdistpackage.data.tokens.token_encoder import load_tokenizer
from torchdistpackage.errors import ConfigError, DataError
from torchdistpackage.train.evaluation import DocumentWindows

IGNORED = -100


def dataset(source: TextSource, folder: Path, **changes) -> PackedDataset:
    options = {"vocab": 300, "seq_len": 16, "global_batch": 8, "val_fraction": 0.2, **changes}
    return PackedDataset(tokenized(source, folder / "cache"), **options)


def samples(data: PackedDataset, split: str, number: int, first: int = 0, seed: int = 7):
    """Yield samples one by one, by step and index in it."""
    for n in range(first, first + number):
        step, place = divmod(n, 8)
        step += split == "train"
        yield tuple(x[0] for x in data.batch(split, seed, step, 0, 1, 1, first=place))


def test_ids_are_those_of_the_tokenizer_with_an_end_of_text(tmp_path):
    texts = sentences(30)
    source = json_lines(tmp_path, texts)
    found = tokenized(source, tmp_path / "cache")
    tokenizer, eos = load_tokenizer(Path(source.tokenizer))
    assert eos == tokenizer.token_to_id("</s>") == found.eos and found.tokens.dtype == np.uint16
    for i, (start, end) in enumerate(zip(found.starts, found.ends, strict=True)):
        ids = found.tokens[start:end].tolist()
        assert ids == [*tokenizer.encode(texts[i]).ids, eos]
        assert tokenizer.decode(ids[:-1]) == texts[i]
    assert found.origin(4) == f"{tmp_path}/data.jsonl:5"


def test_an_end_of_text_that_is_no_token_is_refused(tmp_path):
    source = json_lines(tmp_path, sentences(3))
    settings = Path(source.tokenizer) / "tokenizer_config.json"
    settings.write_text('{"eos_token": "<end>"}')
    with pytest.raises(DataError, match=facts_pattern("'<end>'", "tokenizer.json")):
        tokenized(source, tmp_path / "cache")
    settings.write_text("{}")
    assert tokenized(source, tmp_path / "cache").eos is not None


def test_an_entry_is_found_by_content_and_made_once(tmp_path):
    source, cache = json_lines(tmp_path, sentences(1200)), tmp_path / "cache"
    told: list[tuple[int, int]] = []
    made = tokenized(source, cache, lambda done, total: told.append((done, total)))
    size = Path(source.path).stat().st_size
    assert len(told) >= 3 and told == sorted(told) and told[-1] == (size, size)
    told.clear()
    elsewhere = tmp_path / "copy"
    elsewhere.mkdir()
    shutil.copy(source.path, elsewhere / "other.jsonl")
    shutil.copytree(source.tokenizer, elsewhere / "t")
    moved = TextSource("jsonl", str(elsewhere), str(elsewhere / "t"))
    assert tokenized(moved, cache, lambda *at: told.append(at)).folder == made.folder and not told
    with Path(source.path).open("a") as file:
        file.write('{"text": "one more"}\n')
    assert tokenized(source, cache).folder != made.folder
    save_tokenizer(Path(source.tokenizer), 280)
    assert tokenized(source, cache).vocab == 280
    assert len([path for path in cache.iterdir() if path.is_dir()]) == 3
    assert not list(cache.glob("*.draft"))


def reference(data: PackedDataset, documents: np.ndarray) -> tuple[list[int], list[bool]]:
    """Return the tokens of these documents in order, and which of them may be targets."""
    tokens, counts, text = [], [], data.text
    for i in documents:
        piece = slice(int(text.starts[i]), int(text.ends[i]))
        counted = (
            text.counted[piece] if text.counted is not None else np.ones(len(text.tokens[piece]))
        )
        tokens += text.tokens[piece].tolist()
        counts += [False, *(counted[1:] != 0).tolist()]
    return tokens, counts


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("kind", ["texts", "pairs"])
def test_an_epoch_has_every_token_once_and_counts_no_other_documents_next(tmp_path, split, kind):
    texts = sentences(40)
    source = json_lines(tmp_path, texts)
    if kind == "pairs":
        source = pairs(tmp_path, [(" ".join(t.split()[:2]), t) for t in texts])
    data = dataset(source, tmp_path)
    epochs = []
    per_epoch = data.num_samples[split]
    for epoch in range(2):
        order = data._order(split, 7, epoch if split == "train" else 0).documents
        tokens, counts = reference(data, order)
        assert per_epoch == -(-(len(tokens) - 1) // 16)
        for n, (ids, targets) in enumerate(samples(data, split, per_epoch, epoch * per_epoch)):
            at = n * 16
            here = tokens[at : at + 16]
            assert ids.tolist() == here + [0] * (16 - len(here))
            want = [
                token if count else IGNORED
                for token, count in zip(
                    tokens[at + 1 : at + 17], counts[at + 1 : at + 17], strict=True
                )
            ]
            assert targets.tolist() == want + [IGNORED] * (16 - len(want))
        epochs.append(order.tolist())
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert (epochs[0] != epochs[1]) == (split == "train")


def test_prompts_never_count(tmp_path):
    data = dataset(pairs(tmp_path, [("alpha beta", "gamma"), ("delta", "mu nu")] * 20), tmp_path)
    tokenizer, eos = load_tokenizer(tmp_path / "tokenizer")
    completions = {*tokenizer.encode("gamma").ids, *tokenizer.encode("mu nu").ids, eos}
    _, targets = data.batch("train", 1, 1, 0, 1, 8)
    assert {*targets.flatten().tolist()} <= completions | {IGNORED}
    assert (targets == eos).any()


@pytest.mark.parametrize("split", ["train", "val"])
def test_every_layout_sees_the_same_samples_across_epochs(tmp_path, split):
    data = dataset(json_lines(tmp_path, sentences(30)), tmp_path)
    assert isinstance(data, DataSource) and data.num_samples["train"] % 8
    last = -(-data.num_samples["train"] // 8) + 1
    for step in (1, 2, last):
        ids, targets = data.batch(split, 3, step, 0, 1, 8)
        fresh = dataset(json_lines(tmp_path, sentences(30)), tmp_path)  # resumed at that step
        # a validation has no rounds
        for num_data, rounds in ((2, 1), (4, 1), *[(2, 2)] * (split == "train")):
            per_rank = 8 // num_data // rounds
            parts = [
                fresh.batch(split, 3, step, d, num_data, per_rank, first=r * num_data * per_rank)
                for r in range(rounds)
                for d in range(num_data)
            ]
            assert torch.equal(torch.cat([p[0] for p in parts]), ids)
            assert torch.equal(torch.cat([p[1] for p in parts]), targets)


def test_equal_texts_are_on_one_side_and_sides_share_none(tmp_path):
    texts = sentences(60) * 2
    data = dataset(json_lines(tmp_path, texts), tmp_path, val_fraction=0.3)
    train, val = ({texts[i] for i in data.split.parts[s].documents} for s in ("train", "val"))
    assert train and val and not train & val and len(train | val) == 60
    few = dataset(json_lines(tmp_path, sentences(2)), tmp_path, val_fraction=1e-9, seq_len=1)
    assert [len(few.split.parts[s].documents) for s in ("train", "val")] == [1, 1]


def test_files_of_a_folder_are_documents(tmp_path):
    texts = tmp_path / "texts"
    (texts / "below").mkdir(parents=True)
    (texts / "b.txt").write_text("beta " * 30)
    (texts / "below" / "a.md").write_text("älpha " * 30)
    (texts / ".hidden").write_text("no")
    os.mkfifo(texts / "pipe")
    tokenizer = save_tokenizer(tmp_path / "t")
    found = tokenized(TextSource("text", str(texts), str(tokenizer)), tmp_path / "cache")
    assert len(found.ends) == 2 and found.origin(1) == f"{texts}/below/a.md:1"


def write_parquet(path: Path, rows: dict[str, list]) -> None:
    arrow = pytest.importorskip("pyarrow", reason="parquet files are optional")
    from pyarrow import parquet

    parquet.write_table(arrow.table(rows), path)


def test_parquet_files_are_read(tmp_path):
    texts, tokenizer = sentences(20), str(save_tokenizer(tmp_path / "t"))
    write_parquet(tmp_path / "a.parquet", {"body+": texts, "n": list(range(20))})
    source = TextSource("parquet", str(tmp_path), tokenizer, "body+")
    found = tokenized(source, tmp_path / "cache")
    lines = save_lines(tmp_path / "x.jsonl", [{"body+": text} for text in texts])
    other = tokenized(replace(source, kind="jsonl", path=str(lines)), tmp_path / "cache")
    assert np.array_equal(found.tokens, other.tokens) and np.array_equal(found.ends, other.ends)
    with pytest.raises(DataError, match=facts_pattern("a.parquet", "'text'")):
        tokenized(replace(source, field="text"), tmp_path / "cache")
    (tmp_path / "b.parquet").write_bytes(b"no")
    with pytest.raises(DataError, match=r"cannot read .*b\.parquet as parquet"):
        tokenized(source, tmp_path / "cache")


def test_without_its_library_parquet_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    source = TextSource("parquet", str(tmp_path), str(save_tokenizer(tmp_path / "t")))
    with pytest.raises(DataError, match=r"parquet needs pyarrow.*or write JSON lines"):
        tokenized(source, tmp_path / "cache")


@pytest.mark.parametrize(
    ("lines", "field", "text"),
    [
        ('{"text": "a"}\n{"text": ', "text", r"data\.jsonl:2: not JSON: "),
        ('{"text": "a"}\n\n{"text": 5}\n', "text", r"data\.jsonl:3: field 'text' is a int"),
        ("[1]\n", "text", r"data\.jsonl:1: got a JSON list; write one JSON object on each line"),
        ('{"body": "a"}\n', "text", r"data\.jsonl:1: no field 'text'; there are body \(data.field"),
        ('{"text": 5}\n', "text", r"data\.jsonl:1: field 'text' is a int; write a text"),
        ('{"text": ""}\n', "text", r"data\.jsonl:1: field 'text' is empty; remove this document"),
        (
            '{"text": "a\\ud800"}\n',
            "text",
            r"data\.jsonl:1: field 'text' is not Unicode text: character 1",
        ),
        ('{"prompt": "a"}\n', "prompt+completion", r"data\.jsonl:1: no field 'completion'"),
        ("[" * 100_000, "text", r"data\.jsonl:1: not JSON: it is nested too deeply"),
        (b'{"text": "\xff"}\n', "text", r"data\.jsonl:1: not JSON: "),
        ("", "text", r"data\.jsonl holds no token"),
    ],
)
def test_lines_that_are_no_documents_are_named(tmp_path, lines, field, text):
    path = tmp_path / "data.jsonl"
    path.write_bytes(lines if isinstance(lines, bytes) else lines.encode())
    source = TextSource("jsonl", str(path), str(save_tokenizer(tmp_path / "t")), field)
    with pytest.raises(DataError, match=text):
        tokenized(source, tmp_path / "cache")
    assert not [p for p in (tmp_path / "cache").iterdir() if p.is_dir()], "nothing half made stays"


def test_missing_and_wrong_files_are_refused(tmp_path):
    source, cache = json_lines(tmp_path, sentences(10)), tmp_path / "cache"
    with pytest.raises(DataError, match=r"tokenizer\.json is not a file; name a folder"):
        tokenized(replace(source, tokenizer=str(tmp_path)), cache)
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(DataError, match=r"bad\.json is not a tokenizer of the tokenizers library"):
        tokenized(replace(source, tokenizer=str(tmp_path / "bad.json")), cache)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty has no \.jsonl file"):
        tokenized(replace(source, path=str(tmp_path / "empty")), cache)
    (tmp_path / "latin.txt").write_bytes(b"\xe4")
    with pytest.raises(DataError, match=facts_pattern("latin.txt", "UTF", "8 text", "byte 0")):
        tokenized(replace(source, kind="text", path=str(tmp_path / "latin.txt")), cache)
    found = tokenized(source, cache)
    (found.folder / "tokens.bin").write_bytes(b"\0\0")
    with pytest.raises(DataError, match=r"is damaged \(tokens\.bin has changed since"):
        tokenized(source, cache)


def test_what_does_not_fit_the_run_is_said_at_once(tmp_path):
    with pytest.raises(DataError) as caught:
        dataset(json_lines(tmp_path, sentences(6)), tmp_path, vocab=100, seq_len=5000)
    for text in ("300 ids, but model.vocab is 100; set", "the train split has", "the val split"):
        assert text in str(caught.value)
    long = [("alpha", "beta")] * 9 + [(" ".join(["gamma"] * 30), "mu")]
    with pytest.raises(DataError, match=r"pairs\.jsonl:10: a prompt of \d+ tokens .* 1 of 10"):
        dataset(pairs(tmp_path, long), tmp_path, seq_len=8)
    data = dataset(json_lines(tmp_path, sentences(30)), tmp_path)
    with pytest.raises(DataError, match="there is no split 'test'; use train or val"):
        data.batch("test", 0, 1, 0, 1, 1)  # type: ignore[arg-type]


def save_words(folder: Path, ids: dict[str, int]) -> Path:
    """Return a tokenizer of these words only, without an end of text or an unknown token."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel(ids))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    return folder


def test_ids_with_gaps_keep_their_numbers(tmp_path):
    rows = [{"text": f"near far {'near ' * n}"} for n in range(40)]
    path = save_lines(tmp_path / "data.jsonl", rows)
    tokenizer = save_words(tmp_path / "words", {"near": 0, "far": 70_000})
    source = TextSource("jsonl", str(path), str(tokenizer))
    found = tokenized(source, tmp_path / "cache")
    assert found.vocab == 70_001 and found.tokens[:2].tolist() == [0, 70_000]
    with pytest.raises(DataError, match=r"70001 ids, but model\.vocab is 70000"):
        dataset(source, tmp_path, vocab=70_000, seq_len=4)


def test_a_document_may_have_no_token(tmp_path):
    texts = [("near", " "), *[("near", " far" * (n + 3)) for n in range(40)], ("", " ")]
    rows = [{"prompt": prompt, "completion": text} for prompt, text in texts]
    path = save_lines(tmp_path / "pairs.jsonl", rows)
    tokenizer = save_words(tmp_path / "words", {"near": 0, "far": 1})
    data = dataset(
        TextSource("jsonl", str(path), str(tokenizer), "prompt+completion"), tmp_path, seq_len=4
    )
    assert data.text.ends[-1] == data.text.ends[-2]
    for split in ("train", "val"):
        for ids, targets in samples(data, split, data.num_samples[split]):
            assert not (targets == 0).any(), "a prompt never counts"
            assert (targets[:-1][targets[:-1] == 1] == ids[1:][targets[:-1] == 1]).all()


def test_texts_that_the_tokenizer_cannot_take_are_named(tmp_path):
    path = save_lines(tmp_path / "data.jsonl", [{"text": "near"}, {"text": "elsewhere"}])
    tokenizer = save_words(tmp_path / "words", {"near": 0})
    with pytest.raises(DataError, match=facts_pattern("data.jsonl", "documents 1", "2")):
        tokenized(TextSource("jsonl", str(path), str(tokenizer)), tmp_path / "cache")


RUN = [
    *("model.layers=2", "model.dim=16", "model.heads=2", "model.vocab=300", "data.seq_len=16"),
    *("data.global_batch=8", "pipeline.microbatches=2", "train.steps=3", "optim.warmup_steps=1"),
    *("train.eval_batches=1", "precision.dtype=float64", "data.name=jsonl"),
]


def trained(overrides: list[str]) -> list[float]:
    run = parity.trainer([*RUN, *overrides])
    losses = [run.train_step(step).wait().loss for step in (1, 2)]
    losses.append(run.evaluate() or 0.0)
    run.close()
    return losses


def test_a_run_trains_alike_on_every_layout_and_ranks_tokenize_once(ranks, tmp_path):
    source = json_lines(tmp_path, sentences(40))
    where = [f"data.path={source.path}", f"data.tokenizer={source.tokenizer}"]
    where.append(f"data.cache={tmp_path}/cache")
    pipe = ranks(2).run(trained, [*where, "parallel.pipe=2"])
    assert len([path for path in (tmp_path / "cache").iterdir() if path.is_dir()]) == 1
    (alone,) = ranks(1).run(trained, where)
    data = ranks(2).run(trained, [*where, "parallel.data=2"])
    for losses in (*pipe, *data):
        assert losses == pytest.approx(alone, rel=1e-12)


def test_tdp_data_tokenizes_ahead(tmp_path, capsys):
    source = json_lines(tmp_path, sentences(12))
    config = tmp_path / "run.yaml"
    section = {"name": "jsonl", "path": source.path, "tokenizer": source.tokenizer}
    config.write_text(json.dumps({"data": section, "run": {"dir": str(tmp_path / "runs")}}))
    assert main(["data", "tokenize", str(config)]) == 0
    said = capsys.readouterr()
    found = tokenized(source, tmp_path / "runs" / "tokens")
    assert f"tokens of 12 documents, vocabulary 300, in {found.folder}\n" in said.out
    assert f"{len(found.tokens):,} tokens" in said.out
    with Path(source.path).open("a") as file:
        file.write("no\n")
    assert main(["data", "tokenize", str(config)]) == 2
    assert "data.jsonl:13: not JSON" in capsys.readouterr().err
    assert main(["data", "tokenize", str(config), "data.name=text", "data.tokenizer=null"]) == 2
    assert "nothing to tokenize" in capsys.readouterr().err


def test_tdp_data_tokenize_checks_the_sections_it_reads(tmp_path, capsys):
    source = json_lines(tmp_path, sentences(12))
    wrong_elsewhere = {
        "model": {"hf": str(tmp_path / "not here"), "layrs": 2},
        "optim": {"warmup_steps": 9},
        "train": {"steps": 5, "memory_gb": "much"},
        "launch": {"slurm": {"nodes": "many"}, "local": {"procs": 3}},
        "parallel": {"data": 2},
    }
    section = {"name": "jsonl", "path": source.path, "tokenizer": source.tokenizer}
    text = {"run": {"dir": str(tmp_path / "runs")}, "data": section, **wrong_elsewhere}
    (config := tmp_path / "run.yaml").write_text(json.dumps(text))
    assert main(["data", "tokenize", str(config)]) == 0
    assert "tokens of 12 documents" in capsys.readouterr().out
    assert main(["data", "tokenize", str(config), "data.seq_len=0", "data.dtype=uint8"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert said.startswith("tdp: 2 problems in") and "data.seq_len=0: wants" in said
    assert "data.dtype=uint8 has no effect with data.name=jsonl" in said
    assert main(["data", "tokenize", str(config), "dta.path=x"]) == 2
    assert "dta: unknown key; did you mean data?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["data.name=jsonl", "data.path=x"], "data.name=jsonl needs data.tokenizer, a folder"),
        (["data.name=parquet", "data.tokenizer=t"], "needs data.path, the file or folder to read"),
        (["data.tokenizer=t"], "data.tokenizer=t has no effect with data.name=python_stdlib"),
        (["data.field=body"], "data.field=body has no effect with data.name=python_stdlib"),
        (["data.cache=c"], "data.cache=c has no effect without data.tokenizer"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(overrides, text):
    with pytest.raises(ConfigError, match=text):
        parity.config(overrides)


@pytest.mark.parametrize("packing", ["auto", "wrapped"])
def test_windows_of_an_evaluation_are_packed_as_training_packs(tmp_path, packing):
    """Check what docs/generate.md says about the windows of chats."""
    texts = sentences(20, seed=3)
    found = tokenized(pairs(tmp_path, [(f"q {i}", x) for i, x in enumerate(texts)]), tmp_path / "c")
    lengths, size = np.diff(found.ends, prepend=0), 40
    assert lengths.min() < size < lengths.max()
    options = {"vocab": 300, "seq_len": size, "global_batch": 4, "val_fraction": 1.0}
    windows = DocumentWindows(PackedDataset(found, packing=packing, **options))
    ids, targets, _ = windows.read(0, windows.number)
    counted = found.counted.astype(bool) & ~np.isin(np.arange(len(found.tokens)), found.starts)
    assert int((targets != IGNORE).sum()) == counted.sum(), "each token is predicted once"
    rows = [[*row.tolist(), int(last)] for row, last in zip(ids, targets[:, -1], strict=True)]
    whole = [
        any(
            row[at : at + last - first] == found.tokens[first:last].tolist()
            for row in rows
            for at in range(size + 1)
        )
        for first, last in zip(found.starts, found.ends, strict=True)
    ]
    if packing == "auto":
        assert whole == (lengths <= size + 1).tolist()
        padded = sum(row[-2] == 0 for row in rows)
        assert padded, "what no document fits into"
    else:
        stream = ids.flatten()[: len(found.tokens) - 1].tolist()
        assert stream == found.tokens[:-1].tolist(), "one after another"


def test_without_packing_each_document_has_a_sample_of_its_own(tmp_path):
    """One that is longer than a sample goes on in the next, from its last token there."""
    found = tokenized(json_lines(tmp_path, sentences(40)), tmp_path / "cache")
    options = {"vocab": 300, "seq_len": 24, "global_batch": 8, "val_fraction": 0.0}
    data = PackedDataset(found, packing="none", document_masks=True, **options)
    expected = []
    for first, last in zip(found.starts, found.ends, strict=True):
        tokens = found.tokens[first:last].tolist()
        pieces = [tokens[at : at + 25] for at in range(0, max(len(tokens) - 1, 0), 24)]
        expected += pieces
    assert any(len(x) == 25 for x in expected) and any(len(x) < 20 for x in expected)
    got = []
    for ids, targets, positions in samples(data, "train", data.num_samples["train"]):
        counted = int((targets != IGNORE).sum())
        got.append([*ids[:counted].tolist(), int(targets[counted - 1])])
        assert targets[counted:].eq(IGNORE).all() and ids[counted + 1 :].eq(0).all()
        assert positions[:counted].tolist() == list(range(counted))
    assert sorted(got) == sorted(expected)
