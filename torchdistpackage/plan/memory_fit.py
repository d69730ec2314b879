"""Decide whether a run fits into the memory of its devices, and find changes that would make it
fit. No torch.

Three pipe indices have candidates for the largest peak: the first, whose stage holds most
micro-batches, the last, which has the logits, and the one with the most weights and state.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import Any, cast

from torchdistpackage.environment.gpu_sharing import memory_fraction
from torchdistpackage.models.gpt_layout import GPTShape
from torchdistpackage.plan.memory import MemoryEstimate
from torchdistpackage.plan.peak import PeakMemory, flat_memory, peak_memory
from torchdistpackage.plan.run_plan import Plan, StageLoad, splits_backward, stage_loads
from torchdistpackage.plan.step_time import device_of
from torchdistpackage.text import size_text


@dataclass(frozen=True, slots=True)
class RankPeak:
    """The rank with the largest peak among the examined ones."""

    rank: int
    peak: PeakMemory


def unpredicted_memory(plan: Plan) -> str | None:
    """Return why the peak of this plan is not predicted, or None."""
    train = plan.config.train
    if train.distill.is_on:
        return "activations are not counted for a run with a teacher (train.distill)"
    if train.recompute == "offload" and (plan.traced or needs_trace(plan)):
        return (
            "activations that wait in host memory are counted only of our models without a task "
            "(train.recompute: offload)"
        )
    if train.recompute == "offload" and splits_backward(plan.schedule.programs):
        return (
            "activations that wait in host memory are not counted where "
            f"pipeline.schedule={plan.config.pipeline.schedule} splits backwards"
        )
    is_auto = train.recompute == "auto"
    if is_auto and (plan.traced or needs_trace(plan)):
        return "activations take what train.memory_gb leaves (train.recompute: auto)"
    return "--memory counts activations too" if needs_trace(plan) else None


def needs_trace(plan: Plan) -> bool:
    """Return whether stages must run on fake tensors (train/stage_trace.py) to show what they keep.

    These are stages of transformers or of a user's own model, and any stage with the loss of a task
    or a user's loss."""
    if plan.traced:
        return False
    data, is_ours = plan.config.data, isinstance(plan.shape, GPTShape)
    has_task = data.spec is not None and bool(data.spec.task)
    return not is_ours or has_task or plan.config.model.loss is not None


def asked_places(plan: Plan, loads: Sequence[StageLoad] = ()) -> list[int]:
    """Return the pipe indices whose peak is examined: those that may need most, or all for a user's
    own model.

    loads: the `stage_loads` of the plan, if known.
    """
    if plan.model is None:
        return [*range(len(plan.schedule.programs))]
    loads = loads or stage_loads(plan)
    largest = max(loads, key=lambda load: load.memory.total_bytes).index
    return sorted({0, largest, len(loads) - 1})


def largest_peak(
    plan: Plan, loads: Sequence[StageLoad] = (), *, on_gpu: bool | None = None
) -> RankPeak:
    """Return the rank that needs most, for a plan without a reason in `unpredicted_memory`.

    loads: as in `asked_places`. on_gpu: as in `peak_memory`.
    """
    mesh = plan.topology.dense
    ranks = [mesh.rank({"pipe": i}) for i in asked_places(plan, loads)]
    peaks = [RankPeak(rank, rank_peak(plan, rank, on_gpu=on_gpu)) for rank in ranks]
    return max(peaks, key=lambda each: each.peak.total)


def rank_peak(
    plan: Plan,
    rank: int,
    *,
    on_gpu: bool | None = None,
    flat: tuple[MemoryEstimate, float] | None = None,
) -> PeakMemory:
    """Return the `peak_memory` of a rank.

    With `train.recompute: auto` activations take the most that the run allows: what train.memory_gb
    leaves beside the state, but no less than blocks take."""
    flat = flat or flat_memory(plan, rank)
    peak = peak_memory(plan, rank, on_gpu=on_gpu, flat=flat)
    train = plan.config.train
    if train.recompute != "auto" or train.memory_gb is None:
        return peak
    fewest = peak_memory(recomputing(plan), rank, on_gpu=on_gpu, flat=flat)
    free_bytes = train.memory_gb * 1e9 - flat[0].state_bytes - peak.communicators - peak.loss
    activations = min(peak.activations, max(free_bytes, fewest.activations))
    return replace(peak, activations=activations, is_exact=False)


