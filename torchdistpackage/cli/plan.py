"""`tdp plan`: show the layout, memory and schedule of a run before it is queued."""

import os
import socket
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from torchdistpackage.cli._blend import with_known_steps
from torchdistpackage.cli._common import Config, Overrides, World, wrap
from torchdistpackage.cli._plan_summary import summary
from torchdistpackage.cli._plan_tables import AXES, all_tables, coordinates, groups_text
from torchdistpackage.cli._traffic import traffic_table
from torchdistpackage.config.all_problems import ProblemCollector
from torchdistpackage.config.check import absent_files, wrong_files
from torchdistpackage.config.errors import ConfigErrors, Problem
from torchdistpackage.config.hugging_face import FILE as CONFIG
from torchdistpackage.config.job_geometry import JobGeometry
from torchdistpackage.config.load import Draft, load, load_draft
from torchdistpackage.config.schema import RunConfig
from torchdistpackage.errors import ConfigError
from torchdistpackage.lazy import resolve
from torchdistpackage.plan.run_plan import (
    Plan,
    local_procs,
    make_plan,
    own_model_warnings,
    plan_keys,
    too_long,
)
from torchdistpackage.plan.start_bill import start_bill, start_table
from torchdistpackage.plan.user_code import code_folder, unknown_modules
from torchdistpackage.report.placement import placement_svg
from torchdistpackage.topology.mesh import advice, describe

SPLIT = "torchdistpackage.models.plan_text:split_table"
JOB_SHAPE, PREVIEW = (f"torchdistpackage.launch.slurm.job:{x}" for x in ("job_shape", "preview"))
RENDER = "torchdistpackage.launch.slurm.script:render"
WRITE = "torchdistpackage.files:atomic_write"
UNUSED_KEYS = "torchdistpackage.data.tokens.texts:unused_keys"
READ_PROFILE = "torchdistpackage.harness.bench.profile:read"
OTHER_MACHINE = "torchdistpackage.plan.measured:other_machine"
ESTIMATES = "torchdistpackage.plan.estimate:estimates"
TIMELINE = "torchdistpackage.plan.estimate:timeline_with_messages"
ELASTIC, CHECK_NODES = (f"torchdistpackage.plan.elastic:{x}" for x in ("fitted", "check_nodes"))
TABLE = "torchdistpackage.cli._elastic:elastic_table"
SEARCH = "torchdistpackage.cli._search:search_text"
EXPAND = "torchdistpackage.environment.slurm_env:expand"
SWITCHES = "torchdistpackage.cli._topology:topology_text"
PREDICTED, STEP_LINE, STEP_TABLE, COMPARED = (
    f"torchdistpackage.cli._step_time:{x}"
    for x in ("predicted", "summary_line", "time_table", "compare_table")
)
MEMORY_TABLE = "torchdistpackage.cli._memory:memory_table"
"""Import paths of what few plans need, loaded only for those."""
LIMIT = 64
"""Most ranks that each part lists without --all."""
_SHOWN = 8
"""Most node counts that are listed when Slurm may choose one."""


