"""`context_parallel(module)`: a model of one's own whose attention is torch's own function."""

from contextvars import ContextVar
from copy import deepcopy
from typing import Any, TypeVar

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torchdistpackage.comm.primitives import Group
from torchdistpackage.comm.tpc import resolve_group
from torchdistpackage.errors import LayoutError
from torchdistpackage.parallel.context.attention import context_attention
from torchdistpackage.parallel.context.choice import CommType
from torchdistpackage.parallel.context.order import OrderName

AnyModule = TypeVar("AnyModule", bound=nn.Module)
_inside: ContextVar[bool] = ContextVar("context_parallel", default=False)


def context_parallel(
    module: AnyModule,
    *,
    comm_type: CommType = "p2p",
    order: OrderName = "zigzag",
    a2a_size: int | None = None,
    window: int | None = None,
    seq_len: int | None = None,
    group: Group | None = None,
) -> AnyModule:
    """Let `F.scaled_dot_product_attention` inside the forwards of `module`, and of the modules in
    it, be `context_attention`; returns the module. What it is given are parts of sequences.

    Positions stay the module's own affair: give it those of `sequence_positions`.
    The arguments are those of `context_attention`.

    Raises:
        LayoutError: now, of a module in it whose attention is another function. In a forward, of a
            mask: a part of a sequence has none; or as `context_attention`.
    """
    group = resolve_group(group, "context")
    given = {"comm_type": comm_type, "order": order, "a2a_size": a2a_size, "window": window}
    given |= {"seq_len": seq_len, "group": group}
    other = [name for name, each in module.named_modules() if isinstance(each, _OTHERS)]
    if other:
        raise LayoutError(
            f"{', '.join(other[:4]) or 'the module'}: attention of "
            f"{type(module.get_submodule(other[0])).__name__} is no call of "
            f"F.scaled_dot_product_attention; write it as one, or call context_attention"
        )
    # each of them, since a checkpoint runs one again in the backward, outside of the others
    for each in module.modules():
        each.forward = _Forward(each.forward, given)  # type: ignore[method-assign]
    return module


def is_wrapped(module: nn.Module) -> bool:
    """Return whether `context_parallel` was called on any module in `module`."""
    return any(isinstance(each.forward, _Forward) for each in module.modules())


_OTHERS = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


class _Forward:
    """A forward, with attention over parts."""

    def __init__(self, forward: Any, given: dict[str, Any]):
        self._forward, self._given = forward, given

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _inside.get():
            return self._forward(*args, **kwargs)
        token = _inside.set(True)
        try:
            with _ContextMode(self._given):
                return self._forward(*args, **kwargs)
        finally:
            _inside.reset(token)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Forward":
        return _Forward(deepcopy(self._forward, memo), self._given)  # a group is not copied


class _ContextMode(TorchFunctionMode):
    def __init__(self, given: dict[str, Any]):
        super().__init__()
        self._given = given

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            return _attend(self._given, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _attend(
    given: dict[str, Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if attn_mask is not None:
        raise LayoutError(
            f"a mask of shape {tuple(attn_mask.shape)} is neither causal, nor of documents, nor a "
            f"window, which are all that ranks with parts of a sequence can share; use "
            f"is_causal=True, or call context_attention with document_ids or window"
        )
    return context_attention(
        query, key, value,
        is_causal=is_causal, scale=scale, enable_gqa=enable_gqa, dropout_p=dropout_p, **given,
    )  # fmt: skip
