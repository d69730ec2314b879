"""A checkpoint of a run as a folder of another library, written by one process.

The pieces of each parameter come together from whichever files hold them, so the run may have had
any layout. Held at once are the tensors of one file that is written, and one parameter.
"""

from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from torchdistpackage.checkpoint.commit import damage
from torchdistpackage.checkpoint.manifest import Manifest, read_manifest
from torchdistpackage.errors import CheckpointError
from torchdistpackage.models import gpt_layout
from torchdistpackage.models.gpt_layout import GPTShape
from torchdistpackage.models.hugging_face_export import write_folder


def export_checkpoint(
    path: str | Path,
    shape: GPTShape,
    folder: str | Path,
    *,
    dtype: str | None = None,
    shard_bytes: int,
    like: str | Path | None = None,
) -> Path:
    """Write the weights of the checkpoint folder `path` as `write_folder` does; returns `folder`.

    dtype: torch's name of the type of the weights; default that of the checkpoint.

    Raises:
        CheckpointError: the checkpoint is damaged or of another model, or `folder` is not empty.
        LayoutError: transformers has no such model.
    """
    path = Path(path)
    if problem := damage(path, checksums=True):
        raise CheckpointError(f"{path} is damaged: {problem}; name another checkpoint")
    manifest = read_manifest(path)
    _check_model(manifest, shape, path)
    own = manifest.tensors[gpt_layout.TIED].dtype
    kind = getattr(torch, dtype or own)
    return write_folder(
        folder,
        shape,
        lambda name: _whole(manifest, path, name),
        kind,
        shard_bytes=shard_bytes,
        like=like,
    )


def _check_model(manifest: Manifest, shape: GPTShape, path: Path) -> None:
    wanted = {name: layout.shape for name, layout in gpt_layout.layouts(shape).items()}
    has = {name: entry.shape for name, entry in manifest.tensors.items() if "#" not in name}
    problems = [f"{name} is missing" for name in wanted if name not in has]
    problems += [f"{name} is not expected" for name in has if name not in wanted]
    problems += [
        f"{name} has shape {has[name]}, where the model has {of}"
        for name, of in wanted.items()
        if name in has and has[name] != of
    ]
    if problems:
        raise CheckpointError(
            f"{path} is of another model than its run's resolved.yaml describes: "
            f"{'; '.join(problems[:12])}"
        )


def _whole(manifest: Manifest, path: Path, name: str) -> Tensor:
    entry = manifest.tensors[name]
    full = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
    for piece in entry.pieces:
        with safe_open(path / piece.file, framework="pt") as file:
            full[piece.box] = file.get_tensor(piece.key)
    return full
