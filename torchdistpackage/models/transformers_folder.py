"""A causal language model of transformers as a folder: which tensors, which settings. No torch."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from torchdistpackage.config.model_section import is_adapter
from torchdistpackage.models.hugging_face_layout import (
    FolderFiles,
    Source,
    WeightFolder,
    find_tensors,
)
from torchdistpackage.models.lora_layout import ADAPTER_FILES, peft_name
from torchdistpackage.models.transformers_layout import TransformersShape, layouts, weights


def sources(shape: TransformersShape) -> dict[str, tuple[Source, ...]]:
    """For each parameter that is trained, by global name in order, the tensor of a folder that it
    is."""
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
    return FolderFiles() if shape.lora is None else ADAPTER_FILES


def config_json(
    shape: TransformersShape, dtype: str, like: str | Path | None = None
) -> dict[str, Any]:
    """The config.json it was made of, with torch's name of the type of the weights; with adapters
    their settings, and `like` as the model they are for."""
    if shape.lora is not None:
        held = weights(shape).values()
        transposed = any(w.inputs == 0 for w in held)
        return shape.lora.adapter_config(None if like is None else str(like), transposed)
    kept = {key: value for key, value in shape.given.items() if key != "torch_dtype"}
    return {**kept, "dtype": dtype}


def open_folder(folder: str | Path, shape: TransformersShape) -> WeightFolder:
    """The files of a folder that has exactly the weights of this model; only headers are read.

    Raises:
        CheckpointError: it has no weights, or others: lists all that are missing, unexpected, or
            of another shape or type.
    """
    expected = {name: x.shape for name, x in layouts(replace(shape, lora=None)).items()}
    kind = shape.kind
    tied = (f"{kind.output}.weight", f"{kind.table}.weight") if shape.sizes.tied else None
    return find_tensors(folder, expected, tied, kind.saved_names)
