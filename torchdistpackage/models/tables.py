"""Find the embeddings and the output head of a model whose layouts do not name them."""

from collections.abc import Iterator
from typing import Any

from torch import nn


def table_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the matrices of embeddings and of the output head, by the kind of their modules.

    The head is what `model.get_output_embeddings()` returns, as models of transformers have it;
    where there is no such method, the last nn.Linear, if no other module with a matrix is listed
    behind it. A module is asked, not a size: a width may equal the number of ids.
    """
    last: nn.Module | None = None
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            yield module.weight
        elif any(p.dim() > 1 for p in module.parameters(recurse=False)):
            last = module
    named: Any = getattr(model, "get_output_embeddings", None)
    head = named() if callable(named) else last
    if isinstance(head, nn.Linear):
        yield head.weight
