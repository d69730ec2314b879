"""Where numbers that are not finite came from: rank, stage, first parameter.

A sum over ranks hides who brought it: afterwards all have it. So the step is done once more, with
the same samples and random states, and nothing is summed between replicas; what each rank finds in
its own outputs, loss and gradients is put together.

One rule: all ranks of the run call `explain` and get the same text. It leaves no gradients behind.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchdistpackage.comm import primitives
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.schedule.actions import ActionKind, flatten
from torchdistpackage.train.step import Trainer
from torchdistpackage.train.step_stats import PendingStep

_NOBODY = (-1, "")


@dataclass(frozen=True, slots=True)
class NonFiniteReport:
    """What one rank saw when the step was repeated, and what it had after the sum.

    forward: microbatch, stage and kind (output, loss) of what first came out of one of its stages
    not finite, though all that went in was. parameter, number: the first, in the order of the
    backward, whose own gradient was not finite, and how many were; after, after_number: the same
    after the sum. Each parameter with its stage.
    """

    rank: int
    forward: tuple[int, int, str] | None
    parameter: tuple[int, str]
    number: int
    after: tuple[int, str]
    after_number: int


def explain(trainer: Trainer, issued: PendingStep) -> str:
    """In words, where it began in the step that was issued. Collective over the whole run."""
    after = [
        n for n, ok in zip(issued.names, issued.norms.isfinite().tolist(), strict=True) if not ok
    ]
    witness = _ForwardProbe(trainer)
    # what the repetition draws is not drawn again by the run
    with torch.random.fork_rng(devices=_indices(trainer.device)):
        _set_random(issued.random, trainer.device)
        with witness.watching(), trainer.reducer.no_sync():
            if trainer.optimizer is not None:
                trainer.optimizer.zero_grad()
            trainer.accumulate(issued.step, reduce=False)
    stage_of = {layout.name: _stage_of(name) for name, layout in trainer.layouts.items()}
    own = [
        trainer.layouts[name].name
        for name, p in trainer.stage.named_parameters()
        if p.grad is not None and not bool(p.grad.isfinite().all())
    ]
    if trainer.optimizer is not None:
        trainer.optimizer.zero_grad()
    mine = NonFiniteReport(
        trainer.rank,
        witness.first,
        (stage_of[own[-1]], own[-1]) if own else _NOBODY,
        len(own),
        (stage_of[after[-1]], after[-1]) if after else _NOBODY,
        len(after),
    )
    seen = [x for x in primitives.gather_objects(mine) if isinstance(x, NonFiniteReport)]
    return f"step {issued.step}: {_words(seen)}"


def _words(seen: Sequence[NonFiniteReport]) -> str:
    forward = [x for x in seen if x.forward is not None]
    backward = [x for x in seen if x.number]
    if forward:
        first = min(forward, key=lambda x: (x.forward or (0, 0, ""), x.rank))
        assert first.forward is not None
        number, stage, what = first.forward
        at = f"rank {first.rank}, stage {stage}"
        text = f"the {what} of microbatch {number} is not finite on {at}"
        if first.number:
            text += f", and then {_gradients(first.parameter[1], first.number)}"
    elif backward:
        # a backward runs from the last stage to the first
        first = min(backward, key=lambda x: (-x.parameter[0], x.rank))
        text = f"on {_place(first.rank, first.parameter, first.number)}"
    else:
        summed = [x for x in seen if x.after_number]
        if not summed:
            return (
                "the sum over all gradients or losses is not finite though each of them is: they "
                "are too large for their type; lower optim.lr, or look at the samples of the step"
            )
        first = min(summed, key=lambda x: (-x.after[0], x.rank))
        ranks = ", ".join(str(x.rank) for x in summed)
        return (
            f"after the sum {_gradients(first.after[1], first.after_number)} on rank "
            f"{first.rank}, stage {first.after[0]} (seen on rank {ranks}); the same step done "
            f"again was finite everywhere, so look for a faulty device or network there"
        )
    others = [x.rank for x in (*forward, *backward) if x.rank != first.rank]
    if others:
        text += f"; also on rank {', '.join(map(str, dict.fromkeys(others)))}"
    return text


def _place(rank: int, parameter: tuple[int, str], number: int) -> str:
    stage, name = parameter
    return f"rank {rank}, stage {stage} {_gradients(name, number)}"


def _stage_of(name: str) -> int:
    """Of a parameter by its local name, see TrainStages."""
    return int(name.partition(".")[0])


def _gradients(first: str, number: int) -> str:
    more = f" and {number - 1} more are" if number > 1 else " is"
    return f"the gradient of {first}{more} not finite"


class _ForwardProbe:
    """Looks at what goes into and comes out of each stage, and at the loss."""

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

    def _note(self, what: str, value: object) -> None:
        if self._finite_so_far and not _finite(value):
            self._finite_so_far = False
            if self.first is None:
                self.first = (self._microbatch, self._stage, what)


def _finite(value: object) -> bool:
    """Whether all numbers in a tensor, or in tuples, lists and dicts of them, are finite."""
    if isinstance(value, Tensor):
        return not value.is_floating_point() or bool(value.isfinite().all())
    if isinstance(value, tuple | list):
        return all(map(_finite, value))
    return all(map(_finite, value.values())) if isinstance(value, dict) else True


def _indices(device: torch.device) -> list[int]:
    return [] if device.index is None else [device.index]


def _set_random(states: Sequence[Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1], device)
