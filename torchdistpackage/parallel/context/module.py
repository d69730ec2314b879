"""`context_parallel(module)` for your own model that calls torch's attention function."""

from contextvars import ContextVar
from copy import deepcopy
from typing import Any, TypeVar

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torchdistpackage.comm.primitives import Group
from torchdistpackage.comm.tpc import resolve_group
from torchdistpackage.errors import LayoutError
from torchdistpackage.layout.exchanges import check_comm_type
from torchdistpackage.parallel.context.attention import context_attention
from torchdistpackage.parallel.context.order import OrderName

AnyModule = TypeVar("AnyModule", bound=nn.Module)
_inside: ContextVar[bool] = ContextVar("context_parallel", default=False)


def context_parallel(
    module: AnyModule,
    *,
    comm_type: str = "p2p",
    order: OrderName = "zigzag",
    a2a_size: int | None = None,
    window: int | None = None,
    seq_len: int | None = None,
    group: Group | None = None,
) -> AnyModule:
    """Replace `F.scaled_dot_product_attention` by `context_attention` inside forwards of `module`.

    It applies to all submodules too, and returns `module`, which then takes parts of sequences.
    Pass it the positions from `sequence_positions`. The arguments are those of
    `context_attention`.

    Raises:
        LayoutError: a submodule computes attention by another function. Forwards raise it for an
            attention mask, and as `context_attention` does.
    """
    check_comm_type(comm_type)
    group = resolve_group(group, "context")
    options = {"comm_type": comm_type, "order": order, "a2a_size": a2a_size, "window": window}
    options |= {"seq_len": seq_len, "group": group}
    unsupported = [name for name, each in module.named_modules() if isinstance(each, _OTHERS)]
    if unsupported:
        raise LayoutError(
            f"{', '.join(unsupported[:4]) or 'the module'}: the attention of "
            f"{type(module.get_submodule(unsupported[0])).__name__} does not call "
            "F.scaled_dot_product_attention; let it call that, or call context_attention"
        )
    # wrap every module: activation checkpointing reruns an inner one without its outer ones
    for each in module.modules():
        each.forward = _Forward(each.forward, options)  # type: ignore[method-assign]
    return module


def is_wrapped(module: nn.Module) -> bool:
    """Return whether `context_parallel` was called on any module in `module`."""
    return any(isinstance(each.forward, _Forward) for each in module.modules())


_OTHERS = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


class _Forward:
    """A module's forward that runs with attention over slices of sequences."""

    def __init__(self, forward: Any, options: dict[str, Any]):
        self._forward, self._options = forward, options

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _inside.get():
            return self._forward(*args, **kwargs)
        token = _inside.set(True)
        try:
            with _ContextMode(self._options):
                return self._forward(*args, **kwargs)
        finally:
            _inside.reset(token)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Forward":
        # share the options: a process group cannot be copied
        return _Forward(deepcopy(self._forward, memo), self._options)


class _ContextMode(TorchFunctionMode):
    """A mode that replaces calls of torch's attention function."""

    def __init__(self, options: dict[str, Any]):
        super().__init__()
        self._options = options

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            return _attend(self._options, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _attend(
    options: dict[str, Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Run `context_attention` on the arguments of `F.scaled_dot_product_attention`."""
    if attn_mask is not None:
        raise LayoutError(
            f"a mask of shape {tuple(attn_mask.shape)} is neither causal, nor of documents, nor a "
            f"window, which are all that ranks with parts of a sequence can share; use "
            f"is_causal=True, or call context_attention with document_ids or window"
        )
    return context_attention(
        query, key, value,
        is_causal=is_causal, scale=scale, enable_gqa=enable_gqa, dropout_p=dropout_p, **options,
    )  # fmt: skip
