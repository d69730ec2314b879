"""Turns found without marks equal those that marks in the same template show. No torch."""

from datetime import date
from pathlib import Path

import pytest

from tests.data.chat_shapes import MARKED, NO_TOOLS, PLAIN, TOOL, call, said, save_chat_tokenizer
from tests.data.texts import save_lines
from torchdistpackage.data.tokens.chat import ChatTemplate
from torchdistpackage.data.tokens.documents import TextSource
from torchdistpackage.data.tokens.row_notes import Tally, row_notes
from torchdistpackage.data.tokens.token_cache import tokenized
from torchdistpackage.errors import DataError

ASKED, ANSWER = said("user", "alpha"), said("assistant", "beta")
THOUGHT = {**ANSWER, "reasoning_content": "hm"}
INSIDE = said("assistant", "<think>\nhm\n</think>\n\nbeta")
CHATS = {
    "spaces": [
        *(said("user", " <é & ü> "), said("assistant", " beta\n\n")),
        *(said("user", "a  "), said("assistant", "\n x ")),
    ],
    "system": [said("system", "a"), ASKED, ANSWER, ASKED, said("assistant", "gamma")],
    "same": [said("user", "x"), said("assistant", "x")] * 3,
    "tools": [ASKED, call(), said("tool", "sunny"), ANSWER, ASKED, ANSWER],
    "calls": [
        *(ASKED, call(), said("tool", "a"), call(city="Bonn"), said("tool", "b"), ANSWER),
        *(ASKED, {**call(), "content": "let me see"}, said("tool", "c"), ANSWER),
    ],
    "thought": [ASKED, THOUGHT, ASKED, {**ANSWER, "thinking": "so"}],
    "inside": [ASKED, INSIDE, ASKED, INSIDE],
    "thought calls": [ASKED, {**call(), "thinking": "a"}, said("tool", "b"), THOUGHT] * 2,
    "assistant first": [ANSWER, ASKED, ANSWER],
    "tagged": [ASKED, said("assistant", "<div>"), ASKED, said("assistant", "<th")],
    "two replies": [ASKED, ANSWER, ANSWER, ASKED, ANSWER],
}
REFUSED = {
    "gemma3": ("assistant first", "two replies"),  # by the template
    "mistral": ("assistant first",),  # has no generation prompt, and writes nothing before it
}


def rows_of(name: str) -> dict[str, dict]:
    left_out = REFUSED.get(name, ())
    found = {x: {"messages": CHATS[x]} for x in CHATS if x not in left_out}
    if name in NO_TOOLS:
        return {x: row for x, row in found.items() if not {"tools", "calls"} & {*x.split()}}
    return found | {"with tools": {"messages": CHATS["tools"], "tools": [TOOL]}}


def parts(template: ChatTemplate, row: dict) -> tuple[str, set[int]]:
    """Return the text, and the indices of its letters that count."""
    found = template.document(row, "here")
    assert found.spans is not None
    return found.text, {i for begin, end in found.spans for i in range(begin, end)}


@pytest.mark.parametrize("name", PLAIN)
def test_turns_are_those_that_marks_show(tmp_path, name):
    plain = ChatTemplate(save_chat_tokenizer(tmp_path / "plain", PLAIN[name]), date.today())
    marked = ChatTemplate(save_chat_tokenizer(tmp_path / "marked", MARKED[name]), date.today())
    for kind, row in rows_of(name).items():
        assert parts(plain, row) == parts(marked, row), kind
    for kind in REFUSED.get(name, ()):
        with pytest.raises(DataError):
            plain.document({"messages": CHATS[kind]}, "here")


@pytest.mark.full
@pytest.mark.parametrize("name", PLAIN)
def test_ids_and_masks_are_those_of_transformers(tmp_path, name):
    transformers = pytest.importorskip("transformers")
    folder = save_chat_tokenizer(tmp_path, PLAIN[name])
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    rows = [*rows_of(name).values()]
    path = save_lines(tmp_path / "chats.jsonl", rows)
    found = tokenized(TextSource("jsonl", str(path), str(folder), "messages"), tmp_path / "cache")
    for row, first, last in zip(rows, found.starts, found.ends, strict=True):
        messages, tools = row["messages"], row.get("tools")
        made = theirs.apply_chat_template(messages, tools=tools, return_dict=True)
        assert found.tokens[first:last].tolist() == made["input_ids"]
        made = theirs.apply_chat_template(
            messages,
            tools=tools,
            chat_template=MARKED[name],
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        assert found.counted[first:last].tolist() == made["assistant_masks"]


def learned(folder: Path, row: dict, first: int = 0) -> list[str]:
    found = ChatTemplate(folder, date.today()).document(row, "here", first)
    return [found.text[begin:end] for begin, end in found.spans or ()]


@pytest.mark.parametrize("templates", [PLAIN, MARKED])
def test_messages_that_do_not_count_are_not_learned(tmp_path, templates):
    folder = save_chat_tokenizer(tmp_path, templates["phi3"])
    first, last = ["a<|end|>\n"], "b<|end|>\n</s>"
    for key, no, yes in (("weight", 0, 1), ("train", False, True), ("training", False, None)):
        for one, other, expected in ((no, yes, last), (yes, no, first[0])):
            replies = ({"content": "a", key: one}, {"content": "b", key: other})
            turns = [(ASKED, {"role": "assistant", **reply}) for reply in replies]
            row = {"messages": [message for turn in turns for message in turn]}
            assert "".join(learned(folder, row)) == expected
    row = {"messages": [ASKED, said("assistant", "a"), ASKED, said("assistant", "b")]}
    assert "".join(learned(folder, row, 2)) == last


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"weight": 0.5}, "weight of message 2 is 0.5; write 0 or 1"),
        ({"train": "no"}, "train of message 2 is 'no'; write false or true"),
        ({"weight": 0}, r"no message of the assistant counts \(weight, train, training\)"),
        ({"role": "user", "train": True}, "message 2 of the role user is marked"),
    ],
)
def test_weights_that_cannot_be_followed_are_refused(tmp_path, message, text):
    folder = save_chat_tokenizer(tmp_path, PLAIN["chatml"])
    with pytest.raises(DataError, match=f"here: {text}"):
        more = [ANSWER] if "role" in message else []
        learned(folder, {"messages": [ASKED, {**ANSWER, **message}, *more]})