def plan(
    config: Config,
    overrides: Overrides = None,
    world: World = None,
    ranks_per_node: Annotated[
        int | None,
        typer.Option(
            metavar="K",
            min=1,
            help="Nodes have K ranks each: warn about groups that span nodes, and count the bytes "
            "between nodes.",
        ),
    ] = None,
    groups: Annotated[
        bool,
        typer.Option(
            "--groups", help=f"Print the mesh position and groups of up to {LIMIT} ranks."
        ),
    ] = False,
    show_bytes: Annotated[
        bool,
        typer.Option(
            "--bytes",
            help="Print the communication of a step, by axis and call, and what a start takes.",
        ),
    ] = False,
    show_time: Annotated[
        bool,
        typer.Option("--time", help="Print the predicted seconds of a step, term by term."),
    ] = False,
    show_memory: Annotated[
        bool,
        typer.Option(
            "--memory",
            help="Print the predicted peak memory of a rank by kind, and what would fit.",
        ),
    ] = False,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Predict on this device, such as h100-sxm; default: the type of GPU in "
            "launch.slurm.",
        ),
    ] = None,
    compare: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            help="Print the predicted terms beside those of the run in folder RUN, the term that "
            "was wrong, and the number that would explain it.",
        ),
    ] = None,
    sbatch: Annotated[
        bool, typer.Option("--sbatch", "--script", help="Print the batch script of the job.")
    ] = False,
    show_all: Annotated[
        bool, typer.Option("--all", help="Print every table, with every rank and group.")
    ] = False,
    profile: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Estimate communication times from a profile that tdp comm bench wrote; --time "
            "and --compare predict on its device.",
        ),
    ] = None,
    tensor: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Show how N tensor ranks split a model; CONFIG is its Hugging Face folder.",
        ),
    ] = None,
    seq_len: Annotated[
        int, typer.Option(metavar="L", min=1, help="With --tensor: number of tokens in a forward.")
    ] = 128,
    forward_s: Annotated[
        float | None,
        typer.Option(
            metavar="S",
            min=0,
            help="Seconds that a stage takes for the forward of a microbatch; estimates the bubble "
            "with messages. Needs --profile.",
        ),
    ] = None,
    nodes: Annotated[
        str | None,
        typer.Option(
            metavar="A..B",
            help="Print instead a table of the degrees that the run would have on A to B nodes.",
        ),
    ] = None,
    search: Annotated[
        bool,
        typer.Option(
            "--search",
            help="Print instead the ten layouts whose predicted step is fastest, of those that "
            "fit; with --nodes on each number of nodes.",
        ),
    ] = False,
    apply: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="With --search: write a copy of CONFIG with layout N, CONFIG-layoutN.yaml.",
        ),
    ] = None,
    queue: Annotated[
        bool,
        typer.Option(
            "--queue",
            help="With --search: ask Slurm when each number of nodes could start, and print when "
            "the run would be done.",
        ),
    ] = False,
    network: Annotated[
        str | None,
        typer.Option(
            "--topology",
            metavar="FILE",
            help="Print which groups cross switches, and the order of nodes that crosses least. "
            "FILE is a topology.conf or what scontrol show topology printed; slurm: ask scontrol.",
        ),
    ] = None,
    nodelist: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="With --topology: the nodes of the job, such as n[1-4]; default: those of "
            "launch.slurm, or the first of the topology.",
        ),
    ] = None,
    hostfile: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="With --topology: write that order for srun --distribution=arbitrary.",
        ),
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw the nodes, their ranks and groups to FILE (SVG)."),
    ] = None,
) -> None:
    """Summarize a run's layout, memory, schedule and communication.

    Needs no GPU and starts nothing. --groups, --bytes, --memory, --sbatch and --all print more. If
    the configuration is invalid, all its errors are listed at once.
    """
    if forward_s is not None and profile is None:
        raise typer.BadParameter(
            "needs --profile FILE, which has the times of messages; add it",
            param_hint="--forward-s",
        )
    for option, value in (("--nodelist", nodelist), ("--hostfile", hostfile)):
        if value is not None and network is None:
            raise typer.BadParameter("goes with --topology; add it", param_hint=option)
    if network is not None and (search or nodes is not None or tensor is not None):
        raise typer.BadParameter(
            "goes with one layout; remove --search, --nodes and --tensor", param_hint="--topology"
        )
    if apply is not None and not search:
        raise typer.BadParameter("goes with --search; add it", param_hint="--apply")
    if queue and not search:
        raise typer.BadParameter("goes with --search; add it", param_hint="--queue")
    if search:
        measured = None if profile is None else (profile, resolve(READ_PROFILE)(profile))
        typer.echo(
            resolve(SEARCH)(
                config,
                overrides or [],
                world,
                ranks_per_node,
                nodes,
                device,
                measured,
                apply,
                queue,
            )
        )
        return
    if nodes is not None:
        typer.echo(resolve(TABLE)(config, load(config, overrides or []), nodes, ranks_per_node))
        return
    if tensor is not None:
        other = (overrides, world, ranks_per_node, sbatch, profile, picture, groups, show_bytes)
        other = (*other, show_time, show_memory, device, compare)
        if any(other):
            raise typer.BadParameter(
                "goes with --seq-len and --all only; remove the other options and keys",
                param_hint="--tensor",
            )
        typer.echo(resolve(SPLIT)(Path(config), tensor, seq_len, show_all))
        return
    if (Path(config) / CONFIG).is_file() or config.endswith(".json"):
        raise typer.BadParameter(
            f"{config} is a model, not a run; give the number of tensor ranks, such as --tensor 2",
            param_hint="--tensor",
        )
    cluster = None if profile is None else resolve(READ_PROFILE)(profile)
    run, planned, shape, passes, ranks_per_node = _checked(
        config,
        load_draft(config, overrides or [], world, job=sbatch or None),
        world,
        ranks_per_node,
        nodelist,
        sbatch=sbatch,
    )
    limit = planned.world_size if show_all else LIMIT
    mesh = describe(planned.topology.dense.axes)
    warnings = [x for x in (too_long(planned), *own_model_warnings(planned)) if x is not None]
    warnings += [f"{x}; tdp train and tdp submit refuse it" for x in _absent(run)]
    if run.data.tokenizer is not None and Path(run.data.tokenizer).exists():
        warnings += resolve(UNUSED_KEYS)(run)
    warnings += () if planned.model is None else planned.model.notes()
    warnings += start_bill(planned).warnings()
    if cluster is not None and device is None:
        elsewhere = resolve(OTHER_MACHINE)(cluster, run, profile, socket.gethostname())
        warnings += [] if elsewhere is None else [elsewhere]
    predicted = None
    has_terms = show_time or compare is not None
    if has_terms or device is not None or run.launch.slurm:
        measured = (profile, cluster) if has_terms and profile is not None else None
        predicted = resolve(PREDICTED)(planned, device, ranks_per_node, measured)
    parts = [f"{run.run.name} on {planned.world_size} ranks\n{mesh}, outermost first"]
    if groups or show_all:
        parts += [coordinates(planned, limit), groups_text(planned, limit)]
    if show_all:
        parts += all_tables(planned, ranks_per_node, warnings, passes)
    else:
        crossing = advice(planned.topology.dense, ranks_per_node) if ranks_per_node else ()
        time = None if predicted is None else resolve(STEP_LINE)(predicted)
        warnings += crossing
        parts.append(summary(planned, shape, warnings, passes, time, ranks_per_node, device))
        parts += (
            [*traffic_table(planned, ranks_per_node), *start_table(planned)] if show_bytes else []
        )
    if show_memory or show_all:
        parts.append(resolve(MEMORY_TABLE)(planned, device, traces=show_memory))
    if show_time:
        parts.append(resolve(STEP_TABLE)(predicted))
    if compare is not None:
        parts.append(resolve(COMPARED)(planned, predicted, compare))
    if network is not None:
        parts.append(resolve(SWITCHES)(planned, ranks_per_node, network, nodelist, hostfile))
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


