"""`tdp jobs`: list, show, follow, cancel and resubmit runs.

A run is given by its name, its folder or a job id. As a program this file is the earlier
`python -m torchdistpackage.tools.slurm_job_monitor --cfg FILE`.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer

from torchdistpackage.environment.failure import root_cause, summary
from torchdistpackage.launch.lock import holder_of
from torchdistpackage.launch.slurm import jobs as submitted
from torchdistpackage.launch.slurm import node_blocklist
from torchdistpackage.launch.slurm.monitor import ResubmitLimits, RunTarget, ScriptTarget
from torchdistpackage.launch.slurm.monitor import monitor as watch
from torchdistpackage.launch.slurm.query import JobInfo, Outcome
from torchdistpackage.launch.slurm.runs import (
    AttemptResult,
    LogTail,
    SubmittedRun,
    attempt_results,
    find,
    find_runs,
    follow,
    progress,
    rank_logs,
    restarts,
    single,
    status,
)
from torchdistpackage.lazy import resolve
from torchdistpackage.run_files import RESOLVED, RunDir
from torchdistpackage.text import text_table

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of a run, its folder or a job id.")]
Dir = Annotated[
    Path, typer.Option("--dir", metavar="DIR", help="Folder that contains the run folders.")
]
RUNS = Path("runs")
RUN = "torchdistpackage.report.run:Run"
STATUS_OF = "torchdistpackage.report.status:status_of"
"""Imported only for local runs, because they load yaml, which submitted runs do not need."""
DEFAULTS = ResubmitLimits()

jobs = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@jobs.command()
def ls(folder: Dir = RUNS) -> None:
    """List submitted runs, then local ones, each with the latest last.

    tdp runs does the same.
    """
    runs = find_runs(folder)
    looked = submitted.query_runs(runs)
    rows: list[Sequence[str]] = [
        ("NAME", "JOB", "STATE", "RESTARTS", "STEP", "LOSS", "NODES", "REASON")
    ]
    for run in runs:
        info = looked.jobs[run.latest.job]
        now, reached = status(run, info, time.time()), progress(run.files)
        rows.append(
            (
                run.name,
                run.latest.job,
                now.word,
                str(restarts(run, info)),
                _steps(reached.step, reached.num_steps),
                "" if reached.loss is None else f"{reached.loss:.4f}",
                info.nodes or run.latest.nodes,
                now.reason if now.outcome is not Outcome.SUCCEEDED else "",
            )
        )
    rows += _local_runs(folder)
    table = text_table(rows, num_left=9, num_keys=2)
    typer.echo(table if len(rows) > 1 else f"no run in {folder}")
    _notes(looked.notes)


def _local_runs(folder: Path) -> list[Sequence[str]]:
    """Return a row for each run in `folder` that was never submitted, by their last change."""
    paths = [path.parent for path in folder.glob(f"*/{RESOLVED}")]
    paths = [path for path in paths if not RunDir(path).records.exists()]
    rows: list[Sequence[str]] = []
    for path in sorted(paths, key=lambda path: path.stat().st_mtime):
        data = resolve(RUN)(path)
        now = resolve(STATUS_OF)(data, time.time())
        loss = "" if now.loss is None else f"{now.loss:.4f}"
        restarts = str(max(len(data.starts) - 1, 0))
        steps = _steps(now.step, now.num_steps)
        rows.append(
            (path.name, "local", data.state.word, restarts, steps, loss, "", data.state.reason)
        )
    return rows


@jobs.command()
def show(name: Name, folder: Dir = RUNS) -> None:
    """Show a run's jobs, starts, nodes, failures and logs."""
    runs = find(name, folder)
    looked = submitted.query_runs(runs)
    typer.echo("\n\n".join(_story(run, looked.jobs[run.latest.job]) for run in runs))
    _notes(looked.notes)


@jobs.command()
def logs(
    name: Name,
    folder: Dir = RUNS,
    follow_on: Annotated[
        bool, typer.Option("--follow", "-f", help="Print new lines until the job ends.")
    ] = False,
    rank: Annotated[
        int | None, typer.Option(metavar="R", min=0, help="Print the log of rank R instead.")
    ] = None,
    restart: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Print restart N only; needs --rank.")
    ] = None,
) -> None:
    """Print the main log of a run, or the log of one rank.

    The logs of all restarts are joined. With --follow the exit code is 0 if the job succeeded.
    """
    if restart is not None and rank is None:
        raise typer.BadParameter(
            "the main log holds all restarts together; give --rank too", param_hint="--restart"
        )
    run = single(find(name, folder))

    def paths() -> list[Path]:
        return [run.files.main_log] if rank is None else rank_logs(run, rank, restart)

    def write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    if not follow_on:
        return write(LogTail().read_new(paths()))
    last = follow(run, paths, write)
    typer.echo(f"tdp: {run.name} is {last.word}{last.suffix}", err=True)
    raise typer.Exit(0 if last.outcome is Outcome.SUCCEEDED else 1)


