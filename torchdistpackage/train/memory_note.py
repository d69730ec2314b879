"""List the memory of a rank that ran out of it, by kind, beside the plan's prediction."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

import torch
from torch import Tensor

from torchdistpackage.ddp.sharded import ShardedOptimizer
from torchdistpackage.plan.memory_fit import needs_trace, unpredicted_memory
from torchdistpackage.plan.peak import PeakMemory, flat_memory, peak_memory
from torchdistpackage.plan.run_plan import Plan
from torchdistpackage.text import size_text, text_table
from torchdistpackage.tools.activations import storages_of
from torchdistpackage.train.stage_trace import traced
from torchdistpackage.train.step import Trainer

_ON_HOST = "can't allocate memory"
"""Substring of the RuntimeError that torch's CPU allocator raises when it gives up."""


@contextmanager
def noting_memory(trainer: Trainer) -> Iterator[None]:
    """Add the table of `memory_note` to an exception that says that memory ran out."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            # the end of the rank is reported even if there is no memory left to count in
            with suppress(RuntimeError, MemoryError):
                error.add_note(memory_note(trainer))
        raise


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether torch could not allocate a tensor, or Python an object."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or _ON_HOST in str(error)


def memory_note(trainer: Trainer) -> str:
    """Return a table of predicted and actual bytes by kind, and what to change."""
    plan, rank = trainer.plan, trainer.rank
    actual = actual_bytes(trainer)
    predicted = _predicted(plan, rank, on_gpu=trainer.device.type == "cuda")
    rows = [("memory of this rank", "predicted", "actual")]
    for kind in dict.fromkeys((*predicted, *actual)):
        pair = (predicted.get(kind), actual.get(kind))
        sizes = ["" if x is None else size_text(x) for x in pair]
        rows.append((kind, sizes[0], sizes[1]))
    advice = (
        "recompute activations (train.recompute: blocks) or keep them on the host (offload), split "
        "further (parallel.tensor, parallel.zero) or take smaller micro-batches; tdp plan --memory "
        "says what fits"
    )
    return f"{text_table(rows)}\n{advice}"


def actual_bytes(trainer: Trainer) -> dict[str, int]:
    """Return the bytes that this rank holds, each storage once.

    Anything outside the model and its optimizer is activations and other tensors, which only a
    GPU's allocator counts.
    """
    parameters, inner = [*trainer.stage.parameters()], trainer.update.inner
    weights: list[Tensor] = [*parameters, *trainer.stage.buffers()]
    gradients = [x.grad for x in parameters if x.grad is not None]
    gradients += [x.gradients.flat for x in trainer.reducer.grad_buckets.bucket_comms]
    optimizer: list[Tensor] = []
    if isinstance(trainer.optimizer, ShardedOptimizer):
        shards = [shard.tensor for shard in trainer.optimizer.shards]
        gradients += [x.grad for x in shards if x.grad is not None]
        optimizer += shards
    states = () if inner is None else inner.state.values()
    optimizer += [x for state in states for x in state.values() if isinstance(x, Tensor)]
    seen = set[int]()
    bytes_of = {
        "weights": _new_bytes(weights, seen),
        "gradients": _new_bytes(gradients, seen),
        "optimizer state": _new_bytes(optimizer, seen),
    }
    if trainer.device.type == "cuda":
        # the most, since an exception on its way here has let go of a step's activations
        allocated = torch.cuda.max_memory_allocated(trainer.device)
        bytes_of["activations and other tensors"] = allocated - sum(bytes_of.values())
        bytes_of["allocator"] = torch.cuda.max_memory_reserved(trainer.device) - allocated
    return bytes_of


def _predicted(plan: Plan, rank: int, *, on_gpu: bool) -> dict[str, float]:
    """Return the predicted bytes under the kinds that a rank can count."""
    if needs_trace(plan):
        pipe_index = plan.topology.dense.coord(rank)["pipe"]
        trace = traced(plan, (0, pipe_index) if pipe_index else (0,))
        plan = plan if isinstance(trace, str) else trace
    if not plan.layouts:
        return {}
    if unpredicted_memory(plan) is not None:
        state, buckets = flat_memory(plan, rank)
        weights, gradients = state.weights_bytes, state.gradients_bytes
        return _kinds(weights, gradients, state.optimizer_bytes, buckets)
    peak: PeakMemory = peak_memory(plan, rank, on_gpu=on_gpu)
    kinds = _kinds(peak.weights, peak.gradients, peak.optimizer, peak.buckets)
    moving = peak.activations + peak.loss + peak.temporary + peak.messages
    return kinds | {"activations and other tensors": moving, "allocator": peak.allocator}


def _kinds(weights: float, gradients: float, optimizer: float, buckets: float) -> dict[str, float]:
    return {
        "weights": weights,
        "gradients": gradients,
        "optimizer state": optimizer,
        "buckets and gathered parameters": buckets,
    }


def _new_bytes(tensors: Iterable[Tensor], counted: set[int]) -> int:
    """Return the bytes of storages that are not in `counted`, and add them to it."""
    total = 0
    for storage in storages_of(tensors):
        if storage._cdata not in counted:
            counted.add(storage._cdata)
            total += storage.nbytes()
    return total