class _CheckedRun(NamedTuple):
    """A run that can be planned. shape: of its job, if it is one. passes: lines on epochs."""

    config: RunConfig
    plan: Plan
    shape: JobGeometry | None
    passes: list[str]
    ranks_per_node: int | None


def _checked(
    source: str,
    draft: Draft,
    world: int | None,
    ranks_per_node: int | None,
    nodelist: str | None,
    *,
    sbatch: bool,
) -> _CheckedRun:
    """Return the run and its plan.

    Raises:
        ConfigError: lists all that is wrong with the file, the plan and the files that it names.
    """

    def planned() -> _CheckedRun:
        run, num_ranks, per_node = draft.config, world, ranks_per_node
        is_job = sbatch or bool(run.launch.slurm)
        has_shape = is_job and (world is None or sbatch)
        shape: JobGeometry | None = resolve(JOB_SHAPE)(run, draft.bad) if has_shape else None
        if shape is not None and num_ranks is None:
            per_node = per_node or shape.tasks_per_node
            num_ranks = shape.world_sizes[0]
            if nodelist is not None:  # inside of a job that may have got one of several numbers
                granted = len(resolve(EXPAND)(nodelist)) * shape.tasks_per_node
                num_ranks = granted if granted in shape.world_sizes else num_ranks
        if shape is not None and run.launch.elastic.nodes is not None:
            resolve(CHECK_NODES)(run, shape, source)
        num_ranks = num_ranks or local_procs(run)
        run, passes = with_known_steps(run)
        fitted = _fitted(run, num_ranks, source)
        plan = make_plan(fitted, num_ranks, source, ranks_per_node=per_node, bad=draft.bad)
        return _CheckedRun(run, plan, shape, passes, per_node)

    def refuse_files() -> None:
        if wrong := wrong_files(draft.config):
            raise ConfigErrors(source, wrong)

    collector = ProblemCollector(draft, source)
    checked = collector.run("the plan", plan_keys(draft.config), planned)
    collector.run("the contents of files", ("data", "model", "optim.name"), refuse_files)
    for problem in _absent(draft.config):
        collector.note(f"tdp train and tdp submit also refuse {problem}")
    collector.finish()
    assert checked is not None, "finish raises what it refuses"
    return checked


