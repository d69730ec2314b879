"""`tdp submit`: check a run as `tdp plan` does, and submit it to Slurm.

A run that cannot work is refused before sbatch sees it, with all its problems.
"""

import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from torchdistpackage.cli._common import Config, Overrides
from torchdistpackage.config.all_problems import ProblemCollector
from torchdistpackage.config.errors import ConfigErrors, Problem
from torchdistpackage.config.load import load_draft
from torchdistpackage.config.schema import RunConfig
from torchdistpackage.config.types import MAX_NAME_BYTES
from torchdistpackage.disk_room import shortage
from torchdistpackage.environment.slurm_env import scrub_slurm_env
from torchdistpackage.launch.lock import hold
from torchdistpackage.launch.run_folder import prepare_folder
from torchdistpackage.launch.slurm.by_submitit import check as check_submitit
from torchdistpackage.launch.slurm.by_submitit import submit as submitit_submit
from torchdistpackage.launch.slurm.job import SweepRun, job_shape, points
from torchdistpackage.launch.slurm.query import Outcome, query_jobs
from torchdistpackage.launch.slurm.runs import LogTail, SubmittedRun, read_run
from torchdistpackage.launch.slurm.runs import follow as follow_log
from torchdistpackage.launch.slurm.submit import (
    Prepared,
    Submitted,
    ensure_not_running,
    ensure_sbatch,
    prepare,
    submit_prepared,
)
from torchdistpackage.plan.certificate import unproved
from torchdistpackage.plan.elastic import check_nodes
from torchdistpackage.plan.memory import least_save_bytes
from torchdistpackage.plan.refusals import check_job_files, refuse_unplanned_checkpoint
from torchdistpackage.plan.run_plan import Plan, make_plan, plan_keys
from torchdistpackage.run_files import RunDir
from torchdistpackage.text import size_text
from torchdistpackage.train.submitit_task import TrainingTask


def by_submitit(prepared: Prepared, env: Mapping[str, str]) -> Submitted:
    """Submit through submitit's executor; the job is the same."""
    calls = [TrainingTask(str(RunDir(folder).config)) for folder, _ in prepared.runs]
    requeue = prepared.runs[0][1].launch.requeue

    def enqueue(prepared: Prepared, exclude: Sequence[str]) -> list[str]:
        return submitit_submit(prepared.job, calls, scrub_slurm_env(env), requeue, exclude)

    return submit_prepared(prepared, env, via="submitit", submit_fn=enqueue)


WAYS: dict[str, Callable[[Prepared, Mapping[str, str]], Submitted]] = {
    "sbatch": submit_prepared,
    "submitit": by_submitit,
}
"""--via -> the function that puts a prepared job into the queue."""
INTERRUPTED = 130


def submit(
    config: Config,
    overrides: Overrides = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the batch script and submit nothing.")
    ] = False,
    follow: Annotated[
        bool,
        typer.Option("--follow", help="After submitting, print the main log until the job ends."),
    ] = False,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="key=v1,v2",
            help="Submit a job array with one run for each value; repeat for combinations.",
        ),
    ] = None,
    max_parallel: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Most runs of a --sweep that run at a time; default: all."
        ),
    ] = None,
    via: Annotated[
        str, typer.Option(metavar="|".join(WAYS), help="Program that submits the job.")
    ] = "sbatch",
    proved: Annotated[
        bool,
        typer.Option(
            "--proved", help="Refuse a run without a certificate of tdp prove for its layout."
        ),
    ] = False,
    fresh: Annotated[
        bool,
        typer.Option(
            "--fresh", help="Start anew: rename an earlier run folder of this name first."
        ),
    ] = False,
) -> None:
    """Submit a run, or a sweep of runs, to Slurm.

    The configuration is checked first, as tdp plan checks it. The job runs a copy of the code as it
    is now.
    """
    if via not in WAYS:
        raise typer.BadParameter(
            f"{via} is unknown; use one of {', '.join(WAYS)}", param_hint="--via"
        )
    if sweep and follow:
        raise typer.BadParameter(
            "follows one run, but a sweep has many; follow one with tdp jobs logs -f NAME",
            param_hint="--follow",
        )
    if max_parallel and not sweep:
        raise typer.BadParameter(
            "limits the runs of a --sweep; add --sweep or remove it", param_hint="--max-parallel"
        )
    name, runs = _checked(config, overrides or [], sweep or [], proved)
    if not dry_run:
        ensure_sbatch(os.environ)
    prepared = prepare(
        runs, Path.cwd(), os.environ, sweep=name if sweep else None, max_parallel=max_parallel
    )
    if via == "submitit":
        check_submitit(prepared.job, prepared.runs[0][1].launch.requeue)
    for _, run in () if fresh else prepared.runs:
        refuse_unplanned_checkpoint(run, "auto", job_shape(run).world_sizes[0])
    _note(prepared.notes)
    if dry_run:
        typer.echo(prepared.text, nl=False)
        return
    log = RunDir(prepared.runs[0][0]).main_log
    with ExitStack() as locks:
        for folder, _ in sorted(prepared.runs, key=lambda pair: pair[0]):
            locks.enter_context(hold(RunDir(folder).lock, f"a submission of {folder.name}"))
        ensure_not_running(prepared)
        if fresh:
            for _, run in prepared.runs:
                prepare_folder(run, "never")
        tail = LogTail({log: log.stat().st_size if log.exists() else 0})
        submitted = WAYS[via](prepared, os.environ)
    _note(submitted.notes)
    typer.echo(_summary(prepared, submitted))
    run = read_run(prepared.runs[0][0])
    if follow and run is not None:
        raise typer.Exit(_follow(run, tail))


