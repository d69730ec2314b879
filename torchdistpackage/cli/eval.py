"""`tdp eval`: measure the loss and perplexity of a trained model, on any layout."""

import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from torchdistpackage.cli import _inference as inference
from torchdistpackage.cli._common import ListedIn, refusal, wrap_on_terminal
from torchdistpackage.cli._inference import (
    Averages,
    Changes,
    Checkpoint,
    ModelSource,
    Pipe,
    Target,
    Tensor,
    Tokenizer,
    quoted,
)
from torchdistpackage.config.check import absent_files
from torchdistpackage.config.data_section import (
    DATA,
    EMBEDDING,
    KIND_OF_SUFFIX,
    OWN_KEYS,
    ROWS,
    DataSection,
)
from torchdistpackage.config.schema import RunConfig
from torchdistpackage.config.text_ends import TextEnds
from torchdistpackage.data.tokens.chat import ChatTemplate
from torchdistpackage.data.tokens.documents import TextSource
from torchdistpackage.data.tokens.prompts import TokenCodec
from torchdistpackage.data.tokens.template_date import today
from torchdistpackage.data.tokens.texts import read_at_start, tokenized_part
from torchdistpackage.environment.rendezvous import detect
from torchdistpackage.errors import DataError
from torchdistpackage.lazy import resolve
from torchdistpackage.models.registry import model_of
from torchdistpackage.train.inference_request import (
    EvalRequest,
    EvalResult,
    HarnessChat,
    HarnessRequest,
)

_COMMAND = "tdp eval"
_MICROBATCHES = 4
_ROWS = 8
UNKNOWN_TASKS = "torchdistpackage.train.lm_eval_model:unknown_tasks"
_LINE_BREAK = 10
"""The byte that stands before a text without context, for a model of bytes."""
_WINDOW = 1024
"""Window for a transformers folder; a longer one gives a lower loss and takes more memory."""


