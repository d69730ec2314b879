"""The predicted peak of a rank as `tdp plan` prints it: one line of its summary, or all kinds."""

from collections.abc import Sequence
from dataclasses import replace

from torchdistpackage.cli._common import wrap
from torchdistpackage.lazy import resolve
from torchdistpackage.plan.memory_fit import (
    RankPeak,
    fit_text,
    largest_micro_batch,
    largest_peak,
    longest_seq_len,
    memory_limit,
    needs_trace,
    recomputing,
    unpredicted_memory,
)
from torchdistpackage.plan.run_plan import Plan, StageLoad
from torchdistpackage.text import size_text, text_table

TRACED = "torchdistpackage.train.stage_trace:traced"
"""Import path of what needs torch, and for model.hf transformers."""


def peak_line(plan: Plan, loads: Sequence[StageLoad], device: str | None = None) -> str:
    """Return the peak for the summary of a plan whose memory is predicted."""
    largest, limit = largest_peak(plan, loads), memory_limit(plan, device)
    if limit is None:
        return f"{size_text(largest.peak.total)} on rank {largest.rank}"
    return fit_text(plan, largest, limit)


def memory_table(plan: Plan, device: str | None = None, *, traces: bool = True) -> str:
    """Return the peak by kind, and the longest sequence and largest micro-batch that fit.

    traces: run stages without memory where that alone shows what they keep, which takes seconds.
    """
    if traces and needs_trace(plan):
        peaks = resolve(TRACED)(plan)
        if isinstance(peaks, str):
            return wrap(f"predicted peak: {peaks}")
        plan = peaks
    if (why := unpredicted_memory(plan)) is not None:
        return wrap(f"predicted peak: {why}")
    largest_rank, limit = largest_peak(plan), memory_limit(plan, device)
    kinds = largest_rank.peak.by_kind().items()
    rows = [(kind, size_text(num_bytes)) for kind, num_bytes in kinds]
    rows.append(("in all", size_text(largest_rank.peak.total)))
    lines = [f"predicted peak of rank {largest_rank.rank}, which needs most", text_table(rows)]
    if not largest_rank.peak.is_exact:
        lines.append(
            "activations assume that all experts get as many tokens; some kernels need more"
        )
    if limit is None:
        lines.append("train.memory_gb, or a device, tells whether it fits")
        return wrap("\n".join(lines))
    lines.append(fit_text(plan, largest_rank, limit, _recomputed(plan, largest_rank, limit)))
    longest = longest_seq_len(plan, largest_rank, limit)
    largest = largest_micro_batch(plan, largest_rank, limit)
    lines.append(
        f"longest sequence that fits: {longest:,} tokens"
        if longest is not None
        else "no sequence fits, however short"
    )
    lines.append(
        f"largest micro-batch that fits: {largest} x {plan.config.data.seq_len:,} tokens"
        if largest is not None
        else "not even one sequence fits in a micro-batch"
    )
    return wrap("\n".join(lines))


def _recomputed(plan: Plan, rank_peak: RankPeak, limit: float) -> Plan | None:
    """Return the plan with the blocks computed again, where stages have to run once more for it."""
    if not plan.traced or rank_peak.peak.total <= limit or plan.config.train.recompute != "none":
        return None
    other = resolve(TRACED)(recomputing(replace(plan, traced={})))
    return None if isinstance(other, str) else other
