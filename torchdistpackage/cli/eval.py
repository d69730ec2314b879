"""`tdp eval`: measure the loss and perplexity of a trained model, on any layout."""

import json
import math
import os
from pathlib import Path
from typing import Annotated

import typer

from torchdistpackage.cli import _inference as inference
from torchdistpackage.cli._common import ListedIn, refusal, wrap_on_terminal
from torchdistpackage.cli._inference import (
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
from torchdistpackage.config.data_section import DATA, KIND_OF_SUFFIX, OWN_KEYS, ROWS, DataSection
from torchdistpackage.config.schema import RunConfig
from torchdistpackage.data.tokens.texts import text_parts, tokenized_part
from torchdistpackage.environment.rendezvous import detect
from torchdistpackage.errors import DataError
from torchdistpackage.train.inference_request import EvalRequest, EvalResult

_COMMAND = "tdp eval"
_MICROBATCHES = 4
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
    pipe: Pipe = None,
    tensor: Tensor = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure the loss and perplexity of a trained model, on any layout.

    It reads the validation part of the run's data, or all of --data. Each token is predicted once,
    in windows of data.seq_len. The numbers are the same on every layout.
    """
    problems, changes = list[str](), list(overrides or ())
    if data is not None and not data.exists():
        problems.append(f"--data {data} does not exist, seen from {Path.cwd()}; check the path")
    source = inference.find_source(_COMMAND, target, checkpoint, changes, problems)
    if data is None and source.is_run and source.own.data.is_preference:
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
            for part in text_parts(config).values():
                tokenized_part(config, part)
        except DataError as error:
            raise refusal(_COMMAND, [str(error)]) from error
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


def _data_keys(
    source: ModelSource,
    data: Path | None,
    given: Path | None,
    kind: str | None,
    problems: list[str],
) -> dict[str, object]:
    """Return the keys of a data section that reads this file as tokens of the model."""
    folder, plain = source.tokenizer(given), DataSection()
    if data is None:
        return {} if folder is None else {"data.tokenizer": quoted(folder)}
    kind = kind or KIND_OF_SUFFIX.get(data.suffix, "text")
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
    if spec is not None:
        keys |= {f"data.{key}": getattr(plain, key) for key in OWN_KEYS if key not in spec.keys}
    if not reads_text or folder is None:
        keys |= {"data.cache": "null", "data.bos": "auto", "data.eos": "auto"}
    return keys


def _batch_keys(source: ModelSource, keys: dict[str, object]) -> dict[str, object]:
    """Return keys for microbatches as large as the run's, whatever the layout.

    A source of the user's own gets whole batches, because its samples depend on them.
    """
    run, rendezvous = source.own, detect(os.environ)

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
        batch_keys["data.seq_len"] = min(source.window, _WINDOW)
    if run.data.target is not None and keys.get("data.target") != "null":
        return batch_keys | {"pipeline.microbatches": 1}
    rounds = (run.parallel.data if run.parallel.data != "auto" else 1) * run.train.accumulate
    samples = run.data.global_batch // (rounds * run.pipeline.microbatches) if source.is_run else 1
    return batch_keys | {
        "pipeline.microbatches": _MICROBATCHES,
        "data.global_batch": max(samples, 1) * _MICROBATCHES * num_data,
    }


def _line(result: EvalResult, perplexity: float | None, on: str) -> str:
    line = f"loss {result.loss:.6f}"
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
    return {**numbers, **more, "step": result.step}


def _perplexity(config: RunConfig, result: EvalResult) -> float | None:
    """Return the perplexity, or None if the loss is not the cross entropy of tokens."""
    if config.model.loss is not None or not result.num_windows:
        return None
    return math.exp(result.loss) if not result.loss > 700 else math.inf
