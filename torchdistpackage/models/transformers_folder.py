"""A causal language model of transformers as a folder: which tensors, which settings. No torch."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from torchdistpackage.config.model_section import is_adapter
from torchdistpackage.lazy import resolve
from torchdistpackage.models.hugging_face_layout import (
    FolderFiles,
    Source,
    WeightFolder,
    find_tensors,
)
from torchdistpackage.models.lora_layout import ADAPTER_FILES, peft_name
from torchdistpackage.models.transformers_layout import TransformersShape, layouts, weights

_STORED = "torchdistpackage.models.transformers_weights:Stored"
_OPEN = "torchdistpackage.models.transformers_weights:open_found"
"""Imported for a family without a table alone: they run transformers' conversions, on torch."""


def sources(shape: TransformersShape) -> dict[str, tuple[Source, ...]]:
    """For each parameter that is trained, by global name in order, the tensor of a folder that it
    is."""
    if shape.lora is None and shape.kind.found is not None:
        return stored_of(shape).sources
    if shape.lora is None:
        saved = {name: as_saved for as_saved, name in shape.kind.saved_names.items()}
        return {
            name: (Source(saved.get(name, name), layout.shape),)
            for name, layout in layouts(shape).items()
        }
    return {
        name: (Source(peft_name(name), layout.shape),)
        for name, layout in layouts(shape).items()
        if is_adapter(name)
    }


def files(shape: TransformersShape) -> FolderFiles:
    """Of a folder that has these sources."""
    if shape.lora is not None:
        return ADAPTER_FILES
    return FolderFiles() if shape.kind.found is None else FolderFiles(stored=stored_of(shape).parts)


def stored_of(shape: TransformersShape) -> Any:
    """How a model without a table is stored, which transformers says."""
    return resolve(_STORED)(shape)


def config_json(
    shape: TransformersShape, dtype: str, like: str | Path | None = None
) -> dict[str, Any]:
    """The config.json it was made of, with torch's name of the type of the weights; with adapters
    their settings, and `like` as the model they are for."""
    if shape.lora is not None:
        return shape.lora.adapter_config(None if like is None else str(like), weights(shape))
    kept = {key: value for key, value in shape.given.items() if key != "torch_dtype"}
    return {**kept, "dtype": dtype}


def check_folder(folder: str | Path, shape: TransformersShape) -> None:
    """Raises CheckpointError as `open_folder` does, for a family without a table too."""
    if shape.kind.found is None:
        open_folder(folder, shape)
    else:
        resolve(_OPEN)(folder, shape)


def open_folder(folder: str | Path, shape: TransformersShape) -> WeightFolder:
    """The files of a folder that has exactly the weights of this model, whose family has a table;
    only headers are read.

    Raises:
        CheckpointError: it has no weights, or others: lists all that are missing, unexpected, or
            of another shape or type.
    """
    expected = {name: x.shape for name, x in layouts(replace(shape, lora=None)).items()}
    kind = shape.kind
    tied = (f"{kind.output}.weight", f"{kind.table}.weight") if shape.sizes.tied else None
    return find_tensors(folder, expected, tied, kind.saved_names)
