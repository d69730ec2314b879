"""The batch job of a configuration as a value, and a sweep, which is many runs in one job.

The same configuration, folders and code always give the same job. It contains no shell text, so
that other ways of submission can use it as well. Each task of a sweep's array is a normal run with
its own folder and configuration.
"""

import itertools
import os
import re
import socket
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

from torchdistpackage.config.check import violations
from torchdistpackage.config.elastic import goes_on_without_nodes, nodes_used
from torchdistpackage.config.errors import ConfigErrors
from torchdistpackage.config.job_geometry import LAYOUT, JobGeometry, job_geometry
from torchdistpackage.config.schema import RunConfig
from torchdistpackage.config.site import fitted, read_site
from torchdistpackage.config.slurm import extra_of, header
from torchdistpackage.errors import ConfigError
from torchdistpackage.launch.slurm.run_dir import Submission
from torchdistpackage.launch.slurm.snapshot import PACKAGE, CodeSnapshot
from torchdistpackage.run_files import RunDir

_SIGNAL_S = 30
"""Fewest seconds between Slurm's own signal and the job's end; Slurm may send the signal a minute
early.
"""
TRAIN = ("-u", "-P", "-m", "torchdistpackage", "train")
MAX_RUNS = 1000
"""Largest sweep: Slurm's default limit on the tasks of one array."""


@dataclass(frozen=True, slots=True)
class CodePaths:
    """Folders for the job's code.

    folder: the snapshot. paths: for PYTHONPATH, in order. workdir: replacement of the current
    folder, where a user's own modules are found."""

    folder: str
    paths: tuple[str, ...]
    workdir: str


@dataclass(frozen=True, slots=True)
class Sweep:
    """A job array of several runs. max_parallel: largest number of runs at a time; None for all."""

    folder: Path
    max_parallel: int | None = None

    @property
    def script(self) -> Path:
        return self.folder / "sweep.sbatch"

    def log(self, index: int) -> Path:
        """Return a link to the main log of a task's run, because Slurm knows only the task's
        index.
        """
        return self.folder / f"{index}.log"


@dataclass(frozen=True, slots=True)
class SweepRun:
    """One run of a sweep. suffix: of its name. overrides: `section.key=value`."""

    suffix: str
    overrides: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BatchJob:
    """One job, or with a `sweep` one array of them, in the form its script needs.

    options: of sbatch, None for one without a value; comments: above some of them. runs: run
    folders, one for each task of an array. command: words of a task, to which the path of the
    configuration is added. python: words that start an interpreter on the first node. record: of
    its submission, still without job and time. notes: how the site changed the options. commands:
    folder of Slurm's commands on this machine, "" if it has none. used: of an elastic job, for each
    number of nodes that Slurm may give how many of them ranks run on. trains: the ranks always say
    how they ended, and may be started anew.
    """

    config: RunConfig
    shape: JobGeometry
    options: tuple[tuple[str, str | None], ...]
    comments: tuple[tuple[str, str], ...]
    runs: tuple[str, ...]
    code: CodePaths
    command: tuple[str, ...]
    python: tuple[str, ...]
    record: Submission
    sweep: Sweep | None = None
    trains: bool = True
    used: Mapping[int, int] = field(default_factory=dict[int, int])
    notes: tuple[str, ...] = ()
    commands: str = ""

    @property
    def name(self) -> str:
        return self.config.run.name

    @property
    def script(self) -> str:
        """Return the path of the batch script."""
        return self.record.script

    @property
    def restarts_in_job(self) -> int:
        """Return how many times the ranks may be restarted in one start of the job."""
        return self.config.launch.requeue.in_job_restarts if self.trains else 0

    def extra(self, name: str) -> tuple[str, ...]:
        """Return the words or lines of container, srun, modules, conda or prologue."""
        return extra_of(self.config.launch.slurm, name)


def job_shape(config: RunConfig, bad: Collection[str] = ()) -> JobGeometry:
    """Return the nodes, tasks and CPUs of the job.

    bad: keys already reported as wrong; rules that read them are skipped.

    Raises:
        ConfigError: the options or the degrees do not give one; lists all that is wrong.
    """
    if problems := violations(config, bad=bad, job=True):
        raise ConfigErrors("the configuration", problems)
    shape, _ = job_geometry(config)
    assert shape is not None
    return shape