def memory_limit(plan: Plan, device: str | None = None) -> float | None:
    """Return the bytes that a rank may use, or None if unknown.

    They are train.memory_gb, else all of its device, or its fraction of a shared one. device: in
    the form of `device_of`.
    """
    if (limit_gb := plan.config.train.memory_gb) is not None:
        return limit_gb * 1e9
    accelerator = device_of(plan.config, device)
    if accelerator is None or accelerator.is_host:
        return None
    return accelerator.memory_bytes * memory_fraction(plan.ranks_per_gpu)


def fit_text(plan: Plan, predicted: RankPeak, limit: float, recomputed: Plan | None = None) -> str:
    """Return a text that says whether a rank fits, and how much recomputation would need if it does
    not.

    recomputed: the traced plan with recomputed blocks; None: as their layers state it.
    """
    need = predicted.peak.total
    sizes = f"{size_text(need)} of {size_text(limit)} on rank {predicted.rank}"
    if need <= limit:
        return f"fits: {sizes}"
    if plan.config.train.recompute != "none" or (plan.traced and recomputed is None):
        return f"does not fit: needs {sizes}"
    fewer = peak_memory(recomputed or recomputing(plan), predicted.rank).total
    return f"does not fit: needs {sizes}; train.recompute: blocks would need {size_text(fewer)}"


def recomputing(plan: Plan) -> Plan:
    """Return the plan with `train.recompute: blocks`."""
    config = plan.config
    train = config.train.model_copy(update={"recompute": "blocks"})
    return replace(plan, config=config.model_copy(update={"train": train}))


def longest_seq_len(plan: Plan, predicted: RankPeak, limit: float) -> int | None:
    """Return the longest sequence in tokens with which the rank fits, all else equal; None if one
    step of the split does not fit.
    """
    size = plan.topology.dense.axis_size
    step = lcm(2 * size("context"), size("tensor"))
    step *= max(plan.config.data.seq_len // (64 * step), 1)

    flat = flat_memory(plan, predicted.rank)

    def needs(number: int) -> float:
        longer = _with_seq_len(plan, number * step)
        return rank_peak(longer, predicted.rank, flat=flat).total

    return _most(needs, limit, step)


def largest_micro_batch(plan: Plan, predicted: RankPeak, limit: float) -> int | None:
    """Return the largest micro-batch with which the rank fits, with the same number of
    micro-batches; None if one sequence does not fit.
    """
    batch = plan.config.data.global_batch // plan.samples_per_microbatch

    flat = flat_memory(plan, predicted.rank)

    def needs(number: int) -> float:
        data = plan.config.data.model_copy(update={"global_batch": number * batch})
        changed = replace(plan, config=plan.config.model_copy(update={"data": data}))
        return rank_peak(changed, predicted.rank, flat=flat).total

    return _most(needs, limit, 1)


def _with_seq_len(plan: Plan, seq_len: int) -> Plan:
    config, model = plan.config, cast(Any, plan.model)
    data = config.data.model_copy(update={"seq_len": seq_len})
    plan = replace(plan, config=config.model_copy(update={"data": data}))
    if model is None:
        return plan
    return replace(plan, model=replace(model, shape=replace(model.shape, seq_len=seq_len)))


def _most(needs: Callable[[int], float], limit: float, unit: int) -> int | None:
    """Return the largest number whose need is within the limit, times the unit."""
    low, high = 0, 1
    while high < 1 << 24 and needs(high) <= limit:
        low, high = high, 2 * high
    while high - low > max(low // 64, 1):  # of a large number the first digits
        middle = (low + high) // 2
        low, high = (middle, high) if needs(middle) <= limit else (low, middle)
    return low * unit if low else None
