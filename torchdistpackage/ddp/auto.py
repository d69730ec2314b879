"""One call for data parallelism, which chooses all-reduces or ZeRO by their step time.

`measure` times a step and the link, `StepCost` predicts the step of each design from these times,
and the first rank decides for all. The training loop is the same for both: forward, backward,
`step`, `zero_grad`.

The model: each design takes as long as its longest chain. All-reduces start with the first bucket
of the backward, and the optimizer waits for the last one. ZeRO's reduce-scatters and all-gathers
overlap the full step, but the step's boundary waits for those of one bucket. So slow links favour
ZeRO and fast links all-reduces.

A trial restores gradients, buffers and torch's random state.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchdistpackage.comm import primitives
from torchdistpackage.comm.creation import world
from torchdistpackage.comm.moments import clock_of, seconds
from torchdistpackage.comm.primitives import Group
from torchdistpackage.ddp.bucket_plan import bucket_sizes
from torchdistpackage.ddp.comm_hooks import bf16_compress, fp16_compress
from torchdistpackage.ddp.naive_ddp import NaiveDDP
from torchdistpackage.ddp.param_spec import batch_group
from torchdistpackage.ddp.zero.optimizer import ZeroOptimizer
from torchdistpackage.ddp.zero.shard_bounds import requires_whole_params
from torchdistpackage.ddp.zero.sharing import is_cut
from torchdistpackage.errors import LayoutError
from torchdistpackage.layout.layout import Layout
from torchdistpackage.layout.mark import collect
from torchdistpackage.tools.undisturbed import undisturbed

Mode = Literal["auto", "ddp", "zero"]
_LOG = logging.getLogger(__name__)
_COMPRESSED = {
    None: primitives.start_all_reduce,
    torch.bfloat16: bf16_compress,
    torch.float16: fp16_compress,
}

WORTH_IT = 0.03
"""Fraction of a step that ZeRO must save to be chosen; smaller differences are within the error."""

NUM_TRIALS, NUM_BUCKETS = 3, 4
"""Number of trials (the shortest counts), and of buckets in each trial of the link. Other
work on the machine can only lengthen a trial."""

PASSES_OF_ADAM = 3.5
"""Passes over memory of an Adam step: it reads four numbers for each parameter and writes three."""


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
    """Return NaiveDDP(module) and `optimizer`, or `module` and a ZeroOptimizer, the faster pair.

    All ranks call it, with an optimizer over the module's parameters.

    loss_of: computes the loss of a typical batch: `lambda net: loss_fn(net(x), y)`. It runs four
        times, forward and backward, and gradients, buffers and torch's random state are restored.
    group: ranks that hold the same parameters and make one choice. Default: tpc's data (and
        context) ranks, or all ranks, with one choice for all ranks.
    mode: "ddp" or "zero" selects a design without measuring.
    wire_dtype: torch.bfloat16 or torch.float16, the dtype in which gradients travel, and with ZeRO
        also parameters.
    layouts, bucket_cap_mb, num_grad_acc_iter, reduce_op: as in both classes.

    Raises:
        LayoutError: mode is "zero", but the optimizer needs full parameters.
        ValueError: `mode` or `wire_dtype` is not one of those above.
    """
    if mode not in ("auto", "ddp", "zero"):
        raise ValueError(f"mode is {mode!r}; use 'auto', 'ddp' or 'zero'")
    if wire_dtype not in _COMPRESSED:
        raise ValueError(f"wire_dtype is {wire_dtype}; use torch.bfloat16 or torch.float16")
    if mode == "auto":
        mode = (
            "zero"
            if _zero_is_faster(module, optimizer, loss_of, group, layouts, wire_dtype)
            else "ddp"
        )
    common = {
        "layouts": layouts,
        "bucket_cap_mb": bucket_cap_mb,
        "num_grad_acc_iter": num_grad_acc_iter,
        "reduce_op": reduce_op,
    }
    if mode == "zero":
        sharded = ZeroOptimizer(optimizer, module, group=group, wire_dtype=wire_dtype, **common)
        return module, sharded
    hook = _COMPRESSED[wire_dtype]
    return NaiveDDP(module, process_group=group, comm_hook=hook, **common), optimizer


def _zero_is_faster(
    module: nn.Module,
    optimizer: Optimizer,
    loss_of: Callable[[nn.Module], Tensor],
    group: Group | None,
    layouts: Mapping[str, Layout] | None,
    wire_dtype: torch.dtype | None,
) -> bool:
    """Return the first rank's decision whether ZeRO's step is shorter; log one line there."""
    among = batch_group() if group is None else group
    deciders = world() if group is None else group
    if deciders.size() == 1 or not any(p.requires_grad for p in module.parameters()):
        return False
    work, bytes_per_s = measure(module, loss_of, among, wire_dtype)
    obstacle = _unshareable(module, optimizer, layouts)
    shards = not obstacle and scatters(work, bytes_per_s, among.size())
    shards = bool(primitives.broadcast_object(shards, deciders))
    if deciders.rank() == 0:
        _LOG.info(
            "data parallel: %s of %d ranks%s; expected ms a step: all-reduces %.1f, ZeRO-1 %.1f, "
            "from forward %.1f, backward %.1f, optimizer %.1f, messages %.1f, %.1f MB at %.0f MB/s",
            "ZeRO-1" if shards else "all-reduces",
            among.size(),
            obstacle,
            all_reduced_s(work, bytes_per_s) * 1e3,
            scattered_s(work, bytes_per_s, among.size()) * 1e3,
            work.forward_s * 1e3,
            work.backward_s * 1e3,
            work.optimizer_s * 1e3,
            work.exchange_s * 1e3,
            work.num_bytes / 1e6,
            bytes_per_s / 1e6,
        )
    return shards


def _unshareable(
    module: nn.Module, optimizer: Optimizer, layouts: Mapping[str, Layout] | None
) -> str:
    """Return why ZeRO cannot shard this module and optimizer, or ""."""
    declared = collect(module) if layouts is None else layouts
    split = [name for name, p in module.named_parameters() if is_cut(declared.get(name), p)]
    try:
        requires_whole_params(optimizer, split=split)
    except LayoutError as error:
        return f" ({error})"
    lookups = (m for m in module.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag))
    return " (sparse gradients are in no bucket)" if any(m.sparse for m in lookups) else ""


# -- the model -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepCost:
    """Costs of one step of one rank: seconds of computing, and bytes of gradients on the wire.

    bucket_bytes: bytes of one bucket.
    exchange_s: processor time for all messages of a step with all-reduces. ZeRO adds and copies
        more and needs about half as much again.
    """

    forward_s: float
    backward_s: float
    optimizer_s: float
    num_bytes: int
    bucket_bytes: int
    exchange_s: float = 0.0


def all_reduced_s(work: StepCost, bytes_per_s: float) -> float:
    """Return the seconds of a step with all-reduces of `bytes_per_s`."""
    part = min(1.0, work.bucket_bytes / max(1, work.num_bytes))
    computed_s = work.forward_s + work.backward_s + work.exchange_s
    first_s = work.forward_s + work.backward_s * part
    last_s = work.bucket_bytes / bytes_per_s
    arrived_s = max(first_s + work.num_bytes / bytes_per_s, computed_s + last_s)
    return arrived_s + work.optimizer_s


def scattered_s(work: StepCost, bytes_per_s: float, num_ranks: int) -> float:
    """Return the seconds of a step with ZeRO at the same rate.

    A reduce-scatter and an all-gather together take as long as one all-reduce.
    """
    part = min(1.0, work.bucket_bytes / max(1, work.num_bytes))
    computed_s = work.forward_s + work.backward_s + work.optimizer_s / num_ranks
    boundary_s = work.bucket_bytes / bytes_per_s
    one_bucket_s = (work.forward_s + work.backward_s) * part
    return max(
        computed_s + 1.5 * work.exchange_s + boundary_s,
        work.num_bytes / bytes_per_s + one_bucket_s,
    )


def scatters(work: StepCost, bytes_per_s: float, num_ranks: int) -> bool:
    """Return whether ZeRO's step is shorter by more than the model's error."""
    most_s = (1 - WORTH_IT) * all_reduced_s(work, bytes_per_s)
    return num_ranks > 1 and scattered_s(work, bytes_per_s, num_ranks) < most_s


# -- measurement ---------------------------------------------------------------------------


def measure(
    module: nn.Module,
    loss_of: Callable[[nn.Module], Tensor],
    group: Group,
    wire_dtype: torch.dtype | None = None,
) -> tuple[StepCost, float]:
    """Measure this rank's step, and the bytes per second of an all-reduce; all ranks call it.

    loss_of: computes the loss of one batch.
    wire_dtype: dtype in which gradients travel, if not their own.
    """
    trained = [p for p in module.parameters() if p.requires_grad]
    device = trained[0].device
    with undisturbed(module, gradients_of=trained), torch.enable_grad():
        times = [_times_s(module, loss_of, trained, device) for _ in range(1 + NUM_TRIALS)]
    forward_s, backward_s, pass_s = map(min, zip(*times[1:], strict=True))
    default_bytes = bucket_sizes(queued=primitives.is_queued(group)).default_bytes
    bytes_per_s, busy_s = _measure_link(group, device, default_bytes)
    # gradients are summed in at least fp32, so that is what travels without a wire_dtype
    element_bytes = [wire_dtype.itemsize if wire_dtype else max(4, p.itemsize) for p in trained]
    sizes = [p.numel() * itemsize for p, itemsize in zip(trained, element_bytes, strict=True)]
    work = StepCost(
        forward_s,
        backward_s,
        PASSES_OF_ADAM * pass_s,
        num_bytes=sum(sizes),
        bucket_bytes=max(default_bytes, *sizes),
        exchange_s=busy_s * sum(sizes),
    )
    return work, bytes_per_s


def _times_s(
    module: nn.Module,
    loss_of: Callable[[nn.Module], Tensor],
    trained: Sequence[nn.Parameter],
    device: torch.device,
) -> tuple[float, float, float]:
    """Return the seconds of a forward, of a backward, and of reading and writing each gradient
    once.
    """
    for p in trained:
        p.grad = None
    now = clock_of(device)
    moments = [now()]
    loss = loss_of(module)
    moments.append(now())
    loss.backward()
    moments.append(now())
    dense = [p.grad for p in trained if p.grad is not None and not p.grad.is_sparse]
    if dense:  # in one fused call, as optimizers do
        torch._foreach_mul_(dense, 1)
    moments.append(now())
    return (
        seconds(moments[0], moments[1]),
        seconds(moments[1], moments[2]),
        seconds(moments[2], moments[3]),
    )


def _measure_link(group: Group, device: torch.device, bucket_bytes: int) -> tuple[float, float]:
    """Return an all-reduce's bytes per second, and this rank's processor seconds per byte."""
    buckets = [torch.zeros(bucket_bytes // 4, device=device) for _ in range(NUM_BUCKETS)]
    num_bytes = sum(bucket.nbytes for bucket in buckets)
    now = clock_of(device)
    times: list[float] = []
    busy: list[float] = []
    for _ in range(1 + NUM_TRIALS):
        primitives.all_reduce(buckets[0][:1], group)  # wait until all ranks are ready to measure
        begin, begin_busy_s = now(), time.process_time()
        for pending in [primitives.start_all_reduce(bucket, group) for bucket in buckets]:
            pending.wait()
        times.append(seconds(begin, now()))
        busy.append(time.process_time() - begin_busy_s)
    # on a GPU the device's own engines do the work, and the host only waits
    busy_s = 0.0 if device.type != "cpu" else min(busy[1:]) / num_bytes
    return num_bytes / min(times[1:]), busy_s
