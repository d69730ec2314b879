"""The layer behind the last block that predicts the token after the next one (MTP).

As in the DeepSeek V3 report (arXiv:2412.19437, section 2.2) and in the engines that serve such
folders: the hidden states behind the model's last norm and the embeddings of the next tokens are
normed, joined by a matrix, and go through one more block; its norm and the model's own head make
logits. transformers has the block alone, so its neighbours are made here.
"""

from typing import Any

import torch
from torch import Tensor, nn

COPIES = ("embed_tokens.weight", "shared_head.head.weight")
"""Tensors of the layer in a folder that repeat the embedding and the head of the model."""


def add_mtp(model: Any, layers: int) -> None:
    """Give the block behind the `layers` first ones its neighbours; the model itself runs those
    alone.
    """
    base, dim = model.model, model.config.hidden_size
    block, norm, eps = base.layers[layers], type(base.norm), model.config.rms_norm_eps
    block.enorm, block.hnorm = norm(dim, eps=eps), norm(dim, eps=eps)
    block.eh_proj = nn.Linear(2 * dim, dim, bias=False)
    block.shared_head = nn.Module()
    block.shared_head.norm = norm(dim, eps=eps)
    model.config.num_hidden_layers = layers  # its forward counts them


class FurtherToken:
    """Makes the logits of the token after the next one, behind a forward of the model.

    base: the model without its head. head: makes logits.
    """

    def __init__(self, base: Any, head: nn.Module, layers: int):
        self._base, self._head, self._block = base, head, base.layers[layers]
        self._arguments: dict[str, Any] = {}
        self._hidden: Tensor | None = None
        # the mask and the positions are those of the block before it
        base.layers[layers - 1].register_forward_pre_hook(self._keep_arguments, with_kwargs=True)
        base.norm.register_forward_hook(self._keep_hidden)

    def _keep_arguments(self, block: nn.Module, args: object, kwargs: dict[str, Any]) -> None:
        self._arguments = kwargs

    def _keep_hidden(self, norm: nn.Module, args: object, hidden: Tensor) -> None:
        self._hidden = hidden

    def logits(self, ids: Tensor) -> Tensor:
        """Return logits (B, S, V/n) of the tokens two places behind each of `ids` (B, S). Those of
        the last two places are of no token.
        """
        assert self._hidden is not None
        hidden, self._hidden = self._hidden, None
        arguments, self._arguments = self._arguments, {}
        following = self._base.embed_tokens(ids.roll(-1, 1))
        block = self._block
        x = block.eh_proj(torch.cat([block.enorm(following), block.hnorm(hidden)], -1))
        x = block(x, **arguments)
        return self._head(block.shared_head.norm(x))