def eval(
    target: Target,
    overrides: Changes = None,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File to measure: text, .jsonl, .parquet or token ids (.bin); default: the run's "
            "validation data.",
        ),
    ] = None,
    tokenizer: Tokenizer = None,
    checkpoint: Checkpoint = None,
    ema: Averages = False,
    pipe: Pipe = None,
    tensor: Tensor = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    lm_eval: Annotated[
        str | None,
        typer.Option(
            metavar="TASKS",
            help="Evaluate on these tasks of EleutherAI's lm-eval instead, separated by commas.",
        ),
    ] = None,
    task_path: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Folder with further task files.")
    ] = None,
    num_fewshot: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, help="Examples before each question of a task."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Number of documents of each task.")
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Number of texts of a task in a forward; default 8."),
    ] = None,
    apply_chat_template: Annotated[
        bool,
        typer.Option(
            "--apply-chat-template", help="Write prompts of tasks with the chat template."
        ),
    ] = False,
    fewshot_as_multiturn: Annotated[
        bool | None,
        typer.Option(
            help="Whether examples are messages of their own in a chat; by default they are."
        ),
    ] = None,
    system_instruction: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Text before prompts of tasks, as the system's message."),
    ] = None,
) -> None:
    """Measure the loss and perplexity of a trained model, on any layout.

    It reads the validation part of the run's data, or all of --data. Each token is predicted once,
    in windows of data.seq_len; a head or an embedding has the metrics of its task. The numbers are
    the same on every layout.

    With --lm-eval it prints the metrics of tasks instead.
    """
    problems, changes = list[str](), list(overrides or ())
    if lm_eval is not None:
        if data is not None:
            problems.append("--data has no effect with --lm-eval; leave out one of them")
        _evaluate_tasks(
            inference.find_source(_COMMAND, target, checkpoint, changes, problems),
            changes,
            problems,
            tokenizer,
            {"parallel.pipe": pipe, "parallel.tensor": tensor},
            HarnessOptions(
                lm_eval,
                task_path,
                num_fewshot,
                limit,
                batch or _ROWS,
                apply_chat_template,
                fewshot_as_multiturn,
                system_instruction,
            ),
            as_json=as_json,
        )
        return
    for name, value in (
        ("task-path", task_path),
        ("num-fewshot", num_fewshot),
        ("limit", limit),
        ("batch", batch),
        ("apply-chat-template", apply_chat_template or None),
        ("fewshot-as-multiturn", fewshot_as_multiturn),
        ("system-instruction", system_instruction),
    ):
        if value is not None:
            problems.append(f"--{name} has no effect without --lm-eval TASKS; remove it")
    if data is not None and not data.exists():
        problems.append(f"--data {data} does not exist, seen from {Path.cwd()}; check the path")
    source = inference.find_source(_COMMAND, target, checkpoint, changes, problems, ema)
    if data is None and source.is_run and source.run_config.data.is_preference:
        problems.append(
            f"{target} was trained on preference pairs, whose loss needs the reference model; find "
            f"it in metrics.jsonl at each validation, or give --data FILE for the loss of a text"
        )
    overridden = dict(change.split("=", 1) for change in changes if "=" in change)
    if data is None and not source.is_run and "data.path" not in overridden:
        problems.append(f"{target} names no data; give --data FILE")
    keys: dict[str, object] = {}
    if data is not None or tokenizer is not None:
        keys |= _data_keys(source, data, tokenizer, overridden.get("data.name"), problems)
    layout = {"parallel.pipe": pipe, "parallel.tensor": tensor}
    keys |= {key: size for key, size in layout.items() if size is not None}
    keys |= _batch_keys(source, {**keys, **overridden})
    config = None
    with ListedIn(problems):
        config = source.config(keys, changes)
    if config is not None and (data is None or data.exists()):
        problems += map(str, absent_files(config))
    if problems or config is None:
        raise refusal(_COMMAND, problems)
    if detect(os.environ).source == "alone":
        try:  # refuse a bad line here, before ranks start; they read the tokens stored here
            for part in read_at_start(config).values():
                tokenized_part(config, part)
        except DataError as error:
            raise refusal(_COMMAND, str(error).splitlines()) from error
    result = inference.on_ranks(source, config, EvalRequest(all_data=data is not None))
    if detect(os.environ).rank == 0:
        on = str(data) if data is not None else "validation data"
        every = {on: result, **result.sets}
        if as_json:
            values = {name: _values(x, _perplexity(config, x), name) for name, x in every.items()}
            sets = {name: values[name] for name in result.sets}
            typer.echo(json.dumps(values[on] | ({"sets": sets} if sets else {})))
        else:
            for name, x in every.items():
                typer.echo(wrap_on_terminal(_line(x, _perplexity(config, x), name)))


class HarnessOptions(NamedTuple):
    """The options of --lm-eval."""

    tasks: str
    path: Path | None
    num_fewshot: int | None
    limit: int | None
    batch: int
    chat: bool = False
    multiturn: bool | None = None
    system: str | None = None


