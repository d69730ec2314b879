"""The documents of text files, JSON lines and parquet files, one after another. No torch.

A file is read in pieces of complete lines or row groups, so that several processes can share it.
Where a line or row is not a document, its error comes in its place, so that a reader can name
several errors at once.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

from torchdistpackage.bounded import BOM, parse_json, wrong_encoding
from torchdistpackage.config.cached_datasets import CachedName, located
from torchdistpackage.config.data_section import (
    CHAT_FIELDS,
    DATA,
    EMBEDDING,
    PAIRS,
    PREFERENCE,
    SUFFIX_OF_KIND,
    UNPAIRED,
)
from torchdistpackage.config.head_tasks import HEAD_TASKS, HeadTask
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
from torchdistpackage.data.tokens.parquet_rows import parquet_file, parquet_rows
from torchdistpackage.errors import DataError
from torchdistpackage.lazy import resolve

CHAT, TOOLS = "messages", "tools"
"""Fields of a chat: its list of messages, and its tools."""
TEMPLATE_OPTIONS, RETRIEVED = "chat_template_kwargs", "documents"
"""Fields of a chat: template variables that the row sets, and texts retrieved for it."""
CHAT_EXTRAS = (TOOLS, TEMPLATE_OPTIONS, RETRIEVED)
"""Optional fields next to a chat."""
_CHAT_KINDS = (CHAT, CONVERSATIONS, INSTRUCTION)
"""Fields that hold a chat; a row has one of them."""
_CHAT_HINT = f"; data.field={CHAT} reads chats, also those of ShareGPT and Alpaca"
PIECE_BYTES = 1 << 20
"""Size of a piece; a longer line or row group makes it larger.

A core tokenizes 1 to 4 MB/s, so the cores that finish first wait less than a second for the last
pieces of a file."""
_BLOCK_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class TextSource:
    """The texts to tokenize, and how to read them.

    kind: a name of `DATA` that texts are read of. path: a file, or a folder of such files.
    field: key of a jsonl line, or a parquet column; `prompt+completion` reads these two, `messages`
    a chat of any kind. tokenizer: a folder with tokenizer.json, or that file. bos, eos: see
    `text_ends`. today: the date that a chat template writes as today's; None: it writes none.
    labels, label_field, multi_label: the classes of rows with labels, and how a row holds them.
    """

    kind: str
    path: str
    tokenizer: str
    field: str = "text"
    bos: TextEnd = "auto"
    eos: TextEnd = "auto"
    today: str | None = None
    num_negatives: int = 0
    labels: tuple[str, ...] = ()
    label_field: str = ""
    multi_label: bool = False

    @property
    def head(self) -> HeadTask | None:
        """The task of rows with labels; None for other data."""
        return HEAD_TASKS.get(self.kind)

    @property
    def is_pairs(self) -> bool:
        """True if each line is a chosen and a rejected answer."""
        return self.kind == PREFERENCE or (self.head is not None and self.head.is_pairs)

    @property
    def is_chat(self) -> bool:
        """True if each line or row is a chat."""
        return self.field in CHAT_FIELDS

    @property
    def may_be_chat(self) -> bool:
        """True if the chat template of the tokenizer's folder may write the text."""
        return self.is_chat or self.is_pairs or self.kind == UNPAIRED

    @property
    def has_prompts(self) -> bool:
        """True if some tokens may not count in the loss."""
        is_answer = self.is_pairs or self.kind == UNPAIRED
        return self.is_chat or self.field == PAIRS or is_answer

    @property
    def documents_per_line(self) -> int:
        """Number of documents of a line: a pair has two, the chosen answer first; texts to compare
        are the anchor, the positive and the negatives.
        """
        if self.kind == EMBEDDING:
            return 2 + self.num_negatives
        return 2 if self.is_pairs else 1

    @property
    def ends(self) -> TextEnds:
        """Ids around each document; none around a chat, because its template writes them.

        Raises:
            DataError: see `text_ends`.
        """
        if self.is_chat:
            return TextEnds()
        return text_ends(Path(self.tokenizer), self.bos, self.eos)


