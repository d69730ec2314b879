"""The cache of token ids: texts are tokenized once, and found again by their content. No torch.

A cache entry is a folder named by a hash of the tokenizer, of every file, and of what is read from
them. A process writes it beside its final name and renames it when it is complete, under a lock:
the first of many ranks tokenizes and the others wait. It holds

tokens.bin     ids of all documents, one after another, uint16 or uint32
ends.bin       int64: where each document ends in it
lines.bin      int64: the line or row of each document in its file
places.bin     float64 in [0, 1): a hash of each document's text, by which splits are made
counted.bin    uint8, where prompts do not count: 1 for a token that counts in the loss,
               2 for one of an answer that was called bad
prompts.bin    int64, with counted.bin: for each document the tokens before the first that counts
labels.bin     int64, of rows with labels: of each document, or of each token where words have them
meta.json      numbers, names of the files, which documents came from which, and checksums

Long arrays are written as they are made, and mapped, so memory does not grow with the files.
"""

import errno
import fcntl
import hashlib
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from torchdistpackage.bounded import read_regular
from torchdistpackage.checkpoint.checksums import new_checksum
from torchdistpackage.config.chat_templates import template_files
from torchdistpackage.config.hugging_face import settings_files, tokenizer_file
from torchdistpackage.data.tokens.documents import Piece, TextSource, files_of, pieces_of, reader_of
from torchdistpackage.data.tokens.mapped import MappedTensors
from torchdistpackage.data.tokens.row_notes import Tally
from torchdistpackage.data.tokens.token_checks import META, SETTLED_S, checked_meta, meta_text
from torchdistpackage.data.tokens.token_encoder import DocumentEncoder, EncodedBatch
from torchdistpackage.data.tokens.token_workers import Progress, TokenWorkers
from torchdistpackage.errors import DataError
from torchdistpackage.files import appears, atomic_write, make_folder, open_regular
from torchdistpackage.launch.process import undone_by_signals, usable_cpus

