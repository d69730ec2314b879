"""Import of named tensors as a checkpoint of ours, in one file that any layout can load."""

import json
import shutil
from pathlib import Path

from torchdistpackage.checkpoint.commit import commit, folder_name, make_temporary, settle
from torchdistpackage.checkpoint.formats.source import TensorSource
from torchdistpackage.checkpoint.manifest import Manifest, TensorChunk, TensorEntry
from torchdistpackage.checkpoint.writer import write_stream
from torchdistpackage.errors import CheckpointError

_FILE = "rank00000.safetensors"


def write_checkpoint(source: TensorSource, folder: Path) -> Path:
    """Write `source` as a checkpoint of its step into `folder`, and return its path.

    Raises:
        CheckpointError: `folder` has a checkpoint of this step, `source` has no tensors, or
            safetensors has no type for one of them.
        OSError: the disk is full, or another file error.
    """
    if (folder / folder_name(source.step)).exists():
        raise CheckpointError(
            f"{folder / folder_name(source.step)} exists already; choose another folder or --step"
        )
    if not source.tensors:
        raise CheckpointError("there is no tensor to import; correct the names in the mapping file")
    temporary = make_temporary(folder, source.step)
    try:
        keys = {f"{name}[0]": name for name in source.tensors}
        entries = {
            name: TensorEntry(shape, dtype, (TensorChunk(_FILE, key, (0,) * len(shape), shape),))
            for key, name in keys.items()
            for dtype, shape in [source.tensors[name]]
        }
        metadata = {
            "pieces": Manifest(0, 0, (), entries, {}).to_json(),
            "integers": json.dumps({}),
        }
        described = {key: source.tensors[name] for key, name in keys.items()}
        path = temporary / _FILE
        facts = write_stream(path, described, lambda key: source.read(keys[key]), metadata)
        settle(path)
        return commit(
            temporary,
            Manifest(source.step, source.tokens, (), entries, {_FILE: facts}, source.facts),
        )
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