class Document(NamedTuple):
    """A text to train on.

    prompt: precedes the text and does not count. spans: ranges of characters of `text` that count;
    None: all count. is_desirable: the label of an answer that has one. labels: of the text, one, or
    of each of its `words`, ranges of characters; see `labelled_rows`. is_begun, is_ended: False
    where the text before it, or after it, is another document, so that no bos or eos is there.
    """

    text: str
    prompt: str = ""
    spans: tuple[tuple[int, int], ...] | None = None
    is_desirable: bool = True
    labels: tuple[int, ...] = ()
    words: tuple[tuple[int, int], ...] = ()
    is_begun: bool = True
    is_ended: bool = True

    @property
    def learned(self) -> tuple[tuple[int, int], ...] | None:
        """Ranges of characters of prompt + text that count; None: all count."""
        if self.spans is None and self.prompt:
            return ((len(self.prompt), len(self.prompt) + len(self.text)),)
        return self.spans


class AnswerPair(NamedTuple):
    """Two answers to one prompt."""

    chosen: Document
    rejected: Document


class TextGroup(tuple[Document, ...]):
    """Texts to compare: an anchor, its positive and its negatives."""

    __slots__ = ()


Reader = Callable[[dict[str, Any], str], Document | AnswerPair | TextGroup]
"""Reads a document from a row; called with the row and its place, for errors. Raises DataError."""


def files_of(kind: str, path: Path) -> list[Path]:
    """Return the file, or the files in and below a folder that are not hidden, sorted by path.

    A folder gives only the files with the suffix of their kind, if it has one. A path may be a name
    of config/cached_datasets.py.

    Raises:
        DataError: there are none.
    """
    name, path = CachedName.of(str(path)), located(str(path))
    if path.is_file():
        return [path]
    suffix = SUFFIX_OF_KIND.get(kind, "")
    files = list[Path]()
    for folder, folders, names in os.walk(path):
        folders[:] = [name for name in folders if name[0] != "."]
        paths = (Path(folder, n) for n in names if n[0] != "." and n.endswith(suffix))
        files += [path for path in paths if path.is_file()]  # reading a pipe would never end
    if kind in DATA and DATA[kind].reader:
        chosen = getattr(reader_of(kind), "data_files", None)  # of a format with other files too
        files = files if chosen is None else chosen(path, files, name.split if name else "")
    if not files:
        missing = f"no {suffix} file" if suffix else "no file"
        raise DataError(f"data.path {path} has {missing}; put the data there, or correct the path")
    return sorted(files)


class Piece(NamedTuple):
    """A range of a file that is read at once.

    first, last: half-open, in bytes for JSON lines, in row groups for parquet. num_bytes: its size
    in the file.
    """

    path: Path
    first: int
    last: int
    num_bytes: int


Documents = Iterator[Document | AnswerPair | TextGroup | DataError | None]
"""The documents of a piece. A line or row that is not a JSON object or not a document comes as its
error, and an empty line as None."""


class FileReader(Protocol):
    """A reader of the files of one kind of data (`DATA` of config/data_section.py)."""

    def pieces(self, path: Path) -> Iterator[Piece]:
        """Yield the pieces of a file in order, at least one.

        Raises:
            DataError: the file cannot be read.
        """
        ...

    def documents(self, piece: Piece, field: str, reader: Reader, number: int) -> Documents:
        """Yield all documents of a piece.

        field: key or column with the text. reader: reads a line or row. number: lines or rows of
        the file before the piece, for errors.

        Raises:
            DataError: the file cannot be read, or lacks a column.
        """
        ...

    def columns(self, path: Path) -> list[str]:
        """Return the names of columns that rows do not show if nobody asks for them."""
        ...

    def place(self, piece: Piece) -> str:
        """Return the place of a piece for an error."""
        ...

    def part_name(self, piece: Piece) -> str:
        """Return the name of a piece that its lines or rows are counted from, without reading."""
        ...

    def num_before(self, piece: Piece) -> int:
        """Return the number of lines or rows of the file before a piece."""
        ...


