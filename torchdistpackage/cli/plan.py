"""`tdp plan`: the layout, memory and schedule of a run, before it is queued."""

import math
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from torchdistpackage.cli._blend import sources_text, with_known_steps
from torchdistpackage.cli._common import Config, Overrides, World, text_table, wrap
from torchdistpackage.config.check import absent_files, wrong_files
from torchdistpackage.config.errors import ConfigErrors
from torchdistpackage.config.hugging_face import FILE as CONFIG
from torchdistpackage.config.job_geometry import JobGeometry
from torchdistpackage.config.load import load
from torchdistpackage.config.schema import RunConfig
from torchdistpackage.errors import ConfigError
from torchdistpackage.lazy import resolve
from torchdistpackage.report.placement import placement_svg
from torchdistpackage.schedule.actions import ActionKind, flatten
from torchdistpackage.topology.mesh import Mesh, advice, describe
from torchdistpackage.train.context_plan import context_text
from torchdistpackage.train.expert_plan import expert_plan
from torchdistpackage.train.memory import activation_budget_gb
from torchdistpackage.train.plan import (
    Plan,
    local_procs,
    make_plan,
    num_parameters,
    num_trained,
    stage_loads,
    too_long,
)

SPLIT = "torchdistpackage.parallel.auto.plan_text:split_table"
JOB_SHAPE, PREVIEW = (f"torchdistpackage.launch.slurm.job:{x}" for x in ("job_shape", "preview"))
RENDER = "torchdistpackage.launch.slurm.script:render"
WRITE = "torchdistpackage.launch.files:atomic_write"
READ_PROFILE = "torchdistpackage.harness.bench.profile:read"
ESTIMATES = "torchdistpackage.train.estimate:estimates"
TIMELINE = "torchdistpackage.train.estimate:timeline_with_messages"
ELASTIC, CHECK_NODES = (f"torchdistpackage.train.elastic:{x}" for x in ("fitted", "check_nodes"))
TABLE = "torchdistpackage.cli._elastic:elastic_table"
TRAFFIC = "torchdistpackage.cli._traffic:traffic_table"
"""What few plans show is loaded for these alone."""
AXES = ("pipe", "data", "context", "expert", "tensor")
"""Columns of the coordinates."""
GROUPS = ("data", "pipe", "context", "tensor", "model", "expert", "expert_data")
"""Kinds of groups, by the names that Topology knows."""
LIMIT = 64
"""Ranks listed in each part, without --all."""
_ZERO = (
    "",
    "optimizer state",
    "gradients and optimizer state",
    "weights, gradients and optimizer state",
)
"""What is sharded, by parallel.zero."""
_BYTES = ("weights", "gradients", "optimizer", "total")
_SHOWN = 8
"""Counts of nodes named, where there is a choice."""