@jobs.command()
def cancel(name: Name, folder: Dir = RUNS) -> None:
    """Cancel the jobs of a run; the id of an array cancels its sweep."""
    ids = submitted.cancel(find(name, folder))
    typer.echo(f"cancelled job {', '.join(ids)}")


@jobs.command()
def resubmit(name: Name, folder: Dir = RUNS) -> None:
    """Submit the saved batch script of a run again.

    The run resumes from its latest checkpoint.
    """
    run = single(find(name, folder))
    if text := node_blocklist.explain(run.files.suspects, time.time()):
        typer.echo(text)
    record = submitted.resubmit(run, os.environ)
    typer.echo(f"submitted {run.name} as job {record.job}")


@jobs.command()
def monitor(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME|SCRIPT",
            help="Submitted run to watch, or batch script to submit and watch.",
        ),
    ],
    folder: Dir = RUNS,
    max_resubmits: Annotated[
        int, typer.Option(metavar="N", min=0, help="Largest number of resubmissions.")
    ] = DEFAULTS.max_resubmits,
    interval: Annotated[
        float, typer.Option(metavar="S", min=1.0, help="Seconds between queries of Slurm.")
    ] = DEFAULTS.query_s,
    delay: Annotated[
        float,
        typer.Option(
            metavar="S",
            min=0.0,
            help="Seconds to wait before the first resubmission; doubles each time.",
        ),
    ] = DEFAULTS.first_wait_s,
) -> None:
    """Watch a job and submit it again when it fails.

    The delay before a resubmission doubles each time. A job that was cancelled with scancel is
    not submitted again. Ctrl-C stops the watching, not the job.
    """
    limits = ResubmitLimits(max_resubmits=max_resubmits, first_wait_s=delay, query_s=interval)
    if Path(name).is_file():
        target = ScriptTarget(Path(name), os.environ)
    else:
        target = RunTarget(single(find(name, folder)), os.environ)
    stop = watch(target, limits=limits, say=_say)
    raise typer.Exit(0 if stop.outcome is Outcome.SUCCEEDED else 1)


def _say(line: str) -> None:
    typer.echo(f"{time.strftime('%H:%M:%S')} {line}")


def _story(run: SubmittedRun, info: JobInfo) -> str:
    now, reached, latest = status(run, info, time.time()), progress(run.files), run.latest
    loss = "" if reached.loss is None else f", loss {reached.loss:.4f}"
    elapsed = "" if info.elapsed_s is None else str(timedelta(seconds=int(info.elapsed_s)))
    facts = {
        "run": run.name,
        "folder": str(run.folder.resolve()),
        "job": f"{latest.job}, submitted {_when(latest.time_s)} on {latest.host} by {latest.via}",
        "earlier jobs": ", ".join(record.job for record in run.records[:-1]),
        "state": f"{now.word}{now.suffix}",
        "exit code": "" if info.exit_code is None else str(info.exit_code),
        "nodes": info.nodes or f"{latest.nodes} requested",
        "running for": elapsed,
        "restarts": str(restarts(run, info)),
        "step": _steps(reached.step, reached.num_steps) + loss,
        "written by": str(holder_of(run.files.run_lock) or ""),
        "script": latest.script,
        "code": latest.code,
        "main log": str(run.files.main_log),
        "rank logs": str(run.files.logs / "rank<r>.restart<n>.log"),
    }
    width = max(map(len, facts))
    lines = [f"{key:<{width}}  {value}" for key, value in facts.items() if value]
    if ends := attempt_results(run):
        rows: list[Sequence[str]] = [("START", "WHEN", "NODES", "STEP", "ENDED")]
        rows += [_start(end) for end in ends]
        lines += ["", text_table(rows, num_left=len(rows[0]), num_keys=1)]
    if text := node_blocklist.explain(run.files.suspects, time.time()):
        lines += ["", text]
    return "\n".join(lines)


def _start(end: AttemptResult) -> Sequence[str]:
    words = [str(end.decision)] if end.decision else []
    if end.failures:
        first = root_cause(end.failures)
        more = f", and {len(end.failures) - 1} more" if len(end.failures) > 1 else ""
        words.append(f"rank {first.rank} on {first.host} failed: {summary(first)}{more}")
    start = end.start
    return (start.start, _when(start.time_s), start.nodes, str(start.step), "; ".join(words))


def _steps(step: int | None, num_steps: int | None) -> str:
    if step is None and num_steps is None:
        return ""
    return f"{step or 0}/{num_steps or '?'}"


def _when(time_s: float) -> str:
    return time.strftime("%d %b %H:%M:%S", time.localtime(time_s))


def _notes(notes: Iterable[str]) -> None:
    for note in notes:
        typer.echo(f"note: {note}", err=True)


if __name__ == "__main__":
    from torchdistpackage.cli.main import main

    parser = argparse.ArgumentParser(
        prog="slurm_job_monitor", description="Submit a batch script and keep it going."
    )
    parser.add_argument("--cfg", required=True, metavar="FILE", help="batch script")
    sys.exit(main(["jobs", "monitor", parser.parse_args().cfg]))
