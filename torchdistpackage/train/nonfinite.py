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
from torchdistpackage.train.result import Issued
from torchdistpackage.train.step import Trainer


@dataclass(frozen=True, slots=True)
class Seen:
    """What one rank saw when the step was repeated, and what it had after the sum.

    forward: number of the microbatch and kind (output, loss) of what first came out of its stage
    not finite, though all that went in was. parameter, number: the first, in the order of the
    backward, whose own gradient was not finite, and how many were; after, after_number: the same
    after the sum.
    """

    rank: int
    stage: int
    forward: tuple[int, str] | None
    parameter: str
    number: int
    after: str
    after_number: int


def explain(trainer: Trainer, issued: Issued) -> str:
    """In words, where it began in the step that was issued. Collective over the whole run."""
    after = [
        n for n, ok in zip(issued.names, issued.norms.isfinite().tolist(), strict=True) if not ok
    ]
    witness = _Witness(trainer)
    # what the repetition draws is not drawn again by the run
    with torch.random.fork_rng(devices=_indices(trainer.device)):
        _set_random(issued.random, trainer.device)
        with witness.watching(), trainer.reducer.no_sync():
            if trainer.optimizer is not None:
                trainer.optimizer.zero_grad()
            trainer.accumulate(issued.step, reduce=False)
    own = [
        trainer.layouts[name].name
        for name, p in trainer.stage.named_parameters()
        if p.grad is not None and not bool(p.grad.isfinite().all())
    ]
    if trainer.optimizer is not None:
        trainer.optimizer.zero_grad()
    mine = Seen(
        trainer.rank,
        tpc.get_pp_rank(),
        witness.first,
        own[-1] if own else "",
        len(own),
        after[-1] if after else "",
        len(after),
    )
    seen = [x for x in primitives.gather_objects(mine) if isinstance(x, Seen)]
    return f"step {issued.step}: {_words(seen)}"


def _words(seen: Sequence[Seen]) -> str:
    forward = [x for x in seen if x.forward is not None]
    backward = [x for x in seen if x.number]
    if forward:
        first = min(forward, key=lambda x: (x.forward[0] if x.forward else 0, x.stage, x.rank))
        assert first.forward is not None
        number, what = first.forward
        text = f"the {what} of microbatch {number} is not finite on {_place(first)}"
        if first.number:
            text += f", and then {_gradients(first.parameter, first.number)}"
    elif backward:
        # a backward runs from the last stage to the first
        first = min(backward, key=lambda x: (-x.stage, x.rank))
        text = f"on {_place(first)} {_gradients(first.parameter, first.number)}"
    else:
        summed = [x for x in seen if x.after_number]
        if not summed:
            return (
                "the sum over all gradients or losses is not finite though each of them is: they "
                "are too large for their type; lower optim.lr, or look at the samples of the step"
            )
        first = min(summed, key=lambda x: (-x.stage, x.rank))
        ranks = ", ".join(str(x.rank) for x in summed)
        return (
            f"after the sum {_gradients(first.after, first.after_number)} on {_place(first)} "
            f"(seen on rank {ranks}); the same step done again was finite everywhere, so look "
            f"for a faulty device or network there"
        )
    others = [x.rank for x in (*forward, *backward) if x.rank != first.rank]
    if others:
        text += f"; also on rank {', '.join(map(str, dict.fromkeys(others)))}"
    return text


def _place(seen: Seen) -> str:
    return f"rank {seen.rank}, stage {seen.stage}"


def _gradients(first: str, number: int) -> str:
    more = f" and {number - 1} more are" if number > 1 else " is"
    return f"the gradient of {first}{more} not finite"


class _Witness:
    """Looks at what goes into and comes out of the stage, and at the loss."""

    def __init__(self, trainer: Trainer):
        self._trainer, self._number, self._finite_so_far = trainer, -1, True
        self.first: tuple[int, str] | None = None

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

    def _output(self, module: nn.Module, inputs: tuple[object, ...], output: object) -> None:
        self._number += 1
        self._finite_so_far = _finite(inputs)
        self._note("output", output)

    def _loss(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        total, count = self._inner(outputs, targets)
        self._note("loss", total)
        return total, count

    def _note(self, what: str, value: object) -> None:
        if self._finite_so_far and not _finite(value):
            self._finite_so_far = False
            if self.first is None:
                self.first = (self._number, what)


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
