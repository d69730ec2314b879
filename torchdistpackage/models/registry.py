"""The models that a configuration can name: one line each. No torch.

One rule: a plan needs the numbers of a model and never its modules, so the module is
named here by import path and loaded when one is built.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torchdistpackage.errors import ConfigError
from torchdistpackage.launch.entrypoint import EntryPoint
from torchdistpackage.layout.layout import Layout
from torchdistpackage.models import gpt_layout
from torchdistpackage.models.gpt_layout import GPTShape


@dataclass(frozen=True, slots=True)
class Model:
    """What there is to know about a model before any torch is loaded.

    shape: builds the value that all the others take.
    module: "package.module:Class", called as
    `Class(shape, pieces=range, stage_of=..., group=..., dropout=..., dtype=..., device=...)`.
    """

    shape: Callable[..., GPTShape]
    pieces: Callable[[GPTShape], tuple[str, ...]]
    layouts: Callable[[GPTShape, Sequence[int] | None], dict[str, Layout]]
    piece_costs: Callable[[GPTShape], tuple[float, ...]]
    piece_parameters: Callable[[GPTShape], tuple[int, ...]]
    flops_per_token: Callable[[GPTShape], float]
    module: str

    def load(self) -> Callable[..., object]:
        """The module's class; imports torch."""
        return EntryPoint.of(self.module).resolve()


MODELS: dict[str, Model] = {
    "gpt": Model(
        GPTShape,
        gpt_layout.pieces,
        gpt_layout.layouts,
        gpt_layout.piece_costs,
        gpt_layout.piece_parameters,
        gpt_layout.flops_per_token,
        "torchdistpackage.models.gpt:GPT",
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