_FORMAT = 9
MOST_PROBLEMS = 20
"""Largest number of lines named in one error."""
_MOST_NAME = 64
WORKER_BYTES = 4 << 20
"""Bytes of text for each tokenizing process; with less, starting it costs more than it gains."""
_QUICK_BYTES = 1 << 26
"""Size of files up to which a plan reads them to see whether their ids are cached."""
_STALE_S = 3600.0
"""Seconds without a write after which another host's draft counts as abandoned."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenizedText:
    """A mapped cache entry.

    counted, prompts: None where every token counts. prompts: for each document the tokens before
    the first that counts. eos: id of the end of text, or None. lines: the line or row of each
    document in its file. documents_per_line: two where a line is a pair, whose chosen answer comes
    first. tally: see `row_notes`. labels: one of each document or of each token, see
    `labelled_rows`; None without labels.
    """

    folder: Path
    tokens: npt.NDArray[np.unsignedinteger]
    ends: npt.NDArray[np.int64]
    places: npt.NDArray[np.float64]
    counted: npt.NDArray[np.uint8] | None
    prompts: npt.NDArray[np.int64] | None
    vocab: int
    eos: int | None
    files: list[tuple[str, int]]
    lines: npt.NDArray[np.int64]
    mapped: tuple[MappedTensors, ...]
    documents_per_line: int = 1
    tally: Mapping[str, int] = field(default_factory=dict[str, int])
    labels: npt.NDArray[np.int64] | None = None

    def check(self) -> None:
        """Check the mapped files before a read; raises DataError if one became shorter."""
        for file in self.mapped:
            file.check()

    @property
    def starts(self) -> npt.NDArray[np.int64]:
        return np.concatenate([np.zeros(1, np.int64), self.ends[:-1]])

    def origin(self, document: int) -> str:
        """Return the file of a document and its line or row there, from 1."""
        name, _ = max((f for f in self.files if f[1] <= document), key=lambda f: f[1])
        return f"{name}:{self.lines[document]}"


def cut_documents(text: TokenizedText, seq_len: int) -> str | None:
    """Return a note on documents with prompts that are longer than a sample, or None."""
    # a sample has one more token, as its last target
    lengths = np.diff(text.ends, prepend=0)
    num_long = int((lengths > seq_len + 1).sum())
    if text.prompts is None or not num_long:
        return None
    return (
        f"{num_long:,} of {len(lengths):,} documents are longer than a sample (data.seq_len="
        f"{seq_len}; the longest has {lengths.max():,} tokens): they are cut, and what follows a "
        f"cut is learned without the prompt"
    )


def tokenized(source: TextSource, cache: Path, progress: Progress | None = None) -> TokenizedText:
    """Return the cache entry of `source` in `cache`, made now if it is missing.

    Raises:
        DataError: a file or the tokenizer is missing or wrong, by file and line; of many wrong
            lines it names the first ones.
    """
    files = _input_files(source)
    stamp = _stamp(source, files)
    pointer = cache / f"{stamp.name}.known"
    if (folder := _entry_of_stamp(pointer, cache)) is not None:
        return _load(folder)
    write = partial(_write, source, files.texts, progress)
    text = _entry(cache, _digest(source, files), source, write)
    # a change right after the hash could leave the times as they are, so stamp only old files
    if _stamp(source, files) == stamp and stamp.changed_s < time.time() - SETTLED_S:
        with suppress(OSError):  # the cache may be read-only
            atomic_write(pointer, text.folder.name)
    return text


def _entry(cache: Path, name: str, source: TextSource, write: "_Write") -> TokenizedText:
    """Return the entry of this name, made now by `write` if it is missing."""
    folder = cache / name
    if not folder.exists():
        try:
            make_folder(cache)
            # wait for another rank that makes this entry, then look whether it has
            with _locked(cache / f"{name}.lock"):
                if not folder.exists():
                    _make(source, folder, write)
        except OSError as error:
            raise DataError(f"cannot write the cache {folder}: {error.strerror}") from error
    return _load(folder)


def tokenized_block(source: TextSource, pieces: Sequence[Piece], cache: Path) -> TokenizedText:
    """Return the cache entry of these pieces of the files of `source`, made now if it is missing.

    Its name is a hash of the files as the file system describes them, and of the pieces.

    Raises:
        DataError: as `tokenized`.
    """
    texts = list(dict.fromkeys(piece.path for piece in pieces))
    stamp = _stamp(source, _Files(_input_files(source).tokenizer, texts))
    digest = hashlib.blake2b(stamp.name.encode(), digest_size=16)
    for piece in pieces:
        digest.update(f"{texts.index(piece.path)} {piece.first} {piece.last}\n".encode())
    return _entry(cache, digest.hexdigest(), source, partial(_write_block, source, pieces))


def is_tokenized(source: TextSource, cache: Path) -> bool:
    """Return whether `tokenized` would find an entry; False if hashing the files would take long.

    Raises:
        DataError: a file or the tokenizer is missing.
    """
    files = _input_files(source)
    stamp = _stamp(source, files)
    if _entry_of_stamp(cache / f"{stamp.name}.known", cache) is not None:
        return True
    return stamp.num_bytes <= _QUICK_BYTES and (cache / _digest(source, files)).is_dir()


class _Files(NamedTuple):
    """The files that an entry is made from."""

    tokenizer: list[Path]
    texts: list[Path]


def _input_files(source: TextSource) -> _Files:
    vocabulary = tokenizer_file(Path(source.tokenizer))
    settings = settings_files(vocabulary.parent)
    settings += template_files(vocabulary.parent) if source.may_be_chat else []
    return _Files([vocabulary, *settings], files_of(source.kind, Path(source.path)))


@dataclass(frozen=True, slots=True)
class _Stamp:
    """A hash of files as the file system describes them, without reading them.

    name: the hash, which also covers what is read from the files. changed_s: time of the last
    change.
    """

    name: str
    changed_s: float
    num_bytes: int


def _stamp(source: TextSource, files: _Files) -> _Stamp:
    """Return the stamp of files: size, times and inode of each.

    Any change moves ctime, and no program can set it back.
    """
    digest = hashlib.blake2b(f"{_FORMAT} {source}".encode(), digest_size=16)
    changed_ns = num_bytes = 0
    for path in (*files.tokenizer, *files.texts):
        try:
            now = path.stat()
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}") from error
        facts = now.st_size, now.st_mtime_ns, now.st_ctime_ns, now.st_ino
        digest.update(f"{path.absolute()} {facts}\n".encode(errors="surrogateescape"))
        changed_ns = max(changed_ns, now.st_mtime_ns, now.st_ctime_ns)
        num_bytes += now.st_size
    return _Stamp(digest.hexdigest(), changed_ns / 1e9, num_bytes)


def _entry_of_stamp(path: Path, cache: Path) -> Path | None:
    """Return the entry that `path` names: the one for the contents of files with this stamp."""
    try:
        name = read_regular(path, _MOST_NAME, follow=False).decode()
    except (OSError, UnicodeDecodeError):
        return None
    folder = cache / name
    return folder if len(name) == 32 and name.isalnum() and folder.is_dir() else None


def _digest(source: TextSource, files: _Files) -> str:
    """Return the hash of contents, not of times: a copy elsewhere finds the same entry."""
    digest = hashlib.blake2b(digest_size=16)
    ends = source.ends
    digest.update(f"{_FORMAT} {source.kind} {source.field} {len(files.texts)}".encode())
    # the default adds nothing, so entries from before these options are still found
    if ends.bos or source.eos == "off":
        digest.update(f" {ends.bos} {ends.eos}".encode())
    if source.num_negatives:
        digest.update(f" {source.num_negatives} negatives".encode())
    if source.today is not None:
        digest.update(f" {source.today}".encode())
    if source.head is not None:
        digest.update(f" {source.labels} {source.label_field} {source.multi_label}".encode())
    with ThreadPoolExecutor(usable_cpus(os.environ)) as threads:
        for content in threads.map(_content_digest, (*files.tokenizer, *files.texts)):
            digest.update(content)
    return digest.hexdigest()


def _content_digest(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).digest()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock at `path`; waits for other processes, if the file system has locks."""
    handle = open_regular(path, os.O_RDWR | os.O_CREAT)
    try:
        # one process of the machine tokenizes; the others wait here and find its entry
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _make(source: TextSource, folder: Path, write: "_Write") -> None:
    """Make the entry `folder`; the caller holds its lock."""
    encoder = DocumentEncoder(source)
    host = f"{socket.gethostname()}.draft"
    for old in folder.parent.glob(f"{folder.name}.*.draft"):
        # a killed process left it, unless the lock does not reach the host that writes it
        if old.name.endswith(f".{host}") or time.time() - _written_s(old) > _STALE_S:
            shutil.rmtree(old, ignore_errors=True)
    draft = folder.with_name(f"{folder.name}.{os.getpid()}.{host}")
    with undone_by_signals():
        draft.mkdir()
        try:
            with ExitStack() as stack:
                optional = ("counted", "prompts") if source.has_prompts else ()
                optional += ("labels",) if source.head is not None else ()
                writer = _Writer(draft, stack, optional)
                origins = write(encoder, writer)
            if not writer.num_tokens:
                raise DataError(f"{source.path} holds no token; put texts there")
            meta = {
                "source": asdict(source),
                "documents_per_line": source.documents_per_line,
                "dtype": encoder.dtype.name,
                "vocab": encoder.vocab,
                "eos": encoder.eos,
                "files": origins,
                "tally": writer.tally,
                "entry": folder.name,
                "checksums": writer.checksums,
            }
            (draft / META).write_text(meta_text(meta))
            try:
                draft.rename(folder)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                # where the lock does not reach all nodes, another one has made the same meanwhile
                shutil.rmtree(draft, ignore_errors=True)
                appears(folder)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise


