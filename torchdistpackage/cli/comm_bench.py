"""`tdp comm bench`: measure the links of a cluster, over the groups that a run would use.

A request that cannot be measured or written is refused before a process is started. The ranks
measure and return one report, from which this module makes all files and tables.
"""

import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
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
from torchdistpackage.comm.collective_table import COLLECTIVES
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
"""Columns of a table; all but the last few fit in a terminal of 80 columns."""
_MATRIX = 16
"""Most ranks whose matrix of pairs is printed; the JSON file has the matrix for any number."""


def bench(
    words: Words = None,
    axes: Axes = None,
    procs: Procs = None,
    axis: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="Axes to measure, such as data,tensor; default: all with several ranks.",
        ),
    ] = "",
    operations: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES", help="Operations to measure, such as p2p,all_reduce; default: all."
        ),
    ] = None,
    sizes: Annotated[
        str,
        typer.Option(
            metavar="SIZES",
            help="Message sizes: 4MiB, a range that doubles (1KiB:16MiB), or with a factor of "
            "its own (1KiB:16MiB:x4).",
        ),
    ] = _SIZES,
    dtypes: Annotated[
        str, typer.Option(metavar="NAMES", help="Types of the elements, such as float32,bf16.")
    ] = _DTYPES,
    iterations: Annotated[
        int, typer.Option(metavar="N", min=1, help="Number of timed iterations of each operation.")
    ] = 20,
    warmup: Annotated[
        int, typer.Option(metavar="N", min=0, help="Number of iterations before the timed ones.")
    ] = 3,
    isolated: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            help="Number of groups of each axis to measure also alone, while the others are idle.",
        ),
    ] = 2,
    pairs: Annotated[
        bool,
        typer.Option("--pairs", help="Also measure every two ranks, and suggest nodes to exclude."),
    ] = False,
    min_busbw: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[AXIS=]GB/S",
            help="Exit with 1 if the bus bandwidth (of AXIS) is below this; AXIS may be pairs.",
        ),
    ] = None,
    timeout_s: Annotated[
        float,
        typer.Option(
            "--timeout", metavar="S", min=1, help="Seconds to wait for one round of measurements."
        ),
    ] = 60.0,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write all results to FILE (JSON).")
    ] = None,
    plots: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write plots into folder DIR (PNG).")
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Draw slow links and times by size to FILE (SVG); implies --pairs."
        ),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write a cluster profile to FILE, for tdp plan --profile: links, and the speed of "
            "the devices.",
        ),
    ] = None,
    slurm: Annotated[
        str | None,
        typer.Option(
            metavar="CONFIG",
            help="Submit the benchmark to Slurm, on the nodes and ranks of CONFIG.",
        ),
    ] = None,
    run_folder: Annotated[Path | None, typer.Option("--run-folder", hidden=True)] = None,
) -> None:
    """Measure latency and bandwidth of every operation and group.

    Under torchrun or srun this process is one rank. Otherwise it starts all ranks on this machine.
    Every element that arrives is verified, and each time is printed beside that of a bare
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
                "--slurm takes its ranks from its CONFIG and writes all files to the run folder; "
                "remove --axes, --procs, --json, --plots, --picture and --profile"
            )
        _submit(slurm, words or [], request, limits, _options(request, sizes, min_busbw or []))
        return
    want = parse_target(words or [], axes, procs)
    _check_names(request, limits, want.axes, want.expert)
    if profile is not None and math.prod(size or 2 for _, size in want.axes) == 1:
        raise ConfigError(
            "--profile: one rank has no link to measure; give more ranks with CONFIG, --axes or "
            "--procs"
        )
    if run_folder is None:
        raise typer.Exit(_run(request, want, outputs, limits))
    raise typer.Exit(
        _launch_bench(lambda: _run(request, want, into(run_folder, request), limits), run_folder)
    )


def _run(request: Request, want: CommTarget, outputs: Outputs, limits: Mapping[str, float]) -> int:
    """Measure, write and print, and return the exit code. Only rank 0 prints."""
    outputs.check(request)
    request = replace(request, device=outputs.profile is not None)
    results = run_ranks(_RANK, (request,), want, init_timeout_s=INIT_TIMEOUT_S)
    if results is None:
        return 0
    report = cast(BenchReport, results[0])
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
    """Refuse unknown names of groups, and limits for groups that are not measured."""
    sizes = [(name, size or 2) for name, size in axes]  # an open size may turn out as 2
    num_ranks = math.prod(size for _, size in sizes)
    world = topology(sizes, num_ranks, expert=expert)
    over = request.over or tuple(name for name, _ in sizes)
    measured = [name for name in over if len(world.group(0, name)) > 1]
    for name in limits:
        if name == PAIRS and not request.pairs:
            raise ConfigError("--min-busbw pairs=... needs measured pairs; add --pairs")
        if name not in (EVERY, PAIRS, *measured) or not (
            num_ranks > 1 if name == PAIRS else measured
        ):
            where = f"over {name}" if name not in (EVERY, PAIRS) else "at all"
            raise ConfigError(
                f"--min-busbw {name or 'for all axes'}: nothing is measured {where}; name one of "
                f"the measured axes: {', '.join(measured) or 'none, because all have one rank'}"
            )


def _options(request: Request, sizes: str, min_busbw: Sequence[str]) -> list[str]:
    """Return the request as options of a command line."""
    words = ["--operations", ",".join(request.operations), "--dtypes", ",".join(request.dtypes)]
    words += ["--sizes", sizes, "--iterations", str(request.iterations)]
    words += ["--warmup", str(request.warmup), "--isolated", str(request.isolated)]
    words += ["--axis", ",".join(request.over)] if request.over else []
    words += ["--timeout", f"{request.timeout_s:g}"]
    words += ["--pairs"] if request.pairs else []
    return words + [argument for limit in min_busbw for argument in ("--min-busbw", limit)]


# -- tables -------------------------------------------------------------------------------


def report_text(report: BenchReport) -> str:
    """Return all tables, one for each axis, link and mode."""
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
    """Return the matrix of pairs if it is small, the slowest pair, and which nodes to exclude."""
    num_ranks = len(hosts)
    parts = [f"pairs, both ways at once, {size_text(pairs.size_bytes)} of {pairs.dtype}"]
    if num_ranks <= _MATRIX:
        rows: list[Sequence[str]] = [("GB/s", *map(str, range(num_ranks)), "")]
        for a in range(num_ranks):
            row = [(min(a, b), max(a, b)) for b in range(num_ranks)]
            shown = (rate(pairs.busbw_bytes_per_s(x)) if x in pairs.times else "" for x in row)
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
            f"slow rank: {rank} on {hosts[rank]} takes {slower:.1f} x the time of the other ranks "
            "of its host to reach other hosts"
        )
    if suspects.partitions:
        sides = " | ".join(" ".join(members) for members in suspects.partitions)
        lines.append(f"slow between these sets of hosts, but not within them: {sides}")
    for (first, second), slower in suspects.links:
        where = f"inside {first}" if first == second else f"between {first} and {second}"
        lines.append(f"slow link: {where}, {slower:.1f} x the time of fast links")
    lines.append(suspects.exclude or "no host stands out, so exclude none")
    return "\n".join([*parts, wrap("\n".join(lines))])


def _title(rows: Sequence[Row]) -> str:
    row = rows[0]
    link = "on one host" if row.link == "node" else "between hosts"
    if row.mode == ISOLATED:
        return f"{row.axis}, {link}: one group at a time, others idle (GB/s)"
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
            else ", bandwidth not visible at these sizes (use larger ones); "
        )
        + ("two sizes" if x.fit.deviation is None else f"{x.fit.deviation:.0%} off")
        for x in lines
    ]
    return "\nfitted\n" + wrap("\n".join(shown), indent="    ")


# --slurm does what `tdp submit` does, with another command for the tasks and a run folder of its
# own. Inside the job each task is watched as a training rank is, so that the main log ends with the
# rank that failed, and the job has its exit code.


def _submit(
    path: str,
    overrides: Sequence[str],
    request: Request,
    limits: Mapping[str, float],
    options: Sequence[str],
) -> None:
    """Submit the benchmark to Slurm, with the ranks and nodes of the run at `path`.

    Raises:
        ConfigError: the run cannot be a job.
        LaunchError: the code cannot be copied, a benchmark of this run is queued or running, or
            Slurm refuses the job.
    """
    config = load(path, overrides, job=True)
    run_section = config.run.model_copy(update={"name": f"{config.run.name}{_SUFFIX}"})
    config = absolute(config.model_copy(update={"run": run_section}), Path.cwd())
    # the axes of the run on the smallest number of nodes that the job may get
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
        f"job {sent.records[0].job}  {folder}\non {prepared.job.shape}; it writes its results to "
        f"{figures}, its tables to {RunDir(folder).main_log}"
    )


def _launch_bench(body: Callable[[], int], folder: Path) -> int:
    """Run `body` as a task of the job, in a process of its own; return its exit code."""
    files, start, rank = RunDir(folder), attempt_id(os.environ), detect(os.environ).rank
    restart = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
    watched_rank = WatchedRank(rank, files.rank_log(rank, restart), files.failures(start))
    watched_rank.report.unlink(missing_ok=True)
    # an empty SignalFlag: there is nothing to save, so a signal ends this as it ends any program
    return supervise(body, watched_rank, SignalFlag())
