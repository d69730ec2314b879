"""Submit a checked configuration to Slurm.

Everything is computed before anything is written, and everything is written before sbatch is
called, so a refused submission leaves no trace in Slurm.
"""

import contextlib
import hashlib
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from torchdistpackage.config.schema import RunConfig
from torchdistpackage.config.slurm import extra_of
from torchdistpackage.environment.slurm_env import options_dropped
from torchdistpackage.errors import ConfigError, LaunchError
from torchdistpackage.files import atomic_write_all, make_folder, remove_empty
from torchdistpackage.launch.run_events import SUBMIT, note_event, written_keys
from torchdistpackage.launch.slurm import node_blocklist
from torchdistpackage.launch.slurm.exclusion import exclusion, leave_out
from torchdistpackage.launch.slurm.job import (
    BatchJob,
    Sweep,
    absolute,
    batch_job,
    code_paths,
    import_folders,
    job_shape,
)
from torchdistpackage.launch.slurm.jobs import (
    active_jobs,
    refuse_held,
    resolve_intent,
    sbatch,
    submit_with_intent,
)
from torchdistpackage.launch.slurm.query import CommandTimeout, Runner, run_command
from torchdistpackage.launch.slurm.run_dir import Submission, append_record, read_records
from torchdistpackage.launch.slurm.runs import SubmittedRun
from torchdistpackage.launch.slurm.script import render
from torchdistpackage.launch.slurm.snapshot import (
    CodeSnapshot,
    collect,
    materialize,
    prune,
    tree_of,
)
from torchdistpackage.run_files import RunDir

_ADVICE = (
    ("partition", "`sinfo -s` lists the partitions; set launch.slurm.partition"),
    ("account", "`sacctmgr show associations user=$USER` lists yours; set launch.slurm.account"),
    ("qos", "`sacctmgr show qos` lists them; set launch.slurm.qos"),
    ("reservation", "`scontrol show reservations` lists them; set launch.slurm.reservation"),
    ("time limit", "`sinfo -s` shows the longest; set launch.slurm.time"),
    ("feature", "`sinfo -o '%N %f'` lists what nodes have; set launch.slurm.constraint"),
    ("unrecognized option", "this Slurm is too old for it; remove it from launch.slurm"),
    ("node count", "set launch.slurm.nodes; a list such as 2,4 needs a newer Slurm"),
    ("configuration", "`sinfo -o '%N %c %m %G'` shows CPUs, memory and GPUs of the nodes"),
    ("generic resource", "`sinfo -o '%N %G'` shows them; set launch.slurm.gpus-per-node"),
    ("memory", "`sinfo -o '%N %m'` shows what nodes have; set launch.slurm.mem"),
    ("dependency", "set launch.slurm.dependency, e.g. afterok:123"),
    ("policy", "a limit of your account; ask for less, or wait for your other jobs"),
    ("contact", "the controller is away; see `scontrol ping`; submit again later"),
)
"""Substring of sbatch's error -> advice."""
_ASK_SITE = (
    "; what this site wants, `tdp site` finds out: call it, then write launch: {site: site.yaml}"
)
_KEPT = "; the run folder is written and stays, and the same command submits it again"


@dataclass(frozen=True, slots=True)
class Prepared:
    """Everything that a submission will write and print.

    runs: each run folder with its configuration. text: of the batch script. notes: for people.
    """

    job: BatchJob
    text: str
    runs: tuple[tuple[Path, RunConfig], ...]
    snapshot: CodeSnapshot
    notes: tuple[str, ...]

    @property
    def codes(self) -> Path:
        """Return the folder of all snapshots."""
        return Path(self.job.code.folder).parent


@dataclass(frozen=True, slots=True)
class Submitted:
    """The result of a submission. records: one for each run. notes: additional actions."""

    records: tuple[Submission, ...]
    notes: tuple[str, ...] = ()


