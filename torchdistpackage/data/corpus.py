"""The tokens of a run: one long array of ids for training and one for validation.

Validation reads nothing that training reads. A folder is split by file, by a hash of the relative
path; of files with equal contents only the first counts. A single file is cut near its end. Ids are
mapped from the disk, so that the ranks of a node share one copy. Text is read as bytes.
"""

import hashlib
import os
import sysconfig
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from torchdistpackage.bounded import BOM, wrong_encoding
from torchdistpackage.config.data_split import split_at_end
from torchdistpackage.data.tokens.mapped import MappedTensors
from torchdistpackage.errors import DataError


class ConcatView:
    """A concatenation of 1-D arrays of one dtype, read by position and by slices of step 1.

    A slice is copied only where it lies in several of `parts`. files: the file of each part, None
    where a part is not mapped; a read raises DataError if the file became shorter.
    """

    def __init__(
        self,
        parts: Sequence[npt.NDArray],
        dtype: npt.DTypeLike,
        files: Sequence[MappedTensors | None] | None = None,
    ):
        self.dtype = np.dtype(dtype)
        files = [None] * len(parts) if files is None else files
        pairs = [(part, file) for part, file in zip(parts, files, strict=True) if len(part)]
        self._parts = [part for part, _ in pairs]
        self._files = [file for _, file in pairs]
        self._ends = list(accumulate(map(len, self._parts)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, where: int | slice):
        if not isinstance(where, slice):
            index = range(len(self))[where]
            return self[index : index + 1][0]
        start, stop, step = where.indices(len(self))
        assert step == 1
        pieces = []
        i = bisect_right(self._ends, start)
        while start < stop:
            part, end, file = self._parts[i], self._ends[i], self._files[i]
            if file is not None:
                file.check()
            pieces.append(part[start - end + len(part) : stop - end + len(part)])
            start, i = end, i + 1
        return pieces[0] if len(pieces) == 1 else np.concatenate([np.empty(0, self.dtype), *pieces])

    def __array__(self, dtype: npt.DTypeLike = None, copy: bool | None = None) -> npt.NDArray:
        """Return all ids as one array; meant for a look at a small view."""
        return np.asarray(self[:], dtype)


Ids = npt.NDArray[np.unsignedinteger] | ConcatView
"""A row of token ids: uint8, uint16 or uint32."""

BYTE_VOCAB = 256
MAX_TABLE_VOCAB = 4096
TOKEN_DTYPES = ("uint8", "uint16", "uint32")
NOT_LIBRARY = frozenset(
    ("site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo")
)
"""Folders of the standard library that hold other people's code, tests or demonstrations."""

MOST_MAPPED = 1 << 14
"""Largest number of files of a folder that are memory-mapped, the largest files first; the others
are read. Linux allows a process 65,530 maps."""

LARGE_BYTES = 2**31
"""Size above which numpy maps a file instead of torch. numpy keeps each file open, and a process
has few descriptors. torch keeps none open, but its maps are private and writable: Linux refuses one
that is larger than the memory of the node."""

_HEAD_BYTES = 1 << 20
_COUNT_AT_ONCE = 1 << 22


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """Token ids to train on and to validate with."""

    train: Ids
    val: Ids


def python_stdlib(val_fraction: float) -> Corpus:
    """Return the bytes of all `.py` files of the running Python's standard library except its
    tests.

    Raises:
        DataError: there are no such files, or one cannot be read.
    """
    root = Path(sysconfig.get_path("stdlib"))
    names = [name for name in _files(root, NOT_LIBRARY) if name.endswith(".py")]
    if not names:
        raise DataError(
            f"the standard library at {root} has no .py files (it may be zipped); "
            f"use data.name: text with a path of your own"
        )
    return _split_by_file(root, names, val_fraction)


def text(path: str | Path, val_fraction: float) -> Corpus:
    """Return the bytes of a text file, or of all files in and below a folder that are not hidden.

    A folder of two files or more is split by file; the end of a single file is for validation.

    Raises:
        DataError: the path is missing or empty, or a file cannot be read or is not text.
    """
    path = Path(path)
    if path.is_dir():
        names = _files(path)
        if not names:
            raise DataError(f"the folder {path} holds no files to train on; put text files there")
        if len(names) > 1:
            return _split_by_file(path, names, val_fraction)
        path = path / names[0]
    ids, file = _map(path, "uint8")
    _check_text(path, ids[:_HEAD_BYTES].tobytes())
    ids = _without_mark(ids)
    return _split_at_end(ids, file, val_fraction)


def tokens(path: str | Path, dtype: str, val_fraction: float) -> Corpus:
    """Map the ids of a plain binary file in this machine's byte order, without loading them.

    dtype: uint8, uint16 or uint32. The last `val_fraction` is for validation.

    Raises:
        DataError: the file is missing, is empty or ends within an id, or `dtype` is not one of
            these.
    """
    if dtype not in TOKEN_DTYPES:
        raise DataError(
            f"token ids of {path} cannot have the type {dtype!r}; set data.dtype to one of "
            f"{', '.join(TOKEN_DTYPES)}"
        )
    return _split_at_end(*_map(Path(path), dtype), val_fraction)


def entropies(train: Ids, val: Ids, vocab: int = BYTE_VOCAB) -> tuple[float, float]:
    """Return the (unigram, bigram) cross entropy of `val`, in nats a token, by counts on `train`.

    Both are smoothed by adding one to every count (Laplace). The first token of `val` has no
    predecessor, so it counts in the unigram only.

    Raises:
        DataError: fewer than two tokens on a side, or `vocab` is over 4096: the table of pairs
            has vocab * vocab entries.
    """
    if vocab > MAX_TABLE_VOCAB:
        raise DataError(
            f"a table of pairs for a vocabulary of {vocab} has {vocab * vocab} entries; "
            f"entropies are for vocabularies of up to {MAX_TABLE_VOCAB}"
        )
    if min(len(train), len(val)) < 2:
        raise DataError(
            f"entropies need two tokens on each side; train has {len(train)}, val {len(val)}"
        )
    pairs, val_pairs = _count_pairs(train, vocab), _count_pairs(val, vocab)
    # Every token but the very first is the second of a pair.
    single, val_single = pairs.sum(0), val_pairs.sum(0)
    single[train[0]] += 1
    val_single[val[0]] += 1
    unigram = np.log(len(train) + vocab) - np.log(single + 1.0)
    first_total = np.log(pairs.sum(1, keepdims=True) + float(vocab))
    bigram = first_total - np.log(pairs + 1.0)
    return (
        float((val_single * unigram).sum() / len(val)),
        float((val_pairs * bigram).sum() / (len(val) - 1)),
    )


def _count_pairs(ids: Ids, vocab: int) -> npt.NDArray[np.int64]:
    """Return a table [first, second] of how often each pair of neighbours occurs."""
    counts = np.zeros(vocab * vocab, dtype=np.int64)
    for start in range(0, len(ids) - 1, _COUNT_AT_ONCE):
        block = ids[start : start + _COUNT_AT_ONCE + 1].astype(np.int64)
        if (top := int(block.max())) >= vocab:
            raise DataError(
                f"token id {top} is outside a vocabulary of {vocab}; pass a larger vocab, or the "
                "ids of its tokenizer"
            )
        counts += np.bincount(block[:-1] * vocab + block[1:], minlength=vocab * vocab)
    return counts.reshape(vocab, vocab)


def _files(root: Path, skipped_folders: frozenset[str] = frozenset()) -> list[str]:
    """Return the sorted relative paths of the files below `root` that are not hidden."""
    relative_paths: list[str] = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in skipped_folders and name[0] != "."]
        paths = (Path(folder, name) for name in files if name[0] != ".")
        relative_paths += [path.relative_to(root).as_posix() for path in paths if path.is_file()]
    return sorted(relative_paths)


