"""Preference pairs from file to rows: the targets that count, refusals, and the order."""

import json

import numpy as np
import pytest

from tests.data.test_chat import CHATML, MARKED, REPLY, USER, chat, parts
from tests.data.texts import save_lines, save_tokenizer
from tests.tells import tells
from torchdistpackage.cli.main import main
from torchdistpackage.config.load import loads
from torchdistpackage.data.blend import BlendedDataset, BlendPart
from torchdistpackage.data.preference_data import PreferenceDataset
from torchdistpackage.data.tokens.documents import TextSource
from torchdistpackage.data.tokens.pair_rows import cut_pairs, pair_problems
from torchdistpackage.data.tokens.token_cache import tokenized
from torchdistpackage.errors import ConfigError, DataError


def source(folder, rows: list, template: str | None = None) -> TextSource:
    path = save_lines(folder / "pairs.jsonl", rows)
    tokenizer = save_tokenizer(folder / "tokenizer")
    if template is not None:
        (tokenizer / "chat_template.jinja").write_text(template)
    return TextSource("preference", str(path), str(tokenizer))


def texts(prompt: str, chosen: str, rejected: str) -> dict[str, str]:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def test_a_line_is_two_documents_whose_answers_count(tmp_path):
    asked = source(tmp_path, [texts("alpha beta", " gamma", " mu nu"), texts("xi", " a", " b")])
    found = tokenized(asked, tmp_path / "cache")
    said = [parts(found, i, asked) for i in range(4)]
    assert said[0] == ("alpha beta gamma</s>", [" gamma</s>"])
    assert said[1] == ("alpha beta mu nu</s>", [" mu nu</s>"])
    assert [text for text, _ in said[2:]] == ["xi a</s>", "xi b</s>"]
    assert found.places[0] == found.places[1] != found.places[2] == found.places[3]
    assert [found.origin(i).rpartition(":")[2] for i in range(4)] == ["1", "1", "2", "2"]


@pytest.mark.parametrize("implied", [False, True])
@pytest.mark.parametrize(
    ("template", "behind"),
    [(CHATML, "<|im_start|>assistant\n{}</s>\n"), (MARKED, "A: {}</s>")],
)
def test_chats_are_written_by_the_template_and_only_the_answer_counts(
    tmp_path, template, behind, implied
):
    prompt = chat("alpha", "beta", "gamma")["messages"]
    answers = [[{"role": "assistant", "content": text}] for text in ("delta", "mu nu")]
    row = {"prompt": prompt, "chosen": answers[0], "rejected": answers[1]}
    if implied:
        row = {"chosen": [*prompt, *answers[0]], "rejected": [*prompt, *answers[1]]}
    asked = source(tmp_path, [row], template)
    found = tokenized(asked, tmp_path / "cache")
    for i, answer in enumerate(("delta", "mu nu")):
        text, said = parts(found, i, asked)
        assert text.endswith(behind.format(answer)) and "beta" in text
        assert [run.strip() for run in said] == [f"{answer}</s>"]


ANSWER = [REPLY]


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (texts("a", "b", "b"), "chosen and rejected are equal, so neither is preferred"),
        ({"chosen": "b"}, "no key 'prompt'; no key 'rejected'; there are chosen"),
        (texts("a", "", "b"), "chosen is empty"),
        (texts("a", "", ""), "chosen is empty; rejected is empty"),
        ({**texts("a", "b", "c"), "prompt": [USER]}, "prompt is a list; it has to be a text"),
        ({**texts("a", "b", "c"), "chosen": 3}, "chosen is a int; it has to be a text"),
        ({"prompt": "a", "chosen": ANSWER, "rejected": ANSWER}, "prompt is a str; it has to be a"),
        ({"prompt": [USER], "chosen": ANSWER, "rejected": []}, "rejected is empty"),
        ({"prompt": [USER], "chosen": ANSWER, "rejected": ANSWER}, "chosen and rejected are equal"),
        ({"chosen": ANSWER, "rejected": [USER]}, "prompt is empty, and the answers do not begin"),
        ({"chosen": [USER, REPLY], "rejected": [USER]}, "rejected has nothing behind"),
        (
            {"prompt": [USER], "chosen": [{**REPLY, "content": ""}], "rejected": [{"role": "x"}]},
            "chosen: message 2, of the assistant, is empty; .*: rejected: message 2 has no content",
        ),
        ({**texts("a", "b", "c"), "chosen": "\ud800"}, "chosen is not Unicode text"),
    ],
)
def test_lines_that_are_no_pairs_are_named(tmp_path, row, text):
    asked = source(tmp_path, [texts("a", "b", "c"), row], CHATML)
    with pytest.raises(DataError, match=rf"pairs\.jsonl:2: {text}"):
        tokenized(asked, tmp_path / "cache")


def config_of(folder, asked: TextSource, **changes) -> str:
    data = {"name": "preference", "path": asked.path, "tokenizer": asked.tokenizer, **changes}
    made = {"data": data, "model": {"vocab": 300}, "run": {"dir": str(folder / "runs")}}
    (folder / "run.yaml").write_text(json.dumps(made))
    return str(folder / "run.yaml")


def test_all_wrong_lines_are_named_before_ranks_start(tmp_path, capsys):
    rows = [texts("a", "b", "b"), texts("a", "b", "c"), {"prompt": "a"}, texts("a", "", "c")]
    asked = source(tmp_path, rows)
    assert main(["train", config_of(tmp_path, asked)]) == 2
    said = capsys.readouterr().err
    assert all(f"pairs.jsonl:{line}: " in said for line in (1, 3, 4)), said
    same = texts("alpha", " mu" * 30, " mu" * 30 + " nu")
    rows = [texts("a", "b", "c")] * 8 + [texts("d", "e", "f"), same, texts("xi " * 50, "b", "c")]
    asked = source(tmp_path, rows)
    assert main(["train", config_of(tmp_path, asked, seq_len=16)]) == 2
    said = capsys.readouterr().err
    assert tells(said, "pairs.jsonl:10", "17 tokens")
    assert "pairs.jsonl:11: a prompt of " in said and "fills a sample (data.seq_len=16)" in said


