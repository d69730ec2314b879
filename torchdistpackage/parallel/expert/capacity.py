"""Select the choices that find a place when an expert has limited places per sequence.

Each sequence is judged alone, so the layout does not change which choices are dropped. Tokens come
in order, and a token's better choice first. A choice is dropped when all places are taken.
"""

import torch
from torch import Tensor


def kept_choices(experts: Tensor, num_experts: int, places: int) -> Tensor:
    """Mark the choices that find a place: experts (S, B, k) int64 -> (S, B, k) bool."""
    seq_len, batch, top_k = experts.shape
    chosen = experts.transpose(0, 1).reshape(batch, seq_len * top_k)
    # a stable sort keeps the order of tokens within an expert; positions count from its first
    by_expert, order = (x.contiguous() for x in chosen.sort(dim=-1, stable=True))
    firsts = torch.searchsorted(
        by_expert, torch.arange(num_experts, device=chosen.device).expand(batch, -1).contiguous()
    )
    position = torch.arange(seq_len * top_k, device=chosen.device) - firsts.gather(1, by_expert)
    has_room = torch.empty_like(chosen, dtype=torch.bool).scatter_(1, order, position < places)
    return has_room.view(batch, seq_len, top_k).transpose(0, 1)
