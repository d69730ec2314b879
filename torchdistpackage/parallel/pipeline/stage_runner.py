"""One stage of this rank while a schedule runs: its forwards and backwards.

What a microbatch holds between its forward and its backward is in lists by microbatch, and is
released in the action that uses it last.
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
"""(stage, microbatch, what the stage before gave, None on the first) -> what goes on."""
Backward = Callable[[int, int, Message, tuple[Tensor | None, ...] | None], None]
"""(stage, microbatch, what Forward returned, gradients for its members, None on the last stage)."""
Keep = Callable[[int, int, Message], None]
Weight = float | Tensor
"""The gradient with which a microbatch's loss begins: its share of the loss of the step."""

_run_backward = torch.autograd.Variable._execution_engine.run_backward


class StageRunner:
    """Computes stage `stage`. A run starts with `begin`, and ends with `reset`.

    outputs: what the stage has given, by microbatch; the output link reads and releases it too.
    input_link: where its input comes from, None on the first stage.
    output_link: where its output goes, None on the last stage.
    deferred: the weight gradients (W) that wait, by microbatch; grad_sync.py reads whose they are.
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
        # Whether the stage changes its input in place, None until the first run has found out. A
        # leaf must not be changed so, and an alias of it costs a node of autograd for each member.
        self._works_in_place: bool | None = None
        # of a run: `begin` sets them, `reset` lets them go, with what they hold
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
        """Take what the run was given; see `Executor.run`."""
        self.forward_fn, self.backward_fn = forward, backward
        self.keep, self.weights = keep, weights
        if isinstance(self._output_link, SendLink):
            self._output_link.keeps_outputs = backward is not None

    def learned(self) -> None:
        """The first run is over."""
        self._works_in_place = bool(self._works_in_place)

    def reset(self) -> None:
        """Release the run's functions, and what an interrupted run has left."""
        if self.input_link is not None:
            self.input_link.reset()
        self.forward_fn, self.backward_fn, self.keep, self.weights = _unset, None, None, None
        self._outputs[:] = [None] * len(self._outputs)
        self.deferred[:] = [None] * len(self.deferred)

    def forward(self, m: int) -> None:
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
        try:
            return self.forward_fn(self.stage, m, received)
        except RuntimeError as error:
            if "leaf Variable" in str(error):
                error.add_note(
                    f"stage {self.stage} did not change its input in place in the first run, and "
                    f"does for microbatch {m}; let it do so in every run, or never"
                )
            raise

    def _on_aliases(self, m: int, received: Message, leaves: Sequence[Tensor]) -> Message:
        """A leaf may not be changed in place, an alias may: whether that is needed shows here."""
        versions = [x._version for x in leaves]
        output = self.forward_fn(self.stage, m, _aliased(received))
        if [x._version for x in leaves] != versions:
            self._works_in_place = True
        return output

    def evaluate(self, m: int) -> None:
        """`forward` where no backward follows: only what goes on is held."""
        self.forward(m)
        if self._output_link is None:
            self._outputs[m] = None

    def backward(self, m: int) -> None:
        output, gradients = self._end(m)
        with self._clock:
            if self.backward_fn is None:
                autograd(self.stage, m, output, gradients, self._weight(m))
            else:
                self.backward_fn(self.stage, m, output, gradients)

    def backward_input(self, m: int) -> None:
        """A caller's own backward is not split: all of it is here."""
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
        deferred, self.deferred[m] = self.deferred[m], None
        if deferred is not None:
            with self._clock:
                backward_weight(deferred)

    def _weight(self, m: int) -> Weight:
        return 1.0 if self.weights is None else self.weights[m]

    def _end(self, m: int) -> tuple[Output, tuple[Tensor | None, ...] | None]:
        """The output of `m`, no longer held here, and the gradients that came for it."""
        output, self._outputs[m] = self._outputs[m], None
        return output, None if self._output_link is None else self._output_link.gradients(m)


def autograd(
    stage: int,
    m: int,
    output: Output,
    gradients: tuple[Tensor | None, ...] | None,
    weight: Weight = 1.0,
) -> None:
    """Backward of what was sent on from its gradients, or of a scalar loss on the last stage."""
    roots, seeds = _roots(output, gradients, weight)
    if gradients is None and any(seed.numel() != 1 for seed in seeds):
        torch.autograd.backward(roots)  # type: ignore[arg-type]  # which says what is wrong
    elif roots:
        # what that does when all gradients are given, in a third of its time
        _run_backward(tuple(roots), tuple(seeds), False, False, (), True, True)


def _aliased(message: Message) -> Message:
    """The same, with a tensor of its own on the memory of each leaf, which may change in place."""
    if isinstance(message, dict):
        return {key: _alias(x) for key, x in message.items()}
    return tuple(map(_alias, message)) if isinstance(message, tuple | list) else _alias(message)


def _alias(x: Tensor | None) -> Tensor | None:
    return x if x is None or not x.requires_grad else _Alias.apply(x)  # type: ignore[return-value]


class _Alias(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient


def _roots(
    output: Output, gradients: tuple[Tensor | None, ...] | None, weight: Weight
) -> tuple[list[Root], list[Tensor]]:
    """The members to differentiate, and their gradients; of a loss its weight."""
    if gradients is None:
        losses = [x for x in tensors_of(output) if x is not None and x.requires_grad]  # type: ignore[arg-type]
        if not isinstance(weight, Tensor):
            return [*losses], [torch.full_like(x, weight) for x in losses]
        # of a number in host memory too: a copy to the device would wait for it each time
        return [*losses], [torch.ones_like(x).mul_(weight.reshape(())) for x in losses]
    pairs = [
        (x, g)
        for x, g in zip(tensors_of(output), gradients, strict=True)  # type: ignore[arg-type]
        if g is not None and x is not None and (not isinstance(x, Tensor) or x.requires_grad)
    ]
    return [x for x, _ in pairs], [g for _, g in pairs]


def _unset(stage: int, m: int, received: Message) -> Message:
    raise RuntimeError(f"stage {stage} has no forward outside a run")
