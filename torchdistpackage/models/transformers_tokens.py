"""Trained rows of an embedding and of the output head, as peft's `trainable_token_indices`.

The rows are one small parameter that every rank has in full. While the layer's forward runs they
stand in its weight, of which a tensor rank takes those of its own shard: so it has a partial sum of
their gradient.
"""

from typing import Any

import torch
from torch import Tensor, nn

from torchdistpackage.comm import primitives
from torchdistpackage.comm.primitives import Group
from torchdistpackage.config.model_section import TOKEN_ROWS
from torchdistpackage.layout.derive import blocks
from torchdistpackage.layout.layout import Layout
from torchdistpackage.models.transformers_experts import mesh_index_of
from torchdistpackage.models.transformers_layout import TransformersShape, global_name, weights

Place = tuple[list[int], list[int], slice]
"""Positions among the trained rows, the rows of a shard, and the columns of the table that the
shard has."""


class TokenRows(nn.Module):
    """The trained rows (n, D) of a layer whose weight is (V, D), or a shard of it."""

    sources: Tensor
    targets: Tensor

    def __init__(self, layer: Any, layout: Layout, place: Place, is_split: bool):
        super().__init__()
        weight, (sources, targets, self.columns) = layer._parameters["weight"], place
        self.trainable_tokens_delta = nn.Parameter(
            torch.empty(layout.shape, dtype=weight.dtype, device=weight.device)
        )
        for name, positions in (("sources", sources), ("targets", targets)):
            self.register_buffer(name, torch.tensor(positions, dtype=torch.int64), persistent=False)
        self.is_split = is_split

    def joined(self, weight: Tensor) -> Tensor:
        """Return the weight with the trained rows in it."""
        rows = self.trainable_tokens_delta[:, self.columns].to(weight.dtype)
        return weight.index_copy(0, self.targets, rows[self.sources])


def adapt_tokens(
    decoder: nn.Module, shape: TransformersShape, group: Group | None, axis: str
) -> None:
    """Give the embedding and the output head in `decoder` their trained rows, without values."""
    listed, modules = weights(shape, axis=axis), dict(decoder.named_modules())
    by_name: dict[str, TokenRows] = {}
    for path in shape.table_paths:
        weight = global_name(shape, f"{path}.weight")
        name = weight.removesuffix(".weight") + TOKEN_ROWS
        layer: Any = modules.get(path)
        if name not in listed or layer is None or layer._parameters.get("weight") is None:
            continue
        table = listed[weight].layout
        place, is_split = _place(table, shape, group, axis), bool(table.split_axes)
        rows = TokenRows(layer, listed[name].layout, place, is_split)
        if name in by_name:  # a head that is the embedding too
            rows.trainable_tokens_delta = by_name[name].trainable_tokens_delta
        by_name[name] = rows
        layer.token_adapter = rows
        layer._disable_adapters = False
        layer.register_forward_pre_hook(_hide)
        layer.register_forward_hook(_show, always_call=True)


def _place(table: Layout, shape: TransformersShape, group: Group | None, axis: str) -> Place:
    assert shape.lora is not None
    sources: list[int] = []
    targets: list[int] = []
    boxes = blocks(table, *mesh_index_of(group, axis))
    columns = boxes[0][0][1]
    for (rows, _), (local, _) in boxes:
        for position, token in enumerate(shape.lora.trainable_token_indices):
            if rows.start <= token < rows.stop:
                sources.append(position)
                targets.append(local.start + token - rows.start)
    return sources, targets, columns


def _hide(layer: Any, args: object) -> None:
    """Hide the weight by one with the trained rows, for this forward alone."""
    if not layer._disable_adapters:
        layer.__dict__["weight"] = layer.token_adapter.joined(layer._parameters["weight"])


def _show(layer: Any, args: object, output: object) -> None:
    layer.__dict__.pop("weight", None)


@torch.no_grad()
def reset_tokens(model: nn.Module, group: Group | None) -> None:
    """Set the trained rows of `model` to those of the weights, of which ranks have shards."""
    for layer in model.modules():
        rows: Any = getattr(layer, "token_adapter", None)
        if rows is not None:
            weight: Any = layer._parameters["weight"]
            values = torch.zeros_like(rows.trainable_tokens_delta)
            values[rows.sources, rows.columns] = weight[rows.targets]
            if group is not None and rows.is_split:
                primitives.all_reduce(values, group)
            rows.trainable_tokens_delta.copy_(values)
