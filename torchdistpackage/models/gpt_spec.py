"""A GPT (modules in gpt.py) in the form that plans and exports use. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from torchdistpackage.layout.layout import Layout
from torchdistpackage.models import (
    gpt_layout,
    gpt_numbers,
    hugging_face_config,
    hugging_face_layout,
)
from torchdistpackage.models.gpt_layout import GPTShape
from torchdistpackage.models.hugging_face_layout import FolderFiles, Source
from torchdistpackage.models.model_spec import ModelUse
from torchdistpackage.parallel.tensor.numbers import LayerNumbers
from torchdistpackage.predict.calls import Microbatch


@dataclass(frozen=True)
class GPTSpec:
    """A `ModelSpec` of a GPT; its transformers folder is a GPT-2 or Llama."""

    shape: GPTShape

    module: ClassVar[str] = "torchdistpackage.models.gpt:GPT"
    weights_loader: ClassVar[str] = "torchdistpackage.models.hugging_face:load_weights"
    has_own_text: ClassVar[bool] = True

    @classmethod
    def of_section(cls, section: Mapping[str, Any], use: ModelUse) -> Self:
        shape = gpt_layout.shape_of_section(section, use.seq_len, use.sequence_parallel)
        return cls(shape)

    def pieces(self) -> tuple[str, ...]:
        return gpt_layout.pieces(self.shape)

    def layouts(self, stage_of: Sequence[int] | None = None) -> dict[str, Layout]:
        return gpt_layout.layouts(self.shape, stage_of)

    def buffers(self) -> dict[str, Layout]:
        return {}

    def packed(self) -> Mapping[str, int]:
        return {}

    def piece_costs(self) -> tuple[float, ...]:
        return gpt_numbers.piece_costs(self.shape)

    @property
    def output_layer(self) -> str:
        return gpt_layout.HEAD

    def piece_parameters(self) -> tuple[int, ...]:
        return gpt_layout.piece_parameters(self.shape)

    def masks_padding(self) -> bool:
        return False

    def flops_per_token(self) -> float:
        return gpt_numbers.flops_per_token(self.shape)

    def refusals(self, use: ModelUse) -> list[tuple[str, str]]:
        return []  # config/rules_model.py knows all of them

    def layer_numbers(
        self, held_pieces: Sequence[int], batch: Microbatch
    ) -> tuple[LayerNumbers, ...]:
        return tuple(gpt_numbers.layer_numbers(self.shape, held_pieces, batch))

    def uncounted(self, batch: Microbatch) -> str | None:
        return None

    def goes_with(self) -> tuple[tuple[str, str], ...]:
        return ()

    def notes(self) -> tuple[str, ...]:
        return ()

    def check_weights(self, folder: str | Path) -> None:
        hugging_face_layout.open_folder(folder, self.shape)

    def sources(self) -> dict[str, tuple[Source, ...]]:
        return hugging_face_layout.sources(self.shape)

    def config_json(self, dtype: str, like: str | Path | None) -> dict[str, Any]:
        return hugging_face_config.config_json(self.shape, dtype, like)

    def files(self) -> FolderFiles:
        return FolderFiles()
