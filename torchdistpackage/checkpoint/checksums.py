"""Checksums of files: XXH3, which is as fast as memory, and CRC-32 for checkpoints of format 1.

A checksum finds accidental damage. It does not protect against deliberate changes. No torch.
"""

import zlib
from pathlib import Path
from typing import Protocol

import xxhash

BLOCK_BYTES = 1 << 20
"""Bytes hashed and written, or read, at a time: few enough to stay in a core's cache."""


class Checksum(Protocol):
    """A hash that takes the bytes of a file in order."""

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
    """Return a new checksum of the kind written today: 64-bit XXH3 (https://xxhash.com)."""
    return xxhash.xxh3_64()


def add_file(checksum: Checksum, path: Path) -> int:
    """Feed a file into a checksum, block by block, and return its size in bytes.

    Raises:
        OSError: the file cannot be read.
    """
    block = bytearray(BLOCK_BYTES)
    size_bytes = 0
    view = memoryview(block)
    with path.open("rb", buffering=0) as file:
        while number := file.readinto(block):
            checksum.update(view[:number])
            size_bytes += number
    return size_bytes