def _written_s(draft: Path) -> float:
    """Return the time of the last write to a draft."""
    with suppress(OSError):
        return max(x.stat().st_mtime for x in (draft, *draft.iterdir()))
    return 0.0


class _Writer:
    """Writes the long files of an entry in `folder`; `stack` closes them.

    optional: files beside those that every entry has.
    """

    def __init__(self, folder: Path, stack: ExitStack, optional: Sequence[str]):
        self.num_tokens = self.num_documents = 0
        self.tally = Tally()
        names = ("tokens", "ends", "places", "lines", *optional)
        self._files = {n: stack.enter_context((folder / f"{n}.bin").open("xb")) for n in names}
        self._checksums = {name: new_checksum() for name in names}
        self._sizes = dict.fromkeys(names, 0)

    @property
    def checksums(self) -> dict[str, tuple[int, str]]:
        """The size and checksum of each file."""
        return {name: (self._sizes[name], x.hexdigest()) for name, x in self._checksums.items()}

    def add(self, batch: EncodedBatch, number: int) -> None:
        """Write a batch. number: lines of its file before it."""
        ends = self.num_tokens + np.cumsum(batch.lengths)
        parts = {"tokens": batch.ids, "ends": ends, "places": batch.places}
        parts["lines"] = number + 1 + batch.lines
        parts |= {"counted": batch.counted, "prompts": batch.prompts, "labels": batch.labels}
        for name, file in self._files.items():
            data = np.ascontiguousarray(parts[name]).view(np.uint8).data
            file.write(data)
            self._checksums[name].update(data)
            self._sizes[name] += len(data)
        self.tally.update(batch.tally)
        self.num_tokens += len(batch.ids)
        self.num_documents += len(ends)


_Write = Callable[[DocumentEncoder, _Writer], list[tuple[str, int]]]
"""Writes the documents of an entry; returns the name of each file, and the number of documents
before it."""


