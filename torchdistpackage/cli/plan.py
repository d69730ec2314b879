"""`tdp plan`: the layout, memory and schedule of a run, before it is queued."""

from pathlib import Path
from typing import Annotated, Any

import typer

from torchdistpackage.cli._blend import with_known_steps
from torchdistpackage.cli._common import Config, Overrides, World, wrap
from torchdistpackage.cli._plan_summary import summary
from torchdistpackage.cli._plan_tables import AXES, all_tables, coordinates, groups_text
from torchdistpackage.cli._traffic import traffic_table
from torchdistpackage.config.check import absent_files, wrong_files
from torchdistpackage.config.errors import ConfigErrors
from torchdistpackage.config.hugging_face import FILE as CONFIG
from torchdistpackage.config.job_geometry import JobGeometry
from torchdistpackage.config.load import load
from torchdistpackage.config.schema import RunConfig
from torchdistpackage.errors import ConfigError
from torchdistpackage.lazy import resolve
from torchdistpackage.plan.run_plan import (
    Plan,
    local_procs,
    make_plan,
    own_model_warnings,
    too_long,
)
from torchdistpackage.report.placement import placement_svg
from torchdistpackage.topology.mesh import advice, describe

SPLIT = "torchdistpackage.models.plan_text:split_table"
JOB_SHAPE, PREVIEW = (f"torchdistpackage.launch.slurm.job:{x}" for x in ("job_shape", "preview"))
RENDER = "torchdistpackage.launch.slurm.script:render"
WRITE = "torchdistpackage.files:atomic_write"
UNUSED_KEYS = "torchdistpackage.data.tokens.texts:unused_keys"
READ_PROFILE = "torchdistpackage.harness.bench.profile:read"
ESTIMATES = "torchdistpackage.plan.estimate:estimates"
TIMELINE = "torchdistpackage.plan.estimate:timeline_with_messages"
ELASTIC, CHECK_NODES = (f"torchdistpackage.plan.elastic:{x}" for x in ("fitted", "check_nodes"))
TABLE = "torchdistpackage.cli._elastic:elastic_table"
"""What few plans show is loaded for these alone."""
LIMIT = 64
"""Ranks listed in each part, without --all."""
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
    groups: Annotated[
        bool,
        typer.Option("--groups", help=f"Print coordinates and groups of the first {LIMIT} ranks."),
    ] = False,
    show_bytes: Annotated[
        bool, typer.Option("--bytes", help="Print the calls and bytes of a step by axis.")
    ] = False,
    sbatch: Annotated[
        bool, typer.Option("--sbatch", "--script", help="Print the batch script of the job.")
    ] = False,
    show_all: Annotated[
        bool, typer.Option("--all", help="Print every table, with every rank and group.")
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
    """Summarize a run's layout, memory, schedule and communication.

    Needs no GPU. Options print the tables and the batch script. An invalid configuration is refused
    with all its errors at once.
    """
    if forward_s is not None and profile is None:
        raise typer.BadParameter(
            "needs --profile, which has the times of messages", param_hint="--forward-s"
        )
    if nodes is not None:
        typer.echo(resolve(TABLE)(config, load(config, overrides or []), nodes, ranks_per_node))
        return
    if tensor is not None:
        other = (overrides, world, ranks_per_node, sbatch, profile, picture, groups, show_bytes)
        if any(other):
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
    warnings = [x for x in (too_long(planned), *own_model_warnings(planned)) if x is not None]
    # A plan is made on any machine; only those that start or queue a run refuse what is absent.
    warnings += [f"{x}; tdp train and tdp submit refuse it" for x in absent_files(run)]
    if run.data.tokenizer is not None:
        warnings += resolve(UNUSED_KEYS)(run)
    warnings += () if planned.model is None else planned.model.notes()
    parts = [f"{run.run.name} on {planned.world_size} ranks\n{mesh}, outermost first"]
    if groups or show_all:
        parts += [coordinates(planned, limit), groups_text(planned, limit)]
    if show_all:
        parts += all_tables(planned, ranks_per_node, warnings, passes)
    else:
        crossing = advice(planned.topology.dense, ranks_per_node) if ranks_per_node else ()
        parts.append(summary(planned, shape, [*warnings, *crossing], passes))
        parts += traffic_table(planned) if show_bytes else []
    if cluster is not None:
        parts.append(_communication(planned, cluster, ranks_per_node, forward_s))
    if shape is not None and (sbatch or show_all):
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


def _script(run: RunConfig, shape: JobGeometry) -> str:
    many = [f"{n} ({w} ranks)" for n, w in zip(shape.nodes, shape.world_sizes, strict=True)]
    granted = f"; Slurm may grant {', '.join(many[:_SHOWN])} nodes" if len(many) > 1 else ""
    text = resolve(RENDER)(resolve(PREVIEW)(run, Path.cwd()))
    head = f"batch script, as tdp submit writes it but for the folder of the code{granted}"
    return f"{wrap(head)}\n\n{text}"
