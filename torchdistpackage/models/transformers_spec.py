"""A causal language model of transformers, as plans and exports see it. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from torchdistpackage.config.mtp import COUNT, without_mtp
from torchdistpackage.layout.layout import Layout
from torchdistpackage.models import (
    transformers_layout,
    transformers_numbers,
    transformers_refusals,
)
from torchdistpackage.models.hugging_face_layout import FolderFiles, Source
from torchdistpackage.models.lora_folder import adapter_sources, check_adapters
from torchdistpackage.models.lora_layout import ADAPTER_FILES, left_out, to_peft
from torchdistpackage.models.model_spec import ModelUse
from torchdistpackage.models.transformers_folder import folder_of
from torchdistpackage.models.transformers_layout import TransformersShape
from torchdistpackage.parallel.tensor.numbers import LayerNumbers
from torchdistpackage.predict.calls import Microbatch


@dataclass(frozen=True)
class TransformersSpec:
    """A `ModelSpec` of the model that `model.hf` names, with its adapters, if it has some."""

    shape: TransformersShape

    module: ClassVar[str] = "torchdistpackage.models.transformers_model:stage"
    weights_loader: ClassVar[str] = "torchdistpackage.models.transformers_model:load_weights"
    has_own_text: ClassVar[bool] = False

    @classmethod
    def of_section(cls, section: Mapping[str, Any], use: ModelUse) -> Self:
        shape = transformers_layout.shape_of_section(
            section, use.seq_len, use.sequence_parallel, use.tensor, use.head, use.is_embedding
        )
        return cls(shape)

    def pieces(self) -> tuple[str, ...]:
        return transformers_layout.pieces(self.shape)

    def layouts(self, stage_of: Sequence[int] | None = None) -> dict[str, Layout]:
        return transformers_layout.layouts(self.shape, stage_of)

    def buffers(self) -> dict[str, Layout]:
        return transformers_layout.buffers(self.shape)

    def packed(self) -> Mapping[str, int]:
        return self.shape.packed

    def piece_costs(self) -> tuple[float, ...]:
        return transformers_numbers.piece_costs(self.shape)

    @property
    def output_layer(self) -> str:
        return self.shape.kind.output

    def piece_parameters(self) -> tuple[int, ...]:
        return transformers_layout.piece_parameters(self.shape)

    def masks_padding(self) -> bool:
        return transformers_layout.documents_by(self.shape) == "padding"

    def flops_per_token(self) -> float:
        return transformers_numbers.flops_per_token(self.shape)

    def refusals(self, use: ModelUse) -> list[tuple[str, str]]:
        return transformers_refusals.refusals(self.shape, use)

    def layer_numbers(
        self, held_pieces: Sequence[int], batch: Microbatch
    ) -> tuple[LayerNumbers, ...]:
        return tuple(transformers_numbers.layer_numbers(self.shape, held_pieces, batch))

    def uncounted(self, batch: Microbatch) -> str | None:
        return transformers_numbers.problem(self.shape, batch)

    def goes_with(self) -> tuple[tuple[str, str], ...]:
        return transformers_refusals.goes_with(self.shape)

    def notes(self) -> tuple[str, ...]:
        text = None
        if self.shape.lora is not None:
            text = left_out(self.shape.lora, transformers_layout.weights(self.shape))
        return tuple(x for x in (text, self._mtp_note()) if x is not None)

    def _mtp_note(self) -> str | None:
        """Return what becomes of the layers that predict further tokens, or None without some."""
        count, mtp = self.shape.given.get(COUNT), self.shape.mtp
        if not count:
            return None
        if mtp == "train":
            return (
                f"model.mtp=train: the layer behind the last block predicts the token after the "
                f"next one; its loss counts {self.shape.mtp_loss:g} times"
            )
        ends = "keeps them as the folder has them" if mtp == "keep" else "is without them"
        return (
            f"model.mtp={mtp}: the layers that predict further tokens ({COUNT}={count}) do not "
            f"train, and an export of the whole model {ends}"
        )

    def check_weights(self, folder: str | Path) -> None:
        folder_of(self.shape).open(folder)
        lora = self.shape.lora
        if lora is not None and lora.adapter is not None:
            check_adapters(lora.adapter, lora, self.sources())

    def sources(self) -> dict[str, tuple[Source, ...]]:
        if self.shape.lora is None:
            return folder_of(self.shape).sources()
        tied = {} if self._saved_tied is None else dict([self._saved_tied])
        return adapter_sources(self.shape.lora, self.layouts(), tied)

    @property
    def _saved_tied(self) -> tuple[str, str] | None:
        """The name of a trained weight that the embedding and the head share, if there is one, and
        its other name.
        """
        lora, tied = self.shape.lora, self.shape.tied
        pairs = ((name, x) for x, name in tied.items() if lora is not None and lora.trains(name))
        return next(pairs, None)

    def config_json(self, dtype: str, like: str | Path | None) -> dict[str, Any]:
        if self.shape.lora is not None:
            base = None if like is None else str(like)
            parameters = transformers_layout.weights(self.shape)
            return self.shape.lora.adapter_config(
                base, parameters, self.shape.head, self._saved_tied is not None
            )
        given = without_mtp(self.shape.given)
        settings = {key: value for key, value in given.items() if key != "torch_dtype"}
        if self.shape.mtp == "leave_out" and COUNT in settings:
            settings[COUNT] = 0
        if self.shape.head is not None:
            settings["architectures"] = [self.shape.class_name]
        return {**settings, "dtype": dtype}

    def files(self) -> FolderFiles:
        if self.shape.lora is None:
            return folder_of(self.shape).files()
        sources, layouts = self.sources(), self.layouts()

        def stored(name: str, value: Any) -> dict[str, Any]:
            # peft reads a tied weight under both names
            return {x.key: to_peft(layouts[name], value) for x in sources[name]}

        return replace(ADAPTER_FILES, stored=stored)
