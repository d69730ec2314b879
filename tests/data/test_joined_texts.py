"""Adjacent texts, such as prompt and completion, are tokenized as one text. No torch."""

import json

import pytest
from tokenizers import Tokenizer

from tests.data.kinds_of_tokenizers import KINDS, save_kind
from tests.data.texts import save_lines
from torchdistpackage.config.text_ends import TextEnds
from torchdistpackage.data.tokens.documents import TextSource
from torchdistpackage.data.tokens.token_cache import TokenizedText, tokenized

PAIRS = [
    ("Answer:", " that is 42."),
    ("Answer: ", "that is 42."),
    ("Answer: th", "at is 42."),
    ("Answer:\n", "\n42 \u00e9 "),
    ("What is 2 + 2? ", " 4"),
    ("", "that is 42."),
    ("Answer: \u00e9", "\u00e9 more"),
]
ALIKE = "Llama 2", "Metaspace always", "Metaspace first", "Metaspace never", "GPT-2"
"""Kinds whose ids decode to the text; the others lose spaces or line ends."""


def documents(found: TokenizedText) -> list[tuple[list[int], list[int]]]:
    """Return the ids of each document, and the ids that count."""
    every = []
    for begin, end in zip(found.starts, found.ends, strict=True):
        ids, counts = found.tokens[begin:end], found.counted[begin:end] != 0
        every.append((ids.tolist(), ids[counts].tolist()))
    return every


@pytest.mark.parametrize("name", KINDS)
def test_a_prompt_and_its_answer_have_the_ids_of_one_text(tmp_path, name):
    folder = save_kind(name, tmp_path / "tokenizer")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    rows = [{"prompt": p, "completion": c, "chosen": c, "rejected": c + " 2"} for p, c in PAIRS]
    path = str(save_lines(tmp_path / "pairs.jsonl", rows))
    lines = TextSource("jsonl", path, str(folder), "prompt+completion")
    pairs = TextSource("preference", path, str(folder))
    of_lines = documents(tokenized(lines, tmp_path / "cache"))
    of_pairs = documents(tokenized(pairs, tmp_path / "cache"))
    answers = [(p, x) for p, c in PAIRS for x in (c, c + " 2")]
    for (prompt, answer), (ids, learned) in zip(
        [*PAIRS, *answers], [*of_lines, *of_pairs], strict=True
    ):
        text = prompt + answer
        want = [*tokenizer.encode(text, add_special_tokens=False).ids, 2]
        assert ids[name == "Llama 2" :] == want, "with the begin of text of its template"
        if name in ALIKE:
            assert tokenizer.decode(ids) == text
        if name == "GPT-2":  # here a token is its bytes: those that reach into the answer count
            assert (tail := tokenizer.decode(learned)).endswith(answer)
            assert len(tokenizer.decode(learned[1:])) < len(answer) or tail == answer
        if prompt:
            assert 2 <= len(learned) < len(ids)
            assert ids[-len(learned) :] == learned


def test_a_token_across_the_border_counts_as_in_trl(tmp_path):
    """Compare with trl, whose answer begins where ids of prompt and full text diverge."""
    folder = save_kind("Llama 2", tmp_path / "tokenizer")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    rows = [{"prompt": p, "completion": c} for p, c in PAIRS if p]
    path = save_lines(tmp_path / "pairs.jsonl", rows)
    source = TextSource("jsonl", str(path), str(folder), "prompt+completion")
    for row, (ids, learned) in zip(
        rows, documents(tokenized(source, tmp_path / "cache")), strict=True
    ):
        before = tokenizer.encode(row["prompt"]).ids
        alike = next((i for i, (a, b) in enumerate(zip(before, ids, strict=False)) if a != b), None)
        assert ids[len(before) if alike is None else alike :] == learned


@pytest.mark.parametrize("eos", ["auto", "on", "off"])
@pytest.mark.parametrize("name", ["Llama 2", "T5", "GPT-2", "named alone"])
def test_a_text_that_ends_with_the_end_of_text_gets_no_second_one(tmp_path, name, eos):
    folder = save_kind("GPT-2" if name == "named alone" else name, tmp_path / "tokenizer")
    if name == "named alone":  # the settings alone say that it is special, as in older folders
        content = json.loads((folder / "tokenizer.json").read_text())
        content["added_tokens"] = []
        (folder / "tokenizer.json").write_text(json.dumps(content))
    texts = ["42</s>", "42", "42</s></s>", "</s>", "42</s> "]
    want = [1, 1, 2, 1, 2] if eos != "off" else [1, 0, 2, 1, 1]
    rows = [{"text": x, "prompt": "2 + 2?", "completion": x} for x in texts]
    rows = [{**x, "chosen": x["text"], "rejected": "4"} for x in rows]
    path = str(save_lines(tmp_path / "lines.jsonl", rows))

    def ids(kind: str, field: str = "text") -> list[list[int]]:
        found = tokenized(
            TextSource(kind, path, str(folder), field, eos=eos), tmp_path / f"{kind} {field}"
        )
        return [found.tokens[a:b].tolist() for a, b in zip(found.starts, found.ends, strict=True)]

    of_texts, of_pairs = ids("jsonl"), ids("jsonl", "prompt+completion")
    of_answers = ids("preference")[::2]
    for found in (of_texts, of_pairs, of_answers):
        assert [x.count(2) for x in found] == want
        assert eos == "off" or all(x[-1] == 2 for x in found)
    if name != "named alone":
        continue_with = Tokenizer.from_file(str(folder / "tokenizer.json"))
        assert [x[name == "Llama 2" :] for x in of_pairs[:1]] == [
            continue_with.encode("2 + 2?42</s>", add_special_tokens=False).ids
        ]


def test_one_token_is_not_begin_and_end_of_a_text_at_once():
    ends = TextEnds((7,), (7,))
    assert [ends.around(x) for x in ([7], [7, 7], [3], [7, 3], [3, 7])] == [
        *([7, 7], [7, 7], [7, 3, 7], [7, 3, 7], [7, 3, 7])
    ]