def test_one_pair_is_not_shared_by_training_and_validation(tmp_path, capsys):
    asked = source(tmp_path, [texts("a", "b", "c")] * 5)
    assert main(["train", config_of(tmp_path, asked)]) == 2
    assert "the val split has no pair: there is only one" in capsys.readouterr().err


def dataset(text, **changes) -> PreferenceDataset:
    options = {"vocab": 300, "seq_len": 20, "global_batch": 4, "val_fraction": 0.3, **changes}
    return PreferenceDataset(text, **options)


def test_rows_hold_prompt_and_answer_and_each_pair_once_an_epoch(tmp_path):
    rows = [texts(f"alpha {i}", " mu" * (1 + i % 3), " nu xi") for i in range(13)]
    found = tokenized(source(tmp_path, rows), tmp_path / "cache")
    data = dataset(found)
    num_train, num_val = (data.num_samples[x] // 2 for x in ("train", "val"))
    assert num_train + num_val == 13 and num_val > 1
    seen = []
    for step in range(1, num_train + 1):  # as many steps as make four epochs
        ids, targets = data.batch("train", 5, step, 0, 1, 8)
        halves = [data.batch("train", 5, step, i, 2, 4) for i in range(2)]
        assert all(np.array_equal(ids[4 * i : 4 * i + 4], half[0]) for i, half in enumerate(halves))
        for row in range(8):
            length = int((ids[row] != 0).sum())
            counted = targets[row] != -100
            assert np.array_equal(targets[row][counted], ids[row][1:][counted[:-1]]) or length > 19
            seen.append(tuple(ids[row].tolist()))
    assert all(seen[i][:2] == seen[i + 1][:2] for i in range(0, len(seen), 2)), "one prompt a pair"
    epochs = [seen[i : i + 2 * num_train] for i in range(0, len(seen), 2 * num_train)]
    assert len(epochs) == 4 and all(sorted(x) == sorted(epochs[0]) for x in epochs)
    assert epochs[0] != epochs[1] and len({*epochs[0]}) == 2 * num_train


def test_long_answers_are_cut_at_their_end_and_that_is_said(tmp_path):
    rows = [texts("alpha", " mu" * 40, " nu" * 40), texts("beta", " mu", " nu")]
    found = tokenized(source(tmp_path, rows), tmp_path / "cache")
    note = cut_pairs(found, 20)
    assert note is not None and tells(note, "1", "2 pairs", "seq_len=20")
    assert not pair_problems(found, 20) and cut_pairs(found, 400) is None
    ids, targets = dataset(found, val_fraction=0.0).batch("train", 0, 1, 0, 1, 4)
    assert any((targets[row] != -100).sum() >= 18 and (ids[row] != 0).all() for row in range(4))


def test_sources_are_mixed_by_pairs(tmp_path):
    parts_of = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        rows = [texts(f"{name} {i}", " mu", " nu") for i in range(9)]
        data = dataset(tokenized(source(tmp_path / name, rows), tmp_path / "cache"))
        parts_of.append(BlendPart(name, 1.0, data, data.num_samples["train"]))
    blend = BlendedDataset(parts_of, 4, rows_per_sample=2)
    for step in (1, 2, 3):
        ids, _ = blend.batch("train", 3, step, 0, 1, 8)
        halves = [blend.batch("train", 3, step, i, 2, 4)[0] for i in range(2)]
        assert np.array_equal(ids, np.concatenate(halves))
        pairs = ids.reshape(4, 2, -1)
        assert np.array_equal(pairs[:, 0, :2], pairs[:, 1, :2]), "a pair is of one source"
    assert sum(blend.shares(3, 1).values()) == 1
    assert blend.epochs(3, 9)["one"] == pytest.approx(18 / (parts_of[0].num_samples / 2), rel=0.2)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (["data.document_masks=true"], "does not go with data.document_masks=true"),
        (["data.packing=whole"], "does not go with data.packing=whole"),
        (["data.field=text2"], "data.field (the fields are prompt, chosen and rejected)"),
        (["model.loss=a.b:c"], "does not go with model.loss=a.b:c"),
        (["model.moe.num_experts=4"], "does not go with mixtures of experts"),
        (["data.tokenizer=null"], "data.name=preference needs data.tokenizer"),
        (["data.path=null"], "data.name=preference needs data.path"),
        (["data.name=text", "train.dpo.beta=0.3"], "train.dpo is for preference pairs"),
        (["train.dpo.label_smoothing=0.5"], "train.dpo.label_smoothing"),
        (["train.dpo.beta=0"], "train.dpo.beta"),
        (["train.dpo.loss=kto"], "train.dpo.loss"),
        (
            ["train.dpo={loss: ipo, gamma: 1.0, label_smoothing: 0.1}"],
            "train.dpo.loss=ipo does not read train.dpo.label_smoothing=0.1 and "
            "train.dpo.gamma=1.0; remove it",
        ),
    ],
)
def test_what_does_not_go_with_pairs_is_refused_by_name(changes, text):
    plain = ["data.name=preference", "data.path=pairs.jsonl", "data.tokenizer=tokenizer"]
    last = {x.partition("=")[0]: x for x in [*plain, *changes]}
    with pytest.raises(ConfigError) as caught:
        loads("", overrides=list(last.values()))
    assert text in str(caught.value)
