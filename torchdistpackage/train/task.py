"""The interface of a task, which computes a run's loss and its additional values for the log and
validations.

A run without a task predicts tokens, by the loss of its model. `build_task` in train/build.py makes
the task of a run by its data.name. What a task sums over samples travels in the one all-reduce of a
step; what needs all samples at once, such as the area under a curve, is gathered once a validation.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from torchdistpackage.comm.autograd import Reduce, apply
from torchdistpackage.comm.primitives import Group
from torchdistpackage.data.source import Split
from torchdistpackage.parallel.pipeline.executor import Executor
from torchdistpackage.parallel.pipeline.losses import totals_on
from torchdistpackage.plan.run_plan import TASK_ROOM
from torchdistpackage.train.staged_model import Microbatches, MicrobatchLoss, StagedModel

Run = Callable[..., None]
"""A function that calls `Executor.run` in the contexts of a pass, such as autocast."""


def summed_over(context: Group, x: Tensor) -> Tensor:
    """Return the sum of `x` over the ranks that share sequences; the gradient passes unchanged to
    each.
    """
    return apply(Reduce(context), x) if context.size() > 1 else x


def told_once(context: Group, loss: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Return loss and count such that they are reported once, if all ranks that share sequences
    have the full loss.

    The first of them returns both as they are, the others zeros with the gradient of the loss.
    """
    if context.rank() == 0:
        return loss, count
    return loss - loss.detach(), torch.zeros_like(count)


class TaskLoss:
    """Base class of the losses of tasks. device: of the sums.

    unit: the samples over which the loss is a mean, as the log names them. executors: of further
    models that run beside the trained one; their messages have the time limit of the run's.
    """

    unit: ClassVar[str] = "samples"
    executors: Sequence[Executor] = ()

    def __init__(self, device: torch.device):
        self._sums = totals_on(device, TASK_ROOM)

    def begin_round(self, split: Split, number: int, index: int) -> None:
        """Called before `loss_of` with the round: index `index` of step `number`, or of this batch
        of a validation.
        """

    def loss_of(
        self,
        model: StagedModel,
        executor: Executor,
        run: Run,
        inputs: Sequence[Tensor],
        targets: Sequence[Tensor],
    ) -> MicrobatchLoss:
        """Return the loss of these micro-batches; it is called with the outputs of the last stage.

        executor: forward only; run: its `run`, for forwards that must precede the model's.
        """
        raise NotImplementedError

    def loss_of_batch(
        self, model: StagedModel, executor: Executor, run: Run, batch: Microbatches
    ) -> MicrobatchLoss:
        """Return `loss_of` for samples that may have their own positions."""
        return self.loss_of(model, executor, run, batch.inputs, batch.targets)

    def trained(self, batch: Microbatches) -> Microbatches:
        """Return the rows and targets on which the model is trained, if some were only for
        `loss_of`.
        """
        return batch

    def add(self, sums: Sequence[Tensor]) -> None:
        """Add sums over samples, one number each, on the one rank that reports them; at most
        `TASK_ROOM`.
        """
        self._sums[: len(sums)] += torch.stack([x.to(self._sums) for x in sums]).detach()

    def take(self) -> Tensor:
        """Return this rank's sums (TASK_ROOM,) since the last call, in float64."""
        sums, self._sums = self._sums, torch.zeros_like(self._sums)
        return sums

    def means(self, sums: Sequence[float], count: float) -> Mapping[str, float]:
        """Return values of the log from sums over all ranks. count: that of the loss."""
        return {}

    def num_samples(self, sums: Sequence[float], count: float) -> int:
        """Return the number of counted samples or tokens, which a weighted count does not give."""
        return round(count)

    def text(self, means: Mapping[str, float]) -> str:
        """Return the part of `means` that fits on a log line."""
        return ""

    def begin_validation(self) -> None:
        """Start to collect what `end_validation` needs of each sample."""

    def end_validation(self, group: Group) -> Mapping[str, float]:
        """Return the validation's values besides `means`, equal on all ranks of `group`, which call
        it together.

        It is not called for an interrupted validation.
        """
        return {}
