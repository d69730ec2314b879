"""Training steps of a plan with threads as ranks, under the order linter.

One rule: they are the steps of the run but for the number of samples, of which each microbatch has
one: the order of calls does not depend on it.
"""

import os
import traceback

import torch

from torchdistpackage.errors import ConfigError, TorchDistError
from torchdistpackage.harness.lint.linter import lint
from torchdistpackage.harness.lint.report import LintReport
from torchdistpackage.train.build import build, build_data, user_object
from torchdistpackage.train.data import DataSource
from torchdistpackage.train.plan import Plan, make_plan
from torchdistpackage.train.user_code import add_user_code

STEPS = 2
"""The first announces shapes and learns what a backward does; the second is as all later ones."""
_CALLER = build_data.__code__.co_filename


def trial(plan: Plan, *, limit_s: float = 600.0) -> LintReport:
    """Build and run `STEPS` steps of every rank, on the CPU, and check all their calls.

    The results are the losses of the steps. limit_s: wall seconds for all of it.

    Raises:
        ConfigError: a target of the file cannot be loaded, or the data cannot be made or read.
        TorchDistError: the smaller batch does not fit the plan.
    """
    small = _one_sample(plan)
    _load_targets(small)
    data = _data(small)

    def step(rank: int) -> list[float]:
        trainer = build(small, rank, torch.device("cpu"), data)
        return [trainer.train_step(number).wait().loss for number in range(1, STEPS + 1)]

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return lint(step, small.topology, limit_s=limit_s)
    finally:
        torch.set_num_threads(threads)


def _one_sample(plan: Plan) -> Plan:
    """The same plan with one sample in each microbatch."""
    config = plan.config
    fewest = config.data.global_batch // plan.samples_per_microbatch
    data = config.data.model_copy(update={"global_batch": fewest})
    return make_plan(config.model_copy(update={"data": data}), plan.world_size)


def _load_targets(plan: Plan) -> None:
    """Import what the ranks will need, so that a wrong name is no finding of a rank."""
    folder = add_user_code(os.environ)
    model, data = plan.config.model, plan.config.data
    targets = {"model.target": model.target, "model.loss": model.loss, "data.target": data.target}
    for key, target in targets.items():
        if target is None:
            continue
        try:
            user_object(target)
        except Exception as error:  # an import may raise anything
            raise ConfigError(
                f"{key} {target} cannot be loaded: {_in_words(error)}; correct it, or run this "
                f"where the module can be imported from (looked in {folder} and Python's own path)"
            ) from error


def _data(plan: Plan) -> DataSource:
    section = plan.config.data
    try:
        return build_data(plan)
    except TorchDistError as error:
        raise ConfigError(f"data: {error}") from error
    except Exception as error:  # a constructor may too
        if section.target is None:
            raise
        raise ConfigError(
            f"data.target {section.target} cannot be made with data.args {section.args}: "
            f"{_in_words(error)}; correct the one or the other"
        ) from error


def _in_words(error: Exception) -> str:
    """What was raised, and on which line of yours: no traceback is printed with a refusal."""
    said = f"{type(error).__name__}: {error}"
    last = traceback.extract_tb(error.__traceback__)[-1]
    # of a call that did not fit, and of a name that is not there, the line is ours
    ours = isinstance(error, ImportError | TorchDistError) or last.filename == _CALLER
    return said if ours else f"{said} ({last.filename}:{last.lineno})"
