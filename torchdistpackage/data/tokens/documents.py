"""The documents of text files, JSON lines and parquet files, one after another. No torch.

A file is read in pieces, each of whole lines or row groups, so that several processes can share it.
A line or row that is no document comes as the error that says so, in its place, so that a reader
can name several of them at once.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from torchdistpackage.bounded import BOM, parse_json, wrong_encoding
from torchdistpackage.config.data_section import CHAT_FIELDS, PREFERENCE, SUFFIX_OF_KIND
from torchdistpackage.config.text_ends import TextEnds, text_ends
from torchdistpackage.config.types import TextEnd
from torchdistpackage.data.tokens.chat_rows import (
    ALPACA,
    CONVERSATIONS,
    INSTRUCTION,
    SYSTEM,
    alpaca_texts,
    is_alpaca,
)
from torchdistpackage.data.tokens.parquet_rows import parquet_file, plain_rows
from torchdistpackage.errors import DataError

PAIRS = "prompt+completion"
"""The field that stands for two: the prompt does not count in the loss."""
CHAT, TOOLS = "messages", "tools"
"""The field that holds a chat, a list of messages, and that of its tools."""
TEMPLATE_OPTIONS, RETRIEVED = "chat_template_kwargs", "documents"
"""Variables of the chat template that a row sets, and texts that were found for it."""
CHAT_EXTRAS = (TOOLS, TEMPLATE_OPTIONS, RETRIEVED)
"""Fields next to a chat, which need not be there."""
_CHAT_KINDS = (CHAT, CONVERSATIONS, INSTRUCTION)
"""Fields of which a chat has one."""
_CHAT_HINT = f"; data.field={CHAT} reads chats, also those of ShareGPT and Alpaca"
PIECE_BYTES = 1 << 20
"""Of a file that is read at once, more where a line or row group is longer: at the 1 to 4 MB/s that
a core tokenizes, cores that share the last pieces of a file wait less than a second."""
_BLOCK_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class TextSource:
    """What to tokenize. kind: text, jsonl, parquet or preference; path: a file, or a folder of such
    files.

    field: of a jsonl line or parquet column; `prompt+completion` reads these two, `messages` is a
    chat of any kind. tokenizer: a folder with tokenizer.json, or that file. bos, eos: see
    `text_ends`. today: the date that a chat template writes as today's; None: it writes none.
    """

    kind: str
    path: str
    tokenizer: str
    field: str = "text"
    bos: TextEnd = "auto"
    eos: TextEnd = "auto"
    today: str | None = None

    @property
    def is_chat(self) -> bool:
        """Whether each line or row is a chat."""
        return self.field in CHAT_FIELDS

    @property
    def may_be_chat(self) -> bool:
        """Whether the chat template of the tokenizer's folder says what the text is."""
        return self.is_chat or self.kind == PREFERENCE

    @property
    def has_prompts(self) -> bool:
        """Whether some tokens do not count."""
        return self.is_chat or self.field == PAIRS or self.kind == PREFERENCE

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
        if self.is_chat:
            return TextEnds()
        return text_ends(Path(self.tokenizer), self.bos, self.eos)


class Document(NamedTuple):
    """text: what is trained on. prompt: before it, without counting. spans: the characters of text
    that count, from and to; None: all.
    """

    text: str
    prompt: str = ""
    spans: tuple[tuple[int, int], ...] | None = None

    @property
    def learned(self) -> tuple[tuple[int, int], ...] | None:
        """The characters of prompt and text together that count; None: all."""
        if self.spans is None and self.prompt:
            return ((len(self.prompt), len(self.prompt) + len(self.text)),)
        return self.spans


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


class Piece(NamedTuple):
    """What is read at once of a file: of JSON lines from byte `first` to before byte `last`, of
    parquet these row groups. num_bytes: that it has in the file.
    """

    path: Path
    first: int
    last: int
    num_bytes: int


def pieces_of(kind: str, path: Path) -> Iterator[Piece]:
    """A file in pieces, in order; one, even if it is empty. A text file is one document, so one.

    Raises:
        DataError: the file cannot be read, or is no parquet file.
    """
    if kind == "parquet":
        yield from _row_groups(path)
        return
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            first, last = 0, size if kind == "text" else _line_end(file, PIECE_BYTES, size)
            yield Piece(path, first, last, last)
            while last < size:
                first, last = last, _line_end(file, last + PIECE_BYTES, size)
                yield Piece(path, first, last, last - first)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


def _line_end(file: BinaryIO, at: int, size: int) -> int:
    """The first beginning of a line from byte `at` on; `size`: there is none."""
    at = min(at, size) - 1  # the byte before may end a line
    file.seek(max(at, 0))
    while at < size and (block := file.read(_BLOCK_BYTES)):
        if (found := block.find(b"\n")) >= 0:
            return at + found + 1
        at += len(block)
    return size


def documents_of(
    kind: str, piece: Piece, field: str, reader: Reader | None = None, number: int = 0
) -> Iterator[Document | AnswerPair | DataError | None]:
    """All documents of a piece of a file.

    reader: of lines and rows; by default texts under `field`. number: lines or rows of the file
    before the piece, for errors. Instead of a line or row that is no JSON object or no document
    comes the error that says so, and None for an empty line.

    Raises:
        DataError: the file cannot be read, is no text or no parquet file, or lacks a column.
    """
    reader = partial(text_document, field=field) if reader is None else reader
    if kind == "text":
        yield Document(_text(_content(piece.path), str(piece.path)))
    elif kind == "parquet":
        yield from _rows(piece, field, reader, number)
    else:
        yield from _json_lines(piece, reader, number)