def test_rows_set_variables_of_the_template(tmp_path):
    folder = save_chat_tokenizer(tmp_path, PLAIN["qwen3"])
    row = {"messages": [ASKED, ANSWER]}
    assert learned(folder, row) == ["<think>\n\n</think>\n\nbeta<|im_end|>\n"]
    for options in ({"enable_thinking": False, "x": None}, '{"enable_thinking": false}'):
        assert learned(folder, {**row, "chat_template_kwargs": options}) == ["beta<|im_end|>\n"]
    for options, text in (
        ({"tools": []}, "chat_template_kwargs has tools, which a row may not set"),
        ([1], "chat_template_kwargs is a list"),
    ):
        with pytest.raises(DataError, match=f"here: {text}"):
            learned(folder, {**row, "chat_template_kwargs": options})
    (folder / "chat_template.jinja").write_text("{{ documents | tojson }}" + PLAIN["chatml"])
    texts = [{"title": "t", "text": "x"}]
    found = ChatTemplate(folder, date.today()).document({**row, "documents": texts}, "here")
    assert found.text.startswith('[{"title": "t", "text": "x"}]<|im_start|>')


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "preference"])
def test_options_and_weights_are_read_of_every_format(tmp_path, kind):
    folder = save_chat_tokenizer(tmp_path / "tokenizer", PLAIN["qwen3"])
    left_out = [ASKED, {**ANSWER, "weight": 0}, ASKED, {**ANSWER, "weight": 1}]
    row = {"messages": left_out, "chat_template_kwargs": {"enable_thinking": False}, "id": 1}
    path, field = tmp_path / f"chats.{kind}", "messages"
    if kind == "parquet":
        arrow = pytest.importorskip("pyarrow", reason="parquet files are optional")
        from pyarrow import parquet

        parquet.write_table(arrow.Table.from_pylist([row, {"messages": left_out, "id": 2}]), path)
    elif kind == "preference":
        other = [said("assistant", "x"), ASKED, ANSWER]
        answers = {"prompt": [ASKED], "chosen": left_out[1:], "rejected": other}
        save_lines(path, [{**answers, **row}, answers])
        field = "text"
    else:
        save_lines(path, [row, {"messages": left_out}])
    found = tokenized(TextSource(kind, str(path), str(folder), field), tmp_path / "cache")
    edges = zip(found.starts, found.ends, strict=True)
    counts = [int(found.counted[first:last].sum()) for first, last in edges]
    chosen = counts[:: found.documents_per_line]
    assert 0 < chosen[0] < chosen[1], "the empty thought is learned only where it is asked for"
    said_of = row_notes(found.tally)
    number = {"parquet": 2}.get(kind, 1)
    unused = f"'id' of rows ({number})"
    if kind == "preference":
        unused = f"'messages' of rows (1), {unused}"
    assert said_of[-1] == f"keys that were not used: {unused}"


def test_keys_that_nobody_used_are_counted(tmp_path):
    tally = Tally()
    folder = save_chat_tokenizer(tmp_path, PLAIN["chatml"])
    template = ChatTemplate(folder, date.today(), tally)
    message = {**ANSWER, "weight": 1, "na\x1bme": "x", "empty": None}
    options = {"enable_thinking": True}
    for _ in range(2):
        row = {"messages": [ASKED, message], "chat_template_kwargs": options}
        template.document(row, "here")
    assert row_notes(tally) == [
        "2 chats whose replies are what each adds to the chat before it",
        "keys that were not used: 'na\\x1bme' of messages (2), "
        "'enable_thinking' of chat_template_kwargs (2)",
    ]
    many = row_notes({f"{i} of rows": 1 for i in range(30)})
    assert len(many) == 1 and many[0].endswith(" and 10 more")


def test_a_header_behind_a_tools_reply_is_not_learned(tmp_path):
    """Check a template like DiffusionGemma's.

    Its generation prompt is empty behind a tool's reply, but the chat has a header there.
    """
    template = (
        "{% for m in messages %}{% if m.role == 'tool' %}<tool>{{ m.content }}</tool>"
        "{% else %}<turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{{ m.content or 'call' }}</turn>{% endif %}{% endfor %}"
        "{% if add_generation_prompt and messages[-1].role != 'tool' %}<turn>model\n{% endif %}"
    )
    chat = ChatTemplate(save_chat_tokenizer(tmp_path, template), date.today())
    found = chat.document({"messages": CHATS["tools"]}, "here")
    learned = [found.text[begin:end] for begin, end in found.spans or ()]
    assert learned == ["call</turn>", "beta</turn>", "beta</turn>"]
