"""Chat templates of a tokenizer's folder: the choice of one, its variables, and its date."""

import json
from datetime import date
from pathlib import Path

import pytest

from tests.data.chat_shapes import PLAIN, said, save_chat_tokenizer
from tests.data.texts import save_lines
from torchdistpackage.config.load import load
from torchdistpackage.config.schema import RunConfig
from torchdistpackage.config.text_ends import end_of_text
from torchdistpackage.data.tokens.chat import ChatTemplate
from torchdistpackage.data.tokens.documents import TextSource
from torchdistpackage.data.tokens.preference_pairs import PairReader
from torchdistpackage.data.tokens.template_date import with_template_date
from torchdistpackage.data.tokens.texts import text_source
from torchdistpackage.data.tokens.token_cache import tokenized
from torchdistpackage.data.tokens.token_encoder import load_tokenizer
from torchdistpackage.errors import DataError
from torchdistpackage.models.hugging_face_folder import copy_companions
from torchdistpackage.run_files import RESOLVED

DAY = date(2024, 7, 6)
ASKED, ANSWER = said("user", "alpha"), said("assistant", "beta")
ROW = {"messages": [ASKED, ANSWER]}
DEFAULT = "{% for m in messages %}{{ m.content }}|{% endfor %}"
TOOL_USE = "{{ tools | tojson }}" + DEFAULT


def written(folder: Path, row: dict, day: date = DAY) -> str:
    return ChatTemplate(folder, day).document(row, "here").text


def put(folder: Path, name: str, content: object) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / name).write_text(text, encoding="utf-8")


NAMED = [{"name": "tool_use", "template": TOOL_USE}, {"name": "default", "template": DEFAULT}]


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config.json": {"chat_template": NAMED}},
        {"chat_template.jinja": DEFAULT, "additional_chat_templates/tool_use.jinja": TOOL_USE},
        {"chat_template.json": {"chat_template": NAMED}},
        {"processor_config.json": {"chat_template": NAMED}},
    ],
)
def test_a_chat_with_tools_is_written_by_the_template_for_them(tmp_path, files):
    save_chat_tokenizer(tmp_path)
    for name, content in files.items():
        put(tmp_path, name, content)
    assert written(tmp_path, ROW) == "alpha|beta|"
    for tools in ([{"name": "é"}], []):
        expected = f"{json.dumps(tools, ensure_ascii=False)}alpha|beta|"
        assert written(tmp_path, {**ROW, "tools": tools}) == expected
        assert written(tmp_path, {**ROW, "tools": json.dumps(tools)}) == expected


def test_pairs_with_tools_are_written_by_the_template_for_them(tmp_path):
    save_chat_tokenizer(tmp_path, chat_template=NAMED)
    row = {"prompt": [ASKED], "chosen": [ANSWER], "rejected": [ASKED, ANSWER], "tools": [{}]}
    pair = PairReader(tmp_path, DAY)(row, "here")
    assert pair.chosen.text == "[{}]alpha|beta|" and pair.rejected.text == "[{}]alpha|alpha|beta|"


def test_files_of_templates_go_before_those_of_the_configuration(tmp_path):
    save_chat_tokenizer(tmp_path, chat_template=DEFAULT)
    put(tmp_path, "additional_chat_templates/tool_use.jinja", "tools" + DEFAULT)
    assert written(tmp_path, {**ROW, "tools": [{}]}) == "toolsalpha|beta|"
    with pytest.raises(DataError, match=r"here: .* has the chat templates tool_use, but none for"):
        written(tmp_path, ROW)
    put(tmp_path, "chat_template.jinja", "file" + DEFAULT)
    assert written(tmp_path, ROW) == "filealpha|beta|"


def test_tokens_have_the_names_that_transformers_gives_them(tmp_path):
    names = "{{ image_token }}{{ boi }}{{ eot }}{{ eos_token }}{{ bos_token }}"
    more = {"image_token": "<image>", "boi": {"content": "<boi>"}}
    settings = {"extra_special_tokens": more, "model_specific_special_tokens": {"eot": "<eot>"}}
    folder = save_chat_tokenizer(tmp_path, names + DEFAULT, **settings)
    assert written(folder, ROW) == "<image><boi><eot></s><s>alpha|beta|"
    # the map goes first, unless the configuration has all tokens
    put(folder, "special_tokens_map.json", {"eos_token": "<|end|>"})
    assert written(folder, ROW) == "<image><boi><eot><|end|><s>alpha|beta|"
    tokenizer, _ = load_tokenizer(folder)
    assert end_of_text(folder) == tokenizer.token_to_id("<|end|>")
    save_chat_tokenizer(folder, **settings, added_tokens_decoder={})
    assert written(folder, ROW) == "<image><boi><eot></s><s>alpha|beta|"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "é<"}'),
        ("{{ messages[0].content | tojson(true) }}", '"\\u00e9<"'),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}", '{\n "a": 2,\n "b": 1\n}'),
        ("{{ {'b': 1} | tojson(separators=(',', ':')) }}", '{"b":1}'),
        ("{{ dict(messages[0], role='x').role }}{{ dict.fromkeys(['k'], 1) }}", "x{'k': 1}"),
        ("{% set n = namespace({'a': 1}, self=2) %}{{ n.a }}{{ n.self }}", "12"),
        ("{{ documents is none and tools is none }}", "True"),
        ("{{ strftime_now('%d %b %Y %H') }}", "06 Jul 2024 00"),
    ],
)
def test_functions_of_templates_are_those_of_transformers(tmp_path, source, text):
    folder = save_chat_tokenizer(tmp_path, source + DEFAULT)
    assert written(folder, {"messages": [said("user", "é<"), ANSWER]}) == text + "é<|beta|"