class TextFiles:
    """Files that are one document each."""

    def pieces(self, path: Path) -> Iterator[Piece]:
        """See `FileReader`; a text is one piece, whatever its size."""
        with _opened(path) as (_, size):
            yield Piece(path, 0, size, size)

    def parts(self, path: Path) -> Iterator[Piece]:
        """Yield the parts of a text that is streamed: complete lines, each part a document.

        A line that is longer than a part is cut between two characters.
        """
        with _opened(path) as (file, size):
            first = 0
            while True:
                target = min(first + PIECE_BYTES, size)
                line_end = _line_end(file, target, min(target + PIECE_BYTES, size))
                last = _character_end(file, line_end)
                yield Piece(path, first, last, last - first)
                if last >= size:
                    return
                first = last

    def documents(self, piece: Piece, field: str, reader: Reader, number: int) -> Documents:
        """See `FileReader`."""
        with _opened(piece.path) as (file, size):
            file.seek(piece.first)
            content = file.read(piece.last - piece.first)
        text = _text(content, str(piece.path), piece.first)
        yield Document(text, is_begun=not piece.first, is_ended=piece.last >= size)

    def columns(self, path: Path) -> list[str]:
        """See `FileReader`; a text has none."""
        return []

    def place(self, piece: Piece) -> str:
        """See `FileReader`."""
        return _from_byte(piece)

    def part_name(self, piece: Piece) -> str:
        """See `FileReader`."""
        return _from_byte(piece)

    def num_before(self, piece: Piece) -> int:
        """See `FileReader`."""
        return 0


class JsonLines:
    """Files of lines, each a JSON object."""

    def pieces(self, path: Path) -> Iterator[Piece]:
        """See `FileReader`; a piece is complete lines."""
        with _opened(path) as (file, size):
            first, last = 0, _line_end(file, PIECE_BYTES, size)
            yield Piece(path, first, last, last)
            while last < size:
                first, last = last, _line_end(file, last + PIECE_BYTES, size)
                yield Piece(path, first, last, last - first)

    def documents(self, piece: Piece, field: str, reader: Reader, number: int) -> Documents:
        """Yield the documents of a piece of JSON lines, as `FileReader.documents` says."""
        return _json_lines(piece, reader, number)

    def columns(self, path: Path) -> list[str]:
        """See `FileReader`; lines show all their keys."""
        return []

    def place(self, piece: Piece) -> str:
        """See `FileReader`."""
        path = piece.path
        first = _num_lines(path, 0, piece.first) + 1
        num = max(_num_lines(path, piece.first, piece.last), 1)
        return f"{path}: lines {first} to {first + num - 1}"

    def part_name(self, piece: Piece) -> str:
        """See `FileReader`."""
        return _from_byte(piece)

    def num_before(self, piece: Piece) -> int:
        """See `FileReader`."""
        return _num_lines(piece.path, 0, piece.first)


class ParquetRows:
    """Parquet files, each row a document."""

    def pieces(self, path: Path) -> Iterator[Piece]:
        """See `FileReader`; a piece is complete row groups."""
        return _row_groups(path)

    def documents(self, piece: Piece, field: str, reader: Reader, number: int) -> Documents:
        """See `FileReader`."""
        return _rows(piece, field, reader, number)

    def columns(self, path: Path) -> list[str]:
        """See `FileReader`; only columns that are asked for are read."""
        with parquet_file(path) as file:
            return file.schema_arrow.names

    def place(self, piece: Piece) -> str:
        """See `FileReader`."""
        return f"{piece.path}: row groups {piece.first + 1} to {piece.last}"

    def part_name(self, piece: Piece) -> str:
        """See `FileReader`."""
        return (
            f"{piece.path}, from row group {piece.first + 1} on" if piece.first else str(piece.path)
        )

    def num_before(self, piece: Piece) -> int:
        """See `FileReader`."""
        with parquet_file(piece.path) as file:
            return sum(file.metadata.row_group(i).num_rows for i in range(piece.first))