def _evaluate_tasks(
    source: ModelSource,
    changes: list[str],
    problems: list[str],
    tokenizer: Path | None,
    layout: Mapping[str, int | None],
    options: HarnessOptions,
    *,
    as_json: bool,
) -> None:
    """Print the metrics of lm-eval's tasks."""
    keys: dict[str, object] = {key: size for key, size in layout.items() if size is not None}
    overridden = dict(change.split("=", 1) for change in changes if "=" in change)
    keys |= _batch_keys(source, {**keys, **overridden})
    config = None
    with ListedIn(problems):
        config = source.config(keys, changes)
    folder = source.tokenizer(tokenizer)
    if source.run_config.data.head is not None:
        problems.append(
            f"{source.path} has a head for data.name={source.run_config.data.name} instead of one "
            "for the next token, so it cannot score text; remove --lm-eval"
        )
    elif model_of(source.run_config.model) is None:
        problems.append(
            f"the model was built by model.target={source.run_config.model.target}; only a "
            f"language model of this package or of transformers can score texts"
        )
    elif folder is None and not source.has_bytes:
        problems.append(
            f"{source.path} has no tokenizer, and its tokens are not bytes; give --tokenizer FOLDER"
        )
    data = source.run_config.data if config is None else config.data
    codec = inference.codec_of(folder, source, data, problems) if not problems else None
    stops = inference.stops_of(source, codec, problems)
    prefix = _prefix(folder, codec, problems)
    chat = _chat(folder, options, data, problems)
    if options.path is not None and not options.path.is_dir():
        problems.append(f"--task-path {options.path}: there is no such folder; check the path")
    names = tuple(x.strip() for x in options.tasks.split(",") if x.strip())
    if not names:
        problems.append("--lm-eval names no task; give names, separated by commas")
    with_defaults = True
    if find_spec("lm_eval") is None:
        problems.append('--lm-eval needs lm-eval; pip install "torchdistpackage[lm-eval]"')
    elif not problems and detect(os.environ).source == "alone":
        path = None if options.path is None else str(options.path)
        unknown, with_defaults = resolve(UNKNOWN_TASKS)(names, path)
        problems += [
            f"--lm-eval {name}: lm-eval has no such task; name another, or the folder of its file "
            f"with --task-path FOLDER"
            for name in unknown
        ]
    if problems or config is None:
        raise refusal(_COMMAND, problems)
    request = HarnessRequest(
        tasks=names,
        include_path=None if options.path is None else str(options.path.absolute()),
        with_defaults=with_defaults,
        num_fewshot=options.num_fewshot,
        limit=options.limit,
        batch=options.batch,
        window=source.window,
        tokenizer=None if folder is None else str(folder.absolute()),
        bos=() if folder is None else _ends(folder, data, data.bos).bos,
        prefix=prefix,
        stops=stops,
        chat=chat,
        system=options.system,
    )
    result = inference.on_ranks(source, config, request)
    if detect(os.environ).rank == 0:
        values = {**result.values, "step": result.step}
        typer.echo(json.dumps(values) if as_json else result.table)


def _ends(folder: Path, data: DataSection, bos: str) -> TextEnds:
    return TextSource("text", "", str(folder), data.field, bos, "off").ends


def _chat(
    folder: Path | None, options: HarnessOptions, data: DataSection, problems: list[str]
) -> HarnessChat | None:
    """Return how prompts become chats, or None if they do not."""
    if not options.chat:
        if options.multiturn:
            problems.append(
                "--fewshot-as-multiturn makes messages of a chat; add --apply-chat-template"
            )
        return None
    if folder is None:
        problems.append(
            "--apply-chat-template needs the chat template of a tokenizer; give --tokenizer FOLDER"
        )
        return None
    day = data.template_date or today()
    try:
        ChatTemplate(folder, date.fromisoformat(day))
    except DataError as error:
        problems.append(f"--apply-chat-template: {error}")
    return HarnessChat(str(folder.absolute()), day, options.multiturn is not False)


def _prefix(folder: Path | None, codec: TokenCodec | None, problems: list[str]) -> int:
    """Return the id before a text without context: as in lm-eval that which begins a text, or else
    that which ends one.
    """
    if folder is None or codec is None:
        return _LINE_BREAK
    with suppress(DataError):
        return _ends(folder, DataSection(), "on").bos[0]
    if codec.stop is None:
        problems.append(
            f"the tokenizer {folder} has neither a bos_token nor an eos_token, and a text without "
            "context must begin with one; set one in its tokenizer_config.json"
        )
    return codec.stop or 0


def _data_keys(
    source: ModelSource,
    data: Path | None,
    tokenizer: Path | None,
    kind: str | None,
    problems: list[str],
) -> dict[str, object]:
    """Return the keys of a data section that reads this file as tokens of the model."""
    folder, plain = source.tokenizer(tokenizer), DataSection()
    if data is None:
        return {} if folder is None else {"data.tokenizer": quoted(folder)}
    own_data = source.run_config.data
    # no loss of tokens is asked of a head or an embedding; of a model of answers, no other
    of_task = (
        own_data.name
        if own_data.spec is not None and own_data.spec.task and not own_data.is_preference
        else None
    )
    kind = kind or of_task or KIND_OF_SUFFIX.get(data.suffix, "text")
    spec = DATA.get(kind)
    reads_text = spec is None or bool(spec.reader)
    if reads_text and folder is None and not source.has_bytes:
        problems.append(
            f"--data {data} is text, but {source.path} has no tokenizer, and its tokens are not "
            f"bytes; give --tokenizer FOLDER, or a file of token ids (.bin)"
        )
    elif reads_text and folder is not None:
        problems += source.tokenizer_problems(folder)
    keys: dict[str, object] = {
        "data.name": kind,
        "data.path": quoted(data),
        "data.target": "null",
        "data.args": "{}",
        "data.sources": "[]",
        "data.val_path": "null",
        "data.eval": "{}",
        "train.dpo": "{}",
        "data.tokenizer": quoted(folder) if reads_text and folder is not None else "null",
    }
    if kind not in ROWS:
        keys["data.field"] = plain.field
    if kind != EMBEDDING:
        keys["train.embedding"] = "{}"
    elif not source.is_run and source.run_config.model.hf is None:  # our GPT has no embeddings
        keys |= {"model.hf": quoted(source.path), "model.weights": "null"}
    if spec is not None:
        unread = (key for key in OWN_KEYS if key not in spec.keys)
        keys |= {f"data.{key}": json.dumps(getattr(plain, key)) for key in unread}
    if not reads_text or folder is None:
        keys |= {"data.cache": "null", "data.bos": "auto", "data.eos": "auto"}
    return keys


