"""Submit through submitit, with its executor, its job folder and its way of requeueing.

The only file that imports submitit, for people whose tools use it already. It submits the same
`BatchJob` as the plain script; submitit writes its own script around it.
"""

import os
import shlex
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from torchdistpackage.config.schema import RequeueSection
from torchdistpackage.errors import ConfigError, LaunchError
from torchdistpackage.launch.slurm.job import BatchJob
from torchdistpackage.launch.slurm.restart_script import IGNORE_SIGNALS_UNTIL_READY
from torchdistpackage.launch.slurm.script import setup_lines, verdict_lines
from torchdistpackage.run_files import RunDir

# What submitit states itself: by its own parameters, or because its protocol rests on it.
_ITS_OWN = ("job-name", "output", "error", "open-mode", "array", "signal")
_SIGNAL_S = 90
FOLDER = "submitit"


def check(job: BatchJob, requeue: RequeueSection) -> None:
    """Refuse options that submitit cannot serve.

    Raises:
        ConfigError: says what, and what to do instead.
    """
    if requeue.mode == "chain":
        raise ConfigError(
            "launch.requeue.mode=chain: submitit only requeues its jobs; submit via sbatch, or set "
            "requeue or never"
        )
    if job.restarts_in_job:
        raise ConfigError(
            "launch.requeue.in_job_restarts: submitit starts the ranks once in a job; submit via "
            "sbatch, or set it to 0"
        )
    if job.used:
        raise ConfigError(
            "launch.elastic.nodes: submitit does not choose among the nodes that it gets; submit "
            "via sbatch, or set it to null"
        )
    if "time" not in dict(job.options):
        raise ConfigError(
            "launch.slurm.time is not set, and submitit states a time limit for every job, 5 "
            "minutes by default; set it, e.g. launch.slurm.time=24:00:00, or submit via sbatch"
        )


def submit(
    job: BatchJob,
    calls: Sequence[Callable[[], object]],
    env: Mapping[str, str],
    requeue: RequeueSection,
    exclude: Sequence[str] = (),
) -> list[str]:
    """Submit `calls`, one for each run of `job` and each with a `checkpoint` method; return the job
    ids.

    env: environment for sbatch instead of this process's. exclude: nodes to leave out. Rank 0's log
    from submitit becomes the main log of its run.

    Raises:
        ConfigError: see `check`.
        LaunchError: submitit or sbatch refused.
    """
    check(job, requeue)
    # takes a third of a second, which only those who ask for it shall wait
    from submitit import AutoExecutor

    folder = RunDir(Path(job.runs[0])).job / FOLDER
    if job.sweep:
        folder = Path(job.script).parent / FOLDER
    with _environment(env):
        try:
            # a start that comes back is counted by us, whatever submitit takes for a timeout
            executor = AutoExecutor(
                folder=folder,
                cluster="slurm",
                slurm_max_num_timeout=requeue.max_requeues + 1,
                slurm_python=shlex.join(_python(job)),
            )
            executor.update_parameters(**_parameters(job, exclude))
            if job.sweep:
                with executor.batch():
                    jobs = [executor.submit(call) for call in calls]
            else:
                jobs = [executor.submit(calls[0])]
        except Exception as error:
            raise LaunchError(f"submitit did not submit {job.name}: {error}") from error
    ids = [submitted.job_id for submitted in jobs]
    for run, submitted in zip(job.runs, jobs, strict=True):
        _link_main_log(RunDir(Path(run)), Path(submitted.paths.stdout))
    return ids


def _python(job: BatchJob) -> tuple[str, ...]:
    """Return the command that starts a rank, in the job's container and protected from early
    signals.
    """
    return ("sh", "-c", IGNORE_SIGNALS_UNTIL_READY, "task", *job.extra("container"), job.python[0])


def _parameters(job: BatchJob, exclude: Sequence[str]) -> dict[str, object]:
    options, shape = dict(job.options), job.shape
    limit = job.sweep.max_parallel if job.sweep else None
    # as text, so that ranges of nodes and Slurm's forms of a time go through
    more: dict[str, object] = {
        name.replace("-", "_"): True if value is None else value
        for name, value in options.items()
        if name not in _ITS_OWN
    }
    if exclude:
        more["exclude"] = ",".join([*filter(None, [options.get("exclude")]), *exclude])
    stated = [
        "--mpi=none",
        "--kill-on-bad-exit=1",
        f"--cpus-per-task={shape.cpus_per_task}",
        f"--ntasks-per-node={shape.tasks_per_node}",
    ]
    if len(shape.nodes) == 1:
        stated += [f"--nodes={shape.nodes[0]}", f"--ntasks={shape.world_sizes[0]}"]
    return {
        "name": job.name,
        "nodes": shape.nodes[0],
        "tasks_per_node": shape.tasks_per_node,
        "cpus_per_task": shape.cpus_per_task,
        # its estimate of timeouts rests on this; ours on the job's real end
        "timeout_min": 60 * 24 * 365,
        "slurm_signal_delay_s": _SIGNAL_S,
        "slurm_stderr_to_stdout": True,
        "slurm_setup": setup_lines(job),
        "slurm_teardown": verdict_lines(job),
        "slurm_srun_args": [*stated, *job.extra("srun")],
        "slurm_additional_parameters": more,
        **({"slurm_array_parallelism": limit} if limit else {}),
    }


def _link_main_log(files: RunDir, output: Path) -> None:
    files.logs.mkdir(parents=True, exist_ok=True)
    if files.main_log.exists() and not files.main_log.is_symlink():
        number = 1
        while (aside := files.main_log.with_name(f"main.{number}.log")).exists():
            number += 1
        files.main_log.rename(aside)
    files.main_log.unlink(missing_ok=True)
    files.main_log.symlink_to(os.path.relpath(output, files.logs))


@contextmanager
def _environment(env: Mapping[str, str]) -> Generator[None]:
    """Make `env` this process's environment inside the block, because submitit starts sbatch with
    that.
    """
    previous = dict(os.environ)
    os.environ.clear()
    os.environ.update(env)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(previous)
