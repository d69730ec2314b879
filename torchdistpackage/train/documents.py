"""The documents of text files, JSON lines and parquet files, one after another. No torch.

A line or row that is no document comes as the error that says so, in its place, so that a reader
can name several of them at once.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torchdistpackage.bounded import parse_json
from torchdistpackage.config.data_section import PREFERENCE, SUFFIX_OF_KIND
from torchdistpackage.config.text_ends import TextEnds, text_ends
from torchdistpackage.config.types import TextEnd
from torchdistpackage.errors import DataError

PAIRS = "prompt+completion"
"""The field that stands for two: the prompt does not count in the loss."""
CHAT, TOOLS = "messages", "tools"
"""The field that holds a chat, a list of messages, and that of its tools."""
_ROWS = 512
"""Of a parquet file that are in memory at once."""


@dataclass(frozen=True, slots=True)
class TextSource:
    """What to tokenize. kind: text, jsonl, parquet or preference; path: a file, or a folder of such
    files.

    field: of a jsonl line or parquet column; `prompt+completion` reads these two, `messages` is a
    chat. tokenizer: a folder with tokenizer.json, or that file. bos, eos: see `text_ends`.
    """

    kind: str
    path: str
    tokenizer: str
    field: str = "text"
    bos: TextEnd = "auto"
    eos: TextEnd = "auto"

    @property
    def may_be_chat(self) -> bool:
        """Whether the chat template of the tokenizer's folder says what the text is."""
        return self.field == CHAT or self.kind == PREFERENCE

    @property
    def has_prompts(self) -> bool:
        """Whether some tokens do not count."""
        return self.field in (CHAT, PAIRS) or self.kind == PREFERENCE

    @property
    def documents_per_line(self) -> int:
        """Of a pair both answers are documents, the chosen one first."""
        return 2 if self.kind == PREFERENCE else 1

    @property
    def ends(self) -> TextEnds:
        """What stands around each document; around a chat nothing, as a template has written it.

        Raises:
            DataError: see `text_ends`.
        """
        if self.field == CHAT:
            return TextEnds()
        return text_ends(Path(self.tokenizer), self.bos, self.eos)


class Document(NamedTuple):
    """text: what is trained on. prompt: before it, without counting. spans: the characters of text
    that count, from and to; None: all.
    """

    text: str
    prompt: str = ""
    spans: tuple[tuple[int, int], ...] | None = None


class AnswerPair(NamedTuple):
    """Two answers to one prompt."""

    chosen: Document
    rejected: Document


Reader = Callable[[dict[str, Any], str], Document | AnswerPair]
"""What an object holds, and where it is, for errors; raises DataError if it holds no such thing."""


def files_of(kind: str, path: Path) -> list[Path]:
    """The file, or those of a folder and below that are not hidden, in order of their names.

    Of a folder jsonl and parquet files are those with that suffix.

    Raises:
        DataError: there are none.
    """
    if path.is_file():
        return [path]
    suffix, found = SUFFIX_OF_KIND.get(kind, ""), list[Path]()
    for folder, folders, names in os.walk(path):
        folders[:] = [name for name in folders if name[0] != "."]
        paths = (Path(folder, n) for n in names if n[0] != "." and n.endswith(suffix))
        found += [path for path in paths if path.is_file()]  # the read of a pipe would not end
    if not found:
        what = f"no {suffix} file" if suffix else "no file"
        raise DataError(f"data.path {path}: there is {what} there; put the data there")
    return sorted(found)


def documents_of(
    kind: str, path: Path, field: str, reader: Reader | None = None
) -> Iterator[Document | AnswerPair | DataError]:
    """All documents of one file: of a text file one.

    reader: of lines and rows; by default texts under `field`. Instead of a line or row that is no
    JSON object or no document comes the error that says so.

    Raises:
        DataError: the file cannot be read, is no text or no parquet file, or lacks a column.
    """
    reader = partial(text_document, field=field) if reader is None else reader
    if kind == "text":
        yield Document(_text(_content(path), str(path)))
    elif kind in ("jsonl", PREFERENCE):
        yield from _json_lines(path, reader)
    else:
        yield from _rows(path, field, reader)


def _json_lines(path: Path, reader: Reader) -> Iterator[Document | AnswerPair | DataError]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                where = f"{path}:{number}"
                try:
                    yield reader(_json_object(line, where), where)
                except DataError as error:
                    yield error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


def _json_object(line: bytes, where: str) -> dict[str, Any]:
    if not line.strip():
        raise DataError(f"{where}: an empty line; each line is one JSON object")
    try:
        value = parse_json(line.decode())
    except ValueError as error:
        raise DataError(f"{where}: not JSON: {error}") from error
    if not isinstance(value, dict):
        kind = type(value).__name__
        raise DataError(f"{where}: a JSON {kind}; each line is one JSON object")
    return value


def _rows(path: Path, field: str, reader: Reader) -> Iterator[Document | AnswerPair | DataError]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise DataError(
            f"data.name=parquet needs pyarrow, which cannot be imported ({error}); "
            f"pip install pyarrow, or write JSON lines"
        ) from error
    number = 0
    try:
        with ParquetFile(path) as file:
            there = file.schema_arrow.names
            missing = [x for x in _fields(field) if x not in there and (field, x) != (CHAT, TOOLS)]
            if missing:
                raise DataError(
                    f"{path}: no column {missing[0]!r}; there are {', '.join(there)} (data.field)"
                )
            names = [name for name in _fields(field) if name in there]
            for batch in file.iter_batches(_ROWS, columns=names):
                for row in batch.to_pylist():
                    number += 1
                    try:
                        yield reader(row, f"{path}: row {number}")
                    except DataError as error:
                        yield error
    except (OSError, ArrowException) as error:
        raise DataError(f"cannot read {path} as parquet: {error}") from error


def _fields(field: str) -> list[str]:
    if field == CHAT:
        return [CHAT, TOOLS]
    return field.split("+") if field == PAIRS else [field]


def text_document(value: dict[str, Any], where: str, *, field: str) -> Document:
    """The texts of one line or row.

    Raises:
        DataError: it lacks a field, or that is no text or empty.
    """
    names = _fields(field)
    if missing := [name for name in names if name not in value]:
        raise DataError(
            f"{where}: no field {missing[0]!r}; there are {', '.join(value) or 'none'} (data.field)"
        )
    for name in names:
        if not isinstance(value[name], str):
            kind = type(value[name]).__name__
            raise DataError(f"{where}: field {name!r} is a {kind}; it has to be a text")
        is_unicode(value[name], f"{where}: field {name!r}")
    texts = [value[name] for name in names]
    if not texts[-1]:
        raise DataError(f"{where}: field {names[-1]!r} is empty; remove this document")
    return Document(texts[-1], texts[0] if len(texts) > 1 else "")


def is_unicode(text: str, what: str) -> str:
    """`text`, which JSON can write with half of a pair of surrogates; raises DataError of such."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{what} is no Unicode text: letter {error.start}") from error
    return text


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


def _text(content: bytes, where: str) -> str:
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where} is not UTF-8 text: byte {error.start}; save it as such"
        ) from error
    if not text:
        raise DataError(f"{where} is empty; remove it")
    return text
