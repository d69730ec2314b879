"""Texts turned into token ids once, and kept by the content of what they were made from. No torch.

A cache entry is a folder named by a hash of the tokenizer, of every file, and of what is read from
them. It is written beside and renamed when it is complete, under a lock: of many ranks the first
tokenizes and the others wait. It holds

tokens.bin     ids of all documents, one after another, uint16 or uint32
ends.bin       int64: where each document ends in it
places.bin     float64 in [0, 1): a hash of each document's text, by which splits are made
counted.bin    uint8, where prompts do not count: 1 for a token that counts in the loss
prompts.bin    int64, with counted.bin: of each document the tokens before the first that counts
meta.json      numbers, names of the files, and which documents came from which

Whatever is long is written as it is made and mapped, so memory does not grow with the files.
"""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from torchdistpackage.bounded import parse_json
from torchdistpackage.config.data_section import PREFERENCE
from torchdistpackage.config.hugging_face import (
    described_by,
    tokenizer_file,
    vocabulary_size,
)
from torchdistpackage.config.text_ends import TextEnds, end_of_text
from torchdistpackage.errors import DataError
from torchdistpackage.train.chat import ChatTemplate
from torchdistpackage.train.documents import (
    CHAT,
    AnswerPair,
    Document,
    Reader,
    TextSource,
    documents_of,
    files_of,
)
from torchdistpackage.train.mapped import MappedTensors
from torchdistpackage.train.preference_pairs import PairReader

_FORMAT = 3
_AT_ONCE = 512
"""Documents that the tokenizer's threads get together."""
MOST_PROBLEMS = 20
"""Lines named in one error."""

Progress = Callable[[int, int], None]
"""Told (bytes of text read, of all) now and then."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenizedText:
    """A cache entry, mapped. counted, prompts: None where every token counts. eos: its id, or None.

    prompts: by document the tokens before the first that counts. documents_per_line: two where a
    line is a pair, whose chosen answer comes first.
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
    mapped: tuple[MappedTensors, ...]
    documents_per_line: int = 1

    def check(self) -> None:
        """Before a read of tokens or counted: raises DataError if their file became shorter."""
        for file in self.mapped:
            file.check()

    @property
    def starts(self) -> npt.NDArray[np.int64]:
        return np.concatenate([np.zeros(1, np.int64), self.ends[:-1]])

    def origin(self, document: int) -> str:
        """File and number of a document in it, from 1: of jsonl, its line."""
        name, first = max((f for f in self.files if f[1] <= document), key=lambda f: f[1])
        return f"{name}:{(document - first) // self.documents_per_line + 1}"


def cut_documents(text: TokenizedText, seq_len: int) -> str | None:
    """What to say of documents with a prompt that no sample of `seq_len` tokens can hold whole."""
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
    """The cache entry of `source` in `cache`, made now if it is not there.

    Raises:
        DataError: a file or the tokenizer is missing or wrong, by file and line; of many wrong
            lines the first ones.
    """
    vocabulary, ends = tokenizer_file(Path(source.tokenizer)), source.ends
    files = files_of(source.kind, Path(source.path))
    folder = cache / _digest(source, ends, vocabulary, files)
    if not folder.exists():
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with _locked(cache / f"{folder.name}.lock"):
                if not folder.exists():
                    _make(source, ends, vocabulary, files, folder, progress)
        except OSError as error:
            raise DataError(f"cannot write the cache {folder}: {error.strerror}") from error
    return _read(folder)


