"""Rows of Arrow files as Hugging Face `datasets` keeps them: folders of save_to_disk and its cache.

The files are streams of record batches, which pyarrow maps, so `datasets` itself is not needed. No
torch.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from torchdistpackage.bounded import parse_json
from torchdistpackage.data.tokens.documents import (
    PIECE_BYTES,
    Documents,
    Piece,
    Reader,
    table_documents,
)
from torchdistpackage.data.tokens.parquet_rows import plain_rows
from torchdistpackage.errors import DataError

if TYPE_CHECKING:
    from pyarrow import RecordBatch, RecordBatchReader

TRAIN = "train"
"""The split that a folder with several stands for."""
_SPLITS_FILE = "dataset_dict.json"
_FILE = re.compile(r".+-(?P<split>[A-Za-z_]\w*)(?:-\d{5}-of-\d{5})?\.arrow")
"""A file of the cache: NAME-SPLIT.arrow, or NAME-SPLIT-00000-of-00002.arrow."""
_RESULT = "cache-"
"""Beginnings of files that hold results of `map` and `filter` beside their source rows."""


class ArrowRows:
    """Arrow files, each row a document. A piece is complete record batches."""

    def data_files(self, folder: Path, files: Sequence[Path], split: str = "") -> list[Path]:
        """Return those of the files below `folder` that hold rows of a split; "": the only one, or
        among several `train`.

        Raises:
            DataError: there is no such split, or there are several and none is `train`.
        """
        files = [file for file in files if not file.name.startswith(_RESULT)]
        split_of = {file: _split_of(folder, file) for file in files}
        splits = sorted({*split_of.values()})
        if len(splits) < 2 and not split:
            return list(files)
        split_name = split or TRAIN
        if split_name in splits:
            return [file for file in files if split_of[file] == split_name]
        raise DataError(
            f"data.path {folder}: it has the splits {', '.join(map(repr, splits))}, and none is "
            f"{split_name}; name one, or its folder or file"
        )

    def pieces(self, path: Path) -> Iterator[Piece]:
        """See `FileReader`."""
        first = index = size = 0
        with _opened(path) as reader:
            for batch in reader:
                index += 1
                size += batch.nbytes
                if size >= PIECE_BYTES:
                    yield Piece(path, first, index, size)
                    first = index
                    size = 0
        if first < index or not index:
            yield Piece(path, first, index, size)

    def documents(self, piece: Piece, field: str, reader: Reader, number: int) -> Documents:
        """See `FileReader`."""
        with _opened(piece.path) as batches:
            schema = batches.schema

            def rows(names: list[str]):
                return plain_rows(schema, _between(batches, piece), names)

            yield from table_documents(piece.path, field, reader, number, schema.names, rows)

    def columns(self, path: Path) -> list[str]:
        """See `FileReader`."""
        with _opened(path) as reader:
            return reader.schema.names

    def place(self, piece: Piece) -> str:
        """See `FileReader`."""
        return f"{piece.path}: record batches {piece.first + 1} to {piece.last}"

    def part_name(self, piece: Piece) -> str:
        """See `FileReader`."""
        where = f", from record batch {piece.first + 1} on" if piece.first else ""
        return f"{piece.path}{where}"

    def num_before(self, piece: Piece) -> int:
        """See `FileReader`."""
        with _opened(piece.path) as reader:
            return sum(batch.num_rows for batch in islice(reader, piece.first))


def _split_of(folder: Path, file: Path) -> str:
    """Return the split of a file: its folder, where a file lists splits, or else by its name."""
    for parent in file.relative_to(folder).parents:
        if (folder / parent / _SPLITS_FILE).is_file():
            try:
                splits = parse_json((folder / parent / _SPLITS_FILE).read_text())["splits"]
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise DataError(f"cannot read {folder / parent / _SPLITS_FILE}: {error}") from error
            inner = file.relative_to(folder / parent).parts[0]
            return inner if inner in splits else ""
    match = _FILE.fullmatch(file.name)
    return "" if match is None else match["split"]


def _between(batches: "RecordBatchReader", piece: Piece) -> "Iterator[RecordBatch]":
    # a stream has no index; a batch that is skipped is mapped and not read
    for index, batch in enumerate(batches):
        if index >= piece.last:
            return
        if index >= piece.first:
            yield batch


@contextmanager
def _opened(path: Path) -> "Iterator[RecordBatchReader]":
    """Open a file; raises DataError if pyarrow is missing or the file cannot be read."""
    try:
        from pyarrow import ArrowException, ipc, memory_map
    except ImportError as error:
        raise DataError(
            f"data.name=arrow needs pyarrow, which cannot be imported ({error}); "
            'pip install "torchdistpackage[parquet]", or write JSON lines'
        ) from error
    try:
        with memory_map(str(path)) as file, ipc.open_stream(file) as reader:
            yield reader
    except (OSError, ArrowException) as error:
        raise DataError(
            f"cannot read {path} as a stream of Arrow: {error}; save the data set again"
        ) from error
