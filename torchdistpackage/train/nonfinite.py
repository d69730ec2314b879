"""Find the origin of non-finite numbers: rank, stage, first parameter.

A sum over ranks hides its origin: afterwards all have it. So the step is repeated with the same
samples and random states, without sums between replicas, and each rank's findings in its outputs,
loss and gradients are combined. No gradients are left behind.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchdistpackage.comm import primitives
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.schedule.actions import ActionKind, flatten
from torchdistpackage.tools.undisturbed import keep_random_states
from torchdistpackage.train.compiled import run_eagerly
from torchdistpackage.train.step import Trainer
from torchdistpackage.train.step_stats import PendingStep


@dataclass(frozen=True, slots=True)
class NonFiniteGrads:
    """Parameters of one rank with non-finite gradients: their number, and stage and name of the
    first in backward order."""

    stage: int
    name: str
    number: int

    def __str__(self) -> str:
        more = f" and {self.number - 1} more are" if self.number > 1 else " is"
        return f"the gradient of {self.name}{more} not finite"


@dataclass(frozen=True, slots=True)
class NonFiniteReport:
    """The non-finite values that one rank saw when the step was repeated, before and after the sum.

    forward: micro-batch, stage and kind (output, loss) of the first non-finite result whose inputs
    were finite. own, summed: gradients before and after the sum.
    """

    rank: int
    forward: tuple[int, int, str] | None
    own: NonFiniteGrads | None
    summed: NonFiniteGrads | None


def explain(trainer: Trainer, issued: PendingStep) -> str:
    """Return a text that says where the first non-finite number of the last issued step came from.

    Collective over the entire run.
    """
    finite = issued.norms.isfinite().tolist()
    later = [n for n, ok in zip(issued.names, finite, strict=True) if not ok]
    probe, layouts = _ForwardProbe(trainer), trainer.layouts
    # what the repetition draws is not drawn again by the run
    with keep_random_states(trainer.device):
        torch.set_rng_state(issued.random[0])
        if len(issued.random) > 1:
            torch.cuda.set_rng_state(issued.random[1], trainer.device)
        with run_eagerly(trainer.stage.compiled), probe.watching(), trainer.reducer.no_sync():
            if trainer.optimizer is not None:
                trainer.optimizer.zero_grad()
            trainer.accumulate(issued.step, reduce=False)
    own_grads = [
        layouts[name].name
        for name, p in trainer.stage.named_parameters()
        if p.grad is not None and not bool(p.grad.isfinite().all())
    ]
    if trainer.optimizer is not None:
        trainer.optimizer.zero_grad()
    # local names begin with the stage, see TrainStages
    stage_of = {layout.name: int(name.partition(".")[0]) for name, layout in layouts.items()}
    grads, summed = (
        NonFiniteGrads(stage_of[names[-1]], names[-1], len(names)) if names else None
        for names in (own_grads, later)
    )
    report = NonFiniteReport(trainer.rank, probe.first, grads, summed)
    words = primitives.reduce_objects(
        report, lambda seen: _words([x for x in seen if isinstance(x, NonFiniteReport)])
    )
    return f"step {issued.step}: {words}"


def _words(reports: Sequence[NonFiniteReport]) -> str:
    forward = [(x.forward, x.rank, x.own) for x in reports if x.forward is not None]
    # a backward runs from the last stage to the first
    with_own = sorted(
        ((-x.own.stage, x.rank, x.own) for x in reports if x.own), key=lambda x: x[:2]
    )
    summed = sorted(
        ((-x.summed.stage, x.rank, x.summed) for x in reports if x.summed), key=lambda x: x[:2]
    )
    if forward:
        (number, stage, tensor_name), first, grads = min(forward, key=lambda x: x[:2])
        text = (
            f"the {tensor_name} of microbatch {number} is not finite on rank {first}, stage {stage}"
        )
        text += f", and then {grads}" if grads else ""
    elif with_own:
        _, first, grads = with_own[0]
        text = f"on rank {first}, stage {grads.stage} {grads}"
    elif summed:
        _, first, grads = summed[0]
        ranks = ", ".join(str(x.rank) for x in reports if x.summed)
        return (
            f"after the sum {grads} on rank {first}, stage {grads.stage} (seen on rank {ranks}); "
            f"the same step done again was finite everywhere, so look for a faulty device or "
            f"network there"
        )
    else:
        return (
            "the sum over all gradients or losses is not finite, but each of them is: they are "
            "too large for their type; lower optim.lr, or look at the samples of the step"
        )
    others = [str(x.rank) for x in reports if (x.forward or x.own) and x.rank != first]
    return f"{text}; also on rank {', '.join(others)}" if others else text


class _ForwardProbe:
    """Watches the inputs and outputs of each stage, and the loss."""

    def __init__(self, trainer: Trainer):
        self._trainer, self._finite_so_far = trainer, True
        self._stage, self._microbatch = 0, 0
        schedule = trainer.plan.schedule
        self._number = schedule.num_microbatches
        # of each stage the microbatches of its forwards, in the order in which they come
        self._order: dict[int, list[int]] = {}
        for action in flatten(schedule.programs[tpc.get_pp_rank()]):
            if action.kind is ActionKind.F:
                self._order.setdefault(action.stage, []).append(action.microbatch)
        self._done = dict.fromkeys(self._order, 0)
        self.first: tuple[int, int, str] | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        trainer, loss = self._trainer, self._trainer.loss
        trainer.loss = self._loss
        self._inner = loss
        handle = trainer.stage.register_forward_hook(self._output)
        try:
            yield
        finally:
            handle.remove()
            trainer.loss = loss

    def _output(self, module: nn.Module, inputs: tuple[int, object], output: object) -> None:
        self._stage, x = inputs
        rounds, at = divmod(self._done[self._stage], self._number)
        self._done[self._stage] += 1
        self._microbatch = rounds * self._number + self._order[self._stage][at]
        self._finite_so_far = _finite(x)
        self._note("output", output)

    def _loss(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        total, count = self._inner(outputs, targets)
        self._note("loss", total)
        return total, count

    def _note(self, tensor_name: str, value: object) -> None:
        if self._finite_so_far and not _finite(value):
            self._finite_so_far = False
            if self.first is None:
                self.first = (self._microbatch, self._stage, tensor_name)


def _finite(value: object) -> bool:
    """Return whether all numbers in a tensor, or in tuples, lists and dicts of tensors, are
    finite.
    """
    if isinstance(value, Tensor):
        return not value.is_floating_point() or bool(value.isfinite().all())
    if isinstance(value, tuple | list):
        return all(map(_finite, value))
    return all(map(_finite, value.values())) if isinstance(value, dict) else True
