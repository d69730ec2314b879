"""Refuse a run before its folder is touched and a rank starts. No torch.

The process that starts a run (train/job.py), or rank 0 of a launcher, refuses in this order, each
thing once, what costs little first. What 1 to 4 find is listed together (config/all_problems.py),
except for texts, which take long to read:

1. keys of the file, and rules that join keys: config/load.py
2. the number of ranks: `fitted` (elastic.py); what a model cannot do: `make_plan`, which calls
   models/refusals.py
3. `--resume` of a folder that is not there: `named_folder` (resume_check.py)
4. files and your own modules: `refuse_files`, then texts: `refuse_texts`; of a job `job_problems`,
   by `tdp submit`, which also refuses a run folder without room (cli/submit.py)
5. under the lock of the run folder: a folder that a job would move away under itself
   (`refuse_moving_aside`), and the checkpoint to resume from (`refuse_checkpoint`)
6. a start that would do again what came to nothing: `restart_denied` (launch/slurm/requeue.py)
"""

import os
from collections.abc import Callable, Sequence

from torchdistpackage.checkpoint.node_folder import expanded
from torchdistpackage.config.all_problems import ProblemCollector
from torchdistpackage.config.check import absent_files, wrong_files
from torchdistpackage.config.errors import ConfigErrors, Problem
from torchdistpackage.config.schema import RunConfig
from torchdistpackage.config.slurm import extra_of
from torchdistpackage.data.tokens.texts import wrong_texts
from torchdistpackage.errors import CheckpointError, LaunchError
from torchdistpackage.plan.elastic import fitted
from torchdistpackage.plan.logits_file import wrong_logits
from torchdistpackage.plan.reference_file import wrong_reference
from torchdistpackage.plan.resume_check import (
    refuse_other_model,
    refuse_other_optimizer,
    resumed_from,
)
from torchdistpackage.plan.run_plan import Plan, make_plan
from torchdistpackage.plan.teacher import other_tokenizer
from torchdistpackage.plan.user_code import unknown_modules
from torchdistpackage.run_files import CHECKPOINTS, RunDir

FILE_KEYS = (
    *("data", "model", "optim.name", "run.seed", "precision.dtype"),
    *("train.steps", "train.epochs", "train.distill", "train.dpo"),
)
"""Keys and sections that determine the required contents of a run's files."""


def refuse_here(config: RunConfig, source: str, code: str) -> None:
    """Refuse a run on this machine, read from `source`, whose own modules are in the folder `code`.

    Raises:
        ConfigError: lists all files and modules that are not there or of no use, or all that is
            wrong with the texts.
    """
    _refuse(source, _missing_here(config, code) + unfit_files(config))
    refuse_texts(config, source)


def check_files(collector: ProblemCollector, config: RunConfig, source: str, code: str) -> None:
    """Add the refusals of `refuse_here`, except those of texts, to the problems of the run."""
    collector.run("the contents of files", FILE_KEYS, lambda: _refuse(source, unfit_files(config)))
    collector.run("files", (), lambda: _refuse(source, _missing_here(config, code)))


def check_job_files(collector: ProblemCollector, config: RunConfig, source: str, code: str) -> None:
    """Add the `job_problems` of a run to its problems."""
    missing, unfit = _of_job(config, code)
    collector.run("the contents of files", FILE_KEYS, lambda: _refuse(source, unfit()))
    collector.run("files", (), lambda: _refuse(source, missing()))


def refuse_texts(config: RunConfig, source: str) -> None:
    """Refuse a run whose texts are wrong; the ranks find the tokens that are made here.

    Raises:
        ConfigError: lists all that is wrong with the texts.
    """
    _refuse(source, wrong_texts(config))


def unfit_files(config: RunConfig) -> list[Problem]:
    """Return a problem for each existing file whose contents this run cannot use."""
    problems = wrong_files(config) + other_tokenizer(config)
    return problems + wrong_reference(config) + wrong_logits(config)


def _missing_here(config: RunConfig, code: str) -> list[Problem]:
    problems = absent_files(config) + unknown_modules(config, code)
    return problems + _unusable_local_dir(config)


def _refuse(source: str, problems: Sequence[Problem]) -> None:
    if problems:
        raise ConfigErrors(source, problems)


def _unusable_local_dir(config: RunConfig) -> list[Problem]:
    """Return the problem with `checkpoint.local_dir` on this machine, the run's only node, or
    [].
    """
    where = config.checkpoint.local_dir
    if where is None:
        return []
    try:
        root = expanded(where, os.environ)
        nearest = next(x for x in (root, *root.parents) if x.exists())
        if nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK):
            return []
        text = f"{root} cannot be written, as {nearest} is not "
        "a folder that you can write to; name another"
    except CheckpointError as error:
        text = str(error).partition(": ")[2]
    except OSError as error:
        text = f"{where}: {error.strerror}; name another folder"
    return [config.problem("checkpoint.local_dir", text)]


_OWN = ("container", "conda", "prologue", "python")
"""Keys of launch.slurm with which the nodes may have other files or modules than this machine."""


def job_problems(config: RunConfig, code: str) -> list[Problem]:
    """Return the problems of a Slurm job's modules and files that are visible before it runs.

    A container sees other folders, a prologue may fetch files, conda may have other modules.
    """
    missing, unfit = _of_job(config, code)
    return missing() + unfit()


def _of_job(
    config: RunConfig, code: str
) -> tuple[Callable[[], list[Problem]], Callable[[], list[Problem]]]:
    """Return the checks for missing files and modules of a job, and for files that do not fit."""
    has = {x: bool(extra_of(config.launch.slurm, x)) for x in _OWN}
    sees_modules = not (has["container"] or has["conda"] or has["python"])
    sees_files = not (has["container"] or has["prologue"])

    def missing() -> list[Problem]:
        problems = unknown_modules(config, code) if sees_modules else []
        return problems + (absent_files(config) if sees_files else [])

    return missing, lambda: unfit_files(config) if sees_files else []


def refuse_moving_aside(files: RunDir, resume: str) -> None:
    """Raise LaunchError if a job would move away the folder that `tdp submit` made for it."""
    if resume == "never" and files.script.exists():
        raise LaunchError(
            f"--resume never: {files.run} was made by tdp submit, whose script, logs and code are "
            f"there, and a job cannot move them away under itself; use tdp submit --fresh, or name "
            f"another run with run.name=..."
        )


def refuse_checkpoint(config: RunConfig, resume: str, plan: Callable[[], Plan]) -> None:
    """Raise CheckpointError if the checkpoint from which this start would resume does not fit its
    plan.

    The plan is made only if there is such a checkpoint.
    """
    has_copies = config.checkpoint.local_dir is not None
    own_folder = config.run.folder / CHECKPOINTS
    if (checkpoint := resumed_from(resume, own_folder, has_copies=has_copies)) is not None:
        refuse_other_model(checkpoint, plan())
        refuse_other_optimizer(checkpoint, config)


def refuse_unplanned_checkpoint(config: RunConfig, resume: str, num_ranks: int) -> None:
    """Call `refuse_checkpoint` for a run without a plan, on `num_ranks` ranks."""
    refuse_checkpoint(config, resume, lambda: make_plan(fitted(config, num_ranks), num_ranks))
