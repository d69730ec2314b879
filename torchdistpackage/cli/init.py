"""`tdp init`: write the first YAML file of a run from the answers to five questions.

The questions are those of every run. What only some runs need, such as adapters, has an option.
The comment of a key is its text in the schema, and the file must pass the rules of every run before
it is written, so this module has no rules of its own.
"""

import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from torchdistpackage.config.check import bytes_there
from torchdistpackage.config.data_section import (
    CHAT_FIELDS,
    DATA,
    EMBEDDING,
    KIND_OF_SUFFIX,
    PREFERENCE,
    SUFFIX_OF_KIND,
    UNPAIRED,
    DataSection,
)
from torchdistpackage.config.head_tasks import HEAD_TASKS
from torchdistpackage.config.hugging_face import read_config
from torchdistpackage.config.load import KEYS, SECTIONS, loads
from torchdistpackage.config.yaml_loader import write
from torchdistpackage.errors import ConfigError

EXAMPLE, GPT, LOCAL = "example", "gpt", "local"
_IMPORT_PATH = re.compile(r"[\w.]+:\w+")
_MAX_SEQ_LEN = {GPT: 128, "hf": 512}
_MIN_SEQ_LEN, _BYTES_PER_TOKEN = 16, 8
_MOST_OF_A_LINE = 1 << 24
"""Most bytes of the first row that are read to find its fields."""
_WIDTH = 96
"""Columns of a line with its comment; a longer comment is wrapped above its key."""
_PROMPTS = ("prompt", "completion")
_FIELDS_OF_TASK = {
    PREFERENCE: ("chosen", "rejected"),
    EMBEDDING: ("anchor", "positive"),
    UNPAIRED: (*_PROMPTS, "label"),
}
"""The task of rows of JSON that have these fields; the first that fits."""
TASKS = (*_FIELDS_OF_TASK, *HEAD_TASKS)
"""Values of data.name, for rows of JSON, that decide what a run learns."""
IGNORED = -100
"""The label of a word that does not count, as in transformers."""
_MOST_LABELS = 1 << 26
"""Most bytes of the first file that are read to find the classes of its labels."""


@dataclass(frozen=True)
class Answers:
    """The user's answers. model: a folder, an import path or GPT; per_node: ranks on a node.

    task: of rows of JSON, "": by their fields. lora: rank of adapters, 0: none. teacher: folder of
    a model to learn from.
    """

    data: str
    model: str
    partition: str
    nodes: int
    per_node: int
    steps: int
    task: str = ""
    lora: int = 0
    teacher: str | None = None

    @property
    def is_target(self) -> bool:
        return _IMPORT_PATH.fullmatch(self.model) is not None

    @property
    def is_hf(self) -> bool:
        return self.model != GPT and not self.is_target


def init(
    file: Annotated[str, typer.Argument(metavar="FILE", help="YAML file to write.")] = "run.yaml",
    data: Annotated[
        str | None,
        typer.Option(
            metavar="PATH|MODULE:CLASS|example",
            help="Training data: a file or folder of text, JSON lines, parquet or token ids, "
            "your own class, or example for the sources of Python's standard library.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="gpt|FOLDER|MODULE:FUNCTION",
            help="Model: gpt for a small GPT, a Hugging Face folder, or your own function.",
        ),
    ] = None,
    where: Annotated[
        str | None,
        typer.Option(
            metavar="local|PARTITION", help="Where to run: on this machine or on a Slurm partition."
        ),
    ] = None,
    procs: Annotated[
        str | None,
        typer.Option(
            metavar="N|NODESxN",
            help="Number of processes, one for each GPU; on Slurm nodes x processes, such as 2x8.",
        ),
    ] = None,
    steps: Annotated[
        str | None, typer.Option(metavar="N", help="Number of optimizer steps.")
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="What rows of JSON teach, a value of data.name such as classification or reward; "
            "default: by their fields.",
        ),
    ] = None,
    lora: Annotated[
        int | None,
        typer.Option(
            metavar="R", min=1, help="Train adapters of rank R on a Hugging Face folder (LoRA)."
        ),
    ] = None,
    teacher: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER", help="Learn from the predictions of this Hugging Face model, too."
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite FILE if it exists already.")
    ] = False,
) -> None:
    """Write the YAML file of a run, from five questions or options.

    On a terminal the command asks for each option that is not given. Elsewhere give at least one;
    the others default to example, gpt, local, 1 and 200.
    """
    path = Path(file)
    if path.exists() and not force:
        raise ConfigError(f"{file} exists already; name another file or pass --force")
    if task is not None and task not in TASKS:
        raise ConfigError(f"task: {task} is not one of {', '.join(TASKS)}; choose one of these")
    answers = _answers(data, model, where, procs, steps)
    if lora is not None and not answers.is_hf:
        raise ConfigError("lora: adapters are for a Hugging Face folder; name one with --model")
    answers = replace(answers, task=task or "", lora=lora or 0, teacher=teacher)
    text = _text(answers, path)
    loads(text, file)  # the rules of a run
    path.write_text(text, "utf-8")
    typer.echo(f"wrote {file}; next:")
    typer.echo(f"  tdp plan {file}      # layout, memory and bytes; starts nothing")
    if answers.partition == LOCAL:
        typer.echo(f"  tdp train {file}")
    else:
        typer.echo(f"  tdp submit {file} --follow")