def _batch_keys(source: ModelSource, keys: dict[str, object]) -> dict[str, object]:
    """Return keys for microbatches as large as the run's, whatever the layout.

    A source of the user's own gets whole batches, because its samples depend on them.
    """
    run, rendezvous = source.run_config, detect(os.environ)

    def size(axis: str) -> int:
        text = str(keys.get(f"parallel.{axis}", getattr(run.parallel, axis)))
        return int(text) if text.isdigit() else 1

    if rendezvous.source == "alone" or "parallel.data" in keys:
        num_data = size("data")
    else:
        num_data = max(
            rendezvous.world_size // (size("pipe") * size("context") * size("tensor")), 1
        )
    batch_keys: dict[str, object] = {"parallel.data": num_data}
    if not source.is_run:
        batch_keys["data.seq_len"] = min(run.data.seq_len, _WINDOW)
    if run.data.target is not None and keys.get("data.target") != "null":
        return batch_keys | {"pipeline.microbatches": 1}
    if keys.get("data.name", run.data.name) == EMBEDDING:
        # the loss depends on the negatives of a batch, so it is that of a round of the run
        batch = str(keys.get("data.global_batch", run.data.global_batch // run.train.accumulate))
        per_rank = int(batch) // num_data if batch.isdigit() else 1
        microbatches = math.gcd(per_rank, run.pipeline.microbatches)
        return batch_keys | {"data.global_batch": batch, "pipeline.microbatches": microbatches}
    rounds = (run.parallel.data if run.parallel.data != "auto" else 1) * run.train.accumulate
    samples = run.data.global_batch // (rounds * run.pipeline.microbatches) if source.is_run else 1
    return batch_keys | {
        "pipeline.microbatches": _MICROBATCHES,
        "data.global_batch": max(samples, 1) * _MICROBATCHES * num_data,
    }


def _line(result: EvalResult, perplexity: float | None, on: str) -> str:
    line = f"loss {result.loss:.6f}"
    if result.values:
        line += "".join(f", {name} {value:.4f}" for name, value in result.values.items())
    if perplexity is not None:
        line += f" nats per token, perplexity {perplexity:.4f}, {result.num_tokens:,} tokens"
    else:
        line += f", {result.num_tokens:,} counted"
    return f"{line} of {on}" + ("" if result.step is None else f", step {result.step}")


def _values(result: EvalResult, perplexity: float | None, on: str) -> dict[str, object]:
    """Return the values for JSON, with null for NaN and infinity, which JSON cannot hold."""
    values = {"loss": result.loss, "perplexity": perplexity}
    numbers = {k: x if x is not None and math.isfinite(x) else None for k, x in values.items()}
    more = {"tokens": result.num_tokens, "windows": result.num_windows, "data": on}
    return {**numbers, **result.values, **more, "step": result.step}


def _perplexity(config: RunConfig, result: EvalResult) -> float | None:
    """Return the perplexity, or None if the loss is not the cross entropy of tokens."""
    spec = config.data.spec
    is_of_tokens = config.model.loss is None and (spec is None or not spec.task)
    if not is_of_tokens or not result.num_windows:
        return None
    return math.exp(result.loss) if not result.loss > 700 else math.inf
