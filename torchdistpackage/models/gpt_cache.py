"""Keys and values of the tokens that a GPT has seen, so that each next token is computed alone.

Each attention gets a separate sequence for the time of a call, which holds the keys and values of
this rank's heads; the model itself does not know about it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from torchdistpackage.parallel.tensor.attention import (
    ParallelAttention,
    Tokens,
    WholeSequence,
    attend,
)


class GPTCache(WholeSequence):
    """Keys and values of one stage's blocks. `call` lets their attentions use it for one
    forward.
    """

    takes_padding = True

    def __init__(self, model: Any):
        self._model, self.length = model, 0
        attentions = (m for m in model.modules() if isinstance(m, ParallelAttention))
        self._attentions = [(attention, _CachedHeads()) for attention in attentions]
        self._padding: Tensor | None = None

    @contextmanager
    def call(self, num: int, padding: Tensor | None) -> Iterator[None]:
        """Make a forward in the block compute `num` more tokens of each row; the last stage makes
        logits only for the last of them.

        padding: (B,) columns before a row's first token; None: none.
        """
        previous, self._padding = self._model.sequence, padding
        self._model.sequence = self
        of_attentions = [(attention, attention.sequence) for attention, _ in self._attentions]
        for attention, cached in self._attentions:
            attention.sequence = cached
        try:
            yield
            self.length += num
        finally:
            self._model.sequence = previous
            for attention, sequence in of_attentions:
                attention.sequence = sequence

    def tokens(self, num: int, position_ids: Tensor | None, device: torch.device) -> Tokens:
        columns = torch.arange(self.length, self.length + num, device=device)
        end, padding, mask = self.length + num, self._padding, None
        if padding is not None or (num > 1 and self.length):
            keys = torch.arange(end, device=device)
            mask = (columns[:, None] >= keys)[None, None]
            if padding is not None:
                # a column of padding sees itself: a softmax of nothing would not be a number
                is_visible = keys >= padding[:, None]
                is_self = columns[:, None] == keys
                mask = mask & (is_visible[:, None, None] | is_self)
        positions = columns if padding is None else (columns - padding[:, None]).clamp(min=0)
        return Tokens(end, positions, mask, last_only=True)


class _CachedHeads(WholeSequence):
    """Keys and values (B, h, S, d) of one attention."""

    def __init__(self) -> None:
        self._held: tuple[Tensor, Tensor] | None = None

    def __call__(self, q, k, v, causal, dropout, group, mask) -> Tensor:
        if self._held is not None:
            k, v = (torch.cat(pair, 2) for pair in zip(self._held, (k, v), strict=True))
        self._held = k, v
        # a single query is the last position, and sees everything
        return attend(q, k, v, causal and q.shape[2] > 1, dropout, group, mask)