def load_tokenizer(path: Path) -> tuple[Any, int | None]:
    """(tokenizer, id of its end-of-text token or None), from a folder or a file.

    Raises:
        DataError: the tokenizers library is missing, or the file is none of its.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise DataError(
            f"data.tokenizer needs the tokenizers library ({error}); pip install tokenizers"
        ) from error
    file = tokenizer_file(path)
    try:
        found = Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises plain Exceptions
        raise DataError(f"{file} is no tokenizer of the tokenizers library: {error}") from error
    found.no_padding()
    found.no_truncation()
    return found, end_of_text(file)


def _digest(source: TextSource, ends: TextEnds, vocabulary: Path, files: list[Path]) -> str:
    """Of contents, not of times: a copy elsewhere finds the same entry."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(f"{_FORMAT} {source.kind} {source.field} {len(files)}".encode())
    if ends.bos or source.eos == "off":  # else as in entries that are older than the choice
        digest.update(f" {ends.bos} {ends.eos}".encode())
    beside = described_by(vocabulary.parent, chat=source.may_be_chat)
    for path in (vocabulary, *beside, *files):
        try:
            with path.open("rb") as file:
                whole = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16))
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}") from error
        digest.update(whole.digest())
    return digest.hexdigest()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Wait until no other process, on a file system that knows locks, holds it."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(
    source: TextSource,
    ends: TextEnds,
    vocabulary: Path,
    files: list[Path],
    folder: Path,
    progress: Progress | None,
) -> None:
    tokenizer, eos = load_tokenizer(vocabulary)
    reader = _reader(source, vocabulary.parent)
    vocab = vocabulary_size(vocabulary)
    draft = folder.with_name(f"{folder.name}.{os.getpid()}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    try:
        with ExitStack() as stack:
            writer = _Writer(draft, vocab, stack, masks=source.has_prompts)
            origins = _write(source, reader, tokenizer, ends, files, writer, progress)
        if not writer.num_tokens:
            raise DataError(f"{source.path} holds no token; put texts there")
        each = source.documents_per_line
        meta = {
            "source": asdict(source),
            "documents_per_line": each,
            "dtype": writer.dtype.name,
            "vocab": vocab,
            "eos": eos,
        }
        (draft / "meta.json").write_text(json.dumps({**meta, "files": origins}, indent=1) + "\n")
        draft.rename(folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def _reader(source: TextSource, folder: Path) -> Reader | None:
    """Of its lines; None: texts under its field. folder: of the tokenizer."""
    if source.kind == PREFERENCE:
        return PairReader(folder)
    return ChatTemplate(folder).document if source.field == CHAT else None


class _Writer:
    """The long files of an entry in `folder`, which `stack` closes. masks: tokens may not count."""

    def __init__(self, folder: Path, vocab: int, stack: ExitStack, *, masks: bool):
        self.masks, self.dtype = masks, np.dtype(np.uint16 if vocab <= 1 << 16 else np.uint32)
        self.num_tokens = self.num_documents = 0
        names = ("tokens", "ends", "places", *(("counted", "prompts") if masks else ()))
        self._files = {n: stack.enter_context((folder / f"{n}.bin").open("wb")) for n in names}

    def add(self, place: float, ids: npt.NDArray, counted: npt.NDArray[np.uint8]) -> None:
        self.num_tokens += len(ids)
        self.num_documents += 1
        self._files["tokens"].write(ids.astype(self.dtype).tobytes())
        self._files["ends"].write(np.int64(self.num_tokens).tobytes())
        self._files["places"].write(np.float64(place).tobytes())
        if self.masks:
            prompt = int(counted.argmax()) if counted.any() else len(counted)
            self._files["counted"].write(counted.tobytes())
            self._files["prompts"].write(np.int64(prompt).tobytes())


def _write(
    source: TextSource,
    reader: Reader | None,
    tokenizer: Any,
    ends: TextEnds,
    files: list[Path],
    writer: _Writer,
    progress: Progress | None,
) -> list[tuple[str, int]]:
    """For each file its name and how many documents were before it."""
    origins: list[tuple[str, int]] = []
    problems: list[str] = []
    each = source.documents_per_line
    sizes = [path.stat().st_size for path in files]
    done = 0
    for path, size in zip(files, sizes, strict=True):
        origins.append((str(path), writer.num_documents))
        found = documents_of(source.kind, path, source.field, reader)
        read = number = 0
        while (batch := list(islice(found, _AT_ONCE))) and len(problems) < MOST_PROBLEMS:
            held = [x for x in batch if not isinstance(x, DataError)]
            documents = [y for x in held for y in (x if isinstance(x, AnswerPair) else (x,))]
            problems += [str(x) for x in batch if isinstance(x, DataError)]
            where = f"{path}: documents {number + 1} to {number + len(batch)}"
            if not problems:  # else the rest is only looked through
                encoded = _encoded(tokenizer, documents, ends, where)
                # the answers of a pair are on one side of a split
                places = [_place(documents[i - i % each]) for i in range(len(documents))]
                for place, (ids, counted) in zip(places, encoded, strict=True):
                    writer.add(place, ids, counted)
            number += len(batch)
            read += sum(len(document.prompt) + len(document.text) for document in documents)
            if progress is not None:
                progress(done + min(read, size), sum(sizes))
        done += size
        if progress is not None:
            progress(done, sum(sizes))
    if problems:
        more = ["and maybe more"] * (len(problems) >= MOST_PROBLEMS)
        raise DataError("\n".join([*problems[:MOST_PROBLEMS], *more]))
    return origins


def _encoded(
    tokenizer: Any, batch: list[Document], ends: TextEnds, where: str
) -> Iterator[tuple[npt.NDArray, npt.NDArray[np.uint8]]]:
    """(ids, 1 where one counts) of each document, with `ends` around it."""

    def encode(texts: list[str]) -> list[Any]:
        try:
            return tokenizer.encode_batch(texts, add_special_tokens=False)
        except Exception as error:  # the library raises plain Exceptions
            raise DataError(f"{where} cannot be tokenized: {error}") from error

    in_pairs = any(x.prompt for x in batch)
    prompts = [x.ids for x in encode([x.prompt for x in batch])] if in_pairs else [[]] * len(batch)
    for document, prompt, text in zip(batch, prompts, encode([x.text for x in batch]), strict=True):
        # what a template has written has its special tokens already
        around = ends if document.spans is None else TextEnds()
        ids = np.asarray(around.around([*prompt, *text.ids]), np.int64)
        counted = np.ones(len(ids), np.uint8)
        if document.prompt:  # with what stands before it
            counted[: len(ids) - len(text.ids) - len(around.eos)] = 0
        if document.spans is not None:
            counted[:] = _within(text.offsets, document.spans)
        yield ids, counted


def _within(
    offsets: list[tuple[int, int]], spans: tuple[tuple[int, int], ...]
) -> npt.NDArray[np.bool_]:
    """Which tokens, each from one character to another, have a character of a span."""
    begin, end = np.asarray(offsets, np.int64).reshape(-1, 2).T
    found = np.zeros(len(begin), bool)
    for first, last in spans:
        found |= (begin < last) & (np.maximum(end, begin + 1) > first)
    return found


def _place(document: Document) -> float:
    """Equal texts have equal places, so no text is on both sides of a split."""
    digest = hashlib.blake2b(document.prompt.encode(), digest_size=7)
    digest.update(b"\0" + document.text.encode())
    return int.from_bytes(digest.digest(), "big") / 2**56


def _read(folder: Path) -> TokenizedText:
    try:
        meta = parse_json((folder / "meta.json").read_text(encoding="utf-8"))
        types = {"tokens": meta["dtype"], "ends": "int64", "places": "float64"}
        if (folder / "counted.bin").exists():
            types |= {"counted": "uint8", "prompts": "int64"}
        paths = {name: folder / f"{name}.bin" for name in types}
        # only these are read again and again
        mapped = tuple(MappedTensors.of(paths[n]) for n in ("tokens", "counted") if n in paths)
        found = {
            name: np.asarray(np.memmap(paths[name], dtype, mode="r"))
            for name, dtype in types.items()
        }
        files = [(str(name), int(first)) for name, first in meta["files"]]
        tokens, ends, places = found["tokens"], found["ends"], found["places"]
        counted, prompts = found.get("counted", tokens), found.get("prompts", ends)
        if not len(tokens) == len(counted) == ends[-1]:
            raise ValueError(f"{len(tokens)} tokens, where the documents end at {ends[-1]}")
        if not len(ends) == len(places) == len(prompts):
            raise ValueError(f"{len(ends)} documents, of which {len(places)} have a place")
        vocab, eos = int(meta["vocab"]), meta["eos"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"the cache entry {folder} is damaged ({error}); remove it") from error
    masks = found.get("counted"), found.get("prompts")
    each = int(meta.get("documents_per_line", 1))
    return TokenizedText(folder, tokens, ends, places, *masks, vocab, eos, files, mapped, each)