def _write(
    source: TextSource,
    files: list[Path],
    progress: Progress | None,
    encoder: DocumentEncoder,
    writer: _Writer,
) -> list[tuple[str, int]]:
    """Write all files; return the name of each and the number of documents before it."""
    origins: list[tuple[str, int]] = []
    problems: list[str] = []
    sizes = [path.stat().st_size for path in files]
    total = sum(sizes)
    num_written = number = 0
    num_workers = min(usable_cpus(os.environ), total // WORKER_BYTES)
    pieces = (piece for path in files for piece in pieces_of(source.kind, path))
    with TokenWorkers(source, num_workers) as workers:
        for piece, encoded in workers.results(pieces):
            if piece.first == 0:  # the next file
                num_written = sum(sizes[: len(origins)])
                number = 0
                origins.append((str(piece.path), writer.num_documents))
            num_read = 0
            # only here are line numbers known, so encode a wrong piece again to name its lines
            batches = encoder.batches(piece, number, encode=not problems)
            for batch in batches if encoded is None else encoded:
                problems += batch.problems
                if not problems:
                    writer.add(batch, number)
                number += batch.num_lines
                num_read = min(num_read + batch.num_letters, piece.num_bytes)
                if progress is not None:
                    progress(num_written + num_read, total)
            num_written += piece.num_bytes
            if progress is not None:
                progress(num_written, total)
            workers.encode = not problems
            if len(problems) >= MOST_PROBLEMS:
                break
    if problems:
        more = ["and maybe more"] * (len(problems) >= MOST_PROBLEMS)
        raise DataError("\n".join([*problems[:MOST_PROBLEMS], *more]))
    return origins


def _write_block(
    source: TextSource, pieces: Sequence[Piece], encoder: DocumentEncoder, writer: _Writer
) -> list[tuple[str, int]]:
    """Write pieces of files; returns a name with the part of the file for each, as `_Write`."""
    origins: list[tuple[str, int]] = []
    num_workers = min(usable_cpus(os.environ), sum(x.num_bytes for x in pieces) // WORKER_BYTES)
    with TokenWorkers(source, num_workers) as workers:
        for piece, encoded in workers.results(pieces):
            number = 0
            origins.append((f"{reader_of(source.kind).part_name(piece)}", writer.num_documents))
            for batch in encoder.batches(piece) if encoded is None else encoded:
                if batch.problems:
                    raise DataError("\n".join(_problems(source, encoder, piece)))
                writer.add(batch, number)
                number += batch.num_lines
    return origins


def _problems(source: TextSource, encoder: DocumentEncoder, piece: Piece) -> list[str]:
    """Return the problems of a piece by line, for which the lines before it are counted."""
    number = reader_of(source.kind).num_before(piece)
    batches = encoder.batches(piece, number, encode=False)
    return [text for batch in batches for text in batch.problems][:MOST_PROBLEMS]


def _load(folder: Path) -> TokenizedText:
    try:
        meta = checked_meta(folder)
        types = {"tokens": meta["dtype"], "ends": "int64", "places": "float64", "lines": "int64"}
        if (folder / "counted.bin").exists():
            types |= {"counted": "uint8", "prompts": "int64"}
        types |= {"labels": "int64"} if (folder / "labels.bin").exists() else {}
        paths = {name: folder / f"{name}.bin" for name in types}
        # the rest is read once, here; these are read in every step
        mapped = tuple(MappedTensors.of(paths[n]) for n in ("tokens", "counted") if n in paths)
        arrays = {
            name: np.asarray(np.memmap(paths[name], dtype, mode="r"))
            for name, dtype in types.items()
        }
        files = [(str(name), int(first)) for name, first in meta["files"]]
        tokens = arrays["tokens"]
        ends = arrays["ends"]
        places = arrays["places"]
        counted = arrays.get("counted", tokens)
        prompts = arrays.get("prompts", ends)
        if not len(tokens) == len(counted) == ends[-1]:
            raise ValueError(f"{len(tokens)} tokens, where the documents end at {ends[-1]}")
        if not len(ends) == len(places) == len(arrays["lines"]) == len(prompts):
            raise ValueError(f"{len(ends)} documents, but {len(places)} places")
        vocab = int(meta["vocab"])
        eos = meta["eos"]
        tally = {str(name): int(number) for name, number in meta.get("tally", {}).items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"the cache entry {folder} is damaged ({error}); remove it") from error
    return TokenizedText(
        folder=folder,
        tokens=tokens,
        ends=ends,
        places=places,
        counted=arrays.get("counted"),
        prompts=arrays.get("prompts"),
        vocab=vocab,
        eos=eos,
        files=files,
        lines=arrays["lines"],
        labels=arrays.get("labels"),
        mapped=mapped,
        documents_per_line=int(meta.get("documents_per_line", 1)),
        tally=tally,
    )
