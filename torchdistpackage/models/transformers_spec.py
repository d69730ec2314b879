"""A causal language model of transformers, as plans and exports see it. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from torchdistpackage.layout.layout import Layout
from torchdistpackage.models import (
    transformers_folder,
    transformers_layout,
    transformers_refusals,
    transformers_traffic,
)
from torchdistpackage.models.hugging_face_layout import FolderFiles, Source
from torchdistpackage.models.lora_layout import left_out
from torchdistpackage.models.model_spec import ModelUse
from torchdistpackage.models.transformers_layout import TransformersShape
from torchdistpackage.predict.calls import CallCount, Microbatch


@dataclass(frozen=True)
class TransformersSpec:
    """A `ModelSpec` of the model that `model.hf` names, with its adapters, if it has some."""

    shape: TransformersShape

    module: ClassVar[str] = "torchdistpackage.models.transformers_model:stage"
    weights_loader: ClassVar[str] = "torchdistpackage.models.transformers_model:load_weights"
    has_own_text: ClassVar[bool] = False

    @classmethod
    def of_section(cls, section: Mapping[str, Any], use: ModelUse) -> Self:
        how = use.seq_len, use.sequence_parallel, use.tensor
        return cls(transformers_layout.shape_of_section(section, *how))

    def pieces(self) -> tuple[str, ...]:
        return transformers_layout.pieces(self.shape)

    def layouts(self, stage_of: Sequence[int] | None = None) -> dict[str, Layout]:
        return transformers_layout.layouts(self.shape, stage_of)

    def buffers(self) -> dict[str, Layout]:
        return transformers_layout.buffers(self.shape)

    def packed(self) -> frozenset[str]:
        return self.shape.packed

    def piece_costs(self) -> tuple[float, ...]:
        return transformers_layout.piece_costs(self.shape)

    def piece_parameters(self) -> tuple[int, ...]:
        return transformers_layout.piece_parameters(self.shape)

    def flops_per_token(self) -> float:
        return transformers_layout.flops_per_token(self.shape)

    def refusals(self, use: ModelUse) -> list[tuple[str, str]]:
        return transformers_refusals.refusals(self.shape, use)

    def tensor_calls(self, held: Sequence[int], of: Microbatch) -> tuple[CallCount, ...]:
        return tuple(transformers_traffic.layer_calls(self.shape, held, of))

    def uncounted(self, of: Microbatch) -> str | None:
        return transformers_traffic.problem(self.shape, of)

    def goes_with(self) -> tuple[tuple[str, str], ...]:
        return transformers_refusals.goes_with(self.shape)

    def notes(self) -> tuple[str, ...]:
        lora, weights = self.shape.lora, transformers_layout.weights
        text = None if lora is None else left_out(lora, weights(self.shape))
        return () if text is None else (text,)

    def check_weights(self, folder: str | Path) -> None:
        transformers_folder.check_folder(folder, self.shape)

    def sources(self) -> dict[str, tuple[Source, ...]]:
        return transformers_folder.sources(self.shape)

    def config_json(self, dtype: str, like: str | Path | None) -> dict[str, Any]:
        return transformers_folder.config_json(self.shape, dtype, like)

    def files(self) -> FolderFiles:
        return transformers_folder.files(self.shape)
