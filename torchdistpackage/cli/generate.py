"""`tdp generate`: what a trained model writes after a prompt, on any layout."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import typer

from torchdistpackage.bounded import parse_json
from torchdistpackage.cli import _inference as inference
from torchdistpackage.cli._common import ListedIn, refusal
from torchdistpackage.cli._inference import Changes, Checkpoint, Pipe, Target, Tensor, Tokenizer
from torchdistpackage.config.data_section import DataSection
from torchdistpackage.data.tokens.chat import ChatTemplate
from torchdistpackage.data.tokens.documents import TextSource
from torchdistpackage.data.tokens.prompts import ByteCodec, TokenCodec, TokenizerCodec
from torchdistpackage.data.tokens.template_date import today
from torchdistpackage.errors import DataError
from torchdistpackage.models.registry import model_of
from torchdistpackage.train.inference_request import GenerateRequest, Sampling

_COMMAND = "tdp generate"
_STOPS_IN = ("generation_config.json", "config.json")


def generate(
    target: Target,
    overrides: Changes = None,
    prompt: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Text to continue; repeatable.")
    ] = None,
    prompt_file: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Read a prompt from FILE; repeatable."),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(metavar="N", min=1, help="Maximum number of new tokens.")
    ] = 100,
    temperature: Annotated[
        float, typer.Option(metavar="T", help="Sampling temperature; 0 is greedy decoding.")
    ] = 0.0,
    top_k: Annotated[
        int | None, typer.Option(metavar="K", help="Sample from the K most likely tokens.")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(metavar="P", help="Nucleus sampling with cumulative probability P."),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Random seed of the sampling.")] = 0,
    chat: Annotated[
        bool, typer.Option("--chat", help="Prompts are messages, written by the chat template.")
    ] = False,
    stop: Annotated[
        list[str] | None,
        typer.Option(metavar="TOKEN", help="Another token that ends a text; repeatable."),
    ] = None,
    batch: Annotated[
        int, typer.Option(metavar="N", min=1, help="Prompts that are continued together.")
    ] = 8,
    tokenizer: Tokenizer = None,
    checkpoint: Checkpoint = None,
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
        problems.append("nothing to continue; give --prompt TEXT or --prompt-file FILE")
    problems += [f"prompt {i} is empty; write something" for i, x in enumerate(texts, 1) if not x]
    source = inference.find_source(_COMMAND, target, checkpoint, changes, problems)
    layout = {"parallel.pipe": pipe, "parallel.tensor": tensor}
    keys = {key: size for key, size in layout.items() if size is not None}
    given = dict(change.split("=", 1) for change in changes if "=" in change)
    replicas = given.get("parallel.data", 1)  # which all write the same
    keys |= {"parallel.data": 1, "pipeline.microbatches": 1, "data.global_batch": replicas}
    config = None
    with ListedIn(problems):
        config = source.config(keys, changes)
    codec, folder = None, source.tokenizer(tokenizer)
    if model_of(source.own.model) is None:
        problems.append(
            f"model.target={source.own.model.target} built the model, and only a language model of "
            f"this package or of transformers can be asked for tokens"
        )
    elif folder is None and chat:
        problems.append("--chat: tokens are bytes, and a chat template is of a tokenizer; give one")
        codec = ByteCodec()
    elif folder is None and not source.has_bytes:
        problems.append(
            f"{target} has no tokenizer, and its tokens are no bytes; give --tokenizer FOLDER"
        )
    else:
        data = source.own.data if config is None else config.data
        codec = _codec(folder, source, data, problems)
    stops = _stops(source, codec, problems)
    if codec is not None:
        stops += tuple(_asked_stops(stop or (), codec, problems))
    encoded = [] if codec is None else [codec.encode(text) for text in texts]
    if chat:
        day = None if config is None else config.data.template_date
        found = _Chat.of(folder, codec, day or today(), problems)
        encoded = [] if found is None else list(found.encode(texts, problems))
        stops += () if found is None else found.stops
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
    """Messages as a tokenizer's chat template writes them. stops: what ends a reply."""

    template: ChatTemplate
    codec: TokenizerCodec
    stops: tuple[int, ...]

    @classmethod
    def of(
        cls, folder: Path | None, codec: TokenCodec | None, day: str, problems: list[str]
    ) -> "_Chat | None":
        if folder is None or codec is None:
            return None  # which is a problem already, but for a model of bytes
        try:
            template = ChatTemplate(folder, date.fromisoformat(day))
            # no token stands before what the template writes
            written = TokenizerCodec(folder)
            found = written.special(template.behind_reply().lstrip())
        except DataError as error:
            problems.append(f"--chat: {error}")
            return None
        return cls(template, written, () if found is None else (found,))

    def encode(self, texts: list[str], problems: list[str]) -> Iterator[list[int]]:
        for number, text in enumerate(texts, 1):
            try:
                yield self.codec.encode(self.template.prompt(text, f"prompt {number}"))
            except DataError as error:
                problems.append(str(error))


def _asked_stops(tokens: list[str], codec: TokenCodec, problems: list[str]) -> Iterator[int]:
    for text in tokens:
        if (found := codec.token(text)) is None:
            problems.append(f"--stop {text!r}: no single token of this model's tokenizer")
        else:
            yield found


def _codec(
    folder: Path | None, source: inference.ModelSource, data: DataSection, problems: list[str]
) -> TokenCodec | None:
    """What makes ids of prompts as `data` does of documents, whose end is yet to come."""
    if folder is None:
        return ByteCodec()
    if wrong := source.tokenizer_problems(folder):
        problems += wrong
        return None
    try:
        ends = TextSource("text", "", str(folder), data.field, data.bos, "off").ends
        return TokenizerCodec(folder, bos=ends.bos)
    except DataError as error:
        problems.append(str(error))
        return None


def _sampling_problems(temperature: float, top_k: int | None, top_p: float | None) -> Iterator[str]:
    if top_p is not None and not 0 < top_p <= 1:
        yield f"--top-p {top_p:g}: a share of the chances, above 0 and at most 1"
    if top_k is not None and top_k < 1:
        yield f"--top-k {top_k}: a number of tokens, 1 or more"
    if not 0 <= temperature < math.inf:
        yield f"--temperature {temperature}: use a finite number, 0 or more"
    for name, value in (("top-k", top_k), ("top-p", top_p)):
        if value is not None and temperature == 0:
            yield f"--{name} {value:g} would not be used with --temperature 0; set that to 1, say"


def _given(texts: Iterable[str], problems: list[str]) -> Iterator[str]:
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError:
            problems.append(f"--prompt {text!r} is no UTF-8 text")
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
                f"prompt {number} has {len(ids)} tokens, and the model sees {window} at once; "
                f"shorten it by {len(ids) - window}"
            )
        elif text and not ids:
            yield f"prompt {number} has no token; write something that the tokenizer knows"


def _stops(
    source: inference.ModelSource, codec: TokenCodec | None, problems: list[str]
) -> tuple[int, ...]:
    """Ids that end a text: of a transformers folder those that its files name."""
    for name in _STOPS_IN if not source.is_run else ():
        if not (file := source.path / name).is_file():
            continue
        try:
            found = parse_json(file.read_text(encoding="utf-8")).get("eos_token_id")
        except (OSError, ValueError, AttributeError) as error:
            problems.append(f"{file} cannot be read: {error}")
            continue
        if found is not None:
            return tuple(x for x in (found if isinstance(found, list) else [found]))
    return () if codec is None or codec.stop is None else (codec.stop,)
