"""`tdp comm bench --slurm`: the bench as a job of its own, on the nodes that a run would get.

One rule: everything but the command of the tasks is that of `tdp submit`, in a run folder beside
the run's own. Inside the job each task is watched as a training rank is, so a rank that fails is
named at the end of the main log, and the job has its exit code.
"""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from torchdistpackage.config.load import load
from torchdistpackage.config.schema import RunConfig
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

SUFFIX = "-bench"
BENCH = ("-u", "-P", "-m", "torchdistpackage", "comm", "bench")


def bench_run(path: str, overrides: Sequence[str]) -> RunConfig:
    """The run at `path` under a name of its own, its folder from the root on.

    Raises:
        ConfigError: it cannot be a job.
    """
    config = load(path, overrides, job=True)
    own = config.run.model_copy(update={"name": f"{config.run.name}{SUFFIX}"})
    return absolute(config.model_copy(update={"run": own}), Path.cwd())


def axes_of(config: RunConfig) -> tuple[tuple[str, int], ...]:
    """Its axes on the smallest number of nodes that the job may get."""
    return config.resolve(job_shape(config).world_sizes[0]).parallel.axes()


def prepare_bench(config: RunConfig, options: Sequence[str]) -> Prepared:
    """The job that runs `tdp comm bench OPTIONS` with the ranks and nodes of `config`.

    Raises:
        LaunchError: the code cannot be gathered.
    """
    folder = Path(config.run.dir) / config.run.name
    words = [interpreter_of(config, sys.executable), *BENCH, *options]
    words += ["--run-folder", str(folder)]
    return prepare([config], Path.cwd(), os.environ, command=words)


def submit_bench(prepared: Prepared) -> tuple[str, Path]:
    """Hand it to Slurm: the job's id and its run folder.

    Raises:
        LaunchError: a bench of this run waits or runs already, or Slurm does not take the job.
    """
    folder = prepared.runs[0][0]
    with hold(RunDir(folder).lock, f"a submission of {folder.name}"):
        ensure_not_running(prepared)
        sent = submit_prepared(prepared, os.environ)
    return sent.records[0].job, folder


def launch_bench(body: Callable[[], int], folder: Path) -> int:
    """Be a task of the job: run `body` in a process of its own; its exit code."""
    files, start, rank = RunDir(folder), attempt_id(os.environ), detect(os.environ).rank
    restart = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
    place = WatchedRank(rank, files.rank_log(rank, restart), files.failures(start))
    place.report.unlink(missing_ok=True)
    # nothing is noted, for there is nothing to save: a signal ends this as any program
    return supervise(body, place, SignalFlag())