def _split_by_file(root: Path, names: Sequence[str], val_fraction: float) -> Corpus:
    hashes = {name: _place(name) for name in names}
    in_val = {name for name in names if hashes[name] < val_fraction}
    # With few files the hashes may put all on one side.
    if not in_val and val_fraction > 0:
        in_val = {min(names, key=lambda name: hashes[name])}
    if len(in_val) == len(names):
        in_val.remove(max(names, key=lambda name: hashes[name]))
    contents = _contents(root, names)
    sides = ([x for name, x in contents.items() if (name in in_val) is s] for s in (False, True))
    return Corpus(*(ConcatView([x for x, _ in s], np.uint8, [f for _, f in s]) for s in sides))


_Content = tuple[npt.NDArray[np.uint8], MappedTensors | None]


def _contents(root: Path, names: Sequence[str]) -> dict[str, _Content]:
    """Return the bytes of each file, and the file if it is mapped; skip repeated contents."""
    sizes = {name: _text_size(root / name) for name in names}
    mapped = set(sorted(names, key=sizes.__getitem__, reverse=True)[:MOST_MAPPED])
    num_of_size = Counter(sizes.values())
    contents: dict[str, _Content] = {}
    seen: set[bytes] = set()
    for name, size in sizes.items():
        if not size:
            continue
        file = MappedTensors.of(root / name) if name in mapped else None
        content = _without_mark(_file_bytes(root / name, size, mapped=file is not None))
        if num_of_size[size] > 1:
            digest = hashlib.blake2b(content.data).digest()
            if digest in seen:
                continue
            seen.add(digest)
        contents[name] = content, file
    return contents


