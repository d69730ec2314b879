"""`tdp comm bench`: how fast the links of a cluster are, by the groups that a run would use.

One rule: what cannot be measured or written is refused before a process is started. The ranks
measure and return one value; all files and texts are made of it here.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, cast

import typer

from torchdistpackage.cli import bench_job
from torchdistpackage.cli.comm_groups import Asked, Axes, Procs, Words, asked
from torchdistpackage.errors import ConfigError
from torchdistpackage.harness.bench import table
from torchdistpackage.harness.bench.limits import EVERY, PAIRS, below, parse_limits
from torchdistpackage.harness.bench.outputs import Outputs, into
from torchdistpackage.harness.bench.pairs import find_suspects
from torchdistpackage.harness.bench.report import Report
from torchdistpackage.harness.bench.request import (
    Request,
    parse_dtypes,
    parse_operations,
    parse_sizes,
)
from torchdistpackage.harness.cases import CASES
from torchdistpackage.harness.start import on_ranks
from torchdistpackage.launch.slurm.files import JobFiles
from torchdistpackage.topology.mesh import describe
from torchdistpackage.topology.views import topology

MEASURE = "torchdistpackage.harness.measure.run:bench"
Sizes = Sequence[tuple[str, int | None]]
_SIZES, _DTYPES = "1KiB:4MiB:x16", "float32"


def bench(
    words: Words = None,
    axes: Axes = None,
    procs: Procs = None,
    over: Annotated[
        str, typer.Option(metavar="AXES", help="Which groups; else all axes longer than 1.")
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
    alone: Annotated[
        int, typer.Option(metavar="N", min=0, help="Groups measured while others are silent.")
    ] = 2,
    pairs: Annotated[
        bool, typer.Option("--pairs", help="Also all pairs of ranks, and whom to exclude.")
    ] = False,
    min_busbw: Annotated[
        list[str] | None,
        typer.Option(metavar="[AXIS=]GB/S", help="Exit code 1 below it; axis or pairs."),
    ] = None,
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
        operations=parse_operations(operations or ",".join(CASES)),
        sizes_bytes=parse_sizes(sizes),
        dtypes=parse_dtypes(dtypes),
        over=tuple(dict.fromkeys(name.strip() for name in over.split(",") if name.strip())),
        iterations=iterations,
        warmup=warmup,
        alone=alone,
        pairs=pairs,
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
    want = asked(words or [], axes, procs)
    _check_names(request, limits, want.axes)
    if run_folder is None:
        raise typer.Exit(_run(request, want, outputs, limits))
    raise typer.Exit(
        bench_job.watched(lambda: _run(request, want, into(run_folder), limits), run_folder)
    )


def _run(request: Request, want: Asked, outputs: Outputs, limits: Mapping[str, float]) -> int:
    """Measure, write and print; the exit code. Of several ranks only the first says anything."""
    outputs.check()
    found = on_ranks(
        MEASURE,
        (request,),
        axes=want.axes,
        procs=want.num_ranks,
        expert=want.expert,
        init_timeout_s=want.init_timeout_s,
    )
    if found is None:
        return 0
    report = cast(Report, found[0])
    if not report.rows and report.pairs is None:
        typer.echo(
            f"nothing to measure: no group of {describe(report.topology)} has more than one rank"
        )
        return 0
    typer.echo(table.text(report))
    if report.pairs is not None:
        suspects = find_suspects({(a, b): t for a, b, t in report.pairs.times}, report.hosts)
        typer.echo("\n" + table.pairs_text(report.pairs, suspects, report.hosts))
    for path in outputs.write(report):
        typer.echo(f"wrote {path}")
    for line in (slow := below(report, limits)):
        typer.echo(f"too slow: {line}", err=True)
    return 1 if slow else 0


def _check_names(request: Request, limits: Mapping[str, float], axes: Sizes) -> None:
    """Refuse names of groups that there are not, and limits for what is not measured."""
    known = [(name, size or 2) for name, size in axes]  # what is left open may be 2
    world = topology(known, math.prod(size for _, size in known))
    for name in request.over:
        world.named(name)
    measured = request.over or tuple(name for name, size in known if size > 1)
    for name in limits:
        if name == PAIRS and not request.pairs:
            raise ConfigError("--min-busbw pairs=... needs --pairs")
        if name not in (EVERY, PAIRS, *measured):
            raise ConfigError(
                f"--min-busbw {name}=...: nothing is measured over {name}; measured are "
                f"{', '.join(measured) or 'no groups, all have one rank'}"
            )


def _options(request: Request, sizes: str, min_busbw: Sequence[str]) -> list[str]:
    """The request again as words of a command line."""
    words = ["--operations", ",".join(request.operations), "--dtypes", ",".join(request.dtypes)]
    words += ["--sizes", sizes, "--iterations", str(request.iterations)]
    words += ["--warmup", str(request.warmup), "--alone", str(request.alone)]
    words += ["--over", ",".join(request.over)] if request.over else []
    words += ["--pairs"] if request.pairs else []
    return words + [word for limit in min_busbw for word in ("--min-busbw", limit)]


def _submit(
    path: str,
    overrides: Sequence[str],
    request: Request,
    limits: Mapping[str, float],
    options: Sequence[str],
) -> None:
    config = bench_job.bench_run(path, overrides)
    _check_names(request, limits, bench_job.axes_of(config))
    prepared = bench_job.prepare_bench(config, options)
    for note in prepared.notes:
        print(f"note: {note}", file=sys.stderr)
    job, folder = bench_job.submit_bench(prepared)
    files = into(folder)
    typer.echo(
        f"job {job}  {folder}\non {prepared.job.shape}; its figures will be in {files.json} and "
        f"{files.profile}, its tables in {JobFiles(folder).main_log}"
    )
