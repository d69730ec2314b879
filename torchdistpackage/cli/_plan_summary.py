"""The summary of `tdp plan`: one line for each question, at most 30 lines in all."""

from collections.abc import Sequence

from torchdistpackage.cli._common import wrap
from torchdistpackage.cli._memory import peak_line
from torchdistpackage.config.job_geometry import JobGeometry
from torchdistpackage.plan.expert_plan import expert_plan
from torchdistpackage.plan.memory_fit import unpredicted_memory
from torchdistpackage.plan.run_plan import Plan, num_parameters, num_trained, stage_loads
from torchdistpackage.plan.traffic import between_nodes, busiest, uncounted
from torchdistpackage.text import size_text
from torchdistpackage.topology.mesh import describe

_SHOWN = 4
"""Most items of one kind that are shown, such as warnings or data sources."""
_STAGES = 16
"""Most stages whose live microbatches are shown."""
_WIDTH = 19
"""Columns of the labels."""


def summary(
    plan: Plan,
    shape: JobGeometry | None,
    warnings: Sequence[str],
    passes: Sequence[str],
    time: str | None = None,
    ranks_per_node: int | None = None,
    device: str | None = None,
) -> str:
    """Return the layout, memory, schedule, communication and job of a run.

    Args:
        shape: nodes and tasks of the Slurm job; None if the run is not a job.
        warnings: sentences, of which the first few are shown.
        passes: lines about the epochs of the run.
        time: the predicted step, if a device is named.
        ranks_per_node: tells apart the bytes between nodes.
        device: whose memory limits a rank, if not that of the job.
    """
    lines = [
        *_memory(plan, device),
        *_teacher(plan),
        *_schedule(plan),
        *_bytes(plan, ranks_per_node),
        *(() if time is None else (("step time", time),)),
        *_features(plan),
        *(("data", text) for text in passes),
        *_data(plan),
        *_saves(plan),
        *_job(shape),
        *(("warning", text) for text in warnings[:_SHOWN]),
    ]
    if (num_hidden := len(warnings) - _SHOWN) > 0:
        lines.append(("warning", f"{num_hidden} more (--all shows them)"))
    options = "--groups, --bytes, --memory, --sbatch, or --all for all"
    lines.append(("details", options))
    return "\n".join(wrap(f"{label:<{_WIDTH}}{text}", indent=" " * _WIDTH) for label, text in lines)


def _teacher(plan: Plan) -> list[tuple[str, str]]:
    if plan.teacher is None:
        return []
    sharded = ", ZeRO stage 3" if plan.config.train.distill.teacher_zero else ""
    degrees = describe(plan.teacher.topology.dense.axes)
    return [("teacher", f"{num_parameters(plan.teacher):,} parameters on {degrees}{sharded}")]


def _memory(plan: Plan, device: str | None) -> list[tuple[str, str]]:
    if plan.shape is None:
        text = f"parameters are known only after {plan.config.model.target} has built the model"
        return [("memory", f"{text}; --memory builds it without memory")]
    number, trained = num_parameters(plan), num_trained(plan)
    some = "" if trained == number else f", of which {trained:,} are trained"
    loads = stage_loads(plan)
    most = max(loads, key=lambda load: load.memory.total_bytes)
    where = f" (pipe {most.index}, the largest)" if len(loads) > 1 else ""
    zero = plan.config.parallel.zero
    over = f" over {plan.zero_group} data ranks" if plan.zero_group is not None else ""
    sharded = f"; ZeRO stage {zero}{over}" if zero else ""
    kinds = ("weights", "gradients", "optimizer")
    parts = ", ".join(
        f"{kind} {size_text(getattr(most.memory, f'{kind}_bytes'))}" for kind in kinds
    )
    if most.memory.communicators_bytes:
        parts += f", NCCL's communicators about {size_text(most.memory.communicators_bytes)}"
    total = size_text(most.memory.total_bytes)
    lines = [("parameters", f"{number:,}{some}")]
    if (why := unpredicted_memory(plan)) is not None:
        return [*lines, ("memory of a rank", f"{total}{where}: {parts}{sharded}; {why}")]
    lines.append(("memory of a rank", f"{total}{where}: {parts}{sharded}"))
    return [*lines, ("predicted peak", peak_line(plan, loads, device))]


