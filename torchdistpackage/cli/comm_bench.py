"""`tdp comm bench`: how fast the links of a cluster are, by the groups that a run would use.

One rule: what cannot be measured or written is refused before a process is started. The ranks
measure and return one value; all files and texts are made of it here.
"""

import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, cast

import typer

from torchdistpackage.cli._common import Axes, CommTarget, Procs, Words, parse_target
from torchdistpackage.config.load import load
from torchdistpackage.config.schema import RunConfig
from torchdistpackage.errors import CommError, ConfigError, RankError
from torchdistpackage.harness.bench.outputs import Outputs, into
from torchdistpackage.harness.bench.pairs import find_suspects
from torchdistpackage.harness.bench.report import (
    EVERY,
    PAIRS,
    BenchReport,
    pairs_text,
    parse_limits,
    report_text,
    violations,
)
from torchdistpackage.harness.bench.request import (
    Request,
    parse_dtypes,
    parse_operations,
    parse_sizes,
)
from torchdistpackage.harness.comm_test_report import CommTestError
from torchdistpackage.harness.operations import COLLECTIVES
from torchdistpackage.harness.run_on_topology import INIT_TIMEOUT_S, run_on_topology
from torchdistpackage.launch.lock import hold
from torchdistpackage.launch.rendezvous import detect
from torchdistpackage.launch.signals import SignalFlag
from torchdistpackage.launch.slurm.job import absolute, interpreter_of, job_shape
from torchdistpackage.launch.slurm.run_dir import RunDir, attempt_id
from torchdistpackage.launch.slurm.submit import (
    Prepared,
    ensure_not_running,
    prepare,
    submit_prepared,
)
from torchdistpackage.launch.supervisor import WatchedRank, supervise
from torchdistpackage.topology.mesh import describe
from torchdistpackage.topology.views import topology

_RANK = "torchdistpackage.harness.measure.watched:bench"
Sizes = Sequence[tuple[str, int | None]]
_SIZES, _DTYPES = "1KiB:4MiB:x16", "float32"
_SUFFIX = "-bench"
_BENCH = ("-u", "-P", "-m", "torchdistpackage", "comm", "bench")


def bench(
    words: Words = None,
    axes: Axes = None,
    procs: Procs = None,
    axis: Annotated[
        str, typer.Option(metavar="NAMES", help="Groups of these axes; else all longer than 1.")
    ] = "",
    operations: Annotated[
        str | None, typer.Option(metavar="NAMES", help="p2p,all_reduce,...; else all.")
    ] = None,
    sizes: Annotated[
        str, typer.Option(metavar="SIZES", help="4MiB, or 1KiB:16MiB doubling, or ...:x4.")
    ] = _SIZES,
    dtypes: Annotated[str, typer.Option(metavar="NAMES", help="float32,bf16,...")] = _DTYPES,
    iterations: Annotated[int, typer.Option(metavar="N", min=1, help="Calls that are timed.")] = 20,
    warmup: Annotated[int, typer.Option(metavar="N", min=0, help="Calls ahead of them.")] = 3,
    isolated: Annotated[
        int, typer.Option(metavar="N", min=0, help="Groups measured while others are silent.")
    ] = 2,
    pairs: Annotated[
        bool, typer.Option("--pairs", help="Also all pairs of ranks, and whom to exclude.")
    ] = False,
    min_busbw: Annotated[
        list[str] | None,
        typer.Option(metavar="[AXIS=]GB/S", help="Exit code 1 below it; axis or pairs."),
    ] = None,
    timeout_s: Annotated[
        float,
        typer.Option("--timeout", metavar="S", min=1, help="Wait for a round so many seconds."),
    ] = 60.0,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="All figures as JSON.")] = None,
    plots: Annotated[Path | None, typer.Option(metavar="DIR", help="Pictures (PNG).")] = None,
    profile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A cluster profile for tdp plan.")
    ] = None,
    slurm: Annotated[
        str | None, typer.Option(metavar="CONFIG", help="Submit it as a job of this CONFIG.")
    ] = None,
    run_folder: Annotated[Path | None, typer.Option("--run-folder", hidden=True)] = None,
) -> None:
    """Measure latency and bandwidth of every operation over every group.

    Starts local processes when alone, and is a rank under torchrun or srun. Every element that
    arrives is compared; each figure stands beside that of a bare torch.distributed loop.
    """
    request = Request(
        operations=parse_operations(operations or ",".join(COLLECTIVES)),
        sizes_bytes=parse_sizes(sizes),
        dtypes=parse_dtypes(dtypes),
        over=tuple(dict.fromkeys(name.strip() for name in axis.split(",") if name.strip())),
        iterations=iterations,
        warmup=warmup,
        isolated=isolated,
        pairs=pairs,
        timeout_s=timeout_s,
    )
    limits = parse_limits(min_busbw or [])
    outputs = Outputs(json, profile, plots)
    if slurm is not None:
        if axes or procs or outputs != Outputs():
            raise ConfigError(
                "--slurm takes its ranks from its CONFIG and writes all files into the run folder; "
                "leave out --axes, --procs, --json, --plots and --profile"
            )
        _submit(slurm, words or [], request, limits, _options(request, sizes, min_busbw or []))
        return
    want = parse_target(words or [], axes, procs)
    _check_names(request, limits, want.axes, want.expert)
    if profile is not None and math.prod(size or 2 for _, size in want.axes) == 1:
        raise ConfigError("--profile: nothing can be measured, there is one rank; give more")
    if run_folder is None:
        raise typer.Exit(_run(request, want, outputs, limits))
    raise typer.Exit(
        _launch_bench(lambda: _run(request, want, into(run_folder, request), limits), run_folder)
    )