def prepare(
    configs: Sequence[RunConfig],
    start_folder: Path,
    env: Mapping[str, str],
    *,
    sweep: str | None = None,
    max_parallel: int | None = None,
    command: Sequence[str] | None = None,
) -> Prepared:
    """Compute a submission from `start_folder`, without writing anything.

    configs: one, or one for each run of a sweep. sweep: its name. command: of a task, if not
    training.

    Raises:
        ConfigError: the options do not give a job, or runs of a sweep cannot share one.
        LaunchError: the code cannot be gathered.
    """
    configs = [absolute(config, start_folder) for config in configs]
    first = configs[0]
    runs = tuple((Path(config.run.dir) / config.run.name, config) for config in configs)
    array = None
    if sweep is not None:
        _check_shared(configs)
        names = "\0".join(folder.name for folder, _ in runs)
        tag = hashlib.sha256(names.encode()).hexdigest()[:8]
        array = Sweep(Path(first.run.dir) / f"{sweep}.sweep-{tag}", max_parallel)
        run_section = first.run.model_copy(update={"name": sweep})
        first = first.model_copy(update={"run": run_section})
    _check_paths(start_folder, Path(first.run.dir))
    tree = tree_of(start_folder, extra_of(first.launch.slurm, "files"), [Path(first.run.dir)])
    snapshot = collect(tree)
    codes = (array.folder if array else runs[0][0]) / "code"
    code = code_paths(snapshot, snapshot.folder(codes), start_folder, import_folders(), env)
    folders = [folder for folder, _ in runs]
    job = batch_job(
        first,
        folders,
        start_folder,
        code,
        sys.executable,
        socket.gethostname(),
        sweep=array,
        command=command,
    )
    if (sbatch_path := shutil.which("sbatch", path=env.get("PATH"))) is not None:
        job = replace(job, commands=str(Path(sbatch_path).absolute().parent))
    notes = (*snapshot.notes, *job.notes)
    if names := options_dropped(env):
        note = f"not passed on to sbatch: {', '.join(names)}; write such options into launch.slurm"
        notes = (*notes, note)
    return Prepared(job, render(job), runs, snapshot, notes)


def ensure_sbatch(env: Mapping[str, str]) -> None:
    """Raise LaunchError if there is no Slurm to submit to."""
    if shutil.which("sbatch", path=env.get("PATH")) is None:
        raise LaunchError("there is no sbatch here; submit from where it is, on a login node")


def ensure_not_running(prepared: Prepared, runner: Runner = run_command) -> None:
    """Refuse a submission while a job of the run is active, because two would write to one run
    folder. A job whose submission got no answer is recorded first.

    Raises:
        HeldError: a run writes there that was not submitted.
        LaunchError: a job of one of the runs waits or runs, or Slurm cannot say.
    """
    for folder, _ in prepared.runs:
        files = RunDir(folder)
        resolve_intent(files, runner, time.time())
        refuse_held(folder)
        records = read_records(files.records)
        if not records:
            continue
        for info in active_jobs(SubmittedRun(folder, records), runner):
            raise LaunchError(
                f"job {info.job} of the run {folder.name} is {info.state or 'just submitted'}; "
                f"follow it (tdp jobs logs -f {folder.name}), cancel it first "
                f"(tdp jobs cancel {folder.name}), or give this run another run.name"
            )


