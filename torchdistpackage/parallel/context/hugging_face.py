"""Context-parallel attention for transformers models, through its `AttentionInterface`.

transformers hands an attention mask with four dims to every layer unchanged. So document ids travel
as a mask (B, 1, 1, S): the document of each position of the full sequence.
"""

from typing import Any

import torch
from torch import Tensor, nn

from torchdistpackage.errors import LayoutError
from torchdistpackage.parallel.context.model import ContextSequence
from torchdistpackage.parallel.context.visibility import Documents

NAME = "tdp_context"
"""Name of this attention in transformers, which makes no mask for a name without a mask
function.
"""
_SEQUENCE, _DOCUMENTS = "_tdp_sequence", "_tdp_documents"


def attend_over(model: nn.Module, sequence: ContextSequence) -> None:
    """Make every attention of `model`, which gets this rank's slice, see the full sequence.

    The model must call transformers' attention functions, and get its inputs from `inputs_of`.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attend)
    for module in model.modules():
        if (config := getattr(module, "config", None)) is not None:
            config._attn_implementation = NAME
        module.__dict__[_SEQUENCE] = sequence


def inputs_of(
    sequence: ContextSequence, num: int, position_ids: Tensor | None, device: torch.device
) -> tuple[Tensor | None, Tensor]:
    """Return (attention mask, position_ids) for this rank's `num` tokens of each sample.

    position_ids (B, S): positions of the full sequence, from 0 in each document.
    """
    tokens = sequence.tokens(num, position_ids, device)
    assert tokens.positions is not None
    if tokens.mask is None:
        return None, tokens.positions[None]
    mask = tokens.mask.ids[:, None, None, :]
    setattr(mask, _DOCUMENTS, tokens.mask)
    return mask, tokens.positions


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend from q (B, H, S, D) to k and v (B, h, S, D) of this rank; return (B, S, H, D)."""
    for name in ("softcap", "s_aux", "position_bias", "head_mask"):
        if others.get(name) is not None:
            raise LayoutError(
                f"{type(module).__name__} asks for {name}, which attention over parts of a "
                f"sequence has not; set parallel.context to 1"
            )
    documents = None
    if attention_mask is not None:
        documents = getattr(attention_mask, _DOCUMENTS, None)
        if documents is None:  # activation checkpointing passes a copy, without the attribute
            documents = Documents(attention_mask[:, 0, 0])
            setattr(attention_mask, _DOCUMENTS, documents)
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    sequence: ContextSequence = getattr(module, _SEQUENCE)
    out = sequence(
        query, key, value, is_causal, dropout, None, documents,
        scale=scaling, window=sliding_window,
    )  # fmt: skip
    return out.transpose(1, 2).contiguous(), None