def _run(request: Request, want: CommTarget, outputs: Outputs, limits: Mapping[str, float]) -> int:
    """Measure, write and print; the exit code. Of several ranks only the first says anything."""
    outputs.check(request)
    with TemporaryDirectory() as folder:
        found = _measured(request, want, Path(folder) / "error")
    if found is None:
        return 0
    report = cast(BenchReport, found[0])
    if not report.rows and report.pairs is None:
        typer.echo(
            f"nothing to measure: no group of {describe(report.topology)} has more than one rank"
        )
    else:
        typer.echo(report_text(report))
    if report.pairs is not None:
        suspects = find_suspects({(a, b): t for a, b, t in report.pairs.times}, report.hosts)
        typer.echo("\n" + pairs_text(report.pairs, suspects, report.hosts))
    written, problems = outputs.write(report)
    for path in written:
        typer.echo(f"wrote {path}")
    for line in (slow := violations(report, limits)):
        typer.echo(f"too slow: {line}", err=True)
    for line in problems:
        typer.echo(f"not written: {line}", err=True)
    return 1 if slow or problems else 0


def _measured(request: Request, want: CommTarget, note: Path) -> list[Any] | None:
    """What `run_on_topology` returns; an error of all ranks is told once, without traceback."""
    try:
        return run_on_topology(
            _RANK,
            (request, str(note)),
            axes=want.axes,
            procs=want.num_ranks,
            expert=want.expert,
            init_timeout_s=want.init_timeout_s or INIT_TIMEOUT_S,
        )
    except CommTestError as error:
        if error.speaker in (None, detect(os.environ).rank):
            raise
        raise typer.Exit(1) from error
    except RankError as error:
        if not note.exists():
            raise
        raise CommError(note.read_text(encoding="utf-8")) from error


def _check_names(
    request: Request, limits: Mapping[str, float], axes: Sizes, expert: int = 1
) -> None:
    """Refuse names of groups that there are not, and limits for what is not measured."""
    known = [(name, size or 2) for name, size in axes]  # what is left open may be 2
    num_ranks = math.prod(size for _, size in known)
    world = topology(known, num_ranks, expert=expert)
    over = request.over or tuple(name for name, _ in known)
    measured = [name for name in over if len(world.group(0, name)) > 1]
    for name in limits:
        if name == PAIRS and not request.pairs:
            raise ConfigError("--min-busbw pairs=... needs --pairs")
        if name not in (EVERY, PAIRS, *measured) or not (
            num_ranks > 1 if name == PAIRS else measured
        ):
            what = f"over {name}" if name not in (EVERY, PAIRS) else "at all"
            raise ConfigError(
                f"--min-busbw {name or 'for all axes'}: nothing is measured {what}; measured are "
                f"{', '.join(measured) or 'no groups, all have one rank'}"
            )


