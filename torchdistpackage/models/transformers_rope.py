"""Rotary positions of transformers whose frequencies depend on the length of a document.

For the rope types `dynamic` and `longrope` transformers takes the longest sequence of a batch, and
for `dynamic` that of earlier batches too. Here each document counts by its own length, as it would
alone in a fresh model, whatever is beside it in a sample or a batch and whatever came before.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn


def keep_lengths_apart(model: nn.Module) -> None:
    """Let the rotary tables of a model follow each document's own length."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)  # by kind of layer in some classes
        named = kinds.values() if isinstance(kinds, dict) else (kinds,)
        if any(isinstance(kind, str) and _by_length(kind) for kind in named):
            module.__class__ = _apart(type(module))


def document_lengths(position_ids: Tensor) -> Tensor:
    """Return the length of each token's document: one more than the last position in its run of
    positions that go up by one.

    position_ids, result: (..., S) int64.
    """
    begins = torch.zeros_like(position_ids)
    begins[..., 1:] = position_ids[..., 1:] != position_ids[..., :-1] + 1
    run = begins.cumsum(-1)
    longest = torch.zeros_like(position_ids).scatter_reduce(-1, run, position_ids + 1, "amax")
    return longest.gather(-1, run)


def _by_length(kind: str) -> bool:
    return "dynamic" in kind or kind == "longrope"


class _RotaryByDocument:
    """A base class before transformers' rotary embedding that runs its forward once for each
    document length.
    """

    config: Any
    rope_type: Any
    original_max_seq_len: int

    def forward(self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        tables = super().forward  # type: ignore[misc]
        layer_type = args[0] if args else kwargs.get("layer_type")
        kind = self.rope_type if layer_type is None else self.rope_type[layer_type]
        if not _by_length(kind):
            return tables(x, position_ids, *args, **kwargs)
        if "dynamic" in kind:
            self._forget(layer_type)
        if position_ids.dim() > 2:  # of height and width too, which are of no documents
            return tables(x, position_ids, *args, **kwargs)
        lengths = document_lengths(position_ids)
        if kind == "longrope":
            group = lengths > self._trained_length(layer_type)
        else:
            group = lengths.clamp(min=self.original_max_seq_len)
        merged: Any = None
        for each in group.unique().tolist():
            if "dynamic" in kind:
                self._forget(layer_type)
            in_group = group == each
            # the longest position that transformers sees is one of these
            part = tables(x, torch.where(in_group, position_ids, 0), *args, **kwargs)
            merged = part if merged is None else _chosen(in_group[..., None], part, merged)
        return merged

    def _forget(self, layer_type: str | None) -> None:
        """Reset the frequencies to those at construction: `dynamic` keeps those of the longest
        sequence that it has seen.

        `longrope` has no such memory, and writes into its frequencies in place."""
        prefix = "" if layer_type is None else f"{layer_type}_"
        first, now = f"{prefix}original_inv_freq", f"{prefix}inv_freq"
        device = getattr(self, now).device
        setattr(self, now, getattr(self, first).to(device))
        setattr(self, f"{prefix}max_seq_len_cached", self.original_max_seq_len)

    def _trained_length(self, layer_type: str | None) -> int:
        name, config = "original_max_position_embeddings", self.config
        rope = getattr(config, "rope_parameters", None) or {}  # none before transformers 5
        rope = rope if layer_type is None else rope[layer_type]
        return rope.get(name) or getattr(config, name, None) or config.max_position_embeddings


def _chosen(is_chosen: Tensor, part: Any, other: Any) -> Any:
    """Return `part` where a token is its own, else `other`; each is a table, or cosines and
    sines.
    """
    if isinstance(part, Tensor):
        return torch.where(is_chosen, part, other)
    return tuple(torch.where(is_chosen, a, b) for a, b in zip(part, other, strict=True))


@cache
def _apart(kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (_RotaryByDocument, kind), {"__module__": kind.__module__})
