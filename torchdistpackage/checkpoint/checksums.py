"""Checksums of files: XXH3, which keeps up with memory, and CRC-32 of checkpoints before format 2.

A checksum finds damage by accident, and is no defence against who wants to deceive. No torch.
"""

import zlib
from pathlib import Path
from typing import Protocol

import xxhash

BLOCK_BYTES = 1 << 20
"""Bytes that are hashed and written, or read, at a time: few enough to stay in a core's cache."""


class Checksum(Protocol):
    """Takes the bytes of a file in order."""

    def update(self, data: bytes | memoryview, /) -> None: ...

    def hexdigest(self) -> str: ...


class Crc32:
    """CRC-32 with the methods of a hash."""

    def __init__(self) -> None:
        self._value = 0

    def update(self, data: bytes | memoryview, /) -> None:
        self._value = zlib.crc32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


def new_checksum() -> Checksum:
    """One of the kind that files are written with: XXH3 of 64 bits (https://xxhash.com)."""
    return xxhash.xxh3_64()


def add_file(checksum: Checksum, path: Path) -> int:
    """Feed a file into a checksum, block by block; returns its size in bytes.

    Raises:
        OSError: it cannot be read.
    """
    block, size_bytes = bytearray(BLOCK_BYTES), 0
    view = memoryview(block)
    with path.open("rb", buffering=0) as file:
        while number := file.readinto(block):
            checksum.update(view[:number])
            size_bytes += number
    return size_bytes
