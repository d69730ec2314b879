"""The runner of one stage during a schedule: its forwards and backwards.

State of a micro-batch between its forward and its backward is in lists by micro-batch, and is
released by the action that uses it last.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torchdistpackage.comm.moments import ComputeClock
from torchdistpackage.comm.tensor_meta import Message, tensors_of
from torchdistpackage.parallel.pipeline.links import LocalLink, Output, Root, SendLink, StageInput
from torchdistpackage.parallel.pipeline.split_backward import (
    Deferred,
    backward_input,
    backward_weight,
)

Forward = Callable[[int, int, Message], Message]
"""A function (stage, micro-batch, the previous stage's output, None on the first) -> output."""
Backward = Callable[[int, int, Message, tuple[Tensor | None, ...] | None], None]
"""A function of (stage, micro-batch, output of Forward, gradients for its members, None on
the last).
"""
Keep = Callable[[int, int, Message], None]
Weight = float | Tensor
"""The gradient that a micro-batch's backward starts from: its share of the step's loss."""

_run_backward = torch.autograd.Variable._execution_engine.run_backward


class StageRunner:
    """A runner that computes stage `stage`. A run starts with `begin` and ends with `reset`.

    outputs: outputs of the stage, by micro-batch; the output link reads and releases them too.
    input_link: source of its input, None on the first stage.
    output_link: target of its output, None on the last stage.
    deferred: waiting weight gradients (W), by micro-batch; grad_sync.py reads their parameters.
    """

    def __init__(
        self,
        stage: int,
        outputs: list[Output],
        input_link: StageInput | None,
        output_link: SendLink | LocalLink | None,
        clock: ComputeClock,
    ):
        self.stage, self._outputs = stage, outputs
        self.input_link, self._output_link, self._clock = input_link, output_link, clock
        self.deferred: list[Deferred | None] = [None] * len(outputs)
        # Whether the stage changes its input in place; None until the first run has shown it. A
        # leaf must not be changed in place, and an alias of it costs an autograd node for each
        # member.
        self._works_in_place: bool | None = None
        # set by `begin` for one run, and released by `reset` with everything that they refer to
        self.forward_fn: Forward = _unset
        self.backward_fn: Backward | None = None
        self.keep: Keep | None = None
        self.weights: Sequence[Weight] | None = None

    def begin(
        self,
        forward: Forward,
        backward: Backward | None,
        keep: Keep | None,
        weights: Sequence[Weight] | None,
    ) -> None:
        """Set the functions and weights of a run; see `Executor.run`."""
        self.forward_fn, self.backward_fn = forward, backward
        self.keep, self.weights = keep, weights
        if isinstance(self._output_link, SendLink):
            self._output_link.keeps_outputs = backward is not None

    def learned(self) -> None:
        """Note at the end of the first run whether the stage changes its input in place."""
        self._works_in_place = bool(self._works_in_place)

    def reset(self) -> None:
        """Release the run's functions, and what an interrupted run left."""
        if self.input_link is not None:
            self.input_link.reset()
        self.forward_fn, self.backward_fn, self.keep, self.weights = _unset, None, None, None
        self._outputs[:] = [None] * len(self._outputs)
        self.deferred[:] = [None] * len(self.deferred)

    def forward(self, m: int) -> None:
        """Run the forward of micro-batch `m`."""
        input_link = self.input_link
        received = None if input_link is None else input_link.take(m)
        with self._clock:
            if input_link is None or self._works_in_place is False:
                output = self._on_leaves(m, received)
            else:
                output = self._on_aliases(m, received, input_link.leaves[m])
        if self.keep is not None:
            self.keep(self.stage, m, output)
        self._outputs[m] = output

    def _on_leaves(self, m: int, received: Message) -> Message:
        """Call the forward on leaves, which it must not change in place."""
        try:
            return self.forward_fn(self.stage, m, received)
        except RuntimeError as error:
            if "leaf Variable" in str(error):
                error.add_note(
                    f"stage {self.stage} changes its input in place for microbatch {m}, but did "
                    "not in the first run; change it in every run, or never"
                )
            raise

    def _on_aliases(self, m: int, received: Message, leaves: Sequence[Tensor]) -> Message:
        """Call the forward on aliases of the leaves, and note whether it changes them in place."""
        versions = [x._version for x in leaves]
        output = self.forward_fn(self.stage, m, _aliased(received))
        if [x._version for x in leaves] != versions:
            self._works_in_place = True
        return output

    def evaluate(self, m: int) -> None:
        """Run the forward without a backward, so keep the output only if it is sent."""
        self.forward(m)
        if self._output_link is None:
            self._outputs[m] = None

    def backward(self, m: int) -> None:
        """Run the full backward of micro-batch `m`."""
        output, gradients = self._end(m)
        with self._clock:
            if self.backward_fn is None:
                autograd(self.stage, m, output, gradients, self._weight(m))
            else:
                self.backward_fn(self.stage, m, output, gradients)

    def backward_input(self, m: int) -> None:
        """Run the first half of the backward of `m`, or all of a caller's own backward."""
        if self.backward_fn is not None:
            self.backward(m)
            return
        output, gradients = self._end(m)
        leaves = [] if self.input_link is None else self.input_link.leaves[m]
        with self._clock:
            roots, seeds = _roots(output, gradients, self._weight(m))
            if roots:
                self.deferred[m] = backward_input(roots, seeds, leaves)

    def backward_weight(self, m: int) -> None:
        """Run the second half of the backward of `m`."""
        deferred, self.deferred[m] = self.deferred[m], None
        if deferred is not None:
            with self._clock:
                backward_weight(deferred)

    def _weight(self, m: int) -> Weight:
        return 1.0 if self.weights is None else self.weights[m]

    def _end(self, m: int) -> tuple[Output, tuple[Tensor | None, ...] | None]:
        """Release the output of `m`, and return it with the gradients received for it."""
        output, self._outputs[m] = self._outputs[m], None
        return output, None if self._output_link is None else self._output_link.gradients(m)


def autograd(
    stage: int,
    m: int,
    output: Output,
    gradients: tuple[Tensor | None, ...] | None,
    weight: Weight = 1.0,
) -> None:
    """Run autograd's backward from the received gradients, or from the loss on the last stage."""
    roots, seeds = _roots(output, gradients, weight)
    if gradients is None and any(seed.numel() != 1 for seed in seeds):
        torch.autograd.backward(roots)  # type: ignore[arg-type]  # raises torch's own error
    elif roots:
        # what torch.autograd.backward calls if all gradients are given, in a third of its time
        _run_backward(tuple(roots), tuple(seeds), False, False, (), True, True)


def _aliased(message: Message) -> Message:
    """Return the message with an alias of each leaf, which may be changed in place."""
    if isinstance(message, dict):
        return {key: _alias(x) for key, x in message.items()}
    return tuple(map(_alias, message)) if isinstance(message, tuple | list) else _alias(message)


def _alias(x: Tensor | None) -> Tensor | None:
    return x if x is None or not x.requires_grad else _Alias.apply(x)  # type: ignore[return-value]


class _Alias(torch.autograd.Function):
    """Identity whose output shares memory with a leaf and may be changed in place."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient


def _roots(
    output: Output, gradients: tuple[Tensor | None, ...] | None, weight: Weight
) -> tuple[list[Root], list[Tensor]]:
    """Return the members to differentiate with their gradients; for a loss, its weight."""
    if gradients is None:
        losses = [x for x in tensors_of(output) if x is not None and x.requires_grad]  # type: ignore[arg-type]
        if not isinstance(weight, Tensor):
            return [*losses], [torch.full_like(x, weight) for x in losses]
        # multiply instead of copying the weight to the device, which would make the host wait
        return [*losses], [torch.ones_like(x).mul_(weight.reshape(())) for x in losses]
    pairs = [
        (x, g)
        for x, g in zip(tensors_of(output), gradients, strict=True)  # type: ignore[arg-type]
        if g is not None and x is not None and (not isinstance(x, Tensor) or x.requires_grad)
    ]
    return [x for x, _ in pairs], [g for _, g in pairs]


def _unset(stage: int, m: int, received: Message) -> Message:
    """Raise, because a stage has a forward only during a run."""
    raise RuntimeError(f"stage {stage} has no forward outside a run")