def _options(request: Request, sizes: str, min_busbw: Sequence[str]) -> list[str]:
    """The request again as words of a command line."""
    words = ["--operations", ",".join(request.operations), "--dtypes", ",".join(request.dtypes)]
    words += ["--sizes", sizes, "--iterations", str(request.iterations)]
    words += ["--warmup", str(request.warmup), "--isolated", str(request.isolated)]
    words += ["--axis", ",".join(request.over)] if request.over else []
    words += ["--timeout", f"{request.timeout_s:g}"]
    words += ["--pairs"] if request.pairs else []
    return words + [word for limit in min_busbw for word in ("--min-busbw", limit)]


# With --slurm: everything but the command of the tasks is that of `tdp submit`, in a run folder of
# its own. Inside the job each task is watched as a training rank is, so a rank that fails is named
# at the end of the main log, and the job has its exit code.


def _submit(
    path: str,
    overrides: Sequence[str],
    request: Request,
    limits: Mapping[str, float],
    options: Sequence[str],
) -> None:
    config = _bench_run(path, overrides)
    _check_names(request, limits, _axes_of(config), config.parallel.expert)
    prepared = _prepare_bench(config, options)
    for note in prepared.notes:
        print(f"note: {note}", file=sys.stderr)
    job, folder = _submit_bench(prepared)
    files = into(folder, request)
    figures = " and ".join(str(path) for path in (files.json, files.profile) if path is not None)
    typer.echo(
        f"job {job}  {folder}\non {prepared.job.shape}; its figures will be in {figures}, "
        f"its tables in {RunDir(folder).main_log}"
    )


def _bench_run(path: str, overrides: Sequence[str]) -> RunConfig:
    """The run at `path` under a name of its own, its folder from the root on.

    Raises:
        ConfigError: it cannot be a job.
    """
    config = load(path, overrides, job=True)
    own = config.run.model_copy(update={"name": f"{config.run.name}{_SUFFIX}"})
    return absolute(config.model_copy(update={"run": own}), Path.cwd())


def _axes_of(config: RunConfig) -> tuple[tuple[str, int], ...]:
    """Its axes on the smallest number of nodes that the job may get."""
    return config.resolve(job_shape(config).world_sizes[0]).parallel.axes()


def _prepare_bench(config: RunConfig, options: Sequence[str]) -> Prepared:
    """The job that runs `tdp comm bench OPTIONS` with the ranks and nodes of `config`.

    Raises:
        LaunchError: the code cannot be gathered.
    """
    folder = Path(config.run.dir) / config.run.name
    words = [interpreter_of(config, sys.executable), *_BENCH, *options]
    words += ["--run-folder", str(folder)]
    return prepare([config], Path.cwd(), os.environ, command=words)


def _submit_bench(prepared: Prepared) -> tuple[str, Path]:
    """Hand it to Slurm: the job's id and its run folder.

    Raises:
        LaunchError: a bench of this run waits or runs already, or Slurm does not take the job.
    """
    folder = prepared.runs[0][0]
    with hold(RunDir(folder).lock, f"a submission of {folder.name}"):
        ensure_not_running(prepared)
        sent = submit_prepared(prepared, os.environ)
    return sent.records[0].job, folder


def _launch_bench(body: Callable[[], int], folder: Path) -> int:
    """Be a task of the job: run `body` in a process of its own; its exit code."""
    files, start, rank = RunDir(folder), attempt_id(os.environ), detect(os.environ).rank
    restart = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
    place = WatchedRank(rank, files.rank_log(rank, restart), files.failures(start))
    place.report.unlink(missing_ok=True)
    # nothing is noted, for there is nothing to save: a signal ends this as any program
    return supervise(body, place, SignalFlag())
