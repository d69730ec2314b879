"""`tdp comm bench`: how fast the links of a cluster are, by the groups that a run would use.

What cannot be measured or written is refused before a process is started. The ranks measure and
return one value; all files and tables are made of it here.
"""

import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, cast

import typer

from torchdistpackage.cli._common import wrap
from torchdistpackage.cli.comm_ranks import (
    Axes,
    CommTarget,
    Procs,
    Words,
    parse_target,
    run_ranks,
)
from torchdistpackage.config.load import load
from torchdistpackage.environment.rendezvous import detect
from torchdistpackage.errors import ConfigError
from torchdistpackage.harness.bench.outputs import Outputs, into
from torchdistpackage.harness.bench.profile import CostModel
from torchdistpackage.harness.bench.report import (
    EVERY,
    PAIRS,
    BenchReport,
    Pairs,
    Row,
    SlowLinks,
    find_suspects,
    parse_limits,
    rate,
    violations,
)
from torchdistpackage.harness.bench.request import (
    ELEMENT_BYTES,
    ISOLATED,
    Request,
    parse_names,
    parse_sizes,
)
from torchdistpackage.harness.operations import COLLECTIVES
from torchdistpackage.harness.pool import INIT_TIMEOUT_S
from torchdistpackage.launch.lock import hold
from torchdistpackage.launch.process import SignalFlag
from torchdistpackage.launch.slurm.job import absolute, interpreter_of, job_shape
from torchdistpackage.launch.slurm.run_dir import attempt_id
from torchdistpackage.launch.slurm.submit import ensure_not_running, prepare, submit_prepared
from torchdistpackage.launch.supervisor import WatchedRank, supervise
from torchdistpackage.run_files import RunDir
from torchdistpackage.text import short_time, size_text, text_table
from torchdistpackage.topology.mesh import describe, topology

_RANK = "torchdistpackage.harness.measure:bench"
Sizes = Sequence[tuple[str, int | None]]
_SIZES, _DTYPES = "1KiB:4MiB:x16", "float32"
_SUFFIX = "-bench"
_BENCH = ("-u", "-P", "-m", "torchdistpackage", "comm", "bench")
_KEYS = ("operation", "dtype", "size")
_HEAD = (*_KEYS, "p50", "bare p50", "ours", "algbw", "busbw", "p95", "max")
"""On 80 columns all but the last few fit side by side."""
_MATRIX = 16
"""Ranks whose matrix is printed; the file has all of it."""


