"""Writer of one rank's file, in one pass: it hashes each block while it is in the core's cache.

The format is safetensors (https://huggingface.co/docs/safetensors): 8 bytes for the header's
length, a JSON header, and the tensors one after the other, widest types first so that all are
aligned.
"""

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from torchdistpackage.bounded import DTYPES, MAX_HEADER_BYTES
from torchdistpackage.checkpoint.checksums import BLOCK_BYTES, new_checksum
from torchdistpackage.checkpoint.commit import settle
from torchdistpackage.checkpoint.manifest import FileFacts, Manifest
from torchdistpackage.checkpoint.snapshot import Snapshot
from torchdistpackage.comm.flight_recorder import dtype_name
from torchdistpackage.errors import CheckpointError
from torchdistpackage.files import naming

_ALIGN_BYTES = 64


class CancelledSave(CheckpointError):
    """The write stopped because another rank failed."""


def write_snapshot(
    folder: Path, snapshot: Snapshot, cancelled: Callable[[], bool] = lambda: False
) -> FileFacts:
    """Write and flush the file of a rank into a temporary folder.

    cancelled: called before every block; True stops the write.

    Raises:
        CheckpointError: safetensors has no type for one of the tensors.
        OSError: the disk is full, or another file error.
    """
    path = folder / snapshot.file
    header = Manifest(0, 0, (), snapshot.entries, {}).to_json()
    metadata = {"pieces": header, "integers": json.dumps(dict(snapshot.integers))}
    # wait for the copies from the device, because the host reads them from here on
    snapshot.arrived()
    facts = write_safetensors(path, snapshot.tensors, metadata, cancelled)
    settle(path)
    return facts


def write_safetensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    cancelled: Callable[[], bool] = lambda: False,
) -> FileFacts:
    """Write a safetensors file, and return its size and checksum.

    It makes one host copy at a time, of a tensor that is not contiguous or not on the host.

    Raises:
        CheckpointError: safetensors has no type for a tensor, or the header would be too long.
        OSError: the disk is full, or another file error.
    """
    described = {key: (dtype_name(x.dtype), tuple(x.shape)) for key, x in tensors.items()}
    return write_stream(path, described, tensors.__getitem__, metadata, cancelled)


def write_stream(
    path: Path,
    described: Mapping[str, tuple[str, tuple[int, ...]]],
    read_tensor: Callable[[str], Tensor],
    metadata: Mapping[str, str],
    cancelled: Callable[[], bool] = lambda: False,
) -> FileFacts:
    """Write a safetensors file of tensors that `read_tensor` returns one at a time.

    described: key -> (torch's dtype, shape) of the tensor that `read_tensor` returns for it.
    """
    order = sorted(described, key=lambda key: -DTYPES.get(described[key][0], ("", 0))[1])
    head = make_header({key: described[key] for key in order}, metadata)
    checksum, size_bytes = new_checksum(), 0
    with naming(path), path.open("wb", buffering=BLOCK_BYTES) as file:
        for data in _blocks(head, order, read_tensor):
            if cancelled():
                raise CancelledSave(f"{path.name} was not written completely")
            checksum.update(data)
            file.write(data)
            size_bytes += len(data)
        _flush(file)
    return FileFacts(size_bytes, checksum.hexdigest())


def copy_file(
    source: BinaryIO,
    target: Path,
    expected: FileFacts,
    cancelled: Callable[[], bool] = lambda: False,
) -> FileFacts:
    """Copy an open file to its end into a temporary folder, flush it, and return `expected`.

    Raises:
        CheckpointError: the checksum differs from the expected one.
        OSError: the file cannot be read, the disk is full, or another file error.
    """
    checksum = new_checksum()
    with naming(target), target.open("wb", buffering=BLOCK_BYTES) as file:
        while data := _block_of(source):
            if cancelled():
                raise CancelledSave(f"{target.name} was not copied completely")
            checksum.update(data)
            file.write(data)
        _flush(file)
    if problem := expected.differs(checksum):
        raise CheckpointError(f"{source.name} {problem}")
    settle(target)
    return expected


def _block_of(source: BinaryIO) -> bytes:
    """Return the next block of a file; an OSError then names the file."""
    with naming(source.name):
        return source.read(BLOCK_BYTES)


def _flush(file: BinaryIO) -> None:
    """Wait until the disk has what was written by this descriptor.

    A network file system reports an error, such as an exceeded quota, once, and to the descriptor
    that wrote; another descriptor may never get it.
    """
    file.flush()
    os.fsync(file.fileno())


def make_header(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> bytes:
    """Return the bytes before the first tensor.

    tensors: key -> (torch's dtype, shape), in file order.

    Raises:
        CheckpointError: safetensors has no type for a tensor, or readers refuse so long a header.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for key, (dtype, shape) in tensors.items():
        if dtype not in DTYPES:
            raise CheckpointError(
                f"{key} is {dtype}, which safetensors files do not have; use {', '.join(DTYPES)}"
            )
        name, size = DTYPES[dtype]
        begin, end = end, end + size * math.prod(shape)
        header[key] = {"dtype": name, "shape": shape, "data_offsets": (begin, end)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGN_BYTES)
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"the header of a file has {len(text):,} bytes, but readers accept at most "
            f"{MAX_HEADER_BYTES:,}; save fewer tensors from a rank"
        )
    return len(text).to_bytes(8, "little") + text


def _blocks(
    head: bytes, order: list[str], read_tensor: Callable[[str], Tensor]
) -> Iterator[bytes | memoryview]:
    """Yield the header, and then every tensor's bytes in blocks."""
    yield head
    for key in order:
        data = bytes_of(read_tensor(key))
        for start in range(0, len(data), BLOCK_BYTES):
            yield data[start : start + BLOCK_BYTES]


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the elements of a tensor in order, as a view if it is contiguous on the host."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")
