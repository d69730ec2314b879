"""Chats: the tokenizer's own template decides the text and the spans of the assistant."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.data.texts import save_lines, save_tokenizer, sentences
from tests.tells import tells
from torchdistpackage.cli.main import main
from torchdistpackage.config.hugging_face import vocabulary_size
from torchdistpackage.data.packing import PackedDataset
from torchdistpackage.data.tokens.documents import TextSource
from torchdistpackage.data.tokens.token_cache import TokenizedText, tokenized
from torchdistpackage.data.tokens.token_encoder import load_tokenizer
from torchdistpackage.errors import DataError

CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + eos_token + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}
{%- endif %}
"""
MARKED = """\
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{{- 'A: ' }}{% generation %}{{ m.content + eos_token }}{% endgeneration %}
{%- else %}
{{- m.role + ': ' + m.content + '\n' }}
{%- endif %}
{%- endfor %}
"""
LAST_DIFFERS = """\
{%- for m in messages %}
{{- m.role + ': ' }}
{%- if loop.last and m.role == 'assistant' %}{{ '(thinks) ' }}{% endif %}
{{- m.content + '\n' }}
{%- endfor %}
"""
COUNTED_DOWN = "{% for m in messages %}{{ loop.revindex ~ m.content | upper }}|{% endfor %}"
ALTERNATING = """\
{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for m in messages %}{{ '[' + m.role + '] ' + m.content }}{% endfor %}
"""


