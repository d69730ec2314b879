"""Texts turned into token ids once, and kept by the content of what they were made from. No torch.

A cache entry is a folder named by a hash of the tokenizer, of every file, and of what is read from
them. It is written beside and renamed when it is complete, under a lock: of many ranks the first
tokenizes and the others wait. It holds

tokens.bin     ids of all documents, one after another, uint16 or uint32
ends.npy       int64: where each document ends in it
places.npy     float64 in [0, 1): a hash of each document's text, by which splits are made
counted.bin    uint8, of prompts and completions alone: 1 for a token that counts in the loss
meta.json      numbers, names of the files, and which documents came from which
"""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from torchdistpackage.bounded import parse_json
from torchdistpackage.errors import DataError
from torchdistpackage.train.documents import PAIRS, Document, TextSource, documents_of, files_of

_FORMAT = 2
_AT_ONCE = 512
"""Documents that the tokenizer's threads get together."""
_ENDS = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>")
"""Names of the end of text, where no file beside the tokenizer says which it is."""

Progress = Callable[[int, int], None]
"""Told (bytes of text read, of all) now and then."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenizedText:
    """A cache entry, mapped. counted: None where every token counts. eos: its id, or None."""

    folder: Path
    tokens: npt.NDArray[np.unsignedinteger]
    ends: npt.NDArray[np.int64]
    places: npt.NDArray[np.float64]
    counted: npt.NDArray[np.uint8] | None
    vocab: int
    eos: int | None
    files: list[tuple[str, int]]

    @property
    def starts(self) -> npt.NDArray[np.int64]:
        return np.concatenate([np.zeros(1, np.int64), self.ends[:-1]])

    def origin(self, document: int) -> str:
        """File and number of a document in it, from 1: of jsonl, its line."""
        name, first = max((f for f in self.files if f[1] <= document), key=lambda f: f[1])
        return f"{name}:{document - first + 1}"


def tokenized(source: TextSource, cache: Path, progress: Progress | None = None) -> TokenizedText:
    """The cache entry of `source` in `cache`, made now if it is not there.

    Raises:
        DataError: a file or the tokenizer is missing or wrong, by file and line.
    """
    vocabulary = _tokenizer_file(Path(source.tokenizer))
    files = files_of(source.kind, Path(source.path))
    folder = cache / _digest(source, vocabulary, files)
    if not folder.exists():
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with _locked(cache / f"{folder.name}.lock"):
                if not folder.exists():
                    _make(source, vocabulary, files, folder, progress)
        except OSError as error:
            raise DataError(f"cannot write the cache {folder}: {error.strerror}") from error
    return _read(folder)


def _tokenizer_file(path: Path) -> Path:
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise DataError(
            f"data.tokenizer {path}: {file} is no file; give a folder with the tokenizer.json of "
            f"the tokenizers library, as save_pretrained writes it"
        )
    return file


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
    file = _tokenizer_file(path)
    try:
        found = Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises plain Exceptions
        raise DataError(f"{file} is no tokenizer of the tokenizers library: {error}") from error
    found.no_padding()
    found.no_truncation()
    return found, _eos(found, file.parent)


def _eos(tokenizer: Any, folder: Path) -> int | None:
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (file := folder / name).is_file():
            try:
                token = parse_json(file.read_text(encoding="utf-8")).get("eos_token")
            except (ValueError, AttributeError, OSError):
                continue
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                return tokenizer.token_to_id(token)
    ids = (tokenizer.token_to_id(name) for name in _ENDS)
    return next((number for number in ids if number is not None), None)


def _digest(source: TextSource, vocabulary: Path, files: list[Path]) -> str:
    """Of contents, not of times: a copy elsewhere finds the same entry."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(f"{_FORMAT} {source.kind} {source.field} {len(files)}".encode())
    special = [vocabulary.parent / n for n in ("tokenizer_config.json", "special_tokens_map.json")]
    for path in (vocabulary, *(p for p in special if p.is_file()), *files):
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
    source: TextSource, vocabulary: Path, files: list[Path], folder: Path, progress: Progress | None
) -> None:
    tokenizer, eos = load_tokenizer(vocabulary)
    draft = folder.with_name(f"{folder.name}.{os.getpid()}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    try:
        _write(source, tokenizer, eos, files, draft, progress)
        draft.rename(folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def _write(
    source: TextSource,
    tokenizer: Any,
    eos: int | None,
    files: list[Path],
    draft: Path,
    progress: Progress | None,
) -> None:
    # ids may have gaps
    vocab = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    dtype = np.uint16 if vocab <= 1 << 16 else np.uint32
    ends: list[int] = []
    places: list[float] = []
    origins: list[tuple[str, int]] = []
    sizes = [path.stat().st_size for path in files]
    total, done = 0, 0
    in_pairs = source.field == PAIRS
    with (draft / "tokens.bin").open("wb") as out, (draft / "counted.bin").open("wb") as masks:
        for path, size in zip(files, sizes, strict=True):
            origins.append((str(path), len(ends)))
            found = documents_of(source.kind, path, source.field)
            read = 0
            while batch := list(islice(found, _AT_ONCE)):
                first = len(ends) - origins[-1][1] + 1
                where = f"{path}: documents {first} to {first + len(batch) - 1}"
                for ids, counted in _encoded(tokenizer, batch, eos, in_pairs, where):
                    total += len(ids)
                    ends.append(total)
                    out.write(ids.astype(dtype).tobytes())
                    if in_pairs:
                        masks.write(counted.tobytes())
                places += [_place(document) for document in batch]
                read += sum(len(document.prompt) + len(document.text) for document in batch)
                if progress is not None:
                    progress(done + min(read, size), sum(sizes))
            done += size
            if progress is not None:
                progress(done, sum(sizes))
    if not in_pairs:
        (draft / "counted.bin").unlink()
    if not total:
        raise DataError(f"{source.path} holds no token; put texts there")
    np.save(draft / "ends.npy", np.asarray(ends, np.int64))
    np.save(draft / "places.npy", np.asarray(places, np.float64))
    meta = {"source": asdict(source), "dtype": np.dtype(dtype).name, "vocab": vocab, "eos": eos}
    (draft / "meta.json").write_text(json.dumps({**meta, "files": origins}, indent=1) + "\n")


def _encoded(
    tokenizer: Any, batch: list[Document], eos: int | None, in_pairs: bool, where: str
) -> Iterator[tuple[npt.NDArray, npt.NDArray[np.uint8]]]:
    """(ids, 1 where one counts) of each document, with the end of text behind it."""

    def encode(texts: list[str]) -> list[list[int]]:
        try:
            return [x.ids for x in tokenizer.encode_batch(texts, add_special_tokens=False)]
        except Exception as error:  # the library raises plain Exceptions
            raise DataError(f"{where} cannot be tokenized: {error}") from error

    end = [] if eos is None else [eos]
    prompts = encode([x.prompt for x in batch]) if in_pairs else [[] for _ in batch]
    for prompt, ids in zip(prompts, encode([x.text for x in batch]), strict=True):
        counted = np.ones(len(prompt) + len(ids) + len(end), np.uint8)
        counted[: len(prompt)] = 0
        yield np.asarray([*prompt, *ids, *end], np.int64), counted


def _place(document: Document) -> float:
    """Equal texts have equal places, so no text is on both sides of a split."""
    digest = hashlib.blake2b(document.prompt.encode(), digest_size=7)
    digest.update(b"\0" + document.text.encode())
    return int.from_bytes(digest.digest(), "big") / 2**56


def _read(folder: Path) -> TokenizedText:
    try:
        meta = parse_json((folder / "meta.json").read_text(encoding="utf-8"))
        tokens = np.asarray(np.memmap(folder / "tokens.bin", meta["dtype"], mode="r"))
        ends, places = (np.load(folder / f"{n}.npy") for n in ("ends", "places"))
        masks = folder / "counted.bin"
        counted = np.asarray(np.memmap(masks, np.uint8, mode="r")) if masks.exists() else None
        files = [(str(name), int(first)) for name, first in meta["files"]]
        if len(tokens) != ends[-1] or len(places) != len(ends):
            raise ValueError(f"{len(tokens)} tokens, where the documents end at {ends[-1]}")
        vocab, eos = int(meta["vocab"]), meta["eos"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"the cache entry {folder} is damaged ({error}); remove it") from error
    return TokenizedText(folder, tokens, ends, places, counted, vocab, eos, files)
