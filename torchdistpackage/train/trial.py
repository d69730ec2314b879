"""Training steps of a plan with threads as ranks, under the order linter.

One rule: they are the steps of the run but for the number of samples, of which each microbatch has
one: the order of calls does not depend on it.
"""

import torch

from torchdistpackage.harness.lint.linter import lint
from torchdistpackage.harness.lint.report import Report
from torchdistpackage.train.build import build, build_data
from torchdistpackage.train.plan import Plan, make_plan

STEPS = 2
"""The first announces shapes and learns what a backward does; the second is as all later ones."""


def trial(plan: Plan, *, limit_s: float = 600.0) -> Report:
    """Build and run `STEPS` steps of every rank, on the CPU, and check all their calls.

    The results are the losses of the steps. limit_s: wall seconds for all of it.

    Raises:
        TorchDistError: the data cannot be read, or the smaller batch does not fit the plan.
    """
    small = _one_sample(plan)
    data = build_data(small)

    def step(rank: int) -> list[float]:
        trainer = build(small, rank, torch.device("cpu"), data)
        return [trainer.train_step(number).read().loss for number in range(1, STEPS + 1)]

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