def _answers(
    data: str | None, model: str | None, where: str | None, procs: str | None, steps: str | None
) -> Answers:
    """Return the answers: from options, and from questions for the options that are missing."""
    on_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if not on_terminal and {data, model, where, procs, steps} == {None}:
        raise ConfigError(
            "tdp init asks its questions on a terminal; here pass options: --data PATH, "
            "--model gpt|FOLDER|MODULE:FUNCTION, --where local|PARTITION, --procs N, --steps N"
        )

    def answer(
        flag_value: str | None, question: str, default: str, parse: Callable[[str], Any]
    ) -> Any:
        if flag_value is not None or not on_terminal:
            return parse(default if flag_value is None else flag_value)

        def checked(text: str) -> Any:
            try:
                return parse(text)
            except ConfigError as error:  # typer prints this and asks again
                raise typer.BadParameter(str(error)) from error

        return typer.prompt(question, default=default, value_proc=checked)

    source = answer(data, "1/5 Data: a file, a folder, MODULE:CLASS or example", EXAMPLE, _data)
    name = answer(model, "2/5 Model: gpt, a Hugging Face folder or MODULE:FUNCTION", GPT, _model)
    where_to_run = answer(where, "3/5 Where: local, or a Slurm partition", LOCAL, str)
    words = "Processes, one for each GPU" + (
        "" if where_to_run == LOCAL else ", as NODESxN such as 2x8"
    )
    nodes, per_node = answer(procs, f"4/5 {words}", "1", _ranks)
    if where_to_run == LOCAL:
        nodes, per_node = 1, nodes * per_node
    return Answers(
        source,
        name,
        where_to_run,
        nodes,
        per_node,
        answer(steps, "5/5 Optimizer steps", "200", _count),
    )


def _data(text: str) -> str:
    if text != EXAMPLE and not _IMPORT_PATH.fullmatch(text) and not Path(text).exists():
        raise ConfigError(f"data: there is no file or folder {text}; check the path")
    return text


def _model(text: str) -> str:
    if text != GPT and not _IMPORT_PATH.fullmatch(text):
        read_config(text)  # refuses what is not a folder of a model
    return text


def _count(text: str) -> int:
    if not re.fullmatch(r"[1-9]\d{0,8}", text):
        raise ConfigError(
            f"steps: {text} is not a whole number of at least 1; give one such as 100"
        )
    return int(text)


def _ranks(text: str) -> tuple[int, int]:
    """Return nodes and ranks of each."""
    if not (match := re.fullmatch(r"(?:([1-9]\d{0,4})x)?([1-9]\d{0,4})", text)):
        raise ConfigError(
            f"procs: {text} is neither a number nor NODESxN; give one such as 4 or 2x8"
        )
    return int(match[1] or 1), int(match[2])


