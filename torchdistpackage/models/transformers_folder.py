"""The folder of a causal language model of transformers: its tensors. No torch."""

from pathlib import Path
from typing import Any

from torchdistpackage.config.head_tasks import has_head
from torchdistpackage.config.hugging_face import read_config
from torchdistpackage.families.registry import FAMILIES
from torchdistpackage.lazy import resolve
from torchdistpackage.models.hugging_face_layout import (
    FolderFiles,
    Source,
    WeightFolder,
    find_tensors,
)
from torchdistpackage.models.transformers_layout import (
    TransformersShape,
    layouts,
    stored_shapes,
)


class NamedFolder:
    """A folder whose tensors have the names of the modules, but for those that `saved_names` has.

    `ConvertedFolder` (transformers_weights.py) has the same methods for classes of which
    transformers converts what it stores.
    """

    def __init__(self, shape: TransformersShape):
        self._shape = shape

    def sources(self) -> dict[str, tuple[Source, ...]]:
        """Return the folder's tensors that make up each parameter, by global name in order."""
        saved = {name: as_saved for as_saved, name in self._shape.kind.saved_names.items()}
        return {
            name: (Source(saved.get(name, name), layout.shape),)
            for name, layout in layouts(self._shape).items()
        }

    def files(self) -> FolderFiles:
        """Return how a folder that has these sources names its files."""
        return FolderFiles()

    def open(self, folder: str | Path) -> WeightFolder:
        """Open a folder that has exactly the weights of this model; see `open_folder`."""
        return open_folder(folder, self._shape)


def folder_of(shape: TransformersShape) -> Any:
    """Return how files store this model, without its adapters."""
    return resolve(shape.kind.folder)(shape)


def open_folder(folder: str | Path, shape: TransformersShape) -> WeightFolder:
    """Open a folder that has exactly the weights of this model, whose family has a table.

    Only headers are read.

    Raises:
        CheckpointError: it has no weights, or others: lists all that are missing, unexpected, or
            of another shape or type.
    """
    expected = stored_shapes(shape)
    kind, of_head = shape.kind, f"{shape.kind.output}."
    if shape.head is not None:
        unread: tuple[str, ...] = ()
        if not has_head(read_config(folder)):  # of the language model: the head begins anew
            expected = {name: x for name, x in expected.items() if not name.startswith(of_head)}
            unread = (f"{FAMILIES[shape.family].output}.weight",)
        return find_tensors(
            folder, expected, None, kind.saved_names, unread=unread, is_causal=False
        )
    tied = (f"{kind.output}.weight", f"{kind.table}.weight") if shape.sizes.tied else None
    return find_tensors(folder, expected, tied, kind.saved_names)