def batch_job(
    config: RunConfig,
    runs: Sequence[Path],
    folder: Path,
    code: CodePaths,
    python: str,
    host: str,
    *,
    sweep: Sweep | None = None,
    command: Sequence[str] | None = None,
) -> BatchJob:
    """Return the job that trains `config`, or all runs of a `sweep`, which differ only in their
    files.

    runs: absolute run folders. folder: where the job works. python: path of the interpreter, see
    `interpreter_of`. command: of a task, if not training.

    Raises:
        ConfigError: see `job_shape`.
    """
    shape, interpreter = job_shape(config), interpreter_of(config, python)
    files = RunDir(runs[0])
    script, log = files.script, _literal(files.main_log)
    options, comments = _options(config, shape)
    notes: tuple[str, ...] = ()
    if config.launch.site is not None:
        options, notes = _of_site(config.launch.site, options)
    if sweep is not None:
        script, log = sweep.script, f"{_literal(sweep.folder)}/%a.log"
        at_once = f"%{sweep.max_parallel}" if sweep.max_parallel else ""
        options["array"] = f"0-{len(runs) - 1}{at_once}"
    options |= {"output": log, "open-mode": "append"}
    return BatchJob(
        config,
        shape,
        options=(("job-name", config.run.name), ("chdir", str(folder)), *options.items()),
        comments=tuple(comments.items()),
        runs=tuple(map(str, runs)),
        code=code,
        command=tuple(command) if command is not None else (interpreter, *TRAIN),
        python=(interpreter, "-P"),
        record=Submission("", 0.0, "sbatch", str(script), code.folder, shape.nodes_text, host),
        sweep=sweep,
        trains=command is None,
        used=nodes_used(config, shape) if _varies(config) else {},
        notes=notes,
    )


def preview(config: RunConfig, start_folder: Path) -> BatchJob:
    """Return the job without collecting the code, so the code's folder has no name yet."""
    run = absolute(config, start_folder)
    folder = Path(run.run.dir) / run.run.name
    code = folder / "code" / "SNAPSHOT"
    paths = CodePaths(str(code), (str(code / "tree"),), str(code / "tree"))
    return batch_job(run, [folder], start_folder, paths, sys.executable, socket.gethostname())


def interpreter_of(config: RunConfig, python: str) -> str:
    """Return the Python of a task: `launch.slurm.python`, else the path `python`.

    A container or conda environment has its own."""
    section = config.launch.slurm
    if stated := extra_of(section, "python"):
        return stated[0]
    environment = extra_of(section, "container") or extra_of(section, "conda")
    inside = bool(environment) or any("container-image" in x for x in extra_of(section, "srun"))
    return "python" if inside else python


def absolute(config: RunConfig, start_folder: Path) -> RunConfig:
    """Return the configuration with an absolute `run.dir`, because a job may start in another
    folder.
    """
    folder = os.path.normpath(start_folder / config.run.dir)
    return config.model_copy(update={"run": config.run.model_copy(update={"dir": folder})})


def _literal(path: Path) -> str:
    """Return a path for --output with percent signs escaped, because they start patterns."""
    return str(path).replace("%", "%%")


def _options(config: RunConfig, shape: JobGeometry) -> tuple[dict[str, str | None], dict[str, str]]:
    """Return the options of the header, the layout first, and the comments above some of them."""
    sbatch_options = header(config.launch.slurm)
    spares = config.launch.spares
    options: dict[str, str | None] = {
        "nodes": shape.nodes_text,
        **{name: sbatch_options[name] for name in LAYOUT if name in sbatch_options},
        "ntasks-per-node": str(shape.tasks_per_node),
        "cpus-per-task": str(shape.cpus_per_task),
    }
    notes: dict[str, str] = {}
    for name, value in sbatch_options.items():
        if name in options:
            continue
        if name in ("gpus", "gpus-per-task") and shape.gpus_per_node is not None:
            notes["gpus-per-node"] = f"{name}={value}, by node, so that every task sees all of them"
            name, value = "gpus-per-node", shape.gpus_per_node
        options[name] = value
    if spares:
        fewest, most = shape.nodes[0], shape.nodes[-1]
        options["nodes"] = f"{fewest}-{most + spares}" if fewest < most else f"{most + spares}"
    if _varies(config):
        # a number of tasks holds Slurm to the fewest nodes
        for name in ("ntasks", "ntasks-per-node", "cpus-per-task"):
            options.pop(name, None)
        options["mincpus"] = str(shape.tasks_per_node * shape.cpus_per_task)
        notes["mincpus"] = "On each node; tasks would have Slurm give the fewest nodes."
    requeue = config.launch.requeue
    if "signal" not in options and requeue.signals:
        name = "USR1" if "USR1" in requeue.signals else requeue.signals[0]
        options["signal"] = f"{name}@{max(_SIGNAL_S, round(requeue.margin_s))}"
        notes["signal"] = "Ranks watch the time limit themselves; this is for ranks that cannot."
    if goes_on_without_nodes(config):
        options["no-kill"] = None
        notes["no-kill"] = "The ranks are started anew on the nodes that are left."
    options["requeue" if requeue.mode == "requeue" else "no-requeue"] = None
    return options, notes


