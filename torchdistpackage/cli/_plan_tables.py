"""The tables of `tdp plan`: ranks and groups, what each stage holds, and what a step does."""

import math
from collections.abc import Sequence
from itertools import islice

from torchdistpackage.cli._blend import sources_text
from torchdistpackage.cli._common import wrap
from torchdistpackage.cli._traffic import traffic_table
from torchdistpackage.plan.context_plan import context_text
from torchdistpackage.plan.expert_plan import expert_plan
from torchdistpackage.plan.memory import activation_budget_gb
from torchdistpackage.plan.run_plan import Plan, num_parameters, num_trained, stage_loads
from torchdistpackage.plan.start_bill import start_table
from torchdistpackage.schedule.actions import ActionKind, flatten
from torchdistpackage.text import size_text, text_table
from torchdistpackage.topology.mesh import Mesh, advice

AXES = ("pipe", "data", "context", "expert", "tensor")
"""Columns of the coordinates."""
GROUPS = ("data", "pipe", "context", "tensor", "model", "expert", "expert_data")
"""Kinds of groups, by their names in Topology."""
_ZERO = (
    "",
    "optimizer state",
    "gradients and optimizer state",
    "weights, gradients and optimizer state",
)
"""The state that is sharded, by parallel.zero."""


def all_tables(
    plan: Plan, ranks_per_node: int | None, warnings: Sequence[str], passes: Sequence[str]
) -> list[str]:
    """Return every table of a plan except those of groups and of the job."""
    parts = [
        *_goes_with(plan),
        *(wrap(f"warning: {x}") for x in warnings),
        _stages(plan),
        *passes,
        *sources_text(plan),
        *_experts(plan, ranks_per_node),
        _schedule(plan),
        *traffic_table(plan, ranks_per_node),
        *start_table(plan),
        *_checkpoints(plan),
    ]
    if (shared := context_text(plan, ranks_per_node)) is not None:
        parts.append(shared)
    if plan.config.train.recompute != "none":
        parts.append(_recompute(plan))
    if ranks_per_node is not None:
        parts.append(_placement(plan, ranks_per_node))
    return parts


def coordinates(plan: Plan, limit: int) -> str:
    shown = range(min(limit, plan.world_size))
    rows: list[Sequence[object]] = [("rank", *AXES)]
    for rank in shown:
        coord = plan.topology.expert.coord(rank) | plan.topology.dense.coord(rank)
        rows.append((rank, *(coord[axis] for axis in AXES)))
    return text_table(rows) + _more(plan.world_size - len(shown), "ranks")


def groups_text(plan: Plan, limit: int) -> str:
    lines = ["groups"]
    for name in GROUPS:
        mesh, axes = plan.topology.named(name)
        text = f"  {name:<12} {_kind(mesh, axes, limit)}"
        lines.append(wrap(text, indent=" " * 15))
    return "\n".join(lines)