def reader_of(kind: str) -> FileReader:
    """Return the reader of a kind of data whose files hold texts."""
    return resolve(DATA[kind].reader)()


def pieces_of(kind: str, path: Path) -> Iterator[Piece]:
    """Yield the pieces of a file, see `FileReader.pieces`."""
    return reader_of(kind).pieces(path)


def streamed_pieces_of(kind: str, path: Path) -> Iterator[Piece]:
    """Yield the pieces of a file that is streamed: its `parts`, if its documents have such."""
    reader = reader_of(kind)
    return getattr(reader, "parts", reader.pieces)(path)


def documents_of(
    kind: str, piece: Piece, field: str, reader: Reader | None = None, number: int = 0
) -> Documents:
    """Yield all documents of a piece of a file, see `FileReader.documents`.

    reader: by default it takes the texts under `field`.
    """
    reader = partial(text_document, field=field) if reader is None else reader
    return reader_of(kind).documents(piece, field, reader, number)


@contextmanager
def _opened(path: Path) -> Iterator[tuple[BinaryIO, int]]:
    """Open a file; yield it and its size, and raise DataError where it cannot be read."""
    try:
        with path.open("rb") as file:
            yield file, os.fstat(file.fileno()).st_size
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


def _num_lines(path: Path, first: int, last: int) -> int:
    """Return the number of lines that end between these bytes."""
    number = 0
    with path.open("rb") as file:
        file.seek(first)
        while first < last and (block := file.read(min(1 << 20, last - first))):
            number += block.count(b"\n")
            first += len(block)
    return number


def _line_end(file: BinaryIO, at: int, size: int) -> int:
    """Return where the first line starting at or after byte `at` begins, or `size` if none does."""
    at = min(at, size) - 1  # the byte before `at` may end a line
    file.seek(max(at, 0))
    while at < size and (block := file.read(_BLOCK_BYTES)):
        if (newline := block.find(b"\n")) >= 0:
            return at + newline + 1
        at += len(block)
    return size


def _character_end(file: BinaryIO, at: int) -> int:
    """Return the first byte from `at` on that begins a character of UTF-8, or ends the file."""
    file.seek(at)
    following = file.read(3)
    return at + next((i for i, x in enumerate(following) if x & 0xC0 != 0x80), len(following))


def _from_byte(piece: Piece) -> str:
    return f"{piece.path}, from byte {piece.first} on" if piece.first else str(piece.path)


def _json_lines(piece: Piece, reader: Reader, number: int) -> Documents:
    path = piece.path
    num_left = piece.num_bytes
    try:
        with path.open("rb") as file:
            if piece.first == 0 and (problem := wrong_encoding(file.read(4))) is not None:
                raise DataError(f"{path} {problem}")
            file.seek(piece.first)
            while num_left > 0 and (line := file.readline()):
                num_left -= len(line)
                number += 1
                line = line.removeprefix(BOM)  # joined files have one amid their lines too
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
        raise DataError(f"{where}: got a JSON {kind}; write one JSON object on each line")
    return value


def _row_groups(path: Path) -> Iterator[Piece]:
    with parquet_file(path) as file:
        facts = file.metadata
        first = size = 0
        for index in range(facts.num_row_groups):
            group = facts.row_group(index)
            columns = map(group.column, range(group.num_columns))
            size += sum(column.total_compressed_size for column in columns)
            if size >= PIECE_BYTES:
                yield Piece(path, first, index + 1, size)
                first = index + 1
                size = 0
        if first < facts.num_row_groups or not facts.num_row_groups:
            yield Piece(path, first, facts.num_row_groups, size)


