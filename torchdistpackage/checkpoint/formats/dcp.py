"""Folders of torch.distributed.checkpoint (DCP), written and read through DCP in one process.

The file `.metadata` is a pickle, so the reader creates only the types that belong in it.
"""

import io
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint import load as dcp_load
from torch.distributed.checkpoint import save as dcp_save
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from torchdistpackage.bounded import read_regular
from torchdistpackage.checkpoint.formats.files import write_safetensors_file
from torchdistpackage.checkpoint.formats.source import TensorSource
from torchdistpackage.checkpoint.tensor_file import TensorFile
from torchdistpackage.comm.flight_recorder import dtype_name
from torchdistpackage.errors import CheckpointError

_METADATA = ".metadata"
_MAX_BYTES = 1 << 30
_MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
_PLAIN = {
    ("torch", "Size"),
    ("torch", "device"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("builtins", "set"),
    ("builtins", "complex"),
}


def write_dcp(source: TensorSource, folder: Path) -> None:
    """Write a folder that `torch.distributed.checkpoint.load` reads, under the names of `source`.

    A temporary file beside the folder holds the full tensors meanwhile.

    Raises:
        CheckpointError: the folder is not empty.
        OSError: the disk is full, or another file error.
    """
    if folder.exists() and any(folder.iterdir()):
        raise CheckpointError(f"{folder} is not empty; name another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = folder.with_name(f".{folder.name}.tensors")
    try:
        write_safetensors_file(source, beside)
        mapped = TensorFile(beside)
        state = {name: mapped[name] for name in source.tensors}
        with _without_a_group():
            dcp_save(state, storage_writer=FileSystemWriter(str(folder)), no_dist=True)
    finally:
        beside.unlink(missing_ok=True)


def read_dcp(folder: Path) -> TensorSource:
    """Return the tensors of a folder that torch.distributed.checkpoint wrote on any number of
    ranks.

    Raises:
        CheckpointError: the folder is not one of DCP, or is damaged.
    """
    reader = _SafeReader(folder)
    entries = reader.read_metadata().state_dict_metadata
    stored = {k: x for k, x in entries.items() if isinstance(x, TensorStorageMetadata)}
    tensors = {k: (dtype_name(x.properties.dtype), tuple(x.size)) for k, x in stored.items()}

    def read(name: str) -> Tensor:
        dtype, shape = tensors[name]
        state = {name: torch.empty(shape, dtype=getattr(torch, dtype))}
        try:
            with _without_a_group():
                dcp_load(state, storage_reader=_SafeReader(folder), no_dist=True)
        except Exception as error:  # DCP wraps errors in its own types
            why = str(error).strip().splitlines()[-1:]
            raise CheckpointError(f"{folder}: cannot read {name}: {why}") from error
        return state[name]

    return TensorSource(tensors, read)


@contextmanager
def _without_a_group() -> Iterator[None]:
    """Silence DCP's warning that there is no process group, which is intended here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*assuming the intent is to")
        yield


class _SafeReader(FileSystemReader):
    """A reader that unpickles the metadata with only the types that belong there."""

    def __init__(self, folder: Path):
        super().__init__(str(folder))
        self._folder = folder

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = self._folder / _METADATA
        try:
            metadata = _MetadataUnpickler(io.BytesIO(read_regular(path, _MAX_BYTES))).load()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise CheckpointError(
                f"{self._folder} has no {_METADATA}, so it is not a folder of "
                f"torch.distributed.checkpoint; name one that it wrote"
            ) from error
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
        except (pickle.UnpicklingError, EOFError, AttributeError, ValueError, TypeError) as error:
            raise CheckpointError(f"cannot read {path}: {error}") from error
        if not isinstance(metadata, Metadata):
            raise CheckpointError(
                f"{path} holds a {type(metadata).__name__} instead of DCP metadata; name the "
                ".metadata file of a torch.distributed.checkpoint folder"
            )
        return metadata


class _MetadataUnpickler(pickle.Unpickler):
    """An unpickler that creates the types of DCP metadata and refuses all others."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _PLAIN or (module in _MODULES and "." not in name):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(
            f"it refers to {module}.{name}, which DCP metadata never contains"
        )