def _schedule(plan: Plan) -> list[tuple[str, str]]:
    schedule, timeline = plan.schedule, plan.timeline
    samples = f"{schedule.num_microbatches} x {plan.samples_per_microbatch} samples on a data rank"
    lines = [("schedule", f"{schedule.name}, {samples}")]
    if schedule.num_stages > 1:
        more = ", ..." if len(timeline.peak_live) > _STAGES else ""
        live = " ".join(map(str, timeline.peak_live[:_STAGES])) + more
        lines.append(("predicted bubble", f"{timeline.bubble:.1%}"))
        lines.append(("live microbatches", f"{live}   (at most, by stage)"))
    return lines


def _bytes(plan: Plan, ranks_per_node: int | None) -> list[tuple[str, str]]:
    if plan.world_size == 1:
        return []
    if (why := uncounted(plan)) is not None:
        return [("bytes of a step", why)]
    rank, calls = busiest(plan)
    sent = {
        axis: sum(x.num_bytes for x in calls if x.axis == axis)
        for axis in dict.fromkeys(x.axis for x in calls)
    }
    largest = sorted(sent, key=lambda axis: -sent[axis])[:_SHOWN]
    text = ", ".join(f"{axis} {size_text(sent[axis])}" for axis in largest)
    lines = [("bytes of a step", f"{text} (communicated by rank {rank}, the busiest)")]
    if ranks_per_node is not None and ranks_per_node < plan.world_size:
        outside = between_nodes(calls, ranks_per_node)
        inside = sum(x.num_bytes for x in calls) - outside
        text = f"{size_text(inside)} inside nodes, {size_text(outside)} between nodes"
        lines.append(("by nodes", f"{text} of {ranks_per_node} ranks"))
    return lines


def _features(plan: Plan) -> list[tuple[str, str]]:
    """Return the lines about experts and recomputation, if the run has them."""
    lines: list[tuple[str, str]] = []
    if (experts := expert_plan(plan)) is not None:
        least, most = min(experts.on_rank), max(experts.on_rank)
        per_rank = f"{most}" if least == most else f"{least} or {most}"
        text = f"{sum(experts.on_rank)} in {experts.num_blocks} blocks, {per_rank} on each rank"
        sent = size_text(experts.mean_bytes)
        lines.append(("experts", f"{text}; a rank sends {sent} each way in a block and microbatch"))
    train = plan.config.train
    if train.recompute != "none":
        limit = f" within {train.memory_gb:g} GB" if train.recompute == "auto" else ""
        lines.append(("recompute", f"{train.recompute}{limit}"))
    return lines


def _data(plan: Plan) -> list[tuple[str, str]]:
    blend = plan.config.data.blend
    if not blend:
        return []
    total = sum(each.weight for each in blend)
    shares = [f"{each.label} {each.weight / total:.1%}" for each in blend[:_SHOWN]]
    more = f", and {len(blend) - _SHOWN} more" if len(blend) > _SHOWN else ""
    return [("data", f"{len(blend)} sources: {', '.join(shares)}{more}")]


def _saves(plan: Plan) -> list[tuple[str, str]]:
    section = plan.config.checkpoint
    times = [f"{section.save_every} steps"] if section.save_every else []
    times += [f"{section.save_every_min:g} minutes"] if section.save_every_min else []
    if not times and section.export is not None:
        return [("checkpoints", "after the last step")]
    return [("checkpoints", f"every {' and '.join(times)}")] if times else []


def _job(shape: JobGeometry | None) -> list[tuple[str, str]]:
    if shape is None:
        return []
    return [("job", f"{shape}; --sbatch prints its batch script")]
