"""What is refused of a planned run before its folder is touched and a rank starts. No torch.

What the plan itself refuses is refused before: rules that join keys (config/check.py), and what a
model cannot do (models/refusals.py). Here are files, your own modules, texts, and the checkpoint to
resume from, which are looked at where the run is started.
"""

from collections.abc import Callable
from pathlib import Path

from torchdistpackage.config.check import absent_files, wrong_files
from torchdistpackage.config.errors import ConfigErrors, Problem
from torchdistpackage.config.schema import RunConfig
from torchdistpackage.config.slurm import extra_of
from torchdistpackage.train.plan import Plan, make_plan
from torchdistpackage.train.resume_check import refuse_other_model, resumed_from
from torchdistpackage.train.run_folder import CHECKPOINTS, run_folder
from torchdistpackage.train.texts import wrong_texts
from torchdistpackage.train.user_code import unknown_modules


def refuse_here(config: RunConfig, source: str, code: str) -> None:
    """Refuse a run on this machine, read from `source`, whose own modules are in the folder `code`.

    Raises:
        ConfigError: lists all files and modules that are not there or of no use, or all that is
            wrong with the texts.
    """
    if found := absent_files(config) + wrong_files(config) + unknown_modules(config, code):
        raise ConfigErrors(source, found)
    if found := wrong_texts(config):  # the ranks find what is made here
        raise ConfigErrors(source, found)


def job_problems(config: RunConfig, code: str) -> list[Problem]:
    """What is wrong with the modules and files of a Slurm job, as far as it shows before it runs.

    A container sees other folders, a prologue may fetch files, conda may have other modules.
    """
    has = {x: bool(extra_of(config.launch.slurm, x)) for x in ("container", "conda", "prologue")}
    found: list[Problem] = []
    if not (has["container"] or has["conda"]):
        found += unknown_modules(config, code)
    if not (has["container"] or has["prologue"]):
        found += absent_files(config) + wrong_files(config)
    return found


def refuse_checkpoint(run: Path, resume: str, plan: Callable[[], Plan]) -> None:
    """Raises CheckpointError if what such a start of the run folder would resume from is not of its
    plan, which is made only if there is something to resume from."""
    if (checkpoint := resumed_from(resume, run / CHECKPOINTS)) is not None:
        refuse_other_model(checkpoint, plan())


def check_checkpoint(config: RunConfig, resume: str, num_ranks: int) -> None:
    """`refuse_checkpoint` of a run that is not planned yet, on so many ranks."""
    refuse_checkpoint(run_folder(config), resume, lambda: make_plan(config, num_ranks))