def _rows(
    piece: Piece, field: str, reader: Reader, number: int
) -> Iterator[Document | AnswerPair | TextGroup | DataError]:
    path = piece.path
    groups = list(range(piece.first, piece.last))
    with parquet_file(path) as file:
        rows = partial(parquet_rows, file, groups)
        columns = file.schema_arrow.names
        yield from table_documents(path, field, reader, number, columns, rows)


def table_documents(
    path: Path,
    field: str,
    reader: Reader,
    number: int,
    columns: list[str],
    rows: Callable[[list[str]], Iterator[dict[str, Any] | ValueError]],
) -> Iterator[Document | AnswerPair | DataError]:
    """Yield the documents of rows of a table; number: rows of the file before them.

    columns: names of all. rows: called with the names of those to read; a row that is wrong comes
    as its error.
    """
    names, missing = _columns(field, columns)
    if missing is not None:
        raise DataError(
            f"{path}: no column {missing!r}; set data.field to one of {', '.join(columns)}"
        )
    for row in rows(names):
        number += 1
        where = f"{path}: row {number}"
        try:
            if isinstance(row, ValueError):
                raise DataError(f"{where}: not JSON: {row}")
            yield reader(row, where)
        except DataError as error:
            yield error


def _columns(field: str, columns: list[str]) -> tuple[list[str], str | None]:
    """Return which of `columns` to read, and a missing one or None."""
    names = _fields(field)
    if field in CHAT_FIELDS:
        missing = None if any(x in columns for x in _CHAT_KINDS) else field
    elif field == PAIRS and INSTRUCTION in columns:
        missing = None
    else:
        names = field.split("+") if field == PAIRS else [field]
        missing = next((x for x in names if x not in columns), None)
    return [x for x in names if x in columns], missing


def fields_of(source: TextSource) -> list[str]:
    """Return the keys of rows that may be read."""
    if source.kind == EMBEDDING:
        return ["anchor", "positive", "negatives"]
    if source.is_pairs:
        margin = ["margin"] * (source.head is not None)
        return ["prompt", "chosen", "rejected", *margin, CONVERSATIONS, *ALPACA, *CHAT_EXTRAS]
    if source.kind == UNPAIRED:
        return ["prompt", "completion", "label", *CHAT_EXTRAS]
    label = [source.label_field] * (source.head is not None)
    return [*_fields(source.field), *label]


def fields_of_row(source: TextSource, value: dict[str, Any]) -> list[str]:
    """Return the keys of this row that are read, which its kind decides."""
    decisive_keys = (CHAT,) if source.is_chat else ("prompt",)
    unread: tuple[str, ...] = ()
    if any(value.get(key) is not None for key in decisive_keys):
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
    """Return the document of one line or row.

    Raises:
        DataError: a field is missing, is not text or is empty.
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
            raise DataError(f"{where}: field {name!r} is a {kind}; write a text")
        is_unicode(value[name], f"{where}: field {name!r}")
    texts = [value[name] for name in names]
    if not texts[-1]:
        raise DataError(f"{where}: field {names[-1]!r} is empty; remove this document")
    return Document(texts[-1], texts[0] if len(texts) > 1 else "")


def is_unicode(text: str, label: str) -> str:
    """Return `text`; raise DataError if it has half a surrogate pair, which JSON can write."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{label} is not Unicode text: character {error.start} cannot be encoded; remove it"
        ) from error
    return text


def _text(content: bytes, where: str, first: int = 0) -> str:
    """Return the text of the bytes of a file from byte `first` on."""
    if not first and (problem := wrong_encoding(content[:4])) is not None:
        raise DataError(f"{where} {problem}")
    try:
        text = content.decode("utf-8" if first else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where} is not UTF-8 text: byte {first + error.start}; save it as such"
        ) from error
    if not text:
        raise DataError(f"{where} is empty; remove it")
    return text
