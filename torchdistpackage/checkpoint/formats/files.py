"""Tensor files: safetensors, torch's .pt, and files with the suffix of `get_mp_ckpt_suffix`."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchdistpackage.checkpoint.formats.source import TensorSource
from torchdistpackage.checkpoint.tensor_file import TensorFile
from torchdistpackage.checkpoint.writer import write_stream
from torchdistpackage.comm.flight_recorder import dtype_name
from torchdistpackage.errors import CheckpointError

MODEL, OPTIMIZER = "model", "optimizer"
"""Keys of the .pt files that we write."""
_NESTED = (MODEL, OPTIMIZER, "state_dict", "model_state_dict", "module")
"""Keys under which programs commonly store their tensors."""
_SUFFIX = re.compile(r"(?P<stem>.+?)(?:_tp_(?P<tensor>\d+))?(?:_pp_(?P<pipe>\d+))?\.pth")


def write_safetensors_file(source: TensorSource, path: Path) -> None:
    """Write one safetensors file with the full tensors.

    Raises:
        OSError: the disk is full, or another file error.
    """
    metadata = {"format": "pt", "step": str(source.step), "tokens": str(source.tokens)}
    write_stream(path, source.tensors, source.read, metadata)


def read_safetensors(path: Path) -> TensorSource:
    """Return the tensors of a safetensors file, or of all those in a folder.

    Raises:
        CheckpointError: there is no such file, or its header is invalid.
    """
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise CheckpointError(f"{path} has no safetensors file; name a folder that has such files")
    file_of: dict[str, TensorFile] = {}
    for file in files:
        mapped = _mapped(file)
        for key in mapped:
            if key in file_of:
                raise CheckpointError(
                    f"{key} is in {file_of[key].path.name} and in {file.name}; remove one of them"
                )
            file_of[key] = mapped
    tensors = {key: mapped.described(key) for key, mapped in file_of.items()}
    return TensorSource(tensors, lambda key: file_of[key][key])


def _mapped(file: Path) -> TensorFile:
    """Map a safetensors file; raise CheckpointError if it cannot be read."""
    try:
        return TensorFile(file)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: {error}") from error


def write_torch(source: TensorSource, path: Path) -> None:
    """Write a .pt file: {"model": weights, "optimizer": {"name#exp_avg": ...}, "step": ..., ...}.

    torch.save reads the full tensors from a temporary file beside it.

    Raises:
        OSError: the disk is full, or another file error.
    """
    beside = path.with_name(f".{path.name}.tensors")
    try:
        write_safetensors_file(source, beside)
        mapped = TensorFile(beside)
        parts: dict[str, dict[str, Tensor]] = {MODEL: {}, OPTIMIZER: {}}
        for name in source.tensors:
            parts[OPTIMIZER if "#" in name else MODEL][name] = mapped[name]
        torch.save({**parts, "step": source.step, "tokens": source.tokens}, path)
    finally:
        beside.unlink(missing_ok=True)


def read_torch(path: Path) -> TensorSource:
    """Return the tensors of a .pt or .pth file, reading only tensors and plain values.

    Raises:
        CheckpointError: the file has no tensors, or unpickling it would run foreign code.
    """
    content = _load(path)
    flat = dict(_flattened(content))
    if not flat:
        raise CheckpointError(f"{path} has no tensors by name; name a file with a state dict")
    step, tokens = (_count(content, key) for key in ("step", "tokens"))
    tensors = {name: (dtype_name(x.dtype), tuple(x.shape)) for name, x in flat.items()}
    return TensorSource(tensors, flat.__getitem__, step, tokens)


def read_suffixed(path: Path, split_dims: Mapping[str, int] | None = None) -> TensorSource:
    """Return the tensors of all files of one stem that ranks wrote with `get_mp_ckpt_suffix`.

    `path` is any one of these files. Tensors that differ between tensor ranks are joined along the
    dim in `split_dims`, or else along dim 0, which is right for weights split by output rows. The
    stages of a pipeline must use different names.

    Raises:
        CheckpointError: a file is missing, or two stages hold one name.
    """
    match = _SUFFIX.fullmatch(path.name)
    if match is None:
        raise CheckpointError(
            f"{path.name} does not end with a suffix of get_mp_ckpt_suffix, such as "
            "_tp_1_pp_0.pth; name a file that has one"
        )
    files: dict[tuple[int, int], Path] = {}
    for file in path.parent.glob("*.pth"):
        other = _SUFFIX.fullmatch(file.name)
        if other is not None and other["stem"] == match["stem"]:
            files[int(other["pipe"] or 0), int(other["tensor"] or 0)] = file
    num_pipe, num_tensor = (max(key[i] for key in files) + 1 for i in (0, 1))
    expected = {(p, t) for p in range(num_pipe) for t in range(num_tensor)}
    if missing := sorted(expected - files.keys()):
        raise CheckpointError(
            f"{path.parent}: {match['stem']} lacks the file of pipe rank {missing[0][0]}, tensor "
            f"rank {missing[0][1]}; copy it there"
        )
    joined: dict[str, tuple[list[Tensor], int | None]] = {}
    for pipe in range(num_pipe):
        shards = [dict(_flattened(_load(files[pipe, t]))) for t in range(num_tensor)]
        for name, first in shards[0].items():
            if name in joined:
                raise CheckpointError(
                    f"{name} is in two stages; give it a different name in each stage"
                )
            parts = [shard[name] for shard in shards if name in shard]
            equal = all(torch.equal(first, part) for part in parts[1:])
            joined[name] = (parts[:1], None) if equal else (parts, _dim(name, split_dims))
    tensors = {
        name: (dtype_name(parts[0].dtype), _joined_shape(parts, dim))
        for name, (parts, dim) in joined.items()
    }

    def read(name: str) -> Tensor:
        parts, dim = joined[name]
        return parts[0] if dim is None else torch.cat(parts, dim)

    return TensorSource(tensors, read)


def _dim(name: str, split_dims: Mapping[str, int] | None) -> int:
    """Return the dim along which to join a tensor."""
    return 0 if split_dims is None else split_dims.get(name, 0)


def _joined_shape(parts: list[Tensor], dim: int | None) -> tuple[int, ...]:
    """Return the shape of the parts joined along `dim`."""
    shape = list(parts[0].shape)
    if dim is not None:
        shape[dim] = sum(part.shape[dim] for part in parts)
    return tuple(shape)


def _load(path: Path) -> Any:
    """Load a .pt file memory-mapped, with weights only."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"there is no file {path}; check the path") from error
    except Exception as error:  # torch raises many types
        raise CheckpointError(f"cannot read {path}: {str(error).splitlines()[0][:200]}") from error


def _flattened(value: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield (dotted name, tensor) for every tensor in nested mappings."""
    if isinstance(value, Tensor):
        yield prefix, value.detach()
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            below = "" if not prefix and key in _NESTED else f"{prefix}{'.' if prefix else ''}{key}"
            yield from _flattened(inner, below)


def _count(content: Any, key: str) -> int:
    """Return the count stored under `key`, or 0 if there is none."""
    value = content.get(key) if isinstance(content, Mapping) else None
    return value if type(value) is int and value >= 0 else 0
