"""Training steps of a plan with threads as ranks, for the communication linter.

They are the real steps of the run, on the reduced plan of `plan/shrink.py`.
"""

import os
import traceback
from dataclasses import replace

import torch

from torchdistpackage.comm.tpc import tpc
from torchdistpackage.data.source import DataSource
from torchdistpackage.errors import ConfigError, TorchDistError
from torchdistpackage.harness.lint.linter import lint
from torchdistpackage.harness.lint.report import LintReport
from torchdistpackage.launch.entrypoint import user_object
from torchdistpackage.plan.run_plan import Plan
from torchdistpackage.plan.shrink import shrunk
from torchdistpackage.plan.user_code import add_user_code
from torchdistpackage.train.build import build
from torchdistpackage.train.data_build import build_data

STEPS = 2
"""Number of steps. The first announces shapes and learns what a backward does; the second is like
all later ones."""
_CALLER = build_data.__code__.co_filename


def trial(plan: Plan, num_steps: int = STEPS, *, limit_s: float = 600.0) -> LintReport:
    """Build and run the steps of every rank of the reduced plan on the CPU, and check all their
    calls.

    The results are the losses of the steps. num_steps: 0 makes the groups and builds nothing.
    limit_s: wall seconds in total.

    Raises:
        ConfigError: a target of the file cannot be loaded, or the data cannot be made or read.
        TorchDistError: the smaller run does not fit the plan.
    """
    small = shrunk(plan)
    if not num_steps:
        report = lint(lambda rank: tpc.groups.prepare(small.creations(rank)), small.topology)
        return replace(report, unknown=("calls of a step, which was not run (--run runs it)",))
    _load_targets(small)
    data = _data(small)

    def step(rank: int) -> list[float]:
        trainer = build(small, rank, torch.device("cpu"), data)
        # each step is awaited, so that a finding belongs to the step that caused it
        return [trainer.train_step(number).wait().loss for number in range(1, num_steps + 1)]

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return lint(step, small.topology, limit_s=limit_s)
    finally:
        torch.set_num_threads(threads)


def _load_targets(plan: Plan) -> None:
    """Import the modules that ranks will need, so that a wrong name is not reported as a rank's
    failure.
    """
    folder = add_user_code(os.environ)
    for key, (target, _) in plan.user_code.items():
        try:
            user_object(target)
        except Exception as error:  # an import may raise anything
            raise ConfigError(
                f"{key} {target} cannot be loaded: {_in_words(error)}; correct it, or run this "
                f"where the module can be imported from (looked in {folder} and Python's own path)"
            ) from error


def _data(plan: Plan) -> DataSource:
    try:
        return build_data(plan)
    except TorchDistError as error:
        raise ConfigError(f"data: {error}") from error
    except Exception as error:  # a constructor may too
        if "data.target" not in plan.user_code:
            raise
        target, args = plan.user_code["data.target"]
        raise ConfigError(
            f"data.target {target} cannot be made with data.args {args}: "
            f"{_in_words(error)}; correct the one or the other"
        ) from error


def _in_words(error: Exception) -> str:
    """Return the exception's text with the line of user code that raised it; a refusal prints no
    traceback.
    """
    text = f"{type(error).__name__}: {error}"
    last = traceback.extract_tb(error.__traceback__)[-1]
    # of a call that did not fit, and of a name that is not there, the line is ours
    ours = isinstance(error, ImportError | TorchDistError) or last.filename == _CALLER
    return text if ours else f"{text} ({last.filename}:{last.lineno})"
