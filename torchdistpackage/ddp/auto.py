"""One call for data parallelism: all-reduces or ZeRO, whichever has the shorter step here.

One rule: the first rank decides for all. What a step and the wire take is measured
(zero/step_profiler.py), what each design would make of it is computed (zero/cost_model.py), and the
loop around both is the same: forward, backward, `step`, `zero_grad`.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchdistpackage.comm import primitives
from torchdistpackage.comm.primitives import Group
from torchdistpackage.comm.world import world
from torchdistpackage.ddp.comm_hooks import bf16_compress, fp16_compress
from torchdistpackage.ddp.naive_ddp import NaiveDDP
from torchdistpackage.ddp.param_spec import is_cut
from torchdistpackage.ddp.wrapper_state import batch_group
from torchdistpackage.ddp.zero.cost_model import all_reduced_s, scattered_s, scatters
from torchdistpackage.ddp.zero.optimizer import ZeroOptimizer
from torchdistpackage.ddp.zero.requires_whole import requires_whole_params
from torchdistpackage.ddp.zero.step_profiler import measure
from torchdistpackage.errors import LayoutError
from torchdistpackage.layout.collect import collect
from torchdistpackage.layout.layout import Layout

Mode = Literal["auto", "ddp", "zero"]
_LOG = logging.getLogger(__name__)
_COMPRESSED = {
    None: primitives.start_all_reduce,
    torch.bfloat16: bf16_compress,
    torch.float16: fp16_compress,
}


def data_parallel(
    module: nn.Module,
    optimizer: Optimizer,
    loss_of: Callable[[nn.Module], Tensor],
    *,
    group: Group | None = None,
    mode: Mode = "auto",
    layouts: Mapping[str, Layout] | None = None,
    bucket_cap_mb: float | None = None,
    wire_dtype: torch.dtype | None = None,
    num_grad_acc_iter: int = 1,
    reduce_op: str = "avg",
) -> tuple[nn.Module, Optimizer]:
    """What to train with: NaiveDDP(module) and `optimizer`, or `module` and a ZeroOptimizer.

    All ranks call it, with an optimizer over the module's parameters. Stage 1 of ZeRO gathers
    parameters under the next forward, which is faster where the link is slow; on a fast one the
    all-reduces of NaiveDDP are.

    loss_of: computes the loss of a typical batch, as `lambda net: loss_fn(net(x), y)`. It runs
        four times, forward and backward; gradients, buffers and torch's random numbers are left
        as they were.
    group: ranks that hold the same parameters, among whom the choice is then made; default tpc's
        data (and context) ranks, or everybody, and one choice for all ranks.
    mode: "ddp" or "zero" takes that one, unmeasured.
    wire_dtype: torch.bfloat16 or torch.float16, in which gradients travel, and parameters too.
    layouts, bucket_cap_mb, num_grad_acc_iter, reduce_op: as both have them.

    Raises:
        LayoutError: mode is "zero", but the optimizer cannot work on a part of the parameters.
        ValueError: `mode` or `wire_dtype` is none of those above.
    """
    if mode not in ("auto", "ddp", "zero"):
        raise ValueError(f"mode is {mode!r}; use 'auto', 'ddp' or 'zero'")
    if wire_dtype not in _COMPRESSED:
        raise ValueError(f"wire_dtype is {wire_dtype}; use torch.bfloat16 or torch.float16")
    if mode == "auto":
        shares = _is_faster_shared(module, optimizer, loss_of, group, layouts, wire_dtype)
    else:
        shares = mode == "zero"
    if shares:
        return module, ZeroOptimizer(
            optimizer,
            module,
            stage=1,
            group=group,
            layouts=layouts,
            bucket_cap_mb=bucket_cap_mb,
            wire_dtype=wire_dtype,
            num_grad_acc_iter=num_grad_acc_iter,
            reduce_op=reduce_op,
        )
    wrapped = NaiveDDP(
        module,
        process_group=group,
        layouts=layouts,
        bucket_cap_mb=bucket_cap_mb,
        comm_hook=_COMPRESSED[wire_dtype],
        num_grad_acc_iter=num_grad_acc_iter,
        reduce_op=reduce_op,
    )
    return wrapped, optimizer


def _is_faster_shared(
    module: nn.Module,
    optimizer: Optimizer,
    loss_of: Callable[[nn.Module], Tensor],
    group: Group | None,
    layouts: Mapping[str, Layout] | None,
    wire: torch.dtype | None,
) -> bool:
    """Whether ZeRO's step is the shorter one, as the first rank has it; one line in its log."""
    among = batch_group() if group is None else group
    everybody = world() if group is None else group
    if everybody.size() == 1 or not any(p.requires_grad for p in module.parameters()):
        return False
    work, bytes_per_s = measure(module, loss_of, among, wire)
    why = _unshareable(module, optimizer, layouts)
    shares = not why and scatters(work, bytes_per_s, among.size())
    shares = bool(primitives.broadcast_object(shares, everybody))
    if everybody.rank() == 0:
        _LOG.info(
            "data parallel: %s of %d ranks%s; expected ms a step: all-reduces %.1f, ZeRO-1 %.1f, "
            "from forward %.1f, backward %.1f, optimizer %.1f, messages %.1f, %.1f MB at %.0f MB/s",
            "ZeRO-1" if shares else "all-reduces",
            among.size(),
            why,
            all_reduced_s(work, bytes_per_s) * 1e3,
            scattered_s(work, bytes_per_s, among.size()) * 1e3,
            work.forward_s * 1e3,
            work.backward_s * 1e3,
            work.optimizer_s * 1e3,
            work.exchange_s * 1e3,
            work.num_bytes / 1e6,
            bytes_per_s / 1e6,
        )
    return shares


def _unshareable(
    module: nn.Module, optimizer: Optimizer, layouts: Mapping[str, Layout] | None
) -> str:
    """Why ZeRO cannot have them, or nothing."""
    own = collect(module) if layouts is None else layouts
    split = [name for name, p in module.named_parameters() if is_cut(own.get(name), p)]
    try:
        requires_whole_params(optimizer, split=split)
    except LayoutError as error:
        return f" ({error})"
    lookups = (m for m in module.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag))
    return " (sparse gradients are in no bucket)" if any(m.sparse for m in lookups) else ""