def _checked(
    path: str, overrides: Sequence[str], sweeps: Sequence[str], proved: bool
) -> tuple[str, list[RunConfig]]:
    """Return the name of the run or sweep, and its runs, each checked for every size of its job.

    Raises:
        ConfigErrors: lists the problems of all runs.
    """
    problems: dict[Problem, None] = {}
    notes: dict[str, None] = {}
    names, runs = [""], list[RunConfig]()
    for point in points(sweeps) if sweeps else (SweepRun("", ()),):
        try:
            changes = [*overrides, *point.overrides]
            run = _checked_run(path, changes)
            if proved:
                _refuse_unproved(run, path, changes)
        except ConfigErrors as error:
            problems |= dict.fromkeys(error.problems)
            notes |= dict.fromkeys(getattr(error, "__notes__", ()))
            continue
        names[0] = run.run.name
        if point.suffix:
            name = f"{run.run.name}-{point.suffix}"
            if (size := len(name.encode())) > MAX_NAME_BYTES:
                why = (
                    f"has {size} bytes with what the sweep adds to it, more than the "
                    f"{MAX_NAME_BYTES} allowed; use a shorter name"
                )
                problems[run.problem("run.name", why)] = None
                continue
            run_section = run.run.model_copy(update={"name": name})
            run = run.model_copy(update={"run": run_section})
        runs.append(run)
    if problems:
        error = ConfigErrors(path, problems)
        for note in notes:
            error.add_note(note)
        raise error
    return names[0], runs


def _checked_run(path: str, overrides: Sequence[str]) -> RunConfig:
    """Return a run that is checked for every size of its job.

    Raises:
        ConfigErrors: lists all that is wrong with the file, the plan and the files that it names.
    """
    draft = load_draft(path, overrides, job=True)
    config, collector = draft.config, ProblemCollector(draft, path)

    def plan() -> None:
        plans = check_nodes(config, job_shape(config, draft.bad), path, draft.bad)
        _refuse_crowded_folder(plans[-1], path)

    collector.run("the plan", plan_keys(config), plan)
    check_job_files(collector, config, path, str(Path.cwd()))
    collector.finish()
    return config


def _refuse_crowded_folder(plan: Plan, path: str) -> None:
    """Refuse a run if its folder has no room for one checkpoint, by the free space and the quota.

    Raises:
        ConfigErrors: says what is left, and what a checkpoint takes.
    """
    config, world_size = plan.config, plan.topology.world_size
    num_bytes = least_save_bytes(config, plan.layouts.values(), plan.is_trained)
    if problem := shortage(config.run.folder.absolute(), num_bytes, world_size + 1):
        text = f"has no room for one checkpoint: {problem}; make room, or name another folder"
        raise ConfigErrors(path, [config.problem("run.dir", text)])


def _refuse_unproved(run: RunConfig, path: str, overrides: Sequence[str]) -> None:
    """Refuse a run for which tdp prove has written no certificate.

    Raises:
        ConfigErrors: lists what is missing.
    """
    planned = make_plan(run, job_shape(run).world_sizes[0], path).config
    if problems := unproved(run, planned, path, overrides):
        raise ConfigErrors(path, problems)


def _note(notes: Sequence[str]) -> None:
    for note in notes:
        print(f"note: {note}", file=sys.stderr)


def _summary(prepared: Prepared, submitted: Submitted) -> str:
    job, first = prepared.job, prepared.runs[0][0]
    near = first.parent == Path.cwd() / "runs"
    name = first.name if near else os.path.relpath(first)
    git = dict(prepared.snapshot.tree.git)
    commit = f"commit {str(git['commit'])[:12]}" if git.get("commit") else "no commit"
    changed = ", with changes" if git.get("dirty") else ""
    size = f"{len(prepared.snapshot.items)} files, {size_text(prepared.snapshot.num_bytes)}"
    pairs = zip(submitted.records, prepared.runs, strict=True)
    lines = [f"job {record.job}  {folder}" for record, (folder, _) in pairs]
    lines.append(f"on {job.shape}; code: {commit}{changed}; {size}")
    for command in ("show", "logs -f", "cancel"):
        lines.append(f"    tdp jobs {command} {shlex.quote(name)}")
    return "\n".join(lines)


def _follow(run: SubmittedRun, tail: LogTail) -> int:
    """Print the main log until the job is over, and return the job's exit code."""

    def write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    try:
        ended = follow_log(run, lambda: [run.files.main_log], write, tail=tail)
        latest = (read_run(run.folder) or run).latest
        code = query_jobs([latest.job], since_s=latest.time_s).jobs[latest.job].exit_code
    except KeyboardInterrupt:
        print(f"\nstopped following; job {run.latest.job} goes on", file=sys.stderr)
        return INTERRUPTED
    print(f"job {latest.job} is {ended.word}{ended.suffix}", file=sys.stderr)
    return (code or 0) or (0 if ended.outcome is Outcome.SUCCEEDED else 1)
