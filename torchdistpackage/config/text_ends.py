"""The ids of begin and end of text, as a tokenizer's files define them. No torch."""

from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple, cast

from torchdistpackage.config.hugging_face import (
    SETTINGS,
    read_tokenizer,
    special_tokens,
    token_id,
    tokenizer_file,
)
from torchdistpackage.config.types import TextEnd
from torchdistpackage.errors import DataError

_END_NAMES = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>")
"""Usual names of the end-of-text token, tried if no file of the tokenizer names one."""


class TextEnds(NamedTuple):
    """Ids to put before and after each text."""

    bos: tuple[int, ...] = ()
    eos: tuple[int, ...] = ()

    def lacking(self, ids: list[int]) -> "TextEnds":
        """Return the ends that a text's `ids` lack; no token counts for both ends."""
        begun = self.bos if tuple(ids[: len(self.bos)]) == self.bos else ()
        ended = len(ids) - len(begun) >= len(self.eos) and tuple(ids[-len(self.eos) :]) == self.eos
        return TextEnds(() if begun else self.bos, () if self.eos and ended else self.eos)

    def around(self, ids: list[int]) -> list[int]:
        """Return a text's `ids` with both ends; an existing end is not added again."""
        bos, eos = self.lacking(ids)
        return [*bos, *ids, *eos]


def text_ends(tokenizer: Path, bos: TextEnd = "auto", eos: TextEnd = "auto") -> TextEnds:
    """Return the ids to put around each text.

    Args:
        tokenizer: folder with a tokenizer.json, or that file.
        bos: auto takes what the tokenizer's template puts before a text; on takes that, or else its
            bos_token; off takes none.
        eos: auto takes the tokenizer's eos_token if it has one; on demands one; off takes none.

    Raises:
        DataError: a choice is on, and the tokenizer has no such token; a file names one that is no
            token; or the files are not those of a tokenizer.
    """
    file = tokenizer_file(tokenizer)
    content, names = read_tokenizer(file), special_tokens(file.parent)
    first = () if bos == "off" else _around_text(content.get("post_processor"), file).bos
    if bos == "on" and not first:
        first = (_named("bos", content, names, file),)
    last = None if eos == "off" else end_of_text(tokenizer)
    if last is None and (eos == "on" or (eos == "auto" and "eos_token" in names)):
        last = _named("eos", content, names, file)
    return TextEnds(first, () if last is None else (last,))


def template_ends(tokenizer: Path) -> TextEnds:
    """Return the ids that a tokenizer's template puts around a text.

    Raises:
        DataError: the files are not those of a tokenizer.
    """
    file = tokenizer_file(tokenizer)
    return _around_text(read_tokenizer(file).get("post_processor"), file)


def end_of_text(tokenizer: Path) -> int | None:
    """Return the id that ends a text: the named eos_token, or else a token with a usual name.

    Raises:
        DataError: the files are not those of a tokenizer.
    """
    file = tokenizer_file(tokenizer)
    content, name = read_tokenizer(file), special_tokens(file.parent).get("eos_token")
    ids = (token_id(content, x) for x in (_END_NAMES if name is None else (name,)))
    return next((x for x in ids if x is not None), None)


def _named(kind: str, content: Mapping[str, Any], names: Mapping[str, str], file: Path) -> int:
    """Return the id of the bos_token or eos_token."""
    if (name := names.get(f"{kind}_token")) is None:
        raise DataError(
            f"data.{kind}=on, but the tokenizer {file} adds no such token by itself, and no file "
            f"next to it names a {kind}_token; name one in {file.parent / SETTINGS[-1]}, or set "
            f"data.{kind} to auto or off"
        )
    if (number := token_id(content, name)) is None:
        raise DataError(
            f"the {kind}_token of {file.parent} is {name!r}, which {file.name} does not have; name "
            f"one that it has, or set data.{kind} to off"
        )
    return number


def _around_text(processor: Any, file: Path) -> TextEnds:
    """Return the ids that a post_processor of tokenizer.json (or None) puts around a text."""
    settings = cast(dict[str, Any], processor or {})
    try:
        kind = settings.get("type")
        if kind == "TemplateProcessing":
            pieces = cast(list[dict[str, Any]], settings["single"])
            tokens = settings["special_tokens"]
            first, last = (
                takewhile(lambda piece: "SpecialToken" in piece, each)
                for each in (pieces, reversed(pieces))
            )
            preceding, following = (
                [tuple(tokens[piece["SpecialToken"]["id"]]["ids"]) for piece in each]
                for each in (first, last)
            )
            return TextEnds(sum(preceding, ()), sum(reversed(following), ()))
        if kind in ("BertProcessing", "RobertaProcessing"):
            return TextEnds((settings["cls"][1],), (settings["sep"][1],))
        steps = cast(list[Any], settings["processors"] if kind == "Sequence" else [])
        around = (_around_text(step, file) for step in steps)
        return next((ends for ends in around if any(ends)), TextEnds())
    except (AttributeError, KeyError, TypeError, IndexError) as error:
        raise DataError(
            f"{file} has a post_processor of an unknown form: {error!r}; name another tokenizer"
        ) from error
