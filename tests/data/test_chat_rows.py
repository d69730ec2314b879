"""Every kind of row with a chat gives the right chat, from JSON lines and from parquet.

No torch.
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.data.texts import save_lines, save_tokenizer
from torchdistpackage.cli.main import main
from torchdistpackage.data.tokens.documents import TextSource
from torchdistpackage.data.tokens.token_cache import TokenizedText, tokenized
from torchdistpackage.data.tokens.token_encoder import load_tokenizer
from torchdistpackage.errors import DataError

TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}{% for m in messages %}"
    "[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}</s>"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def message(role: str, content: object, **more) -> dict:
    return {"role": role, "content": content, **more}


def call(**arguments) -> dict:
    function = {"name": "weather", "arguments": arguments}
    return message("assistant", "", tool_calls=[{"type": "function", "function": function}])


def tool(**properties) -> dict:
    parameters = {"type": "object", "properties": properties, "required": [*properties]}
    return {"type": "function", "function": {"name": "weather", "parameters": parameters}}


def source(folder: Path, rows: list[dict], field: str = "messages") -> TextSource:
    path = save_lines(folder / "rows.jsonl", rows)
    tokenizer = save_tokenizer(folder / "tokenizer")
    (tokenizer / "chat_template.jinja").write_text(TEMPLATE)
    return TextSource("jsonl", str(path), str(tokenizer), field)


def read(asked: TextSource, folder: Path) -> tuple[TokenizedText, list[str]]:
    """Return the cache entry, and the texts of its documents."""
    found = tokenized(asked, folder / "cache")
    decode = load_tokenizer(Path(asked.tokenizer))[0].decode
    at = zip(found.starts, found.ends, strict=True)
    return found, [decode(found.tokens[a:b].tolist(), False) for a, b in at]


def texts(folder: Path, rows: list[dict], field: str = "messages") -> list[str]:
    return read(source(folder, rows, field), folder)[1]


USER, REPLY = message("user", "Rome?"), message("assistant", "Sunny.")
DEEP = [
    {
        "messages": [USER, call(city="Rome"), message("tool", "sun"), REPLY],
        "tools": [tool(a={"type": "string"})],
    },
    {
        "messages": [USER, call(a=1, days=[{"n": 1}, {"m": "x"}])],
        "tools": [tool(b={"enum": ["x"]})],
    },
    {"messages": [USER, call()]},
    {"messages": [USER, call(a=2, place={"at": {"lat": 1.5}})]},
]


def test_structs_of_parquet_have_the_keys_of_their_row_alone(tmp_path):
    arrow = pytest.importorskip("pyarrow", reason="parquet files are optional")
    from pyarrow import parquet

    lines, plain = read(asked := source(tmp_path, DEEP), tmp_path)
    assert '({"city": "Rome"})' in plain[0] and "null" not in "".join(plain)
    each = [[json.dumps(y) for y in x["messages"]] for x in DEEP]
    written = arrow.array([json.dumps(x["messages"]) for x in DEEP], arrow.large_string())
    tools = arrow.array(
        [json.dumps(x["tools"]) if "tools" in x else None for x in DEEP], arrow.large_string()
    )
    offsets = [0, *np.cumsum([*map(len, each)])]
    as_json = arrow.array([y for x in each for y in x])
    columns = [written, written.dictionary_encode(), arrow.array(each)]
    if hasattr(arrow, "json_"):  # as `datasets` keeps values of mixed types
        as_json = arrow.ExtensionArray.from_storage(arrow.json_(), as_json)
        columns.append(arrow.ListArray.from_arrays(offsets, as_json))
    tables = [arrow.table({"messages": x, "tools": tools}) for x in columns]
    for number, table in enumerate([arrow.Table.from_pylist(DEEP), *tables]):
        path = tmp_path / f"{number}.parquet"
        parquet.write_table(table, path)
        found, same = read(replace(asked, kind="parquet", path=str(path)), tmp_path)
        assert same == plain, table.schema
        assert np.array_equal(found.tokens, lines.tokens)
        assert np.array_equal(found.counted, lines.counted)


def test_null_is_a_value_in_maps_lists_and_json_lines(tmp_path):
    arrow = pytest.importorskip("pyarrow", reason="parquet files are optional")
    from pyarrow import parquet

    chat = [USER, call(a=None, b=["x", None])]
    lines = texts(tmp_path, [{"messages": chat}])
    assert lines[0].endswith('({"a": null, "b": ["x", null]})</s>'), "it was written, so meant"
    text = arrow.string()
    of_map = arrow.map_(text, arrow.list_(text))
    function = arrow.struct([("name", text), ("arguments", of_map)])
    calls = arrow.list_(arrow.struct([("type", text), ("function", function)]))
    kind = arrow.struct([("role", text), ("content", text), ("tool_calls", calls)])
    chat[1]["tool_calls"][0]["function"]["arguments"] = [("a", None), ("b", ["x", None])]
    table = arrow.table({"messages": arrow.array([chat], arrow.list_(kind))})
    parquet.write_table(table, tmp_path / "map.parquet")
    asked = replace(source(tmp_path, []), kind="parquet", path=str(tmp_path / "map.parquet"))
    assert read(asked, tmp_path)[1] == lines


PARTS = [{"type": "text", "text": "Ro"}, {"type": "text", "text": "me?"}]
ASKED = "[user]Rome?</s>[assistant]Sunny.</s>"
CALLS = '{"name": "weather", "arguments": {"city": "Rome"}}'
SHARED = [{"from": "human", "value": "Rome?"}, {"from": "gpt", "value": "Sunny."}]
USED = [
    SHARED[0],
    {"from": "function_call", "value": CALLS},
    {"from": "observation", "value": "sun"},
    SHARED[1],
]
SAID = '[user]Rome?</s>[assistant]weather({"city": "Rome"})</s>[tool]sun</s>[assistant]Sunny.</s>'
OWN = [{"from": "system", "value": "Own"}, *SHARED]
ROWS = {
    "openai": ({"messages": [USER, REPLY]}, ASKED),
    "json": ({"messages": json.dumps([USER, REPLY])}, ASKED),
    "parts": ({"messages": [message("user", PARTS), REPLY]}, ASKED),
    "sharegpt": ({"conversations": SHARED, "messages": None}, ASKED),
    "sharegpt as json": ({"conversations": json.dumps(SHARED)}, ASKED),
    "mixed names": ({"conversations": [USER, SHARED[1]]}, ASKED),
    "system": ({"conversations": SHARED, "system": "Hi"}, f"[system]Hi</s>{ASKED}"),
    "two systems": ({"conversations": OWN, "system": "Hi"}, f"[system]Own</s>{ASKED}"),
    "tools": ({"conversations": USED, "tools": '[{"name": "f"}]'}, f'{{"name": "f"}}\n{SAID}'),
    "empty tools": ({"conversations": SHARED, "tools": "", "system": ""}, ASKED),
    "alpaca": ({"instruction": "Rome?", "input": "", "output": "Sunny."}, ASKED),
    "alpaca without input": ({"instruction": "Rome?", "output": "Sunny."}, ASKED),
    "alpaca input": (
        {"instruction": "Weather?", "input": "Rome", "output": "Sunny."},
        "[user]Weather?\nRome</s>[assistant]Sunny.</s>",
    ),
    "alpaca history": (
        {
            "instruction": "Rome?",
            "input": None,
            "output": "Sunny.",
            "system": "Hi",
            "history": [["Oslo?", "Snow."]],
        },
        f"[system]Hi</s>[user]Oslo?</s>[assistant]Snow.</s>{ASKED}",
    ),
}


def test_every_kind_of_row_is_read_and_they_may_be_mixed(tmp_path, capsys):
    rows, want = zip(*ROWS.values(), strict=True)
    for field in ("messages", "conversations"):
        asked = source(tmp_path, list(rows), field)
        found, said = read(asked, tmp_path)
        assert dict(zip(ROWS, said, strict=True)) == dict(zip(ROWS, want, strict=True))
    decode = load_tokenizer(Path(asked.tokenizer))[0].decode
    first = slice(0, int(found.ends[0]))
    learned = found.tokens[first][found.counted[first] != 0].tolist()
    assert decode(learned, False) == "Sunny.</s>"
    config = {
        "data": {"name": "jsonl", "path": asked.path, "tokenizer": asked.tokenizer},
        "model": {"vocab": 300},
        "run": {"dir": str(tmp_path / "runs")},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    (Path(asked.tokenizer) / "chat_template.jinja").unlink()
    assert main(["plan", str(tmp_path / "run.yaml"), "data.field=conversations"]) == 2
    assert "chats need a chat template" in capsys.readouterr().err


ALPACA = [
    {"instruction": "Weather?", "input": "Rome", "output": " Sunny.", "text": "x"},
    {"instruction": "Rome?", "input": "", "output": " Sunny."},
    {"prompt": "Rome?", "completion": " Sunny."},
]


def test_without_a_template_alpaca_has_its_own_two_prompts(tmp_path):
    arrow = pytest.importorskip("pyarrow", reason="parquet files are optional")
    from pyarrow import parquet

    asked = source(tmp_path, ALPACA, "prompt+completion")
    said = read(asked, tmp_path)[1]
    assert said == [
        "Below is an instruction that describes a task, paired with an input that provides further "
        "context. Write a response that appropriately completes the request.\n\n### Instruction:\n"
        "Weather?\n\n### Input:\nRome\n\n### Response: Sunny.</s>",
        "Below is an instruction that describes a task. Write a response that appropriately "
        "completes the request.\n\n### Instruction:\nRome?\n\n### Response: Sunny.</s>",
        "Rome? Sunny.</s>",
    ]
    parquet.write_table(arrow.Table.from_pylist(ALPACA[:2]), tmp_path / "a.parquet")
    asked = replace(asked, kind="parquet", path=str(tmp_path / "a.parquet"))
    assert read(asked, tmp_path)[1] == said[:2]


def test_pairs_of_answers_may_be_of_every_kind(tmp_path):
    unsure = {"from": "gpt", "value": "Dunno."}
    rows = [
        {"conversations": SHARED[:1], "chosen": SHARED[1], "rejected": unsure},
        {"prompt": [message("user", PARTS)], "chosen": [REPLY], "rejected": [unsure]},
        {"instruction": "Rome?", "input": "", "chosen": " Sunny.", "rejected": " Dunno."},
    ]
    said = read(replace(source(tmp_path, rows), kind="preference", field="text"), tmp_path)[1]
    assert said[:4] == [ASKED, ASKED.replace("Sunny", "Dunno")] * 2
    assert said[4].endswith("Rome?\n\n### Response: Sunny.</s>")


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"messages": [message("user", [{"type": "image"}]), REPLY]}, "message 1 has a .* 'image'"),
        ({"messages": "[{"}, "messages is a text that is not JSON"),
        (
            {"conversations": [{"from": "bot", "value": "x"}, SHARED[1]]},
            "message 1 has the role 'b",
        ),
        ({"conversations": SHARED, "tools": "[x"}, "tools is a text that is no"),
        ({"conversations": SHARED, "system": 1}, "system is a int"),
        ({"instruction": "a", "output": "", "input": ""}, "message 2, of the assistant, is empty"),
        ({"instruction": "a", "output": "b", "history": [["c"]]}, "history has to be a list of"),
        ({"instruction": ["a"], "output": "b"}, "instruction is a list"),
    ],
)
def test_rows_that_are_of_no_kind_are_named(tmp_path, row, text):
    with pytest.raises(DataError, match=rf"rows\.jsonl:2: {text}"):
        texts(tmp_path, [{"messages": [USER, REPLY]}, row])


def test_a_field_of_texts_says_how_chats_are_read(tmp_path):
    with pytest.raises(DataError, match=r"no field 'text'.*data\.field=messages reads chats"):
        texts(tmp_path, [{"conversations": SHARED}], "text")
    with pytest.raises(DataError, match="history has no place in Alpaca's prompts"):
        texts(tmp_path, [{**ALPACA[0], "history": [["a", "b"]]}], "prompt+completion")