def plan(
    config: Config,
    overrides: Overrides = None,
    world: World = None,
    ranks_per_node: Annotated[
        int | None,
        typer.Option(metavar="K", min=1, help="Warn about groups that span nodes of K ranks."),
    ] = None,
    show_all: Annotated[
        bool, typer.Option("--all", help=f"List every rank, not the first {LIMIT}.")
    ] = False,
    sbatch: Annotated[
        bool, typer.Option("--sbatch", help="Print the batch script; implied by launch.slurm.")
    ] = False,
    profile: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Estimate communication times from a profile of tdp comm bench."
        ),
    ] = None,
    tensor: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Split the Hugging Face model in folder CONFIG over N shards."
        ),
    ] = None,
    seq_len: Annotated[
        int, typer.Option(metavar="L", min=1, help="With --tensor, tokens of a forward.")
    ] = 128,
    forward_s: Annotated[
        float | None,
        typer.Option(
            metavar="S",
            min=0,
            help="Seconds of a microbatch's forward on a stage; needs --profile.",
        ),
    ] = None,
    nodes: Annotated[
        str | None,
        typer.Option(
            metavar="A..B", help="Show the degrees of the same training on A to B nodes instead."
        ),
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw the ranks on their nodes, by group (SVG)."),
    ] = None,
) -> None:
    """Show a run's layout, memory, schedule and batch script.

    Needs no GPU. An invalid configuration is refused with all its errors at once.
    """
    if forward_s is not None and profile is None:
        raise typer.BadParameter(
            "needs --profile, which has the times of messages", param_hint="--forward-s"
        )
    if nodes is not None:
        typer.echo(resolve(TABLE)(config, load(config, overrides or []), nodes, ranks_per_node))
        return
    if tensor is not None:
        if overrides or world or ranks_per_node or sbatch or profile or picture:
            raise typer.BadParameter(
                "a model alone takes --seq-len and --all only", param_hint="--tensor"
            )
        typer.echo(resolve(SPLIT)(Path(config), tensor, seq_len, show_all))
        return
    if (Path(config) / CONFIG).is_file() or config.endswith(".json"):
        raise typer.BadParameter("a model needs the number of shards", param_hint="--tensor")
    cluster = None if profile is None else resolve(READ_PROFILE)(profile)
    run = load(config, overrides or [], world, job=sbatch or None)
    is_job = sbatch or bool(run.launch.slurm)
    shape = resolve(JOB_SHAPE)(run) if is_job and (world is None or sbatch) else None
    if shape is not None and world is None:
        world, ranks_per_node = shape.world_sizes[0], ranks_per_node or shape.tasks_per_node
    if shape is not None and run.launch.elastic.nodes is not None:
        resolve(CHECK_NODES)(run, shape, config)
    world = world or local_procs(run)
    run, passes = with_known_steps(run)
    planned = make_plan(_fitted(run, world, config), world, config)
    if wrong := wrong_files(run):
        raise ConfigErrors(config, wrong)
    limit = planned.world_size if show_all else LIMIT
    mesh = describe(planned.topology.dense.axes)
    warnings = [x for x in (too_long(planned),) if x is not None]
    # A plan is made on any machine; only those that start or queue a run refuse what is absent.
    warnings += [f"{x}; tdp train and tdp submit refuse it" for x in absent_files(run)]
    parts = [
        f"{run.run.name} on {planned.world_size} ranks\n{mesh}, outermost first",
        _coordinates(planned, limit),
        _groups(planned, limit),
        *_goes_with(planned),
        *(wrap(f"warning: {x}") for x in warnings),
        _stages(planned),
        *passes,
        *sources_text(planned),
        *_experts(planned, ranks_per_node),
        _schedule(planned),
        *resolve(TRAFFIC)(planned),
        *_checkpoints(planned),
    ]
    if (shared := context_text(planned, ranks_per_node)) is not None:
        parts.append(shared)
    if run.train.recompute != "none":
        parts.append(_recompute(planned))
    if cluster is not None:
        parts.append(_communication(planned, cluster, ranks_per_node, forward_s))
    if ranks_per_node is not None:
        parts.append(_placement(planned, ranks_per_node))
    if shape is not None:
        if run.launch.elastic.nodes is not None:
            parts.append(
                resolve(TABLE)(config, run, "{}..{}".format(*run.launch.elastic.nodes), None)
            )
        parts.append(_script(run, shape))
    if picture is not None:
        parts.append(_draw(planned, ranks_per_node or planned.world_size, picture))
    typer.echo("\n\n".join(parts))


def _fitted(run: RunConfig, world_size: int, source: str) -> RunConfig:
    return run if run.launch.elastic.nodes is None else resolve(ELASTIC)(run, world_size, source)


def _draw(plan: Plan, ranks_per_node: int, path: Path) -> str:
    """Write the ranks on their nodes as a picture; what to say of it."""
    meshes = [(axis, plan.topology.named(axis)[0]) for axis in AXES]
    try:
        path.parent.stat()  # as tdp comm bench, it makes no folder of a mistyped name
        resolve(WRITE)(path, placement_svg(plan.config.run.name, meshes, ranks_per_node))
    except OSError as error:
        raise ConfigError(
            f"--picture {path} cannot be written: {error.strerror}; name a file in a folder that "
            f"exists and is yours"
        ) from error
    return f"wrote {path}"


def _coordinates(plan: Plan, limit: int) -> str:
    shown = range(min(limit, plan.world_size))
    rows: list[Sequence[object]] = [("rank", *AXES)]
    for rank in shown:
        coord = plan.topology.expert.coord(rank) | plan.topology.dense.coord(rank)
        rows.append((rank, *(coord[axis] for axis in AXES)))
    return text_table(rows) + _more(plan.world_size - len(shown), "ranks")


def _groups(plan: Plan, limit: int) -> str:
    lines = ["groups"]
    for name in GROUPS:
        mesh, axes = plan.topology.named(name)
        text = f"  {name:<12} {_kind(mesh, axes, limit)}"
        lines.append(wrap(text, indent=" " * 15))
    return "\n".join(lines)


