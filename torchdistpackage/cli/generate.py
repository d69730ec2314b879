"""`tdp generate`: continue prompts with a trained model, on any layout."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import typer

from torchdistpackage.cli import _inference as inference
from torchdistpackage.cli._common import ListedIn, refusal
from torchdistpackage.cli._inference import (
    Averages,
    Changes,
    Checkpoint,
    Pipe,
    Target,
    Tensor,
    Tokenizer,
)
from torchdistpackage.data.tokens.chat import ChatTemplate
from torchdistpackage.data.tokens.prompts import ByteCodec, TokenCodec, TokenizerCodec
from torchdistpackage.data.tokens.template_date import today
from torchdistpackage.errors import DataError
from torchdistpackage.models.registry import model_of
from torchdistpackage.train.inference_request import GenerateRequest, Sampling

_COMMAND = "tdp generate"


def generate(
    target: Target,
    overrides: Changes = None,
    prompt: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Text to continue; repeatable.")
    ] = None,
    prompt_file: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Read a prompt to continue from FILE; repeatable."),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(metavar="N", min=1, help="Largest number of new tokens for each prompt.")
    ] = 100,
    temperature: Annotated[
        float,
        typer.Option(metavar="T", help="Sampling temperature; 0 always takes the likeliest token."),
    ] = 0.0,
    top_k: Annotated[
        int | None, typer.Option(metavar="K", help="Sample only from the K likeliest tokens.")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            metavar="P",
            help="Sample only from the likeliest tokens whose probabilities add up to P.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Random seed of the sampling.")] = 0,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat", help="Take each prompt as a user's message, and apply the chat template."
        ),
    ] = False,
    stop: Annotated[
        list[str] | None,
        typer.Option(metavar="TOKEN", help="Also end a text at this token; repeatable."),
    ] = None,
    batch: Annotated[
        int, typer.Option(metavar="N", min=1, help="Number of prompts to continue at a time.")
    ] = 8,
    tokenizer: Tokenizer = None,
    checkpoint: Checkpoint = None,
    ema: Averages = False,
    pipe: Pipe = None,
    tensor: Tensor = None,
) -> None:
    """Continue prompts with a trained model, on any layout.

    The tokens are the same on every layout. Text is printed as it is generated.
    """
    changes = overrides or ()
    problems = list(_sampling_problems(temperature, top_k, top_p))
    texts = [*_given(prompt or (), problems), *_read_prompts(prompt_file or (), problems)]
    if not prompt and not prompt_file:
        problems.append("there is no prompt; give --prompt TEXT or --prompt-file FILE")
    problems += [f"prompt {i} is empty; write a text" for i, x in enumerate(texts, 1) if not x]
    source = inference.find_source(_COMMAND, target, checkpoint, changes, problems, ema)
    layout = {"parallel.pipe": pipe, "parallel.tensor": tensor}
    keys = {key: size for key, size in layout.items() if size is not None}
    overridden = dict(change.split("=", 1) for change in changes if "=" in change)
    replicas = overridden.get("parallel.data", 1)  # all replicas write the same text
    keys |= {"parallel.data": 1, "pipeline.microbatches": 1, "data.global_batch": replicas}
    config = None
    with ListedIn(problems):
        config = source.config(keys, changes)
    codec, folder = None, source.tokenizer(tokenizer)
    if source.run_config.data.head is not None:
        problems.append(
            f"{target} has a head for data.name={source.run_config.data.name} instead of one for "
            "the next token; use tdp eval, or tdp export for transformers' pipelines"
        )
    elif model_of(source.run_config.model) is None:
        problems.append(
            f"the model was built by model.target={source.run_config.model.target}; only a "
            f"language model of this package or of transformers can generate text"
        )
    elif folder is None and chat:
        problems.append(
            "--chat needs the chat template of a tokenizer, but the tokens of this model are "
            "bytes; give --tokenizer FOLDER or remove --chat"
        )
        codec = ByteCodec()
    elif folder is None and not source.has_bytes:
        problems.append(
            f"{target} has no tokenizer, and its tokens are not bytes; give --tokenizer FOLDER"
        )
    else:
        data = source.run_config.data if config is None else config.data
        codec = inference.codec_of(folder, source, data, problems)
    stops = inference.stops_of(source, codec, problems)
    if codec is not None:
        stops += tuple(_asked_stops(stop or (), codec, problems))
    encoded = [] if codec is None else [codec.encode(text) for text in texts]
    if chat:
        day = None if config is None else config.data.template_date
        chat_codec = _Chat.of(folder, codec, day or today(), problems)
        encoded = [] if chat_codec is None else list(chat_codec.encode(texts, problems))
        stops += () if chat_codec is None else chat_codec.stops
        texts = [f"{text}\n" for text in texts]
    problems += _prompt_problems(encoded, texts, source.window)
    if problems or codec is None or config is None:
        raise refusal(_COMMAND, problems)
    request = GenerateRequest(
        texts=tuple(texts),
        prompts=tuple(map(tuple, encoded)),
        tokenizer=None if folder is None else str(folder),
        max_new_tokens=max_new_tokens,
        window=source.window,
        stops=stops,
        sampling=Sampling(temperature, top_k, top_p, seed),
        batch=batch,
    )
    inference.on_ranks(source, config, request)


@dataclass(frozen=True, slots=True)
class _Chat:
    """A tokenizer's chat template, which writes messages. stops: tokens that end a reply."""

    template: ChatTemplate
    codec: TokenizerCodec
    stops: tuple[int, ...]

    @classmethod
    def of(
        cls, folder: Path | None, codec: TokenCodec | None, day: str, problems: list[str]
    ) -> "_Chat | None":
        if folder is None or codec is None:
            return None  # already reported, except for a model of bytes
        try:
            template = ChatTemplate(folder, date.fromisoformat(day))
            # without begin-of-text token: the template itself writes it
            plain_codec = TokenizerCodec(folder)
            end = plain_codec.special(template.behind_reply().lstrip())
        except DataError as error:
            problems.append(f"--chat: {error}")
            return None
        return cls(template, plain_codec, () if end is None else (end,))

    def encode(self, texts: list[str], problems: list[str]) -> Iterator[list[int]]:
        for number, text in enumerate(texts, 1):
            try:
                yield self.codec.encode(self.template.prompt(text, f"prompt {number}"))
            except DataError as error:
                problems.append(str(error))