def _text(answers: Answers, path: Path) -> str:
    num_ranks = answers.nodes * answers.per_node
    model, data = _model_keys(answers), _data_keys(answers)
    data["global_batch"] = 4 * num_ranks * -(-8 // num_ranks)  # 4 micro-batches on each rank
    sections: dict[str, dict[str, Any]] = {
        "run": {"name": path.stem},
        "model": model,
        "data": data,
        "parallel": {"data": "auto"},
        "optim": {"lr": _learning_rate(answers)},
        "train": {"steps": answers.steps, "eval_every": max(answers.steps // 4, 1)},
        "checkpoint": {"save_every": max(answers.steps // 2, 1)},
    }
    if data.get("name") == UNPAIRED:
        sections["train"]["dpo"] = {"loss": "kto"}
    if answers.teacher is not None:
        sections["train"]["distill"] = {"teacher": answers.teacher}
    if answers.is_hf:
        sections["checkpoint"]["export"] = "hf"
    lines = [
        f"# A run, written by tdp init. tdp plan {path} shows its layout; docs/config.md has all",
        f"# keys. Values after the file name override the file: tdp train {path} train.steps=10",
    ]
    for section, keys in sections.items():
        lines += [f"\n{section}:", *_lines(section, keys)]
        if section == "parallel":  # docs/which_layout.md
            others = _lines(section, {"pipe": 1, "tensor": 1, "zero": 0})
            lines += [x if x.lstrip()[0] == "#" else x.replace("  ", "  # ", 1) for x in others]
    if answers.partition == LOCAL:
        local = ["launch:", "  local:", *_lines("launch.local", {"procs": answers.per_node}, 4)]
        # a file without it starts what the degrees need, so that they can be overridden alone
        lines += ["", *(local if answers.per_node > 1 else [f"# {line}" for line in local])]
    else:
        lines += ["\nlaunch:", *_slurm(answers)]
    return "\n".join(lines) + "\n"


def _lines(section: str, keys: dict[str, Any], indent: int = 2) -> Iterator[str]:
    """Yield each key with its text in the schema as a comment, behind it or above it."""
    margin = " " * indent
    for key, value in keys.items():
        if f"{section}.{key}" in SECTIONS:
            yield f"{margin}{key}:"
            yield from _lines(f"{section}.{key}", value, indent + 2)
            continue
        comment = KEYS[f"{section}.{key}"].description or ""
        line = f"{margin}{write({key: value}).rstrip()}"
        if len(line) + len("  # ") + len(comment) <= _WIDTH:
            yield f"{line}  # {comment}"
        else:
            start = f"{margin}# "
            yield from textwrap.wrap(comment, _WIDTH, initial_indent=start, subsequent_indent=start)
            yield line


def _slurm(answers: Answers) -> Iterator[str]:
    yield "  slurm:  # options of sbatch by their own names, and a few of ours: docs/slurm.md"
    options = {
        "partition": answers.partition,
        "nodes": answers.nodes,
        "ntasks-per-node": answers.per_node,
        "gpus-per-node": answers.per_node,
        "time": "1:00:00",
    }
    comments = {
        "gpus-per-node": "or h100:8, whose speed tdp plan knows; remove without GPUs",
        "time": "hours:minutes:seconds",
    }
    for key, value in options.items():
        comment = f"  # {comments[key]}" if key in comments else ""
        yield f"    {write({key: value}).rstrip()}{comment}"
    # a comment, because a job that asks for more cores than a node has is refused
    yield "    # cpus-per-task: 8  # CPU cores of a rank; without it Slurm gives each rank 1"


def _learning_rate(answers: Answers) -> float:
    if not answers.is_hf:
        return 1e-3
    return 2e-4 if answers.lora else 2e-5  # adapters start at zero and are few


def _model_keys(answers: Answers) -> dict[str, Any]:
    if answers.is_target:
        return {"target": answers.model}
    if answers.is_hf:
        lora = {"target": ["all-linear"], "r": answers.lora, "alpha": 2.0 * answers.lora}
        return {"hf": answers.model} | ({"lora": lora} if answers.lora else {})
    return {"name": GPT, "layers": 4, "dim": 128, "heads": 4}


def _data_keys(answers: Answers) -> dict[str, Any]:
    if _IMPORT_PATH.fullmatch(answers.data):
        return {"target": answers.data}
    if answers.data == EXAMPLE:
        keys: dict[str, Any] = {"name": "python_stdlib"}
    else:
        keys = _file_keys(Path(answers.data), answers.task)
    if answers.is_hf:
        keys["tokenizer"] = answers.model
        longest = read_config(answers.model).get("max_position_embeddings")
        most = longest if isinstance(longest, int) else _MAX_SEQ_LEN["hf"]
        return keys | {"seq_len": _fitting(min(most, _MAX_SEQ_LEN["hf"]), keys)}
    return keys | {"seq_len": _MAX_SEQ_LEN[GPT]}


def _fitting(seq_len: int, keys: dict[str, Any]) -> int:
    """Return `seq_len`, or less where the validation part of small files may not fill a sample.

    Rows of JSON have about 8 bytes for each token; only a start, which tokenizes them, knows more.
    """
    data = DataSection.model_validate(keys)
    size = bytes_there(data)
    if size is None:
        return seq_len
    tokens = size * data.val_fraction / _BYTES_PER_TOKEN
    while seq_len > _MIN_SEQ_LEN and seq_len + 1 > tokens:
        seq_len //= 2
    return seq_len


def _file_keys(path: Path, task: str) -> dict[str, Any]:
    """Return the data section for files whose kind their suffix tells; the rest is text.

    task: of rows of JSON; "": by their fields.

    Raises:
        ConfigError: there are no such rows, or their fields are not those of a task.
    """
    files = sorted(x for x in path.rglob("*") if x.is_file()) if path.is_dir() else [path]
    kinds = {x: KIND_OF_SUFFIX[x.suffix] for x in files if x.suffix in KIND_OF_SUFFIX}
    first = next(iter(kinds), None)
    is_json = first is not None and first.suffix == SUFFIX_OF_KIND["jsonl"]
    if task and not is_json:
        raise ConfigError(f"task: {task} needs rows of JSON (.jsonl), but data is {path}")
    if first is None:
        return {"name": "text", "path": str(path)}
    keys = {"name": kinds[first], "path": str(path)}
    if not is_json:
        return keys
    row = _first_row(first)
    task = task or next((x for x, names in _FIELDS_OF_TASK.items() if {*names} <= {*row}), "")
    if not task:
        fields = {key for key, value in row.items() if isinstance(value, str | list)}
        return keys | {"field": _field(first, fields)}
    keys |= {"name": task} | _label_keys(first, task)
    if task == EMBEDDING and "negatives" in row:
        keys["num_negatives"] = len(row["negatives"])
    return keys


def _label_keys(file: Path, task: str) -> dict[str, Any]:
    """Return the classes of a task that has some: the labels in the file, in order."""
    if "labels" not in DATA[task].keys:
        return {}
    labels = set[str]()
    with file.open("rb") as lines:
        for line in lines.readlines(_MOST_LABELS):
            label = _row(file, line).get("label", ())
            every = label if isinstance(label, list) else [label]
            labels |= {str(x) for x in every if x not in (None, IGNORED)}
    if not labels:
        raise ConfigError(f"data: no row of {file} has a label; write it under the key label")
    return {"labels": sorted(labels)}


def _first_row(file: Path) -> dict[str, Any]:
    with file.open("rb") as lines:
        return _row(file, lines.readline(_MOST_OF_A_LINE))


def _row(file: Path, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, dict):
        raise ConfigError(
            f"data: {line[:60]!r} in {file} is not a JSON object on one line; write one object on "
            "each line"
        )
    return row


def _field(file: Path, fields: set[str]) -> str:
    """Return the field with the text, a chat, or a prompt and its completion."""
    known_fields = [key for key in (*CHAT_FIELDS, "text") if key in fields]
    if not known_fields and fields.issuperset(_PROMPTS):
        return "+".join(_PROMPTS)
    if not known_fields and len(fields) == 1:
        return next(iter(fields))
    if not known_fields:
        raise ConfigError(
            f"data: {file} has the fields {', '.join(sorted(fields))}, and none is called text, "
            f"messages, or prompt and completion; rename the one with the text"
        )
    return known_fields[0]
