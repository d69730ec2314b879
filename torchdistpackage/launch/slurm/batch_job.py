"""A batch job as a value: all that its script is made of.

One rule: it holds values and no text of a shell, so that other ways to submit read it as well.
"""

from dataclasses import dataclass

from torchdistpackage.config.slurm_shape import JobGeometry


@dataclass(frozen=True, slots=True)
class CodePaths:
    """folder: the snapshot. paths: for PYTHONPATH, in order. workdir: what stands for the current
    folder, where a user's own modules are looked for."""

    folder: str
    paths: tuple[str, ...]
    workdir: str


@dataclass(frozen=True, slots=True)
class BatchJob:
    """One job, or one array of them, as its script has it.

    options: of sbatch, None for one without a value. runs: run folders, one for each task of an
    array. script: where the text will be. command: words of a task, to which the path of the
    configuration is added. python: words that start an interpreter on the first node. record:
    fields of `run_dir.Submission` that a chained job shares with this one, as JSON without braces.
    max_parallel: tasks of the array that may run at a time. comments: comments above options.
    writes_decision: the ranks say how they ended, always. restarts_in_job: times the ranks may be
    started anew in one start of the job; margin_s: for these to be worth it, so long must be left
    at least.
    """

    name: str
    shape: JobGeometry
    options: tuple[tuple[str, str | None], ...]
    runs: tuple[str, ...]
    script: str
    code: CodePaths
    command: tuple[str, ...]
    python: tuple[str, ...]
    record: str
    is_array: bool = False
    max_parallel: int | None = None
    comments: tuple[tuple[str, str], ...] = ()
    container: tuple[str, ...] = ()
    srun: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    conda: str | None = None
    prologue: tuple[str, ...] = ()
    writes_decision: bool = True
    restarts_in_job: int = 0
    margin_s: float = 0.0