def submit_prepared(
    prepared: Prepared,
    env: Mapping[str, str],
    runner: Runner = run_command,
    *,
    via: str = "sbatch",
    submit_fn: Callable[[Prepared, Sequence[str]], Sequence[str]] | None = None,
) -> Submitted:
    """Write all files and submit the job.

    submit_fn: an alternative to sbatch named `via`: it gets the prepared submission and nodes to
    exclude, and returns the id of each run's job.

    Raises:
        LaunchError: the files cannot be written, or Slurm does not take the job.
    """
    now_s, job = time.time(), prepared.job
    folders = [RunDir(folder) for folder, _ in prepared.runs]
    files = folders[0]
    if read_records(files.records):
        node_blocklist.record_failed_nodes(files, env, runner, now_s=now_s)
    ensure_sbatch(env)
    write_run_dir(prepared, now_s)
    nodes, notes = leave_out(Path(job.script), files.suspects, env, runner, now_s)
    for folder, config in prepared.runs:
        note_event(folder, SUBMIT, 0, keys=written_keys(config))
    record = replace(job.record, time_s=now_s, via=via)
    if submit_fn is not None:
        records = [replace(record, job=own_id) for own_id in submit_fn(prepared, nodes)]
        for files, run_record in zip(folders, records, strict=True):
            append_record(files.records, run_record)
    else:
        tasks = [f"_{i}" if job.sweep else "" for i in range(len(folders))]
        intents = [(f, replace(record, job=task)) for f, task in zip(folders, tasks, strict=True)]
        call = partial(_sbatch, Path(job.script), nodes, env, runner)
        records = submit_with_intent(intents, call, runner)
    with contextlib.suppress(OSError):
        prune(prepared.codes, Path(job.script).parent, now_s)
    return Submitted(tuple(records), notes)


def _sbatch(script: Path, nodes: Sequence[str], env: Mapping[str, str], runner: Runner) -> str:
    try:
        return sbatch(script, env, runner, options=exclusion(script, nodes))
    except LaunchError as error:
        answer = str(error).rpartition(f"{script}: ")[2].lower()
        advice = next((f"; {advice}" for part, advice in _ADVICE if part in answer), "")
        is_refusal = not isinstance(error, CommandTimeout)
        raise type(error)(f"{error}{advice}{_ASK_SITE * is_refusal}{_KEPT}") from error


def write_run_dir(prepared: Prepared, now_s: float) -> None:
    """Write everything that the job needs: folders, code, configurations and the script.

    Raises:
        LaunchError: they cannot be written; then all is as before.
    """
    created: list[Path] = []
    code = Path(prepared.job.code.folder)
    is_new = not code.exists()
    texts = {RunDir(folder).config: config.to_yaml() for folder, config in prepared.runs}
    texts[Path(prepared.job.script)] = prepared.text
    folders = [path for f, _ in prepared.runs for path in (RunDir(f).logs, RunDir(f).job)]
    folders += [Path(prepared.job.script).parent, prepared.codes]
    try:
        for folder in folders:
            created = [*make_folder(folder), *created]
        materialize(prepared.snapshot, prepared.codes, socket.gethostname(), now_s)
        atomic_write_all(texts)
        if sweep := prepared.job.sweep:
            for index, (folder, _) in enumerate(prepared.runs):
                link = sweep.log(index)
                link.unlink(missing_ok=True)
                link.symlink_to(Path("..", RunDir(Path(folder.name)).main_log))
    except (OSError, LaunchError) as error:
        if is_new:
            shutil.rmtree(code, ignore_errors=True)
        remove_empty(created)
        if isinstance(error, LaunchError):
            raise
        raise LaunchError(f"the run folder cannot be written: {error}; set run.dir") from error


def _check_shared(configs: Sequence[RunConfig]) -> None:
    shapes = {job_shape(config): config for config in configs}
    if len(shapes) > 1:
        named = "; ".join(
            f"{c.run.name} takes {s.nodes_text} nodes x {s.tasks_per_node} tasks"
            for s, c in list(shapes.items())[:2]
        )
        raise ConfigError(f"the runs of a sweep share one job, but {named}; submit them one by one")


def _check_paths(*paths: Path) -> None:
    for path in paths:
        if not str(path).isprintable() or os.pathsep in str(path):
            raise ConfigError(
                f"{str(path)!r} cannot stand in a batch script and in PYTHONPATH; use a folder "
                f"without {os.pathsep!r} and line breaks in its path"
            )