def chat(*turns: str) -> dict:
    """Return messages of user, assistant, user, ... in turn."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": t} for i, t in enumerate(turns)]}


def chats(folder: Path, rows: list[dict], template: str | None = CHATML) -> TextSource:
    path = save_lines(folder / "chat.jsonl", rows)
    tokenizer = save_tokenizer(folder / "tokenizer")
    if template is not None:
        (tokenizer / "chat_template.jinja").write_text(template)
    return TextSource("jsonl", str(path), str(tokenizer), "messages")


def parts(found: TokenizedText, document: int, source: TextSource) -> tuple[str, list[str]]:
    """Return the text of a document, and the runs of it that count."""
    tokenizer, _ = load_tokenizer(Path(source.tokenizer))
    where = slice(int(found.starts[document]), int(found.ends[document]))
    ids, counted = found.tokens[where].tolist(), found.counted[where].tolist()
    runs: list[list[int]] = []
    for before, number, count in zip([0, *counted], ids, counted, strict=False):
        if count:
            runs.append([*runs.pop(), number] if before else [number])
    decode = tokenizer.decode
    return decode(ids, False), [decode(run, False) for run in runs]


@pytest.mark.parametrize(
    ("template", "text", "said"),
    [
        (
            CHATML,
            "<|im_start|>user\nalpha</s>\n<|im_start|>assistant\nbeta é</s>\n"
            "<|im_start|>user\ngamma</s>\n<|im_start|>assistant\ndelta</s>\n",
            ["beta é</s>\n", "delta</s>\n"],
        ),
        (
            MARKED,
            "user: alpha\nA: beta é</s>user: gamma\nA: delta</s>",
            [" beta é</s>", " delta</s>"],  # a token over the border counts, as in transformers
        ),
    ],
)
def test_only_what_the_assistant_says_counts(tmp_path, template, text, said):
    source = chats(tmp_path, [chat("alpha", "beta é", "gamma", "delta")], template)
    found = tokenized(source, tmp_path / "cache")
    assert parts(found, 0, source) == (text, said)
    tokenizer, _ = load_tokenizer(Path(source.tokenizer))
    assert found.tokens.tolist() == tokenizer.encode(text).ids, (
        "no token is added to the template's"
    )
    assert found.prompts.tolist() == [int(np.argmax(found.counted))]


@pytest.mark.full
@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_ids_and_marks_are_those_of_transformers(tmp_path, template):
    transformers = pytest.importorskip("transformers")
    rows = [chat(*sentences(4, seed)) for seed in range(5)]
    rows.append({"messages": [{"role": "system", "content": "<é & ü>"}, *rows[0]["messages"]]})
    source = chats(tmp_path, rows, template)
    found = tokenized(source, tmp_path / "cache")
    settings = {"eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (Path(source.tokenizer) / "tokenizer_config.json").write_text(json.dumps(settings))
    theirs = transformers.AutoTokenizer.from_pretrained(source.tokenizer)
    for i, row in enumerate(rows):
        marked = template is MARKED
        made = theirs.apply_chat_template(
            row["messages"], return_dict=True, return_assistant_tokens_mask=marked
        )
        where = slice(int(found.starts[i]), int(found.ends[i]))
        assert found.tokens[where].tolist() == made["input_ids"]
        if marked:
            assert found.counted[where].tolist() == made["assistant_masks"]


def test_a_template_in_the_configuration_of_the_tokenizer_is_read(tmp_path):
    source = chats(tmp_path, [chat("alpha", "beta")], None)
    file = Path(source.tokenizer) / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    texts = []
    for template in (
        MARKED,
        [{"name": "rag", "template": "x"}, {"name": "default", "template": MARKED}],
    ):
        file.write_text(json.dumps({**settings, "chat_template": template}))
        texts.append(parts(tokenized(source, tmp_path / "cache"), 0, source))
    assert texts == [("user: alpha\nA: beta</s>", [" beta</s>"])] * 2


def test_another_template_is_another_entry(tmp_path):
    source = chats(tmp_path, [chat("alpha", "beta")])
    first = tokenized(source, tmp_path / "cache").folder
    assert tokenized(source, tmp_path / "cache").folder == first
    (Path(source.tokenizer) / "chat_template.jinja").write_text(MARKED)
    assert tokenized(source, tmp_path / "cache").folder != first


def test_tools_and_calls_of_them_reach_the_template(tmp_path):
    template = (
        "{{ tools[0] | tojson }}"
        "{% for m in messages %}|{{ m.content or m.tool_calls | tojson }}{% endfor %}"
    )
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "<add>"}]}
    row = {"messages": [{"role": "user", "content": "alpha"}, call], "tools": [{"name": "é"}]}
    source = chats(tmp_path, [row], template)
    text, said = parts(tokenized(source, tmp_path / "cache"), 0, source)
    assert text == '{"name": "é"}|alpha|[{"name": "<add>"}]' and said == ['|[{"name": "<add>"}]']


def test_chats_in_parquet_are_read_alike(tmp_path):
    arrow = pytest.importorskip("pyarrow", reason="parquet files are optional")
    from pyarrow import parquet

    rows = [chat("alpha", "beta"), chat("gamma", "delta", "eta", "mu")]
    rows[0]["messages"][0]["name"] = "me"  # of all others null
    source = chats(tmp_path, rows)
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "chat.parquet")
    other = replace(source, kind="parquet", path=str(tmp_path / "chat.parquet"))
    lines, table = (tokenized(x, tmp_path / "cache") for x in (source, other))
    assert lines.folder != table.folder
    assert np.array_equal(lines.tokens, table.tokens)
    assert np.array_equal(lines.counted, table.counted)


ROLES = "the roles are system, developer, user, assistant, tool, function"
USER, REPLY = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"text": "a"}, r"no field 'messages'; there are text \(data\.field\)"),
        ({"messages": "a"}, r"messages is a str; it has to be a list of \{role, content\}"),
        ({"messages": []}, "messages is empty; remove this document"),
        ({"messages": [USER]}, "no message is of the assistant, so nothing would be learned"),
        ({"messages": [{**USER, "role": "bot"}, REPLY]}, f"message 1 has the role 'bot'; {ROLES}"),
        ({"messages": [{**USER, "role": ["u"]}, REPLY]}, r"message 1 has the role \['u'\]; "),
        ({"messages": [{"from": "a"}]}, "message 1 has no role and no content; there are from"),
        ({"messages": [USER, {**REPLY, "content": ["b"]}]}, "content of message 2 is a list"),
        ({"messages": [USER, {**REPLY, "content": ""}]}, "message 2, of the assistant, is empty"),
        ({"messages": [1]}, r"message 1 is a int; it has to be \{role, content\}"),
        ({"messages": [USER, REPLY], "tools": {}}, "tools is a dict; it has to be a list"),
        ({"messages": [{**USER, "content": "\ud800"}, REPLY]}, "the chat is not Unicode text"),
    ],
)
def test_lines_that_are_no_chats_are_named(tmp_path, row, text):
    source = chats(tmp_path, [chat("alpha", "beta"), row])
    with pytest.raises(DataError, match=rf"chat\.jsonl:2: {text}"):
        tokenized(source, tmp_path / "cache")


def test_all_wrong_lines_are_named_at_once_up_to_a_number(tmp_path):
    bad = [{"messages": [{**USER, "role": "bot"}, {"role": "cat", "content": 1}]}, {}]
    source = chats(tmp_path, [chat("alpha", "beta"), *bad, chat("gamma", "delta")])
    with Path(source.path).open("a") as file:
        file.write("{no\n\n1\n")
    with pytest.raises(DataError) as caught:
        tokenized(source, tmp_path / "cache")
    lines = str(caught.value).splitlines()
    assert [line.split(": ")[0].rpartition(":")[2] for line in lines] == ["2", "3", "5", "7"], (
        "an empty line is none"
    )
    assert "'bot'" in lines[0] and "'cat'" in lines[0]
    save_lines(Path(source.path), [{}] * 600)
    with pytest.raises(DataError) as caught:
        tokenized(source, tmp_path / "cache")
    assert len(lines := str(caught.value).splitlines()) == 21 and lines[-1] == "and maybe more"


@pytest.mark.parametrize(
    ("template", "row", "text"),
    [
        (
            COUNTED_DOWN,
            chat("a", "b", "c", "d"),
            "1: in what the chat template writes for message 2, the text of the assistant can",
        ),
        (
            ALTERNATING,
            {"messages": [{**USER, "role": "system"}, REPLY]},
            "1: .* System role not supp",
        ),
        (
            "{{ messages + 1 }}",
            chat("a", "b"),
            "1: the chat template fails at its first 2 mess",
        ),
        ("{{ cycler.__init__.__globals__ }}", chat("a", "b"), "1: .* unsafe"),
        (
            "{% set n = namespace(__class__=1) %}",
            chat("a", "b"),
            "1: .* namespace has no __class__",
        ),
        ("{{ messages.append(1) }}", chat("a", "b"), "1: .* of 'list' object is unsafe"),
        ("same", chat("a", "b"), "1: the chat template writes none of the assistant's text"),
        (
            "{% for m in messages %}{% generation %}{% endgeneration %}{{ m.content }}{% endfor %}",
            chat("a", "b"),
            "1: the chat template writes none of the assistant's text",
        ),
        ("{% for %}", chat("a", "b"), "is not a Jinja template: "),
        (
            None,
            chat("a", "b"),
            r"has none, neither as chat_template\.jinja nor as chat_template in",
        ),
    ],
)
def test_templates_that_do_not_do_are_refused(tmp_path, template, row, text):
    source = chats(tmp_path, [row], template)
    with pytest.raises(DataError, match=text):
        tokenized(source, tmp_path / "cache")


def test_a_turn_is_taken_from_a_template_that_writes_the_last_one_in_another_way(tmp_path):
    source = chats(tmp_path, [chat("a", "b"), chat("a", "b", "c", "d")], LAST_DIFFERS)
    found = tokenized(source, tmp_path / "cache")
    assert parts(found, 0, source)[1] == ["assistant: (thinks) b\n"]
    assert parts(found, 1, source)[1] == ["assistant: b\n", "assistant: (thinks) d\n"]


def test_a_first_turn_of_the_user_as_long_as_a_sample_is_refused(tmp_path):
    rows = [chat("alpha", "beta gamma " * 20)] * 9 + [chat("mu " * 40, "nu")]
    found = tokenized(chats(tmp_path, rows), tmp_path / "cache")
    options = {"vocab": 300, "global_batch": 8, "val_fraction": 0.2}
    longest = int(found.prompts.max())
    with pytest.raises(
        DataError, match=rf"chat\.jsonl:10: a prompt of {longest} tokens .* 1 of 10"
    ):
        PackedDataset(found, seq_len=longest, **options)
    PackedDataset(found, seq_len=longest + 1, **options)


def test_the_size_of_a_vocabulary_is_that_of_the_library(tmp_path):
    from tokenizers import Tokenizer, models

    folder = save_tokenizer(tmp_path / "bpe")
    unigram = Tokenizer(models.Unigram([("a", -1.0), ("b", -2.0)], 0))
    unigram.add_special_tokens(["<x>", "<y>"])
    unigram.save(str(tmp_path / "unigram.json"))
    for file in (folder / "tokenizer.json", tmp_path / "unigram.json"):
        made, _ = load_tokenizer(file)
        assert vocabulary_size(file) == max(made.get_vocab().values()) + 1


def config_of(folder: Path, source: TextSource, **changes) -> Path:
    data = {
        "name": "jsonl",
        "path": source.path,
        "tokenizer": source.tokenizer,
        "field": "messages",
    }
    path = folder / "run.yaml"
    path.write_text(
        json.dumps(
            {
                "data": {**data, **changes},
                "model": {"vocab": 300},
                "run": {"dir": str(folder / "runs")},
            }
        )
    )
    return path


def test_tdp_data_tokenizes_chats(tmp_path, capsys):
    source = chats(tmp_path, [chat("alpha", "beta"), chat("gamma", "delta")])
    assert main(["data", "tokenize", str(config_of(tmp_path, source))]) == 0
    found = tokenized(source, tmp_path / "runs" / "tokens")
    said = capsys.readouterr().out
    assert f"{len(found.tokens)} tokens of 2 documents, voc" in said and "note" not in said


def test_documents_that_no_sample_holds_whole_are_told(tmp_path, capsys):
    rows = [chat("alpha", "beta"), chat("mu", "nu xi " * 60), chat("eta", "mu " * 150)]
    source = chats(tmp_path, rows)
    config = str(config_of(tmp_path, source, seq_len=90))
    assert main(["data", "tokenize", config]) == 0
    longest = int(np.diff(tokenized(source, tmp_path / "runs" / "tokens").ends).max())
    said = capsys.readouterr().out
    assert tells(said, "2", "3 documents", "seq_len=90")
    assert f"gest has {longest} tokens): they are cut, and what follows a cut is learned wi" in said
    assert main(["data", "tokenize", config, f"data.seq_len={longest - 1}"]) == 0
    assert "note" not in capsys.readouterr().out


def test_the_chat_of_the_page_is_read_with_its_configuration(tmp_path, monkeypatch, capsys):
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
    (tmp_path / "run.yaml").write_text(re.search(r"```yaml\n(.*?)```", page, re.DOTALL)[1])
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.jsonl").write_text(
        re.search(r"```json\n(.*?)```", page, re.DOTALL)[1]
    )
    (save_tokenizer(tmp_path / "my-tokenizer") / "chat_template.jinja").write_text(CHATML)
    monkeypatch.chdir(tmp_path)
    assert main(["data", "tokenize", "run.yaml", "data.field=messages", "model.vocab=300"]) == 0
    assert "tokens of 1 documents" in capsys.readouterr().out
    source = TextSource("jsonl", "corpus", "my-tokenizer", "messages")
    assert parts(tokenized(source, Path("runs/tokens")), 0, source)[1] == ["4</s>\n"]


@pytest.mark.parametrize("command", [["plan"], ["train"], ["submit", "--dry-run"]])
def test_a_tokenizer_that_does_not_do_is_refused_before_ranks_start(tmp_path, capsys, command):
    source = chats(tmp_path, [chat("alpha", "beta")], None)
    config = str(config_of(tmp_path, source))
    assert main([*command, config, "model.vocab=256"]) == 2
    said = capsys.readouterr().err
    assert tells(said, "300 ids", "model.vocab", "256", "model.vocab", "300")
    assert "has none, neither as chat_template.jinja" in said and "2 problems" in said
    (Path(source.tokenizer) / "tokenizer.json").unlink()
    assert main([*command, config]) == 2
    assert "tokenizer.json is not a file; name a folder with" in capsys.readouterr().err
    (Path(source.tokenizer) / "tokenizer.json").write_text('{"model": 1}')
    assert main([*command, config]) == 2
    assert "is not a tokenizer of the tokenizers library" in capsys.readouterr().err