def _kind(mesh: Mesh, axes: tuple[str, ...], limit: int) -> str:
    """All groups along `axes`: how many, and the ranks of as many as make up `limit` ranks."""
    size = mesh.axis_size(*axes)
    if size == 1:
        return "each rank alone"
    number, more = mesh.size // size, ", ..." if size > limit else ""
    shown = [
        f"[{', '.join(map(str, ranks[:limit]))}{more}]"
        for ranks in islice(mesh.groups(axes), max(limit // size, 1))
    ]
    return f"{number} of {size}: {' '.join(shown)}" + _more(number - len(shown), "groups", " ")


def _more(number: int, what: str, before: str = "\n") -> str:
    return f"{before}... {number} more {what} (--all lists them)" if number else ""


def _goes_with(plan: Plan) -> list[str]:
    """What goes with a model whose modules are not ours."""
    rows = plan.model.goes_with() if plan.model is not None else ()
    named = plan.config.model.hf
    return [f"{named}: what it goes with\n{text_table(rows)}"] if rows else []


def _stages(plan: Plan) -> str:
    if plan.shape is None:
        return f"stages: their parameters are known once {plan.config.model.target} has built them"
    loads = stage_loads(plan)
    scale, unit = (1e9, "GB") if any(x.memory.state_bytes >= 1e9 for x in loads) else (1e6, "MB")
    memory: list[Sequence[object]] = [("pipe", "parameters", *_BYTES)]
    held: list[Sequence[object]] = [("pipe", "compute", "stage", "modules")]
    for rank in loads:
        m = rank.memory
        parts = (m.weights_bytes, m.gradients_bytes, m.optimizer_bytes, m.state_bytes)
        sizes = [f"{num_bytes / scale:,.3f}" for num_bytes in parts]
        memory.append((rank.index, f"{rank.num_parameters:,}", *sizes))
        first = (rank.index, f"{rank.share:.1%}")
        for stage, names in rank.stages.items():
            held.append((*first, stage, _ends(names)))
            first = ("", "")
    zero, notes = plan.config.parallel.zero, ""
    if zero:
        notes = f"\nZeRO stage {zero} shards {_ZERO[zero]}"
    if zero >= 2 and plan.config.pipeline.microbatches > 1:
        notes += ",\nand holds full gradients too while microbatches accumulate"
    number, trained = num_parameters(plan), num_trained(plan)
    total = f"{number:,} parameters"
    if trained != number:
        total += f", of which {trained:,} ({trained / number:.2%}) are trained"
    if plan.packed:
        in_4_bits = sum(math.prod(plan.layouts[name].shape) for name in plan.packed)
        total += f" and {in_4_bits:,} are held in 4 bits"
    head = f"{total}; a rank of each pipe index holds, in {unit}{notes}"
    return f"{head}\n{text_table(memory)}\n\n{text_table(held, last_left=True)}"


def _experts(plan: Plan, ranks_per_node: int | None) -> list[str]:
    found = expert_plan(plan)
    if found is None:
        return []
    least, most = min(found.on_rank), max(found.on_rank)
    here = f"{most}" if least == most else f"{least} or {most}"
    crossing = ""
    if ranks_per_node is not None:
        crossing = f"; {found.crossing_bytes(plan, ranks_per_node) / 1e6:.3g} MB cross nodes"
    lines = [
        f"experts            {sum(found.on_rank)} in {found.num_blocks} blocks, {here} on each of "
        f"{len(found.on_rank)} ranks; {found.active_parameters:,} parameters meet a token",
        f"dispatch           {found.mean_bytes / 1e6:.3g} MB leave a rank each way in a block and "
        f"microbatch, at most {found.most_bytes / 1e6:.3g} MB{crossing}",
        f"load               {found.mean_rows:,.0f} tokens for a rank's experts, at most "
        f"{found.most_rows:,}",
    ]
    return [wrap("\n".join(lines), indent=" " * 19)]


def _ends(names: Sequence[str]) -> str:
    return " to ".join(dict.fromkeys((*names[:1], *names[-1:]))) or "none"


def _schedule(plan: Plan) -> str:
    schedule, timeline = plan.schedule, plan.timeline
    number, samples = schedule.num_microbatches, plan.samples_per_microbatch
    chunks = max(len(schedule.stages_of(i)) for i in range(len(schedule.programs)))
    ranks = " ".join(map(str, timeline.peak_live_of_rank))
    by = "" if plan.model is None else "   (by operations)"
    if plan.config.pipeline.costs is not None:
        by = f"   (by the costs in {plan.config.pipeline.costs})"
    lines = [
        f"schedule           {schedule.name}, {number} x {samples} samples on a data rank",
        f"chunks             {chunks}   (stages on a pipe rank, {schedule.num_stages} in all)",
        f"predicted bubble   {timeline.bubble:.1%}{by}",
        f"live microbatches  {' '.join(map(str, timeline.peak_live))}   (at most, by stage)",
    ]
    if chunks > 1:
        lines.append(f"                   {ranks}   (at most, of all stages of a pipe rank)")
    if any(a.kind is ActionKind.W for program in schedule.programs for a in flatten(program)):
        lines.append("                   (held until the gradients of the weights are there)")
    return wrap("\n".join(lines), indent=" " * 19)


def _checkpoints(plan: Plan) -> list[str]:
    """How the state is saved, and what the copies of saves beside the steps take."""
    section, loads = plan.config.checkpoint, stage_loads(plan)
    if not section.save_every and not section.save_every_min and section.local_dir is None:
        return []
    times = [f"{section.save_every} steps"] if section.save_every else []
    times += [f"{section.save_every_min:g} minutes"] if section.save_every_min else []
    times = times or [f"{plan.config.train.steps} steps"]
    how = "between steps"
    if section.async_mode != "disabled":
        most = max((x.memory.weights_bytes + x.memory.optimizer_bytes for x in loads), default=0)
        copy = f", at most {most / 1e9:,.3f} GB a rank" if most else ""
        where = ", where the host has room for it" if section.async_mode == "auto" else ""
        how = f"while training goes on, from a copy in host memory{copy}{where}"
    lines = [f"checkpoints        every {' and '.join(times)}, written {how}"]
    if section.local_dir is not None:
        size = sum(x.memory.weights_bytes + x.memory.optimizer_bytes for x in loads) / len(loads)
        # of its own ranks and of the next node's, twice, and once more while they are written
        room = f"; up to {6 * size / 1e9:,.3f} GB there for each rank of a node" if size else ""
        lines.append(
            f"local copies       every {section.local_every} steps in {section.local_dir}, of a "
            f"node's ranks and the next node's{room}"
        )
    return [wrap("\n".join(lines), indent=" " * 19)]


def _recompute(plan: Plan) -> str:
    train, loads = plan.config.train, stage_loads(plan)
    if train.recompute == "blocks":
        return "recompute          every block, in its backward"
    lines = ["recompute          auto: from times and memory measured at the start"]
    lines.append(f"                   {train.memory_gb:g} GB for everything on a rank")
    for held in loads:
        left_gb = activation_budget_gb(plan.config, held.memory, f"pipe {held.index}")
        lines.append(f"                   {left_gb:.4g} GB for activations at pipe {held.index}")
    return "\n".join(lines)


def _communication(
    plan: Plan, profile: Any, ranks_per_node: int | None, forward_s: float | None
) -> str:
    lines = [f"messages in a step, by the profile of {profile.date} ({profile.by})"]
    for found in resolve(ESTIMATES)(plan, profile, ranks_per_node):
        time = "not estimated" if found.time_s is None else f"{found.time_s * 1e3:.3g} ms"
        lines.append(wrap(f"  {found.axis:<8} {time:>13}   {found.what}", indent=" " * 27))
    if len(lines) == 1:
        lines.append("  none: every rank is alone")
    if forward_s is not None:
        timeline = resolve(TIMELINE)(plan, profile, ranks_per_node, forward_s)
        shown = "not estimated" if timeline is None else f"{timeline.bubble:.1%}"
        lines.append(f"bubble with messages, a forward taking {forward_s:g} s   {shown}")
    return "\n".join(lines)


def _placement(plan: Plan, ranks_per_node: int) -> str:
    warnings = advice(plan.topology.dense, ranks_per_node)
    if not warnings:
        return f"placement: tensor and context groups stay inside nodes of {ranks_per_node} ranks"
    return "\n".join(wrap(f"warning: {text}") for text in warnings)


def _script(run: RunConfig, shape: JobGeometry) -> str:
    many = [f"{n} ({w} ranks)" for n, w in zip(shape.nodes, shape.world_sizes, strict=True)]
    granted = f"; Slurm may grant {', '.join(many[:_SHOWN])} nodes" if len(many) > 1 else ""
    text = resolve(RENDER)(resolve(PREVIEW)(run, Path.cwd()))
    head = f"batch script, as tdp submit writes it but for the folder of the code{granted}"
    return f"{wrap(head)}\n\n{text}"
