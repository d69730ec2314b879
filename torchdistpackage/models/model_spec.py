"""The interface of a model that plans, builds and exports use before its modules exist. No
torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

from torchdistpackage.config.head_of_run import head_of
from torchdistpackage.config.head_tasks import ModelHead
from torchdistpackage.config.schema import RunConfig
from torchdistpackage.layout.layout import Layout
from torchdistpackage.models.hugging_face_layout import FolderFiles, Source
from torchdistpackage.parallel.tensor.numbers import LayerNumbers
from torchdistpackage.predict.calls import Microbatch


@dataclass(frozen=True, slots=True)
class ModelUse:
    """The features that a run needs of a model. tensor, num_stages, context, expert: number of
    ranks along each axis.

    compares_rows: its loss is of answers or texts beside each other, not of tokens. head: in place
    of the one for the next token. num_class_weights: of data.class_weights. only_distils: its loss
    is the divergence from a teacher alone. is_embedding: its hidden states are compared.
    compiles_blocks: every block has to become one graph.
    """

    seq_len: int
    sequence_parallel: bool = False
    document_masks: bool = False
    tensor: int = 1
    num_stages: int = 1
    context: int = 1
    expert: int = 1
    compares_rows: bool = False
    head: ModelHead | None = None
    num_class_weights: int = 0
    only_distils: bool = False
    is_embedding: bool = False
    tp_comm_overlap: bool = False
    compiles_blocks: bool = False

    @classmethod
    def of(cls, config: RunConfig, num_stages: int = 1) -> Self:
        p = config.parallel
        return cls(
            config.data.seq_len,
            p.sequence_parallel,
            config.data.document_masks,
            p.tensor,
            num_stages,
            p.context,
            p.expert,
            config.data.is_preference or config.data.is_embedding,
            head_of(config),
            len(config.data.class_weights),
            config.train.distill.is_on and config.train.distill.kd_ratio == 1,
            config.data.is_embedding,
            p.tp_comm_overlap,
            config.train.compile == "blocks",
        )


class ModelShape(Protocol):
    """Sizes that every model has: sequence length, width of activations, number of token ids, the
    longest sequence that it is made for, and that length with scaled positions.
    """

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


class ModelSpec(Protocol):
    """A model as numbers: its shape, and everything that follows from it.

    module: "package.module:Class", called as
        `Class(shape, pieces=range, stage_of=..., group=..., dropout=..., tp_comm_overlap=...,
        sequence=..., dtype=..., device=...)`.
    weights_loader: "package.module:function", called with such a module and a folder. Both are
        strings, since they import torch, which a plan does without.
    has_own_text: whether the model can write a text at the end of a run (train/finish.py).
    """

    module: ClassVar[str]
    weights_loader: ClassVar[str]
    has_own_text: ClassVar[bool]

    @property
    def shape(self) -> ModelShape: ...

    @classmethod
    def of_section(cls, section: Mapping[str, Any], use: ModelUse) -> Self:
        """Return the model that the keys of a model section describe, for a run with this `use`.

        Raises:
            LayoutError, ConfigError: the keys describe no such model.
        """
        ...

    def pieces(self) -> tuple[str, ...]:
        """Return the names of the pieces that a pipeline may be cut between, first to last."""
        ...

    def layouts(self, stage_of: Sequence[int] | None = None) -> dict[str, Layout]:
        """Return every parameter's layout by global name. stage_of: the pipe index that holds each
        piece; None: no pipeline.
        """
        ...

    def buffers(self) -> dict[str, Layout]:
        """Return the buffers that checkpoints and folders hold beside the parameters, by global
        name.
        """
        ...

    def packed(self) -> Mapping[str, int]:
        """Return the frozen parameters that ranks hold in 4 or 8 bits: by global name the dim of
        their inputs."""
        ...

    def piece_costs(self) -> tuple[float, ...]:
        """Return the floating-point operations of each piece's forward, per token of a full
        sequence.
        """
        ...

    @property
    def output_layer(self) -> str:
        """Return the global name of the layer whose outputs are logits; its weight may be that of
        the embedding.
        """
        ...

    def piece_parameters(self) -> tuple[int, ...]:
        """Return the number of parameters of each piece."""
        ...

    def masks_padding(self) -> bool:
        """Return whether tokens see those after them, so that rows must say where their padding
        begins (`position_ids` of `DataBatch`).
        """
        ...

    def flops_per_token(self) -> float:
        """Return the floating-point operations of forward and backward for one token of a full
        sequence.
        """
        ...

    def refusals(self, use: ModelUse) -> list[tuple[str, str]]:
        """Return (key, text) of each thing that the model cannot do, beyond what the
        configuration's rules refuse.
        """
        ...

    def layer_numbers(
        self, held_pieces: Sequence[int], batch: Microbatch
    ) -> tuple[LayerNumbers, ...]:
        """Return what each layer of a stage with `held_pieces` sends over tensor and expert
        ranks, computes and keeps for one micro-batch. A stage with the head counts the loss too.
        """
        ...

    def uncounted(self, batch: Microbatch) -> str | None:
        """Return why the calls cannot be counted before a run, or None."""
        ...

    def goes_with(self) -> tuple[tuple[str, str], ...]:
        """Return (axis or key, text) for each feature that a run of this model may request; () if
        only the rules decide.
        """
        ...

    def notes(self) -> tuple[str, ...]:
        """Return notes on how the model is trained, which a plan and a run's log print once."""
        ...

    def check_weights(self, folder: str | Path) -> None:
        """Read the headers of a folder of weights.

        Raises:
            CheckpointError: it has not the weights of this model; lists what differs.
            LayoutError: transformers has no such model.
        """
        ...

    def sources(self) -> dict[str, tuple[Source, ...]]:
        """Return the tensors that each trained parameter makes up in a transformers or peft folder.

        Raises:
            LayoutError: they have no such model.
        """
        ...

    def config_json(self, dtype: str, like: str | Path | None) -> dict[str, Any]:
        """Return the settings file of such a folder. dtype: torch's name for the type of the
        weights. like: a folder whose other settings are kept or, with adapters, the folder of the
        model they are for.
        """
        ...

    def files(self) -> FolderFiles:
        """Return how such a folder names its settings and its weights."""
        ...