def _json_lines(
    piece: Piece, reader: Reader, number: int
) -> Iterator[Document | AnswerPair | DataError | None]:
    path, left = piece.path, piece.num_bytes
    try:
        with path.open("rb") as file:
            if piece.first == 0 and (problem := wrong_encoding(file.read(4))) is not None:
                raise DataError(f"{path} {problem}")
            file.seek(piece.first)
            while left > 0 and (line := file.readline()):
                left -= len(line)
                number += 1
                line = line.removeprefix(BOM)  # of files that were put together, too
                if not line.strip():
                    yield None
                    continue
                where = f"{path}:{number}"
                try:
                    yield reader(_json_object(line, where), where)
                except DataError as error:
                    yield error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


def _json_object(line: bytes, where: str) -> dict[str, Any]:
    try:
        value = parse_json(line.decode())
    except ValueError as error:
        hint = "; of one JSON list: jq -c '.[]' FILE > FILE.jsonl" * line.lstrip().startswith(b"[")
        raise DataError(f"{where}: not JSON: {error}{hint}") from error
    if not isinstance(value, dict):
        kind = type(value).__name__
        raise DataError(f"{where}: a JSON {kind}; each line is one JSON object")
    return value


def _row_groups(path: Path) -> Iterator[Piece]:
    with parquet_file(path) as file:
        facts, first, size = file.metadata, 0, 0
        for index in range(facts.num_row_groups):
            group = facts.row_group(index)
            columns = map(group.column, range(group.num_columns))
            size += sum(column.total_compressed_size for column in columns)
            if size >= PIECE_BYTES:
                yield Piece(path, first, index + 1, size)
                first, size = index + 1, 0
        if first < facts.num_row_groups or not facts.num_row_groups:
            yield Piece(path, first, facts.num_row_groups, size)


def _rows(
    piece: Piece, field: str, reader: Reader, number: int
) -> Iterator[Document | AnswerPair | DataError]:
    path, groups = piece.path, list(range(piece.first, piece.last))
    with parquet_file(path) as file:
        there = file.schema_arrow.names
        names, missing = _columns(field, there)
        if missing is not None:
            raise DataError(
                f"{path}: no column {missing!r}; there are {', '.join(there)} (data.field)"
            )
        for row in plain_rows(file, groups, names):
            number += 1
            where = f"{path}: row {number}"
            try:
                if isinstance(row, ValueError):
                    raise DataError(f"{where}: not JSON: {row}")
                yield reader(row, where)
            except DataError as error:
                yield error


def _columns(field: str, there: list[str]) -> tuple[list[str], str | None]:
    """Those to read, of these, and one that is missing."""
    names = _fields(field)
    if field in CHAT_FIELDS:
        missing = None if any(x in there for x in _CHAT_KINDS) else field
    elif field == PAIRS and INSTRUCTION in there:
        missing = None
    else:
        names = field.split("+") if field == PAIRS else [field]
        missing = next((x for x in names if x not in there), None)
    return [x for x in names if x in there], missing


def column_names(path: Path) -> list[str]:
    """Return the columns of a parquet file; raises DataError if it is none."""
    with parquet_file(path) as file:
        return file.schema_arrow.names


def fields_of(source: TextSource) -> list[str]:
    """Return the keys of rows that may be read."""
    if source.kind == PREFERENCE:
        return ["prompt", "chosen", "rejected", CONVERSATIONS, *ALPACA, *CHAT_EXTRAS]
    return _fields(source.field)


def fields_of_row(source: TextSource, value: dict[str, Any]) -> list[str]:
    """Return the keys of this row that are read, by the kind that it is of."""
    mine = (CHAT,) if source.is_chat else ("prompt",)
    unread: tuple[str, ...] = ()
    if any(value.get(key) is not None for key in mine):
        unread = (CONVERSATIONS, *ALPACA)
    elif value.get(CONVERSATIONS) is not None:
        unread = tuple(key for key in ALPACA if key != SYSTEM)
    return [key for key in fields_of(source) if key == source.field or key not in unread]


def _fields(field: str) -> list[str]:
    if field in CHAT_FIELDS:
        return [*_CHAT_KINDS, *ALPACA, *CHAT_EXTRAS]
    if field == PAIRS:
        return [*field.split("+"), *ALPACA]
    return [field]


def text_document(value: dict[str, Any], where: str, *, field: str) -> Document:
    """The texts of one line or row.

    Raises:
        DataError: it lacks a field, or that is no text or empty.
    """
    if field == PAIRS and is_alpaca(value) and value.get("prompt") is None:
        prompt, answer = alpaca_texts(value, where)
        value = {"prompt": prompt, "completion": answer}
    names = field.split("+") if field == PAIRS else [field]
    if missing := [name for name in names if name not in value]:
        raise DataError(
            f"{where}: no field {missing[0]!r}; there are {', '.join(value) or 'none'} (data.field)"
            f"{_CHAT_HINT if any(x in value for x in _CHAT_KINDS) else ''}"
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
    if (problem := wrong_encoding(content[:4])) is not None:
        raise DataError(f"{where} {problem}")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where} is not UTF-8 text: byte {error.start}; save it as such"
        ) from error
    if not text:
        raise DataError(f"{where} is empty; remove it")
    return text
