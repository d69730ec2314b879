"""The models that a configuration can name: one line each. No torch.

A plan needs the numbers of a model and not its modules, so these are named by import path.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torchdistpackage.errors import ConfigError
from torchdistpackage.launch.entrypoint import EntryPoint
from torchdistpackage.layout.layout import Layout
from torchdistpackage.models import gpt_layout, hugging_face_layout
from torchdistpackage.models.gpt_layout import GPTShape


@dataclass(frozen=True, slots=True)
class Model:
    """What there is to know about a model before any torch is loaded.

    shape: from a model section, the length of sequences and whether they are cut along it: the
        value that all the others take.
    module: "package.module:Class", called as
        `Class(shape, pieces=range, stage_of=..., group=..., dropout=..., tp_comm_overlap=...,
        dtype=..., device=...)`.
    open_weights: refuses a folder that has not the weights of a model of this shape.
    load_weights: "package.module:function", called with such a module and folder.
    """

    shape: Callable[[Mapping[str, Any], int, bool], GPTShape]
    pieces: Callable[[GPTShape], tuple[str, ...]]
    layouts: Callable[[GPTShape, Sequence[int] | None], dict[str, Layout]]
    piece_costs: Callable[[GPTShape], tuple[float, ...]]
    piece_parameters: Callable[[GPTShape], tuple[int, ...]]
    flops_per_token: Callable[[GPTShape], float]
    module: str
    open_weights: Callable[[str, GPTShape], object]
    load_weights: str

    def load(self) -> Callable[..., object]:
        """The module's class; imports torch."""
        return EntryPoint.of(self.module).resolve()

    def weights_loader(self) -> Callable[[object, str], None]:
        """What fills a module from a folder; imports torch."""
        return cast(Callable[[object, str], None], EntryPoint.of(self.load_weights).resolve())


MODELS: dict[str, Model] = {
    "gpt": Model(
        gpt_layout.shape_of_section,
        gpt_layout.pieces,
        gpt_layout.layouts,
        gpt_layout.piece_costs,
        gpt_layout.piece_parameters,
        gpt_layout.flops_per_token,
        "torchdistpackage.models.gpt:GPT",
        hugging_face_layout.open_folder,
        "torchdistpackage.models.hugging_face:load_weights",
    ),
}


def model(name: str) -> Model:
    """The model called `name`.

    Raises:
        ConfigError: there is none; lists those there are.
    """
    if name not in MODELS:
        raise ConfigError(
            f"there is no model {name!r}; the names are {', '.join(MODELS)}, "
            f"or give your own with model.target"
        )
    return MODELS[name]
