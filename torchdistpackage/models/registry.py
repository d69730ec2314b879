"""The models that a configuration can name: one line each. No torch.

A plan needs the numbers of a model and not its modules, so these are named by import path.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torchdistpackage.config.model_section import ModelSection
from torchdistpackage.errors import ConfigError, LayoutError
from torchdistpackage.layout.layout import Layout
from torchdistpackage.lazy import resolve
from torchdistpackage.models import gpt_layout, hugging_face_layout
from torchdistpackage.models.hugging_face_config import config_json
from torchdistpackage.models.hugging_face_layout import FolderFiles, Source


class ModelShape(Protocol):
    """What every shape has: length of sequences, width of activations, number of token ids, the
    longest sequence that the model is made for, and that with the scaling of its positions."""

    @property
    def seq_len(self) -> int: ...
    @property
    def dim(self) -> int: ...
    @property
    def vocab(self) -> int: ...
    @property
    def num_positions(self) -> int: ...
    @property
    def longest_seq_len(self) -> int: ...
    @property
    def sequence_parallel(self) -> bool: ...


def _no_sources(shape: Any) -> dict[str, tuple[Source, ...]]:
    raise LayoutError("this model has no form as a folder of transformers")


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
    sources: the tensors that each trained parameter makes up in a folder of transformers or peft;
        LayoutError where it has no such model. config_json: the settings of such a folder, from the
        shape, the type of the weights, a folder to be like. files: how it names both.
    refusals: (key, text) of what the model cannot do among so many tensor ranks and stages, and
        with or without document masks, besides what the rules of the configuration find.
    goes_with: what it can do, axis by axis.
    has_own_text: whether it can write a text at the end of a run (train/finish.py).
    """

    shape: Callable[[Mapping[str, Any], int, bool], Any]
    pieces: Callable[[Any], tuple[str, ...]]
    layouts: Callable[[Any, Sequence[int] | None], dict[str, Layout]]
    piece_costs: Callable[[Any], tuple[float, ...]]
    piece_parameters: Callable[[Any], tuple[int, ...]]
    flops_per_token: Callable[[Any], float]
    module: str
    open_weights: Callable[[str, Any], object]
    load_weights: str
    refusals: Callable[[Any, int, int, bool], list[tuple[str, str]]] = lambda *_: []
    goes_with: Callable[[Any], tuple[tuple[str, str], ...]] = lambda _: ()
    has_own_text: bool = False
    sources: Callable[[Any], dict[str, tuple[Source, ...]]] = _no_sources
    config_json: Callable[[Any, str, str | Path | None], dict[str, Any]] = lambda *_: {}
    files: Callable[[Any], FolderFiles] = lambda _: FolderFiles()

    def load(self) -> Callable[..., object]:
        """The module's class; imports torch."""
        return resolve(self.module)

    def weights_loader(self) -> Callable[[object, str], None]:
        """What fills a module from a folder; imports torch."""
        return resolve(self.load_weights)


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
        has_own_text=True,
        sources=hugging_face_layout.sources,
        config_json=config_json,
    ),
}

TRANSFORMERS = "torchdistpackage.models.transformers_entry:TRANSFORMERS"
"""The model of a folder of transformers, loaded only for one."""


def model_of(section: ModelSection) -> Model | None:
    """The model that a model section describes; None: the user's own."""
    if section.hf is not None:
        return resolve(TRANSFORMERS)
    return None if section.name is None else model(section.name)


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