def _varies(config: RunConfig) -> bool:
    """Return whether the job may have another number of nodes than its ranks use."""
    return config.launch.elastic.nodes is not None or config.launch.spares > 0


def _of_site(
    path: str, options: dict[str, str | None]
) -> tuple[dict[str, str | None], tuple[str, ...]]:
    """Return the options in the form that the site of file `path` takes, and the differences."""
    asks = "gpu" in (options.get("gres") or "")
    name = "gpus-per-node" if "gpus-per-node" in options else "gres" if asks else None
    fit = fitted(read_site(path), options, name)
    return fit.options, fit.notes


def code_paths(
    snapshot: CodeSnapshot,
    folder: Path,
    start_folder: Path,
    imports: Iterable[str],
    env: Mapping[str, str],
) -> CodePaths:
    """Return the folders from which a job in `folder` imports modules.

    Args:
        snapshot: the copied code.
        folder: where the snapshot is.
        start_folder: the current folder.
        imports: folders that this process imports from. One with files in the snapshot is replaced
            by its copy; of the others only those in PYTHONPATH stay.
        env: environment of this process.
    """
    folders = {parent.as_posix() for item in snapshot.items for parent in Path(item.name).parents}
    start_folder, root = start_folder.resolve(), snapshot.tree.root

    def counterpart(path: Path) -> str | None:
        if not path.is_relative_to(root):
            return None
        inside = Path("tree", path.relative_to(root)).as_posix()
        return str(folder / inside) if inside in folders else None

    package = str(folder / "package") if "package" in folders else counterpart(PACKAGE.parent)
    here_copied = counterpart(start_folder)
    python_path = [entry for entry in env.get("PYTHONPATH", "").split(os.pathsep) if entry]
    paths = [package, here_copied]
    paths += [
        counterpart(Path(start_folder, x).resolve()) or str(start_folder / x) for x in python_path
    ]
    paths += [counterpart(Path(start_folder, x).resolve()) for x in imports if x]
    return CodePaths(
        str(folder), tuple(dict.fromkeys(x for x in paths if x)), here_copied or str(start_folder)
    )


def import_folders(
    path: Sequence[str] | None = None, modules: Mapping[str, ModuleType] | None = None
) -> tuple[str, ...]:
    """Return sys.path and the folders of editable packages, which may not be on it."""
    folders = list(sys.path if path is None else path)
    for name, module in list((sys.modules if modules is None else modules).items()):
        # setuptools installs one such module a package; pip's `-e` says so by its name alone.
        mapping: object = getattr(module, "MAPPING", None) if "__editable__" in name else None
        if isinstance(mapping, dict):
            folders += [str(Path(str(x)).parent) for x in mapping.values()]  # pyright: ignore
    return tuple(folders)


def points(sweeps: Sequence[str]) -> tuple[SweepRun, ...]:
    """Return every combination of `key=value,value` texts; the last key varies fastest.

    Raises:
        ConfigError: a text has another form, a key or value comes twice, or there are too many
            runs.
    """
    axes = [_axis(text) for text in sweeps]
    keys = [key for key, _ in axes]
    if twice := sorted({key for key in keys if keys.count(key) > 1}):
        raise ConfigError(f"--sweep {twice[0]} is given twice; put all values behind one of them")
    runs: dict[str, SweepRun] = {}
    for values in itertools.product(*(values for _, values in axes)):
        pairs = list(zip(keys, values, strict=True))
        suffix = "-".join(f"{key.rpartition('.')[2]}={_fit(value)}" for key, value in pairs)
        if suffix in runs:
            raise ConfigError(
                f"--sweep makes two runs with the name ending in {suffix}; remove one"
            )
        runs[suffix] = SweepRun(suffix, tuple(f"{key}={value}" for key, value in pairs))
        if len(runs) > MAX_RUNS:
            raise ConfigError(f"--sweep makes more than {MAX_RUNS} runs; sweep fewer values")
    return tuple(runs.values())


def _axis(text: str) -> tuple[str, list[str]]:
    key, equals, values = (part.strip() for part in text.partition("="))
    parts = _split(values)
    if not key or not equals or not all(parts):
        raise ConfigError(f"--sweep {text}: write it as section.key=value,value")
    if key in ("run.name", "run.dir") or key.startswith("launch."):
        raise ConfigError(
            f"--sweep {key}: the runs of an array share their job; submit them one by one"
        )
    return key, parts


def _split(text: str) -> list[str]:
    """Split a text at commas outside of brackets and quotes, because a value may be a list."""
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        else:
            depth += (character in "[{") - (character in "]}")
        if character == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def _fit(value: str) -> str:
    """Return a value in a form that fits into a folder's name."""
    return re.sub(r"[^\w.+=@-]+", "_", value).strip("_")