def _place(name: str) -> float:
    """Return a hash of the path, from 0 to 1."""
    digest = hashlib.blake2b(os.fsencode(name), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def _split_at_end(ids: npt.NDArray, file: MappedTensors, val_fraction: float) -> Corpus:
    cut, _ = split_at_end(len(ids), val_fraction)
    return Corpus(*(ConcatView([side], ids.dtype, [file]) for side in (ids[:cut], ids[cut:])))


def _text_size(path: Path) -> int:
    """Return the size of a file in bytes; raises DataError if it does not begin like text."""
    try:
        with path.open("rb") as file:
            _check_text(path, file.read(_HEAD_BYTES))
            return os.fstat(file.fileno()).st_size
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


def _file_bytes(path: Path, num_bytes: int, *, mapped: bool) -> npt.NDArray[np.uint8]:
    try:
        if not mapped:
            return np.fromfile(path, np.uint8, num_bytes)
        if num_bytes > LARGE_BYTES:
            return np.asarray(np.memmap(path, np.uint8, mode="r", shape=(num_bytes,)))
        return torch.from_file(str(path), size=num_bytes, dtype=torch.uint8).numpy()
    except (OSError, RuntimeError) as error:
        raise DataError(f"cannot read {num_bytes} bytes of {path}: {error}") from error


def _map(path: Path, dtype: str) -> tuple[npt.NDArray[np.unsignedinteger], MappedTensors]:
    try:
        file = MappedTensors.of(path)
        size_bytes = file.num_bytes
        width = np.dtype(dtype).itemsize
        if size_bytes == 0:
            raise DataError(
                f"{path} is empty; check that data.path is the right file, and complete"
            )
        if size_bytes % width:
            raise DataError(
                f"{path} has {size_bytes} bytes, which is not a whole number of ids of {width} "
                f"bytes ({dtype}); check that the file is complete, and data.dtype"
            )
        return np.asarray(np.memmap(path, dtype, mode="r")), file
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


def _without_mark(content: npt.NDArray) -> npt.NDArray:
    """Return the content without a byte order mark, which is not part of the text."""
    return content[len(BOM) :] if content[: len(BOM)].tobytes() == BOM else content


def _check_text(path: Path, head: bytes) -> None:
    if (problem := wrong_encoding(head)) is not None:
        raise DataError(f"{path} {problem}")
    if (at := head.find(b"\0")) >= 0:
        raise DataError(
            f"{path} is not text: byte {at} is 0; take it out of the folder, or save it as UTF-8"
        )
