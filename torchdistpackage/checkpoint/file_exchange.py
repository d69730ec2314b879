"""Files of ranks sent to the ranks that keep a copy, in blocks, by a thread beside the steps.

All ranks go through the blocks alike, and none begins before that before has arrived. So a rank
that cannot write takes what comes all the same, and fails afterwards; none waits for what never
comes.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

import torch
from torch import Tensor

from torchdistpackage.checkpoint.checksums import new_checksum
from torchdistpackage.checkpoint.commit import settle
from torchdistpackage.checkpoint.manifest import FileFacts
from torchdistpackage.checkpoint.save import file_name
from torchdistpackage.comm.primitives import Group
from torchdistpackage.comm.side_channel import SideChannel
from torchdistpackage.errors import CheckpointError

_BLOCK_BYTES = 1 << 22
_HEADER_BYTES = 24
"""8 of the size, -1 if there is no file, and 16 of its XXH3 in hexadecimal."""


class FileExchange:
    """Made, run and closed by all ranks of `group` alike.

    keeper: the rank that keeps a copy of this one's file; None: none does, anywhere. kept_for:
    those whose files this one keeps.
    """

    def __init__(self, group: Group, keeper: int | None, kept_for: Sequence[int]):
        self._keeper, self._kept_for = keeper, kept_for
        self._channel = None if keeper is None else SideChannel(group, "local copies")

    def run(self, path: Path, own: FileFacts | None) -> None:
        """Send the file at `path`, and write those that come beside it.

        own: None if there is no file, as this rank could not write it.

        Raises:
            CheckpointError: a file did not arrive as it was sent.
            CommError: a peer is gone.
            OSError: the disk is full, or the like.
        """
        channel, keeper = self._channel, self._keeper
        if channel is None or keeper is None:
            return
        data, header = _to_send(path, own)
        incoming = [_KeptFile(path.with_name(file_name(rank)), rank) for rank in self._kept_for]
        channel.exchange([(header, keeper)], [(x.header, x.source) for x in incoming])
        for each in incoming:
            each.begin()
        num_blocks = max(_num_blocks(n) for n in (data.numel(), *(x.size for x in incoming)))
        try:
            for at in range(num_blocks):
                begin = at * _BLOCK_BYTES
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
    """A file on its way from rank `source`. What cannot be written is noted, and received."""

    def __init__(self, path: Path, source: int):
        self.path, self.source = path, source
        self.header = torch.zeros(_HEADER_BYTES, dtype=torch.uint8)
        self.size, self._is_sent, self._expected = 0, False, ""
        self._block = torch.empty(0, dtype=torch.uint8)
        self._checksum, self._error = new_checksum(), list[OSError]()
        self._file: FileIO | None = None

    def begin(self) -> None:
        """The header has come."""
        raw = self.header.numpy().tobytes()
        size = int.from_bytes(raw[:8], "little", signed=True)
        self._is_sent, self.size, self._expected = size >= 0, max(size, 0), raw[8:].decode()
        self._block = torch.empty(min(self.size, _BLOCK_BYTES), dtype=torch.uint8)
        if self._is_sent:
            with self._noted():
                self._file = FileIO(self.path, "w")

    def buffer(self, begin: int) -> Tensor:
        return self._block[: max(self.size - begin, 0)]

    def take(self, block: Tensor) -> None:
        data = memoryview(block.numpy())
        self._checksum.update(data)
        if self._file is not None and not self._error:
            with self._noted():
                while data:  # what a full disk has not taken raises
                    data = data[self._file.write(data) :]

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def check(self) -> None:
        """Raises what went wrong; the file of a source that has none is its own concern."""
        if self._error:
            raise self._error[0]
        if not self._is_sent:
            return
        if (found := self._checksum.hexdigest()) != self._expected:
            raise CheckpointError(
                f"{self.path.name} came from rank {self.source} with checksum {found} and left "
                f"with {self._expected}"
            )
        settle(self.path)

    @contextmanager
    def _noted(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._error.append(error)


def _to_send(path: Path, facts: FileFacts | None) -> tuple[Tensor, Tensor]:
    """The bytes of a file, mapped, and what is said before; without a file that there is none."""
    nothing = torch.empty(0, dtype=torch.uint8)
    if facts is None or facts.xxh3 is None:
        raw = (-1).to_bytes(8, "little", signed=True).ljust(_HEADER_BYTES, b" ")
        return nothing, torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    raw = facts.size_bytes.to_bytes(8, "little", signed=True) + facts.xxh3.encode()
    data = torch.from_file(str(path), shared=False, size=facts.size_bytes, dtype=torch.uint8)
    return data, torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def _num_blocks(size_bytes: int) -> int:
    return math.ceil(size_bytes / _BLOCK_BYTES)