def bench(
    words: Words = None,
    axes: Axes = None,
    procs: Procs = None,
    axis: Annotated[
        str, typer.Option(metavar="NAMES", help="Axes to measure; default: all with several ranks.")
    ] = "",
    operations: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Such as p2p,all_reduce; default: all.")
    ] = None,
    sizes: Annotated[
        str, typer.Option(metavar="SIZES", help="4MiB, or 1KiB:16MiB (doubling), or 1KiB:16MiB:x4.")
    ] = _SIZES,
    dtypes: Annotated[str, typer.Option(metavar="NAMES", help="Such as float32,bf16.")] = _DTYPES,
    iterations: Annotated[int, typer.Option(metavar="N", min=1, help="Timed iterations.")] = 20,
    warmup: Annotated[int, typer.Option(metavar="N", min=0, help="Warm-up iterations.")] = 3,
    isolated: Annotated[
        int,
        typer.Option(
            metavar="N", min=0, help="Number of groups measured alone, the others being idle."
        ),
    ] = 2,
    pairs: Annotated[
        bool,
        typer.Option(
            "--pairs", help="Also measure every pair of ranks and suggest nodes to exclude."
        ),
    ] = False,
    min_busbw: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[AXIS=]GB/S", help="Exit with 1 below this bus bandwidth; AXIS may be pairs."
        ),
    ] = None,
    timeout_s: Annotated[
        float,
        typer.Option("--timeout", metavar="S", min=1, help="Seconds to wait for a round."),
    ] = 60.0,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write all results (JSON).")
    ] = None,
    plots: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write plots (PNG) into DIR.")
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw slow links and times by size (SVG); with --pairs."),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a cluster profile for tdp plan --profile."),
    ] = None,
    slurm: Annotated[
        str | None,
        typer.Option(metavar="CONFIG", help="Submit it as a job with the ranks of CONFIG."),
    ] = None,
    run_folder: Annotated[Path | None, typer.Option("--run-folder", hidden=True)] = None,
) -> None:
    """Measure latency and bandwidth of every operation and group.

    Under torchrun or srun this process is one rank. Otherwise it starts all ranks here. Every
    element that arrives is verified, and each time is printed with that of a bare
    torch.distributed loop.
    """
    request = Request(
        operations=parse_names(operations or ",".join(COLLECTIVES), "operation", COLLECTIVES),
        sizes_bytes=parse_sizes(sizes),
        dtypes=parse_names(dtypes.replace("bfloat16", "bf16"), "dtype", ELEMENT_BYTES),
        over=tuple(dict.fromkeys(name.strip() for name in axis.split(",") if name.strip())),
        iterations=iterations,
        warmup=warmup,
        isolated=isolated,
        pairs=pairs or picture is not None,
        timeout_s=timeout_s,
    )
    limits = parse_limits(min_busbw or [])
    outputs = Outputs(json, profile, plots, picture)
    if slurm is not None:
        if axes or procs or outputs != Outputs():
            raise ConfigError(
                "--slurm takes its ranks from its CONFIG and writes all files into the run folder; "
                "leave out --axes, --procs, --json, --plots, --picture and --profile"
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
    """Measure, write and print; the exit code. Of several ranks only the first prints."""
    outputs.check(request)
    found = run_ranks(_RANK, (request,), want, init_timeout_s=INIT_TIMEOUT_S)
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
        suspects = find_suspects(report.pairs.times, report.hosts)
        typer.echo("\n" + pairs_text(report.pairs, suspects, report.hosts))
    written, problems = outputs.write(report)
    for path in written:
        typer.echo(f"wrote {path}")
    for line in (slow := violations(report, limits)):
        typer.echo(f"too slow: {line}", err=True)
    for line in problems:
        typer.echo(f"not written: {line}", err=True)
    return 1 if slow or problems else 0


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


# -- tables -------------------------------------------------------------------------------


def report_text(report: BenchReport) -> str:
    """All tables, one for each axis, link and mode."""
    num_hosts = len(set(report.hosts))
    head = (
        f"{report.backend} on {len(report.hosts)} ranks of {num_hosts} "
        f"host{'s' if num_hosts > 1 else ''} ({describe(report.topology)}), {report.date}; "
        f"{report.iterations} iterations after {report.warmup}, every element verified"
    )
    parts = [wrap(head)]
    kinds = dict.fromkeys((row.axis, row.link, row.mode) for row in report.rows)
    for kind in kinds:
        rows = [row for row in report.rows if (row.axis, row.link, row.mode) == kind]
        lines = [x for x in report.lines if (x.axis, x.link, x.mode) == kind]
        table = text_table(_cells(rows), num_left=1, num_keys=len(_KEYS))
        parts.append(f"{_title(rows)}\n{table}{_fits(lines)}")
    return "\n\n".join(parts)


def pairs_text(pairs: Pairs, suspects: SlowLinks, hosts: Sequence[str]) -> str:
    """The matrix where it is small, the slowest pair, and what to leave out."""
    num_ranks = len(hosts)
    parts = [f"pairs, both ways at once, {size_text(pairs.size_bytes)} of {pairs.dtype}"]
    if num_ranks <= _MATRIX:
        rows: list[Sequence[str]] = [("GB/s", *map(str, range(num_ranks)), "")]
        for a in range(num_ranks):
            found = [(min(a, b), max(a, b)) for b in range(num_ranks)]
            shown = (rate(pairs.busbw_bytes_per_s(x)) if x in pairs.times else "" for x in found)
            rows.append((str(a), *shown, hosts[a]))
        parts.append(text_table(rows, num_left=1, num_keys=1))
    a, b = suspects.slowest
    lines = [
        f"slowest pair: rank {a} ({hosts[a]}) and rank {b} ({hosts[b]}), "
        f"{rate(pairs.busbw_bytes_per_s((a, b)))} GB/s, {suspects.times_slower:.1f} x the "
        f"median time"
    ]
    for rank, slower in suspects.ranks:
        lines.append(
            f"slow rank: {rank} on {hosts[rank]}, to other hosts {slower:.1f} x the time of the "
            f"others there"
        )
    if suspects.partitions:
        sides = " | ".join(" ".join(members) for members in suspects.partitions)
        lines.append(f"slow between these sets of hosts, and not within: {sides}")
    for (first, second), slower in suspects.links:
        where = f"inside {first}" if first == second else f"between {first} and {second}"
        lines.append(f"slow link: {where}, {slower:.1f} x the time of the fast ones")
    lines.append(suspects.exclude or "no host stands out, so none is to be excluded")
    return "\n".join([*parts, wrap("\n".join(lines))])


def _title(rows: Sequence[Row]) -> str:
    row = rows[0]
    link = "on one host" if row.link == "node" else "between hosts"
    if row.mode == ISOLATED:
        return f"{row.axis}, {link}: one group at a time, others silent (GB/s)"
    return f"{row.axis}, {link}: all groups at once, the slowest of them (GB/s)"


def _cells(rows: Sequence[Row]) -> list[Sequence[str]]:
    queues = any(row.host_p50_s is not None for row in rows)
    cells: list[Sequence[str]] = [(*_HEAD, *["host"] * queues, "slowest ranks")]
    for row in rows:
        ranks = " ".join(map(str, row.ranks[:4])) + (" ..." if row.num_ranks > 4 else "")
        cells.append(
            (
                row.operation,
                row.dtype,
                size_text(row.size_bytes),
                short_time(row.p50_s),
                short_time(row.bare_p50_s),
                f"{row.p50_s / row.bare_p50_s:.2f} x",
                *map(rate, (row.algbw_bytes_per_s, row.busbw_bytes_per_s)),
                *map(short_time, (row.p95_s, row.max_s)),
                *[short_time(row.host_p50_s or 0.0)] * queues,
                f"{ranks} (of {row.num_units})" if row.num_units > 1 else ranks,
            )
        )
    return cells


def _fits(lines: Sequence[CostModel]) -> str:
    if not lines:
        return ""
    shown = [
        f"  {x.operation} {x.dtype}: {short_time(x.fit.latency_s)}"
        + (
            f" + bytes x bus factor / {rate(x.fit.bytes_per_s)} GB/s, "
            if x.fit.bytes_per_s
            else ", bandwidth not seen, use larger sizes; "
        )
        + ("two sizes" if x.fit.deviation is None else f"{x.fit.deviation:.0%} off")
        for x in lines
    ]
    return "\nfitted\n" + wrap("\n".join(shown), indent="    ")


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
    """Hand the bench to Slurm, with the ranks and nodes of the run at `path`.

    Raises:
        ConfigError: the run cannot be a job.
        LaunchError: the code cannot be gathered, a bench of this run waits or runs already, or
            Slurm does not take the job.
    """
    config = load(path, overrides, job=True)
    own = config.run.model_copy(update={"name": f"{config.run.name}{_SUFFIX}"})
    config = absolute(config.model_copy(update={"run": own}), Path.cwd())
    # its axes on the smallest number of nodes that the job may get
    axes = config.resolve(job_shape(config).world_sizes[0]).parallel.axes()
    _check_names(request, limits, axes, config.parallel.expert)
    folder = Path(config.run.dir) / config.run.name
    command = [interpreter_of(config, sys.executable), *_BENCH, *options]
    command += ["--run-folder", str(folder)]
    prepared = prepare([config], Path.cwd(), os.environ, command=command)
    for note in prepared.notes:
        print(f"note: {note}", file=sys.stderr)
    folder = prepared.runs[0][0]
    with hold(RunDir(folder).lock, f"a submission of {folder.name}"):
        ensure_not_running(prepared)
        sent = submit_prepared(prepared, os.environ)
    files = into(folder, request)
    figures = " and ".join(str(path) for path in (files.json, files.profile) if path is not None)
    typer.echo(
        f"job {sent.records[0].job}  {folder}\non {prepared.job.shape}; its figures will be in "
        f"{figures}, its tables in {RunDir(folder).main_log}"
    )


def _launch_bench(body: Callable[[], int], folder: Path) -> int:
    """Be a task of the job: run `body` in a process of its own; its exit code."""
    files, start, rank = RunDir(folder), attempt_id(os.environ), detect(os.environ).rank
    restart = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
    watched_rank = WatchedRank(rank, files.rank_log(rank, restart), files.failures(start))
    watched_rank.report.unlink(missing_ok=True)
    # nothing is noted, for there is nothing to save: a signal ends this as any program
    return supervise(body, watched_rank, SignalFlag())
