"""Exchange of files between ranks, in a thread beside the steps, so that other nodes keep copies.

All ranks go through the same sequence of blocks, and none starts a block before the last one has
arrived. A rank that cannot write its disk still receives every block and fails afterwards, so no
rank waits for a block that never comes.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

import torch
from torch import Tensor

from torchdistpackage.checkpoint.checksums import new_checksum
from torchdistpackage.checkpoint.commit import settle
from torchdistpackage.checkpoint.manifest import FileFacts
from torchdistpackage.checkpoint.nodes import NodePlace, pairs_of
from torchdistpackage.checkpoint.save import file_name
from torchdistpackage.comm.side_channel import SideChannel
from torchdistpackage.errors import CheckpointError
from torchdistpackage.files import naming, write_all

_BLOCK_BYTES = 1 << 22
_HEADER_BYTES = 24
"""8 bytes for the size, or -1 without a file, and 16 for its XXH3 in hexadecimal."""


class FileExchange:
    """An exchange that all ranks create, run and close together; on one node it does nothing.

    place: tells which rank keeps a copy of this rank's file, and whose files this rank keeps.
    """

    def __init__(self, place: NodePlace):
        self._keeper, self._kept_for = place.keeper, place.kept_for
        self._channel = None
        if place.keeper is not None:
            self._channel = SideChannel(pairs_of(place), "local copies")

    def run(self, path: Path, own_facts: FileFacts | None) -> None:
        """Send the file at `path`, and write the received files into the same folder.

        own_facts: size and checksum of the file; None if this rank could not write it.

        Raises:
            CheckpointError: a file did not arrive as it was sent.
            CommError: a peer is gone.
            OSError: the disk is full, or another file error.
        """
        channel, keeper = self._channel, self._keeper
        if channel is None or keeper is None:
            return
        data, header = _to_send(path, own_facts)
        incoming = [_KeptFile(path.with_name(file_name(rank)), rank) for rank in self._kept_for]
        channel.exchange([(header, keeper)], [(x.header, x.source) for x in incoming])
        for each in incoming:
            each.begin()
        num_blocks = max(_num_blocks(n) for n in (data.numel(), *(x.size for x in incoming)))
        try:
            for number in range(num_blocks):
                begin = number * _BLOCK_BYTES
                block = data[begin : begin + _BLOCK_BYTES]
                parts = [(x, buffer) for x in incoming if (buffer := x.buffer(begin)).numel()]
                channel.exchange(
                    [(block, keeper)] if block.numel() else [],
                    [(buffer, x.source) for x, buffer in parts],
                )
                for x, buffer in parts:
                    x.take(buffer)
        finally:
            for each in incoming:
                each.close()
        for each in incoming:
            each.check()

    def close(self) -> None:
        """End the connections."""
        if self._channel is not None:
            self._channel.close()


class _KeptFile:
    """A file in transit from rank `source`; after a write error it still receives, for `check`."""

    def __init__(self, path: Path, source: int):
        self.path, self.source = path, source
        self.header = torch.zeros(_HEADER_BYTES, dtype=torch.uint8)
        self.size = 0
        self._is_sent = False
        self._expected = ""
        self._block = torch.empty(0, dtype=torch.uint8)
        self._checksum = new_checksum()
        self._errors: list[OSError] = []
        self._file: FileIO | None = None

    def begin(self) -> None:
        """Read the received header, and create the file if one follows."""
        raw = self.header.numpy().tobytes()
        size = int.from_bytes(raw[:8], "little", signed=True)
        self._is_sent, self.size, self._expected = size >= 0, max(size, 0), raw[8:].decode()
        self._block = torch.empty(min(self.size, _BLOCK_BYTES), dtype=torch.uint8)
        if self._is_sent:
            with self._keeping_error():
                self._file = FileIO(self.path, "w")

    def buffer(self, begin: int) -> Tensor:
        """Return the memory to receive the block at `begin` into; empty past the file's end."""
        return self._block[: max(self.size - begin, 0)]

    def take(self, block: Tensor) -> None:
        """Hash a received block and write it."""
        data = memoryview(block.numpy())
        self._checksum.update(data)
        if self._file is not None and not self._errors:
            with self._keeping_error():
                write_all(self._file.fileno(), data)

    def close(self) -> None:
        if self._file is not None:
            with self._keeping_error():  # a network file system may tell of a full disk only here
                self._file.close()

    def check(self) -> None:
        """Raise the error of the transfer; a source that had no file reports that itself."""
        if self._errors:
            raise self._errors[0]
        if not self._is_sent:
            return
        if (received := self._checksum.hexdigest()) != self._expected:
            raise CheckpointError(
                f"{self.path.name} came from rank {self.source} with checksum {received} and left "
                f"with {self._expected}; save again, and check the network and memory of these "
                "nodes if it happens twice"
            )
        settle(self.path)

    @contextmanager
    def _keeping_error(self) -> Iterator[None]:
        try:
            with naming(self.path):
                yield
        except OSError as error:
            self._errors.append(error)


def _to_send(path: Path, facts: FileFacts | None) -> tuple[Tensor, Tensor]:
    """Return the memory-mapped bytes of a file and its header; without a file, one that says so."""
    nothing = torch.empty(0, dtype=torch.uint8)
    if facts is None or facts.xxh3 is None:
        raw = (-1).to_bytes(8, "little", signed=True).ljust(_HEADER_BYTES, b" ")
        return nothing, torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    raw = facts.size_bytes.to_bytes(8, "little", signed=True) + facts.xxh3.encode()
    data = torch.from_file(str(path), shared=False, size=facts.size_bytes, dtype=torch.uint8)
    return data, torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def _num_blocks(size_bytes: int) -> int:
    """Return the number of blocks of a file."""
    return math.ceil(size_bytes / _BLOCK_BYTES)
