"""Files: safetensors, torch's .pt, and those whose names end as `get_mp_ckpt_suffix` says."""

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
"""Keys of a .pt file of ours."""
_NESTED = (MODEL, OPTIMIZER, "state_dict", "model_state_dict", "module")
"""Keys below which programs commonly put what has the tensors."""
_SUFFIX = re.compile(r"(?P<stem>.+?)(?:_tp_(?P<tensor>\d+))?(?:_pp_(?P<pipe>\d+))?\.pth")


def write_safetensors_file(source: TensorSource, path: Path) -> None:
    """Write one safetensors file with the whole tensors.

    Raises:
        OSError: the disk is full, or the like.
    """
    metadata = {"format": "pt", "step": str(source.step), "tokens": str(source.tokens)}
    write_stream(path, source.tensors, source.read, metadata)


def read_safetensors(path: Path) -> TensorSource:
    """A safetensors file, or all of a folder.

    Raises:
        CheckpointError: there is none, or its header is not true.
    """
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise CheckpointError(f"{path} has no safetensors file")
    held: dict[str, TensorFile] = {}
    for file in files:
        mapped = _mapped(file)
        for key in mapped:
            if key in held:
                raise CheckpointError(f"{key} is in {held[key].path.name} and in {file.name}")
            held[key] = mapped
    tensors = {key: mapped.described(key) for key, mapped in held.items()}
    return TensorSource(tensors, lambda key: held[key][key])


def _mapped(file: Path) -> TensorFile:
    try:
        return TensorFile(file)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: {error}") from error


def write_torch(source: TensorSource, path: Path) -> None:
    """Write a .pt file: {"model": weights, "optimizer": `name#exp_avg` and the like, "step", ...}.

    The whole tensors lie in a file next to it meanwhile, from which torch.save reads.

    Raises:
        OSError: the disk is full, or the like.
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
    """A .pt or .pth file, of which only tensors and plain values are read.

    Raises:
        CheckpointError: it has none, or needs code of others to be read.
    """
    found = _load(path)
    flat = dict(_flattened(found))
    if not flat:
        raise CheckpointError(f"{path} has no tensors by name")
    step, tokens = (_whole_number(found, key) for key in ("step", "tokens"))
    tensors = {name: (dtype_name(x.dtype), tuple(x.shape)) for name, x in flat.items()}
    return TensorSource(tensors, flat.__getitem__, step, tokens)


def read_suffixed(path: Path, split_dims: Mapping[str, int] | None = None) -> TensorSource:
    """The files of one stem that ranks wrote with `get_mp_ckpt_suffix`: `path` names one of them.

    Tensors that differ between tensor ranks are joined along the dim in `split_dims` or, without
    it, the first one that fits the sizes: 0 for weights that are split by rows of outputs. Stages
    of a pipeline have names of their own.

    Raises:
        CheckpointError: a file is missing, or two stages hold one name.
    """
    match = _SUFFIX.fullmatch(path.name)
    if match is None:
        raise CheckpointError(f"{path.name} does not end as get_mp_ckpt_suffix says")
    files: dict[tuple[int, int], Path] = {}
    for file in path.parent.glob("*.pth"):
        other = _SUFFIX.fullmatch(file.name)
        if other is not None and other["stem"] == match["stem"]:
            files[int(other["pipe"] or 0), int(other["tensor"] or 0)] = file
    num_pipe, num_tensor = (max(key[i] for key in files) + 1 for i in (0, 1))
    wanted = {(p, t) for p in range(num_pipe) for t in range(num_tensor)}
    if missing := sorted(wanted - files.keys()):
        raise CheckpointError(
            f"{path.parent}: of {match['stem']} the file of pipe {missing[0][0]}, tensor "
            f"{missing[0][1]} is missing"
        )
    joined: dict[str, tuple[list[Tensor], int | None]] = {}
    for pipe in range(num_pipe):
        shards = [dict(_flattened(_load(files[pipe, t]))) for t in range(num_tensor)]
        for name, first in shards[0].items():
            if name in joined:
                raise CheckpointError(f"{name} is in two stages; give them names of their own")
            parts = [shard[name] for shard in shards if name in shard]
            same = all(torch.equal(first, part) for part in parts[1:])
            joined[name] = (parts[:1], None) if same else (parts, _dim(name, split_dims))
    tensors = {
        name: (dtype_name(parts[0].dtype), _joined_shape(parts, dim))
        for name, (parts, dim) in joined.items()
    }

    def read(name: str) -> Tensor:
        parts, dim = joined[name]
        return parts[0] if dim is None else torch.cat(parts, dim)

    return TensorSource(tensors, read)


def _dim(name: str, split_dims: Mapping[str, int] | None) -> int:
    return 0 if split_dims is None else split_dims.get(name, 0)


def _joined_shape(parts: list[Tensor], dim: int | None) -> tuple[int, ...]:
    shape = list(parts[0].shape)
    if dim is not None:
        shape[dim] = sum(part.shape[dim] for part in parts)
    return tuple(shape)


def _load(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"there is no file {path}") from error
    except Exception as error:  # torch names many kinds
        raise CheckpointError(f"{path} is not read: {str(error).splitlines()[0][:200]}") from error


def _flattened(value: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield prefix, value.detach()
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            below = "" if not prefix and key in _NESTED else f"{prefix}{'.' if prefix else ''}{key}"
            yield from _flattened(inner, below)


def _whole_number(found: Any, key: str) -> int:
    value = found.get(key) if isinstance(found, Mapping) else None
    return value if type(value) is int and value >= 0 else 0
