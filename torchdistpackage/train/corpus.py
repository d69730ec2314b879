"""Where tokens come from: one long array of ids for training and one for validation.

One rule: nothing read in training is read again in validation. Folders are split by whole files
(by a hash of the relative path, so the split is the same on every machine), of equal files only
the first counts, and a single file is cut once, near its end. Sources are numpy arrays of small
ids, mapped from the disk where they are one file; text is bytes, so its vocabulary is 256.
"""

import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from torchdistpackage.errors import DataError

Ids = npt.NDArray[np.unsignedinteger]
"""A row of token ids: uint8, uint16 or uint32."""

BYTE_VOCAB = 256
MAX_TABLE_VOCAB = 4096
TOKEN_DTYPES = ("uint8", "uint16", "uint32")
NOT_LIBRARY = frozenset(
    ("site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo")
)
"""Folders of the standard library that hold other people's code, tests or demonstrations."""

_HEAD_BYTES = 1 << 20
_COUNT_AT_ONCE = 1 << 22


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """Token ids to train on and to validate with."""

    train: Ids
    val: Ids


def python_stdlib(val_fraction: float) -> Corpus:
    """Bytes of every `.py` file of the running Python's standard library, without its tests.

    `val_fraction` of the files, about, is for validation.

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
    """Bytes of a text file, or of all files in a folder and below that are not hidden.

    A folder of two files or more is split by whole files, of which at least one is for validation;
    a single file has its last `val_fraction` cut off.

    Raises:
        DataError: the path is missing or empty, or a file cannot be read or is not text.
    """
    path = Path(path)
    if path.is_dir():
        names = list(_files(path, frozenset()))
        if not names:
            raise DataError(f"the folder {path} holds no files to train on; put text files there")
        if len(names) > 1:
            return _split_by_file(path, names, val_fraction)
        path = path / names[0]
    ids = _map(path, "uint8")
    _check_text(path, ids[:_HEAD_BYTES].tobytes())
    return _split_at_end(ids, val_fraction)


def tokens(path: str | Path, dtype: str, val_fraction: float) -> Corpus:
    """Ids in a plain binary file, in this machine's byte order, mapped and not loaded.

    dtype: uint8, uint16 or uint32. The last `val_fraction` is for validation.

    Raises:
        DataError: the file is missing, empty or not a whole number of ids, or `dtype` is another.
    """
    if dtype not in TOKEN_DTYPES:
        raise DataError(f"token ids of type {dtype!r} in {path}; use {', '.join(TOKEN_DTYPES)}")
    return _split_at_end(_map(Path(path), dtype), val_fraction)


def entropies(train: Ids, val: Ids, vocab: int = BYTE_VOCAB) -> tuple[float, float]:
    """(unigram, bigram) cross entropy of `val`, in nats a token, under tables counted on `train`.

    Both tables are smoothed by adding one to every count (Laplace), so an unseen pair costs a
    finite number. The first token of `val` has no predecessor and counts in the first only.

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
    before = np.log(pairs.sum(1, keepdims=True) + float(vocab))
    bigram = before - np.log(pairs + 1.0)
    return (
        float((val_single * unigram).sum() / len(val)),
        float((val_pairs * bigram).sum() / (len(val) - 1)),
    )


def _count_pairs(ids: Ids, vocab: int) -> npt.NDArray[np.int64]:
    """How often each pair of neighbours occurs: (first, second) -> count."""
    counts = np.zeros(vocab * vocab, dtype=np.int64)
    for start in range(0, len(ids) - 1, _COUNT_AT_ONCE):
        some = ids[start : start + _COUNT_AT_ONCE + 1].astype(np.int64)
        if (top := int(some.max())) >= vocab:
            raise DataError(f"token id {top} is outside a vocabulary of {vocab}")
        counts += np.bincount(some[:-1] * vocab + some[1:], minlength=vocab * vocab)
    return counts.reshape(vocab, vocab)


def _files(root: Path, without: frozenset[str]) -> Iterator[str]:
    """Relative paths of the files below `root`, in order, without hidden ones."""
    found: list[str] = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in without and name[0] != "."]
        paths = (Path(folder, name) for name in files if name[0] != ".")
        found += [path.relative_to(root).as_posix() for path in paths if path.is_file()]
    return iter(sorted(found))


def _split_by_file(root: Path, names: Sequence[str], val_fraction: float) -> Corpus:
    place = {name: _place(name) for name in names}
    in_val = {name for name in names if place[name] < val_fraction}
    # With few files the hashes may put all on one side.
    if not in_val and val_fraction > 0:
        in_val = {min(names, key=lambda name: place[name])}
    if len(in_val) == len(names):
        in_val.remove(max(names, key=lambda name: place[name]))
    train, val = bytearray(), bytearray()
    seen: set[bytes] = set()
    for name in names:
        content = _read(root / name)
        digest = hashlib.blake2b(content).digest()
        if digest not in seen:
            seen.add(digest)
            side = val if name in in_val else train
            side += content
    return Corpus(np.frombuffer(train, np.uint8), np.frombuffer(val, np.uint8))


def _place(name: str) -> float:
    """Where a path falls between 0 and 1, as good as drawn by lot, the same everywhere."""
    digest = hashlib.blake2b(os.fsencode(name), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def _split_at_end(ids: Ids, val_fraction: float) -> Corpus:
    cut = len(ids) - round(len(ids) * val_fraction)
    return Corpus(ids[:cut], ids[cut:])


def _read(path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    _check_text(path, content[:_HEAD_BYTES])
    return content


def _map(path: Path, dtype: str) -> Ids:
    try:
        size_bytes = path.stat().st_size
        width = np.dtype(dtype).itemsize
        if size_bytes == 0 or size_bytes % width:
            raise DataError(
                f"{path} has {size_bytes} bytes, which is not one or more ids of {width} bytes "
                f"({dtype}); is the file complete, and of another dtype?"
            )
        return np.asarray(np.memmap(path, dtype, mode="r"))
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


def _check_text(path: Path, head: bytes) -> None:
    if (at := head.find(b"\0")) >= 0:
        raise DataError(
            f"{path} is not text: byte {at} is 0; take it out of the folder, or save it as UTF-8"
        )
