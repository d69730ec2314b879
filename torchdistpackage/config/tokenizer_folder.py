"""What a tokenizer's folder says of itself, as save_pretrained writes it. Reads JSON alone."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from torchdistpackage.bounded import parse_json, read_regular
from torchdistpackage.errors import DataError

TEMPLATE = "chat_template.jinja"
SETTINGS = ("special_tokens_map.json", "tokenizer_config.json")
"""Where special tokens are named; the last file wins."""
_MAX_BYTES = 1 << 28


def tokenizer_file(path: Path) -> Path:
    """The tokenizer.json of a folder, or that file itself.

    Raises:
        DataError: there is none.
    """
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise DataError(
            f"data.tokenizer {path}: {file} is no file; give a folder with the tokenizer.json of "
            f"the tokenizers library, as save_pretrained writes it"
        )
    return file


def vocabulary_size(file: Path) -> int:
    """The largest id of a tokenizer.json and 1, as ids may have gaps.

    Raises:
        DataError: it is no tokenizer of the tokenizers library.
    """
    found = _mapping(file)
    try:
        vocab = cast(list[Any] | dict[str, int], found["model"]["vocab"])
        added = cast(list[dict[str, int]], found.get("added_tokens") or [])
        # of a unigram model a list of [token, score]; of all others a mapping from token to id
        ids = range(len(vocab)) if isinstance(vocab, list) else vocab.values()
        return max([*ids, *(token["id"] for token in added)], default=-1) + 1
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{file} is no tokenizer of the tokenizers library: {error!r}") from error


def special_tokens(folder: Path) -> dict[str, str]:
    """Texts of the special tokens by name, such as eos_token.

    Raises:
        DataError: a file of the folder that names them is no JSON mapping.
    """
    return {name: text for file in _settings(folder) for name, text in _tokens(_mapping(file))}


def chat_template(folder: Path) -> str | None:
    """The Jinja source by which the tokenizer writes a chat; None if it has none.

    Raises:
        DataError: a file that could have it cannot be read.
    """
    if (file := folder / TEMPLATE).is_file():
        return _content(file)
    if not (file := folder / SETTINGS[-1]).is_file():
        return None
    found = _mapping(file).get("chat_template")
    if isinstance(found, list):  # several, each with a name
        entries = [cast(dict[str, Any], x) for x in cast(list[Any], found) if isinstance(x, dict)]
        found = {x.get("name"): x.get("template") for x in entries}.get("default")
    return found if isinstance(found, str) else None


def described_by(folder: Path, *, chat: bool) -> list[Path]:
    """The files next to tokenizer.json on which ids depend. chat: of chats too."""
    template = folder / TEMPLATE
    return _settings(folder) + ([template] if chat and template.is_file() else [])


def no_chat_template(folder: Path) -> str:
    """What to say of a folder without one."""
    return (
        f"data.field=messages is written by a chat template, and {folder} has none, neither as "
        f"{TEMPLATE} nor as chat_template in {SETTINGS[-1]}; use the tokenizer of a chat model, or "
        f"write the template"
    )


def _settings(folder: Path) -> list[Path]:
    return [file for name in SETTINGS if (file := folder / name).is_file()]


def _tokens(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in found.items():
        text = cast(dict[str, Any], value).get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            yield name, text


def _mapping(file: Path) -> dict[str, Any]:
    try:
        found = parse_json(_content(file))
    except ValueError as error:
        raise DataError(f"{file} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise DataError(f"{file} is no JSON mapping; save the tokenizer again")
    return cast(dict[str, Any], found)


def _content(file: Path) -> str:
    try:
        return read_regular(file, _MAX_BYTES).decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8 text: byte {error.start}") from error
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error}") from error