def test_reasoning_has_every_name_that_templates_read(tmp_path):
    source = "{% for m in messages %}{{ m.reasoning_content }},{{ m.thinking }};{% endfor %}"
    folder = save_chat_tokenizer(tmp_path, source)
    for key in ("reasoning_content", "thinking", "reasoning"):
        text = written(folder, {"messages": [ASKED, {**ANSWER, key: "hm"}]})
        assert text == ",;hm,hm;"


def run_of(folder: Path, template: str, **data: object) -> Path:
    tokenizer = save_chat_tokenizer(folder / "tokenizer", template)
    path = save_lines(folder / "chats.jsonl", [ROW])
    section = {"name": "jsonl", "path": str(path), "tokenizer": str(tokenizer), "field": "messages"}
    run = {"dir": str(folder), "name": "run"}
    config = {"run": run, "data": section | data, "model": {"vocab": 400}}
    put(folder, "run.yaml", config)
    return folder / "run.yaml"


def _text_at_a_start(config: RunConfig, folder: Path) -> str:
    """Return the chat as a start of the run writes it, and record the configuration like a run."""
    started = with_template_date(config)
    (folder / "run" / RESOLVED).write_text(started.to_yaml())
    today = date.fromisoformat(started.data.template_date or "")
    return ChatTemplate(folder / "tokenizer", today).document(ROW, "here").text


def test_a_run_has_one_date_that_its_folder_records(tmp_path):
    plain = load(run_of(tmp_path, PLAIN["chatml"]))
    assert with_template_date(plain) is plain, "no date is asked for"
    config = load(run_of(tmp_path, PLAIN["llama32"]))
    assert with_template_date(config).data.template_date == date.today().isoformat()
    asked = load(tmp_path / "run.yaml", ["data.template_date=2023-01-02"])
    assert with_template_date(asked) is asked
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / RESOLVED).write_text(asked.to_yaml())
    assert with_template_date(config).data.template_date == "2023-01-02", "as at the first start"
    fresh = with_template_date(config, "never")
    assert fresh.data.template_date == date.today().isoformat()
    text = ChatTemplate(tmp_path / "tokenizer", date(2023, 1, 2)).document(ROW, "here").text
    assert _text_at_a_start(config, tmp_path) == text == _text_at_a_start(config, tmp_path)
    other = load(tmp_path / "run.yaml", ["run.name=other"])
    step = tmp_path / "run" / "checkpoints" / "step_000001"
    assert with_template_date(other, str(step)).data.template_date == "2023-01-02"


def test_ids_depend_on_the_date_only_where_a_template_writes_it(tmp_path):
    for name in ("llama32", "chatml"):
        entries = {}
        for day in ("2024-07-26", "2024-07-27"):
            config = load(run_of(tmp_path, PLAIN[name], template_date=day))
            entries[day] = tokenized(text_source(config, config.data), tmp_path / "tokens").folder
        assert len(set(entries.values())) == (2 if name == "llama32" else 1)
    config = load(run_of(tmp_path, PLAIN["llama32"], template_date="2024-07-26"))
    found = tokenized(text_source(config, config.data), tmp_path / "tokens")
    tokenizer, _ = load_tokenizer(tmp_path / "tokenizer")
    assert "Today: 26 Jul 2024" in tokenizer.decode(found.tokens.tolist())


def test_an_edited_template_for_tools_is_another_entry(tmp_path):
    tokenizer = save_chat_tokenizer(tmp_path / "tokenizer", DEFAULT)
    put(tokenizer, "additional_chat_templates/tool_use.jinja", TOOL_USE)
    path = save_lines(tmp_path / "chats.jsonl", [{**ROW, "tools": [{"name": "a"}]}])
    source = TextSource("jsonl", str(path), str(tokenizer), "messages")
    first = tokenized(source, tmp_path / "cache").folder
    put(tokenizer, "additional_chat_templates/tool_use.jinja", "x" + TOOL_USE)
    assert tokenized(source, tmp_path / "cache").folder != first


def test_an_export_has_all_templates(tmp_path):
    base = save_chat_tokenizer(tmp_path / "base", DEFAULT)
    names = ("additional_chat_templates/tool_use.jinja", "chat_template.json")
    for name in names:
        put(base, name, TOOL_USE)
    put(base, "config.json", {})
    (tmp_path / "new").mkdir()
    copy_companions(base, tmp_path / "new")
    for name in (*names, "chat_template.jinja", "tokenizer_config.json"):
        assert (tmp_path / "new" / name).read_bytes() == (base / name).read_bytes()
