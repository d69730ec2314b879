"""A memory-mapped safetensors file, hashed and copied from without an intermediate buffer.

The kernel reads the file from the disk once, ahead of the hash; the copy then finds it in memory.
The mapping is private, so writes to the views do not reach the file.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from torchdistpackage.bounded import DTYPES, StoredTensor, opened_size, read_header
from torchdistpackage.checkpoint.checksums import BLOCK_BYTES, Crc32, new_checksum
from torchdistpackage.checkpoint.manifest import FileFacts
from torchdistpackage.errors import CheckpointError

_TORCH_NAMES = {name: dtype for dtype, (name, _) in DTYPES.items()}


class TensorFile:
    """The tensors of a file by key, as views of its mapping.

    Raises:
        OSError: it is not a regular file, or cannot be read.
        ValueError: its header is wrong.
    """

    def __init__(self, path: Path):
        self.path = path
        self._stored: dict[str, StoredTensor] = read_header(path)
        size_bytes = opened_size(path)
        self._bytes = torch.from_file(str(path), shared=False, size=size_bytes, dtype=torch.uint8)
        ends = (stored.span[1] for stored in self._stored.values())
        self._begin = size_bytes - max(ends, default=0)

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __getitem__(self, key: str) -> Tensor:
        stored = self._stored[key]
        first, last = (self._begin + at for at in stored.span)
        dtype = getattr(torch, _TORCH_NAMES[stored.dtype])
        if first == last:
            return torch.empty(stored.shape, dtype=dtype)
        # give each tensor its own storage: torch.save of one tensor would write the whole file
        flat = torch.frombuffer(self._bytes.numpy()[first:last], dtype=torch.uint8)
        if first % dtype.itemsize:  # files of other writers may be unaligned
            flat = flat.clone()
        return flat.view(dtype).view(stored.shape)

    def described(self, key: str) -> tuple[str, tuple[int, ...]]:
        """Return (torch's dtype, shape) of a tensor."""
        stored = self._stored[key]
        return _TORCH_NAMES[stored.dtype], stored.shape

    def verify(self, expected: FileFacts) -> None:
        """Raise CheckpointError if the checksum of the bytes differs from the expected one."""
        checksum = new_checksum() if expected.crc32 is None else Crc32()
        data = memoryview(self._bytes.numpy())
        for start in range(0, len(data), BLOCK_BYTES):
            checksum.update(data[start : start + BLOCK_BYTES])
        if problem := expected.differs(checksum):
            raise CheckpointError(f"{self.path.name} {problem}")


def read_ahead(paths: Iterable[Path]) -> None:
    """Ask the kernel to start reading these files, so that later reads wait less."""
    for path in paths:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        except OSError:
            continue  # the reader that opens it later reports the error
        with suppress(OSError):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
        os.close(descriptor)
