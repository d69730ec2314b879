"""Whether a run fits in the memory of its devices, and what would. No torch.

A peak is asked of the ranks of three pipe indices: the first, whose stage holds most micro-batches,
the last, which has the logits, and the one with the most weights and state.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import Any

from torchdistpackage.environment.gpu_sharing import memory_fraction
from torchdistpackage.models.gpt_layout import GPTShape
from torchdistpackage.models.transformers_layout import TransformersShape
from torchdistpackage.plan.peak import PeakMemory, flat_memory, peak_memory
from torchdistpackage.plan.run_plan import Plan, StageLoad, stage_loads
from torchdistpackage.plan.step_time import device_of
from torchdistpackage.text import size_text


@dataclass(frozen=True, slots=True)
class RankPeak:
    """The rank with the largest peak among those that were asked."""

    rank: int
    peak: PeakMemory


def unpredicted_memory(plan: Plan) -> str | None:
    """Return why the peak of this plan is not predicted, or None."""
    if plan.model is None:
        return "activations are not counted for a model of your own"
    if needs_trace(plan):
        return "--memory counts activations too"
    if not isinstance(plan.shape, GPTShape) and not _is_traced(plan):
        return (
            "activations of model.hf are not counted for tensor, context or expert ranks or 4 bits"
        )
    if plan.config.data.is_preference:
        return "activations are not counted for pairs of answers, whose reference runs besides"
    if plan.config.data.is_embedding:
        return "activations are not counted for texts to compare"
    if plan.teacher is not None:
        return "activations are not counted for a run whose teacher runs besides"
    if plan.config.data.head is not None:
        return "activations are not counted for a head in place of that for the next token"
    if plan.config.model.loss is not None:
        return f"activations are not counted, as {plan.config.model.loss} may keep any"
    if plan.config.train.recompute == "offload":
        return "activations that wait in host memory are not counted (train.recompute: offload)"
    if plan.config.train.recompute == "auto":
        return "activations take what train.memory_gb leaves (train.recompute: auto)"
    return None


def needs_trace(plan: Plan) -> bool:
    """Return whether a trace (models/kept_trace.py) can state what the layers of this plan keep."""
    size = plan.topology.dense.axis_size
    is_split = max(size("tensor"), size("context"), plan.config.parallel.expert) > 1
    is_plain = isinstance(plan.shape, TransformersShape) and not is_split and not plan.packed
    return is_plain and not _is_traced(plan)


def _is_traced(plan: Plan) -> bool:
    return "lines" in getattr(plan.model, "__dict__", {})


def largest_peak(
    plan: Plan, loads: Sequence[StageLoad] = (), *, on_gpu: bool | None = None
) -> RankPeak:
    """Return the rank that needs most, of a plan for which `unpredicted_memory` has no reason.

    loads: its `stage_loads`, where they are known. on_gpu: as in `peak_memory`.
    """
    loads = loads or stage_loads(plan)
    largest = max(loads, key=lambda load: load.memory.total_bytes).index
    mesh = plan.topology.dense
    ranks = [mesh.rank({"pipe": i}) for i in sorted({0, largest, len(loads) - 1})]
    peaks = [RankPeak(rank, peak_memory(plan, rank, on_gpu=on_gpu)) for rank in ranks]
    return max(peaks, key=lambda each: each.peak.total)


def memory_limit(plan: Plan, device: str | None = None) -> float | None:
    """Return the bytes that a rank may use: train.memory_gb, else all of its device, or its part of
    one that several ranks share; None where neither is known. device: as `device_of` takes it.
    """
    if (limit_gb := plan.config.train.memory_gb) is not None:
        return limit_gb * 1e9
    found = device_of(plan.config, device)
    if found is None or found.is_host:
        return None
    return found.memory_bytes * memory_fraction(plan.ranks_per_gpu)


def fit_text(plan: Plan, found: RankPeak, limit: float) -> str:
    """Return whether a rank fits, and how much recomputation would need if it does not."""
    need = found.peak.total
    sizes = f"{size_text(need)} of {size_text(limit)} on rank {found.rank}"
    if need <= limit:
        return f"fits: {sizes}"
    if plan.config.train.recompute != "none":
        return f"does not fit: needs {sizes}"
    fewer = peak_memory(_recomputing(plan), found.rank).total
    return f"does not fit: needs {sizes}; train.recompute: blocks would need {size_text(fewer)}"


def _recomputing(plan: Plan) -> Plan:
    config = plan.config
    train = config.train.model_copy(update={"recompute": "blocks"})
    return replace(plan, config=config.model_copy(update={"train": train}))


def longest_seq_len(plan: Plan, found: RankPeak, limit: float) -> int | None:
    """Return the most tokens of a sequence with which the rank fits, all else as it is; None where
    one step of the split does not fit.
    """
    size = plan.topology.dense.axis_size
    step = lcm(2 * size("context"), size("tensor"))
    shape: Any = plan.shape
    step *= max(shape.seq_len // (64 * step), 1)

    flat = flat_memory(plan, found.rank)

    def needs(number: int) -> float:
        longer = _with_seq_len(plan, number * step)
        return peak_memory(longer, found.rank, flat=flat).total

    return _most(needs, limit, step)


def largest_micro_batch(plan: Plan, found: RankPeak, limit: float) -> int | None:
    """Return the most sequences of a micro-batch with which the rank fits, their number as it is;
    None where one does not fit.
    """
    batch = plan.config.data.global_batch // plan.samples_per_microbatch

    flat = flat_memory(plan, found.rank)

    def needs(number: int) -> float:
        data = plan.config.data.model_copy(update={"global_batch": number * batch})
        changed = replace(plan, config=plan.config.model_copy(update={"data": data}))
        return peak_memory(changed, found.rank, flat=flat).total

    return _most(needs, limit, 1)


def _with_seq_len(plan: Plan, seq_len: int) -> Plan:
    model: Any = plan.model
    return replace(plan, model=replace(model, shape=replace(model.shape, seq_len=seq_len)))


def _most(needs: Callable[[int], float], limit: float, unit: int) -> int | None:
    """Return the largest number that needs no more than the limit, times the unit."""
    low, high = 0, 1
    while high < 1 << 24 and needs(high) <= limit:
        low, high = high, 2 * high
    while high - low > max(low // 64, 1):  # of a large number the first digits
        middle = (low + high) // 2
        low, high = (middle, high) if needs(middle) <= limit else (low, middle)
    return low * unit if low else None