def _asked_stops(tokens: list[str], codec: TokenCodec, problems: list[str]) -> Iterator[int]:
    for text in tokens:
        if (token := codec.token(text)) is None:
            problems.append(
                f"--stop {text!r} is not a single token of this model's tokenizer; name one that is"
            )
        else:
            yield token


def _sampling_problems(temperature: float, top_k: int | None, top_p: float | None) -> Iterator[str]:
    if top_p is not None and not 0 < top_p <= 1:
        yield f"--top-p {top_p:g}: use a probability above 0 and at most 1"
    if top_k is not None and top_k < 1:
        yield f"--top-k {top_k}: use a number of tokens, 1 or more"
    if not 0 <= temperature < math.inf:
        yield f"--temperature {temperature}: use a finite number, 0 or more"
    for name, value in (("top-k", top_k), ("top-p", top_p)):
        if value is not None and temperature == 0:
            yield (
                f"--{name} {value:g} has no effect with --temperature 0; set a temperature such as "
                f"1, or remove --{name}"
            )


def _given(texts: Iterable[str], problems: list[str]) -> Iterator[str]:
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError:
            problems.append(f"--prompt {text!r} is not valid UTF-8; pass it as UTF-8 text")
        else:
            yield text


def _read_prompts(paths: Any, problems: list[str]) -> Iterator[str]:
    for path in paths:
        try:
            yield path.read_text(encoding="utf-8-sig").removesuffix("\n")
        except (OSError, UnicodeDecodeError) as error:
            problems.append(f"--prompt-file {path} cannot be read as UTF-8 text: {error}")


def _prompt_problems(encoded: list[list[int]], texts: list[str], window: int) -> Iterator[str]:
    for number, (ids, text) in enumerate(zip(encoded, texts, strict=False), 1):
        if len(ids) > window:
            yield (
                f"prompt {number} has {len(ids)} tokens, but the model takes at most {window}; "
                f"shorten it by {len(ids) - window}"
            )
        elif text and not ids:
            yield f"prompt {number} has no token; write a text that the tokenizer can encode"
