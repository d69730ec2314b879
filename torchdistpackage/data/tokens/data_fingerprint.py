"""A fingerprint of a run's data files, by which a resumed run notices edits.

It covers all bytes of a file of at most 64 MiB, and the size and 64 evenly spaced blocks of a
larger one. No torch.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import xxhash

from torchdistpackage.config.cached_datasets import located
from torchdistpackage.config.data_section import DataSection
from torchdistpackage.config.schema import RunConfig
from torchdistpackage.errors import DataError

_WHOLE_BYTES = 1 << 26
_NUM_BLOCKS = 64
_BLOCK_BYTES = 1 << 16


class DataFingerprints(NamedTuple):
    """Fingerprints of the files of training, and of those only validation reads; "": unknown."""

    training: str = ""
    evaluation: str = ""


def data_fingerprints(config: RunConfig) -> DataFingerprints:
    """Return the fingerprints of the files as they are now."""
    both = _parts(config)
    return DataFingerprints(
        *(data_fingerprint([x.path for x in p.values() if x.path is not None]) for p in both)
    )


def edited_data(
    config: RunConfig, step: int, saved: DataFingerprints, current: DataFingerprints
) -> list[str]:
    """Return notes on data files that have changed since `step` was saved."""
    follows = (
        "the samples from here on are not those of an undisturbed run",
        "losses of validations from here on are not comparable with those before",
    )
    notes: list[str] = []
    for parts, old, new, text in zip(_parts(config), saved, current, follows, strict=True):
        if step and old and new != old:
            keys = ", ".join(f"{key} {part.path}" for key, part in parts.items())
            notes.append(f"{keys} has other contents than when step {step} was saved, so {text}")
    return notes


def _parts(config: RunConfig) -> tuple[dict[str, DataSection], dict[str, DataSection]]:
    trains = config.data.parts
    return trains, {key: x for key, x in config.data.all_parts.items() if key not in trains}


def data_fingerprint(paths: Sequence[str]) -> str:
    """Return a hash of files, and of folders with the names in them; "" if one cannot be read."""
    if not paths:
        return ""
    checksum = xxhash.xxh3_64()
    try:
        for name, file in (pair for path in paths for pair in _files(located(path))):
            size_bytes = file.stat().st_size
            checksum.update(f"{name} {size_bytes} ".encode())
            with file.open("rb") as opened:
                for start, length in _spans(size_bytes):
                    opened.seek(start)
                    checksum.update(opened.read(length))
    except (OSError, DataError):  # the reader of the data reports what is wrong
        return ""
    return checksum.hexdigest()


def _files(path: Path) -> Iterator[tuple[str, Path]]:
    if not path.is_dir():
        yield "", path
        return
    for file in sorted(path.rglob("*")):
        if file.is_file():
            yield file.relative_to(path).as_posix(), file


def _spans(size_bytes: int) -> Iterator[tuple[int, int]]:
    if size_bytes <= _WHOLE_BYTES:
        yield 0, size_bytes
        return
    for index in range(_NUM_BLOCKS):
        yield (size_bytes - _BLOCK_BYTES) * index // (_NUM_BLOCKS - 1), _BLOCK_BYTES