def _kind(mesh: Mesh, axes: tuple[str, ...], limit: int) -> str:
    """Return how many groups there are along `axes`, and the ranks of the first of them.

    limit: most ranks to list in all.
    """
    size = mesh.axis_size(*axes)
    if size == 1:
        return "each rank alone"
    number, more = mesh.size // size, ", ..." if size > limit else ""
    shown = [
        f"[{', '.join(map(str, ranks[:limit]))}{more}]"
        for ranks in islice(mesh.groups(axes), max(limit // size, 1))
    ]
    return f"{number} of {size}: {' '.join(shown)}" + _more(number - len(shown), "groups", " ")


def _more(number: int, noun: str, prefix: str = "\n") -> str:
    return f"{prefix}... {number} more {noun} (--all lists them)" if number else ""


def _goes_with(plan: Plan) -> list[str]:
    """Return the features that work with a model of transformers without a table here."""
    rows = plan.model.goes_with() if plan.model is not None else ()
    named = plan.config.model.hf
    return [f"{named}: what works with it\n{text_table(rows)}"] if rows else []


def _stages(plan: Plan) -> str:
    if plan.shape is None:
        return f"stages: parameters are known only after {plan.config.model.target} has built them"
    loads = stage_loads(plan)
    scale, unit = (
        (2**30, "GiB") if any(x.memory.total_bytes >= 2**30 for x in loads) else (2**20, "MiB")
    )
    heads = ["weights", "gradients", "optimizer", "total"]
    if plan.has_gpus:
        heads.insert(-1, "NCCL (about)")
    memory: list[Sequence[object]] = [("pipe", "parameters", *heads)]
    stage_rows: list[Sequence[object]] = [("pipe", "compute", "stage", "modules")]
    for rank in loads:
        m = rank.memory
        parts = [m.weights_bytes, m.gradients_bytes, m.optimizer_bytes, m.total_bytes]
        if plan.has_gpus:
            parts.insert(-1, m.communicators_bytes)
        sizes = [f"{num_bytes / scale:,.3f}" for num_bytes in parts]
        memory.append((rank.index, f"{rank.num_parameters:,}", *sizes))
        first = (rank.index, f"{rank.share:.1%}")
        for stage, names in rank.stages.items():
            stage_rows.append((*first, stage, _ends(names)))
            first = ("", "")
    zero, notes = plan.config.parallel.zero, ""
    if zero:
        notes = f"\nZeRO stage {zero} shards {_ZERO[zero]}"
        if plan.zero_group is not None:
            notes += f" over {plan.zero_group} data ranks"
    if zero >= 2 and plan.config.pipeline.microbatches > 1:
        notes += ",\nand holds full gradients too while microbatches accumulate"
    number, trained = num_parameters(plan), num_trained(plan)
    total = f"{number:,} parameters"
    if trained != number:
        total += f", of which {trained:,} ({trained / number:.2%}) are trained"
    if plan.packed:
        number = sum(math.prod(plan.layouts[name].shape) for name in plan.packed)
        packing = plan.config.model.lora.packing
        assert packing is not None
        total += f" and {number:,} are held in {packing.bits} bits"
    head = f"{total}; each rank of a pipe index holds, in {unit}{notes}"
    return f"{head}\n{text_table(memory)}\n\n{text_table(stage_rows, last_left=True)}"


def _ends(names: Sequence[str]) -> str:
    return " to ".join(dict.fromkeys((*names[:1], *names[-1:]))) or "none"


def _experts(plan: Plan, ranks_per_node: int | None) -> list[str]:
    experts = expert_plan(plan)
    if experts is None:
        return []
    least, most = min(experts.on_rank), max(experts.on_rank)
    per_rank = f"{most}" if least == most else f"{least} or {most}"
    crossing = ""
    if ranks_per_node is not None:
        crossing = f"; {size_text(experts.crossing_bytes(plan, ranks_per_node))} cross nodes"
    lines = [
        f"experts            {sum(experts.on_rank)} in {experts.num_blocks} blocks, {per_rank} on "
        f"each of {len(experts.on_rank)} ranks; {experts.active_parameters:,} parameters are "
        f"active for a token",
        f"dispatch           a rank sends {size_text(experts.mean_bytes)} each way in a block and "
        f"microbatch, at most {size_text(experts.most_bytes)}{crossing}",
        f"load               {experts.mean_rows:,.0f} tokens for a rank's experts, at most "
        f"{experts.most_rows:,}",
    ]
    return [wrap("\n".join(lines), indent=" " * 19)]


def _schedule(plan: Plan) -> str:
    schedule, timeline = plan.schedule, plan.timeline
    number, samples = schedule.num_microbatches, plan.samples_per_microbatch
    chunks = max(len(schedule.stages_of(i)) for i in range(len(schedule.programs)))
    ranks = " ".join(map(str, timeline.peak_live_of_rank))
    by = "" if plan.model is None else "   (from the model's operations)"
    if plan.config.pipeline.costs is not None:
        by = f"   (from the costs in {plan.config.pipeline.costs})"
    lines = [
        f"schedule           {schedule.name}, {number} x {samples} samples on a data rank",
        f"chunks             {chunks}   (stages on a pipe rank, {schedule.num_stages} in all)",
        f"predicted bubble   {timeline.bubble:.1%}{by}",
        f"live microbatches  {' '.join(map(str, timeline.peak_live))}   (at most, by stage)",
    ]
    if chunks > 1:
        lines.append(f"                   {ranks}   (at most, of all stages of a pipe rank)")
    if any(a.kind is ActionKind.W for program in schedule.programs for a in flatten(program)):
        lines.append("                   (held until weight gradients are computed)")
    return wrap("\n".join(lines), indent=" " * 19)


def _checkpoints(plan: Plan) -> list[str]:
    """Return how often checkpoints are saved, and the host memory that asynchronous saves take."""
    section, loads = plan.config.checkpoint, stage_loads(plan)
    last = section.local_dir is not None or section.export is not None
    if not section.save_every and not section.save_every_min and not last:
        return []
    times = [f"{section.save_every} steps"] if section.save_every else []
    times += [f"{section.save_every_min:g} minutes"] if section.save_every_min else []
    times = times or [f"{plan.config.train.steps} steps"]
    manner = "between steps"
    if section.async_mode != "disabled":
        most = max((x.memory.weights_bytes + x.memory.optimizer_bytes for x in loads), default=0)
        copy = f", at most {size_text(most)} a rank" if most else ""
        where = ", where the host has room for it" if section.async_mode == "auto" else ""
        manner = f"while training goes on, from a copy in host memory{copy}{where}"
    lines = [f"checkpoints        every {' and '.join(times)}, written {manner}"]
    if section.local_dir is not None:
        size = sum(x.memory.weights_bytes + x.memory.optimizer_bytes for x in loads) / len(loads)
        # of its own ranks and of the next node's (2), two checkpoints and one that is being written
        # (3): 2 x 3 = 6
        room = f"; up to {size_text(6 * size)} there for each rank of a node" if size else ""
        lines.append(
            f"local copies       every {section.local_every} steps in {section.local_dir}, of a "
            f"node's ranks and the next node's{room}"
        )
    return [wrap("\n".join(lines), indent=" " * 19)]


def _recompute(plan: Plan) -> str:
    train, loads = plan.config.train, stage_loads(plan)
    if train.recompute == "blocks":
        return "recompute          every block, in its backward"
    if train.recompute == "offload":
        return "recompute          nothing: activations of every block wait in host memory"
    lines = ["recompute          auto: chosen from times and memory measured at the start"]
    lines.append(f"                   {train.memory_gb:g} GB in all on a rank")
    for load in loads:
        left_gb = activation_budget_gb(plan.config, load.memory, f"pipe {load.index}")
        lines.append(f"                   {left_gb:.4g} GB for activations at pipe {load.index}")
    return "\n".join(lines)


def _placement(plan: Plan, ranks_per_node: int) -> str:
    warnings = advice(plan.topology.dense, ranks_per_node)
    if not warnings:
        return f"placement: tensor and context groups stay inside nodes of {ranks_per_node} ranks"
    return "\n".join(wrap(f"warning: {text}") for text in warnings)
