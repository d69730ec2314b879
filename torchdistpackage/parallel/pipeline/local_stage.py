"""One stage of this rank while a schedule runs: its forwards and backwards.

One rule: what a microbatch holds between its forward and its backward is in lists by microbatch,
and is let go of in the action that uses it last.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from torchdistpackage.comm.messages import Message, tensors_of
from torchdistpackage.parallel.pipeline.boundary import Entrance, Handover, Outlet
from torchdistpackage.parallel.pipeline.clock import Clock
from torchdistpackage.parallel.pipeline.split_backward import (
    Deferred,
    backward_input,
    backward_weight,
)

Forward = Callable[[int, int, Message], Message]
"""(stage, microbatch, what the stage before gave, None on the first) -> what goes on."""
Backward = Callable[[int, int, Message, tuple[Tensor | None, ...] | None], None]
"""(stage, microbatch, what Forward returned, gradients for its members, None on the last stage)."""
Keep = Callable[[int, int, Message], None]


_run_backward = torch.autograd.Variable._execution_engine.run_backward


class LocalStage:
    """Computes stage `stage`.

    entrance: where its input comes from, None on the first. exit: where its output goes, None on
    the last. outputs: what it has given, by microbatch. deferred: the W that wait, by microbatch.
    Set `forward_fn` and its like before a run.
    """

    def __init__(
        self,
        stage: int,
        outputs: list[Message],
        entrance: Entrance | None,
        exit: Outlet | Handover | None,
        clock: Clock,
    ):
        self.stage, self._outputs = stage, outputs
        self.entrance, self._exit, self._clock = entrance, exit, clock
        self.deferred: list[Deferred | None] = [None] * len(outputs)
        self._works_in_place = False
        self.forward_fn: Forward = _unset
        self.backward_fn: Backward | None = None
        self.keep: Keep | None = None

    def reset(self) -> None:
        """Let go of the run's functions, and of what an interrupted run has left."""
        self.forward_fn, self.backward_fn, self.keep = _unset, None, None
        self._outputs[:] = [None] * len(self._outputs)
        self.deferred[:] = [None] * len(self.deferred)

    def forward(self, m: int) -> None:
        entrance = self.entrance
        received = None if entrance is None else entrance.take(m)
        if self._works_in_place:
            received = _aliased(received)
        with self._clock:
            try:
                output = self.forward_fn(self.stage, m, received)
            except RuntimeError as error:
                # of a leaf that the stage changes in place; it gets aliases from now on
                if self._works_in_place or "leaf Variable" not in str(error):
                    raise
                self._works_in_place = True
                output = self.forward_fn(self.stage, m, _aliased(received))
        if self.keep is not None:
            self.keep(self.stage, m, output)
        self._outputs[m] = output

    def evaluate(self, m: int) -> None:
        """`forward` where no backward follows: only what goes on is held."""
        self.forward(m)
        if self._exit is None:
            self._outputs[m] = None

    def backward(self, m: int) -> None:
        output, gradients = self._end(m)
        with self._clock:
            if self.backward_fn is None:
                autograd(self.stage, m, output, gradients)
            else:
                self.backward_fn(self.stage, m, output, gradients)

    def backward_input(self, m: int) -> None:
        """A caller's own backward is not split: all of it is here."""
        if self.backward_fn is not None:
            self.backward(m)
            return
        output, gradients = self._end(m)
        leaves = [] if self.entrance is None else self.entrance.leaves[m]
        with self._clock:
            roots, seeds = _roots(output, gradients)
            if roots:
                self.deferred[m] = backward_input(roots, seeds, leaves)

    def backward_weight(self, m: int) -> None:
        deferred, self.deferred[m] = self.deferred[m], None
        if deferred is not None:
            with self._clock:
                backward_weight(deferred)

    def _end(self, m: int) -> tuple[Message, tuple[Tensor | None, ...] | None]:
        """The output of `m`, let go of, and the gradients that came for it."""
        output, self._outputs[m] = self._outputs[m], None
        return output, None if self._exit is None else self._exit.gradients(m)


def autograd(
    stage: int, m: int, output: Message, gradients: tuple[Tensor | None, ...] | None
) -> None:
    """Backward of what was sent on from its gradients, or of a scalar loss on the last stage."""
    roots, seeds = _roots(output, gradients)
    if roots and gradients is not None:
        # what torch.autograd.backward does when all gradients are given, in a third of its time
        _run_backward(tuple(roots), tuple(seeds), False, False, (), True, True)
    elif roots:
        torch.autograd.backward(roots)


def _aliased(message: Message) -> Message:
    """The same, with a tensor of its own on the memory of each leaf, which may change in place."""
    if isinstance(message, dict):
        return {key: None if x is None else _alias(x) for key, x in message.items()}
    if isinstance(message, tuple | list):
        return tuple(None if x is None else _alias(x) for x in message)
    return None if message is None else _alias(message)


def _alias(x: Tensor) -> Tensor:
    return _Alias.apply(x) if x.requires_grad else x  # type: ignore[return-value]


class _Alias(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient


def _roots(
    output: Message, gradients: tuple[Tensor | None, ...] | None
) -> tuple[list[Tensor], list[Tensor | None]]:
    """The members to differentiate, and their gradients; None stands for that of a scalar."""
    if gradients is None:
        roots = [x for x in tensors_of(output) if x is not None and x.requires_grad]
        return roots, [None] * len(roots)
    pairs = [
        (x, g)
        for x, g in zip(tensors_of(output), gradients, strict=True)
        if g is not None and x is not None and x.requires_grad
    ]
    return [x for x, _ in pairs], [g for _, g in pairs]


def _unset(stage: int, m: int, received: Message) -> Message:
    raise RuntimeError(f"stage {stage} has no forward outside a run")