def _absent(run: RunConfig) -> list[Problem]:
    """Return what is missing here of a run. A plan may be made on any machine; only commands that
    start or queue a run need the files.
    """
    return absent_files(run) + unknown_modules(run, code_folder(os.environ))


def _fitted(run: RunConfig, world_size: int, source: str) -> RunConfig:
    return run if run.launch.elastic.nodes is None else resolve(ELASTIC)(run, world_size, source)


def _draw(plan: Plan, ranks_per_node: int, path: Path) -> str:
    """Draw the ranks on their nodes; return the line to print."""
    meshes = [(axis, plan.topology.named(axis)[0]) for axis in AXES]
    try:
        path.parent.stat()  # a mistyped folder is an error, not a new folder
        resolve(WRITE)(path, placement_svg(plan.config.run.name, meshes, ranks_per_node))
    except OSError as error:
        raise ConfigError(
            f"--picture {path} cannot be written: {error.strerror}; name a file in a folder that "
            f"exists and that you can write to"
        ) from error
    return f"wrote {path}"


def _communication(
    plan: Plan, profile: Any, ranks_per_node: int | None, forward_s: float | None
) -> str:
    lines = [f"communication of a step, by the profile of {profile.date} ({profile.by})"]
    for estimate in resolve(ESTIMATES)(plan, profile, ranks_per_node):
        time = "not estimated" if estimate.time_s is None else f"{estimate.time_s * 1e3:.3g} ms"
        lines.append(wrap(f"  {estimate.axis:<8} {time:>13}   {estimate.what}", indent=" " * 27))
    if len(lines) == 1:
        lines.append("  none: every group has one rank")
    if forward_s is not None:
        timeline = resolve(TIMELINE)(plan, profile, ranks_per_node, forward_s)
        shown = "not estimated" if timeline is None else f"{timeline.bubble:.1%}"
        lines.append(f"bubble with messages, if a forward takes {forward_s:g} s   {shown}")
    return "\n".join(lines)


def _script(run: RunConfig, shape: JobGeometry) -> str:
    many = [f"{n} ({w} ranks)" for n, w in zip(shape.nodes, shape.world_sizes, strict=True)]
    granted = f"; Slurm may grant {', '.join(many[:_SHOWN])} nodes" if len(many) > 1 else ""
    text = resolve(RENDER)(resolve(PREVIEW)(run, Path.cwd()))
    head = f"batch script, as tdp submit writes it except for the folder of the code{granted}"
    return f"{wrap(head)}\n\n{text}"
