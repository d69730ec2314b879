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


class NamedFolder:
    """A folder whose tensors have the names of the modules, but for those that `saved_names` has.

    `ConvertedFolder` (transformers_weights.py) has the same methods for classes of which
    transformers converts what it stores.
    """

    def __init__(self, shape: TransformersShape):
        self._shape = shape

    def sources(self) -> dict[str, tuple[Source, ...]]:
        """For each parameter, by global name in order, the tensors of a folder that it is."""
        saved = {name: as_saved for as_saved, name in self._shape.kind.saved_names.items()}
        return {
            name: (Source(saved.get(name, name), layout.shape),)
            for name, layout in layouts(self._shape).items()
        }

    def files(self) -> FolderFiles:
        """How a folder that has these sources names them."""
        return FolderFiles()

    def open(self, folder: str | Path) -> WeightFolder:
        """Open a folder that has exactly the weights of this model; see `open_folder`."""
        return open_folder(folder, self._shape)


def folder_of(shape: TransformersShape) -> Any:
    """Return how files hold this model, its adapters left aside."""
    return resolve(shape.kind.folder)(shape)


def sources(shape: TransformersShape) -> dict[str, tuple[Source, ...]]:
    """For each parameter that is trained, by global name in order, the tensor of a folder that it
    is."""
    if shape.lora is None:
        return folder_of(shape).sources()
    return {
        name: (Source(peft_name(name), layout.shape),)
        for name, layout in layouts(shape).items()
        if is_adapter(name)
    }


def files(shape: TransformersShape) -> FolderFiles:
    """Of a folder that has these sources."""
    return folder_of(shape).files() if shape.lora is None else ADAPTER_FILES


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
    """Raises CheckpointError as `open_folder` does."""
    folder_of(shape).open(folder)


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
