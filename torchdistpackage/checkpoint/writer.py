"""Writes the file of one rank in one pass: each block is hashed while it is in the core's cache.

The format is safetensors (https://huggingface.co/docs/safetensors): 8 bytes of length, a header of
JSON, and the tensors one after the other, here the widest types first, so that all are aligned.
"""

import json
import math
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

_ALIGN_BYTES = 64


class CancelledSave(CheckpointError):
    """The writing ended because another rank has failed."""


def write_snapshot(
    folder: Path, snapshot: Snapshot, cancelled: Callable[[], bool] = lambda: False
) -> FileFacts:
    """Write and flush the file of a rank into a temporary folder.

    cancelled: asked after every block.

    Raises:
        CheckpointError: a tensor has a type that files do not have.
        OSError: the disk is full, or the like.
    """
    path = folder / snapshot.file
    header = Manifest(0, 0, (), snapshot.entries, {}).to_json()
    metadata = {"pieces": header, "integers": json.dumps(dict(snapshot.integers))}
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
    """Write a safetensors file; returns its size and checksum.

    Held besides the tensors is one that is not contiguous or not on the host, at a time.

    Raises:
        CheckpointError: a tensor has a type that files do not have, or there are too many.
        OSError: the disk is full, or the like.
    """
    described = {key: (dtype_name(x.dtype), tuple(x.shape)) for key, x in tensors.items()}
    return write_stream(path, described, tensors.__getitem__, metadata, cancelled)


def write_stream(
    path: Path,
    described: Mapping[str, tuple[str, tuple[int, ...]]],
    read: Callable[[str], Tensor],
    metadata: Mapping[str, str],
    cancelled: Callable[[], bool] = lambda: False,
) -> FileFacts:
    """`write_safetensors` of tensors that are made one at a time.

    described: key -> (torch's dtype, shape) of what `read` returns for it.
    """
    order = sorted(described, key=lambda key: -DTYPES.get(described[key][0], ("", 0))[1])
    head = make_header({key: described[key] for key in order}, metadata)
    checksum, size_bytes = new_checksum(), 0
    with path.open("wb", buffering=BLOCK_BYTES) as file:
        for data in _blocks(head, order, read):
            if cancelled():
                raise CancelledSave(f"{path.name} was not written to its end")
            checksum.update(data)
            file.write(data)
            size_bytes += len(data)
    return FileFacts(size_bytes, checksum.hexdigest())


def copy_file(
    source: BinaryIO,
    target: Path,
    expected: FileFacts,
    cancelled: Callable[[], bool] = lambda: False,
) -> FileFacts:
    """Copy an open file to its end into a temporary folder, and flush it; returns `expected`.

    Raises:
        CheckpointError: the bytes are not those that are expected.
        OSError: it cannot be read, the disk is full, or the like.
    """
    checksum = new_checksum()
    with target.open("wb", buffering=BLOCK_BYTES) as file:
        while data := source.read(BLOCK_BYTES):
            if cancelled():
                raise CancelledSave(f"{target.name} was not copied to its end")
            checksum.update(data)
            file.write(data)
    if problem := expected.differs(checksum):
        raise CheckpointError(f"{source.name} {problem}")
    settle(target)
    return expected


def make_header(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> bytes:
    """The bytes before the first tensor. tensors: key -> (torch's dtype, shape), in file order.

    Raises:
        CheckpointError: a type that files do not have, or more than a reader takes.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for key, (dtype, shape) in tensors.items():
        if dtype not in DTYPES:
            raise CheckpointError(
                f"{key} is {dtype}, which files of tensors do not have; use {', '.join(DTYPES)}"
            )
        name, size = DTYPES[dtype]
        begin, end = end, end + size * math.prod(shape)
        header[key] = {"dtype": name, "shape": shape, "data_offsets": (begin, end)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGN_BYTES)
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"the header of a file has {len(text):,} bytes, and no reader takes more than "
            f"{MAX_HEADER_BYTES:,}; save fewer tensors from a rank"
        )
    return len(text).to_bytes(8, "little") + text


def _blocks(
    head: bytes, order: list[str], read: Callable[[str], Tensor]
) -> Iterator[bytes | memoryview]:
    yield head
    for key in order:
        data = bytes_of(read(key))
        for start in range(0, len(data), BLOCK_BYTES):
            yield data[start : start + BLOCK_BYTES]


def bytes_of(tensor: Tensor) -> memoryview:
    """The elements of a tensor in order; of its own memory if it is contiguous on the host."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")
