"""From a configuration to its batch job, as a value.

One rule: what a run may not choose is chosen here, and nothing is looked up: the same
configuration, folders and code always give the same script.
"""

import json
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from torchdistpackage.config.check import violations
from torchdistpackage.config.errors import ConfigErrors
from torchdistpackage.config.schema import RunConfig
from torchdistpackage.config.slurm import extra_of, header
from torchdistpackage.config.slurm_shape import LAYOUT, JobGeometry, job_geometry
from torchdistpackage.launch.slurm.batch_job import BatchJob, CodePaths
from torchdistpackage.launch.slurm.run_dir import RunDir
from torchdistpackage.launch.slurm.script import render
from torchdistpackage.launch.slurm.sweep import Sweep

_SIGNAL_S = 30
"""How long before the end Slurm's own signal comes at the latest; Slurm may be a minute early."""
TRAIN = ("-u", "-P", "-m", "torchdistpackage", "train")


def job_shape(config: RunConfig) -> JobGeometry:
    """Nodes, tasks and CPUs of the job.

    Raises:
        ConfigError: the options or the degrees do not give one; lists all that is wrong.
    """
    if problems := violations(config, job=True):
        raise ConfigErrors("the configuration", problems)
    shape, _ = job_geometry(config)
    assert shape is not None
    return shape


def batch_job(
    config: RunConfig,
    runs: Sequence[Path],
    here: Path,
    code: CodePaths,
    python: str,
    host: str,
    *,
    sweep: Sweep | None = None,
    command: Sequence[str] | None = None,
) -> BatchJob:
    """The job that trains `config`, or all runs of a `sweep`, which differ in their files alone.

    runs: absolute run folders. here: where the job works. python: path of the interpreter, see
    `interpreter_of`. command: of a task, if not training.

    Raises:
        ConfigError: see `job_shape`.
    """
    section = config.launch.slurm
    shape, container, conda = (
        job_shape(config),
        extra_of(section, "container"),
        extra_of(section, "conda"),
    )
    interpreter = interpreter_of(config, python)
    files = RunDir(runs[0])
    script, log = files.script, _literal(files.main_log)
    if sweep is not None:
        script, log = sweep.script, f"{_literal(sweep.folder)}/%a.log"
    options, notes = _options(config, shape)
    if sweep is not None:
        at_once = f"%{sweep.max_parallel}" if sweep.max_parallel else ""
        options["array"] = f"0-{len(runs) - 1}{at_once}"
    options |= {"output": log, "open-mode": "append"}
    record = {
        "via": "sbatch",
        "script": str(script),
        "code": code.folder,
        "nodes": shape.nodes_text,
        "host": host,
    }
    return BatchJob(
        name=config.run.name,
        shape=shape,
        options=(("job-name", config.run.name), ("chdir", str(here)), *options.items()),
        runs=tuple(map(str, runs)),
        script=str(script),
        code=code,
        command=tuple(command) if command is not None else (interpreter, *TRAIN),
        python=(interpreter, "-P"),
        record=json.dumps(record)[1:-1],
        is_array=sweep is not None,
        max_parallel=sweep.max_parallel if sweep is not None else None,
        comments=tuple(notes.items()),
        container=container,
        srun=extra_of(section, "srun"),
        modules=extra_of(section, "modules"),
        conda=next(iter(conda), None),
        prologue=extra_of(section, "prologue"),
        writes_decision=command is None,
        restarts_in_job=config.launch.requeue.in_job_restarts if command is None else 0,
        margin_s=config.launch.requeue.margin_s,
    )


def interpreter_of(config: RunConfig, python: str) -> str:
    """What starts Python in a task: `python`, a path, unless a container or conda has its own."""
    section = config.launch.slurm
    own = extra_of(section, "container") or extra_of(section, "conda")
    inside = bool(own) or any("container-image" in x for x in extra_of(section, "srun"))
    return "python" if inside else python


def preview(config: RunConfig, here: Path) -> str:
    """The script as it would be, without a look at the code: its folder has no name yet."""
    run = absolute(config, here)
    folder = Path(run.run.dir) / run.run.name
    code = folder / "code" / "SNAPSHOT"
    paths = CodePaths(str(code), (str(code / "tree"),), str(code / "tree"))
    return render(batch_job(run, [folder], here, paths, sys.executable, socket.gethostname()))


def absolute(config: RunConfig, here: Path) -> RunConfig:
    """The same with `run.dir` from the root on, because a job may stand elsewhere."""
    folder = os.path.normpath(here / config.run.dir)
    return config.model_copy(update={"run": config.run.model_copy(update={"dir": folder})})


def _literal(path: Path) -> str:
    """For --output, where a percent sign starts a pattern."""
    return str(path).replace("%", "%%")


def _options(config: RunConfig, shape: JobGeometry) -> tuple[dict[str, str | None], dict[str, str]]:
    """Lines of the header, the layout first, and the comments that stand above some."""
    given = header(config.launch.slurm)
    options: dict[str, str | None] = {
        "nodes": shape.nodes_text,
        **{name: given[name] for name in LAYOUT if name in given},
        "ntasks-per-node": str(shape.tasks_per_node),
        "cpus-per-task": str(shape.cpus_per_task),
    }
    notes: dict[str, str] = {}
    for name, value in given.items():
        if name in options:
            continue
        if name in ("gpus", "gpus-per-task") and shape.gpus_per_node is not None:
            notes["gpus-per-node"] = f"{name}={value}, by node, so that every task sees all of them"
            name, value = "gpus-per-node", shape.gpus_per_node
        options[name] = value
    requeue = config.launch.requeue
    if "signal" not in options and requeue.signals:
        name = "USR1" if "USR1" in requeue.signals else requeue.signals[0]
        options["signal"] = f"{name}@{max(_SIGNAL_S, round(requeue.margin_s))}"
        notes["signal"] = "The ranks look at the clock themselves; this is for those that cannot."
    options["requeue" if requeue.mode == "requeue" else "no-requeue"] = None
    return options, notes
