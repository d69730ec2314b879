"""Turn summed gradients into new weights: their norm, one factor for mean and clipping, one step.

Nothing waits for the device. Whether the numbers of all ranks are finite is known on the device
first, so the step is skipped there: the optimizer's kernels take a flag and touch nothing.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchdistpackage.comm.tpc import tpc
from torchdistpackage.ddp.sharded import ShardedOptimizer
from torchdistpackage.layout.layout import Layout
from torchdistpackage.optim.clip import clip_factor, counts_here, grad_norms, scale_gradients
from torchdistpackage.train.weight_averages import WeightAverages

LR_SCALE = "lr_scale"
"""Key of a parameter group: its learning rate relative to the step's."""


@dataclass(frozen=True, slots=True)
class ReducedGrad:
    """A gradient after the sum, `grad_tensor.grad`: full, or the shard that ZeRO leaves here.

    counts_in_norm: it counts for the norm of the full model.
    """

    name: str
    grad_tensor: Tensor
    counts_in_norm: bool


def reduced_grads(
    stage: nn.Module,
    layouts: Mapping[str, Layout],
    optimizer: torch.optim.Optimizer | None,
) -> tuple[ReducedGrad, ...]:
    """Return every gradient that this rank holds after the sum, in the order of its parameters."""
    trained = [(layouts[n], p) for n, p in stage.named_parameters() if p.requires_grad]
    among = frozenset(range(tpc.topology.dense.size))
    if isinstance(optimizer, ShardedOptimizer):
        layout_of = {parameter: layout for layout, parameter in trained}
        order = {parameter: i for i, (_, parameter) in enumerate(trained)}
        shards = sorted(optimizer.shards, key=lambda shard: order[shard.parameter])
        pairs = [(layout_of[shard.parameter], shard) for shard in shards]
        return tuple(
            ReducedGrad(x.name, s.tensor, counts_here(x, among, s.group)) for x, s in pairs
        )
    return tuple(ReducedGrad(x.name, p, counts_here(x, among)) for x, p in trained)


class Update:
    """The update of one rank. optimizer: None for a stage without parameters.

    inner: the optimizer that updates, if `optimizer` shards for it. learning_rate: of each step,
    the first is 1. clip: largest norm of the model's gradient; 0 is off. halts: after a non-finite
    number, nothing is ever updated again. averages: of the weights, which follow each step.
    holders: tensors that hold the gradients.
    """

    def __init__(
        self,
        gradients: Sequence[ReducedGrad],
        optimizer: torch.optim.Optimizer | None,
        inner: torch.optim.Optimizer | None,
        device: torch.device,
        *,
        learning_rate: Callable[[int], float],
        clip: float,
        halts: bool,
        averages: WeightAverages | None = None,
    ):
        self._optimizer, self.inner = optimizer, inner
        self.averages = averages
        self._learning_rate, self._clip, self._halts = learning_rate, clip, halts
        self.holders = [g.grad_tensor for g in gradients]
        self._sharded = isinstance(optimizer, ShardedOptimizer)
        self._device, self._none = device, grad_norms([], 2.0, device)
        counted = [float(g.counts_in_norm) for g in gradients]
        self._counts = torch.tensor(counted, dtype=self._none.dtype, device=device)
        self._names = [g.name for g in gradients]
        self.before_step: Callable[[], None] = lambda: None
        """Function that waits for readers of the weights and the optimizer's state, such as a
        save.
        """
        self.names: list[str] = []
        self._found_inf = torch.zeros((), dtype=torch.float32, device=device)
        self._one = torch.ones_like(self._found_inf)

    def zero_grad(self) -> None:
        """Drop all gradients."""
        if self._sharded and self._optimizer is not None:
            self._optimizer.zero_grad()
            return
        # torch's own opens a record of its profiler, which takes longer than all of them
        for holder in self.holders:
            holder.grad = None

    def measure(self) -> tuple[Tensor, Tensor]:
        """Return (sum of the squares of the gradients this rank counts, norm of each gradient in
        `names`).

        A non-finite gradient makes the sum non-finite, whichever rank owns it.
        """
        grads = [g for x in self.holders if (g := x.grad) is not None]
        if not grads:
            self.names = []
            return self._none.sum(), self._none
        norms = grad_norms(grads, 2.0, self._device)
        self.names, counts = self._names, self._counts
        if len(grads) < len(counts):
            with_grad = [i for i, x in enumerate(self.holders) if x.grad is not None]
            self.names = [self._names[i] for i in with_grad]
            counts = torch.stack([counts[i] for i in with_grad])
        return norms.square().dot(counts), norms

    def step(self, step: int, numbers: Tensor) -> float:
        """Apply summed gradients as mean gradients, with the learning rate of the step.

        numbers: of all ranks, as in `StepStats`: loss, tokens and squares of the gradients come
        first. If one of these is not finite nothing is updated.
        """
        lr = self._learning_rate(step)
        self.before_step()
        if self._optimizer is None or self.inner is None:
            return lr
        sums = numbers.unbind()[:3]
        _, tokens, power = sums
        scale_gradients(self.holders, self._factor(tokens, power))
        # as torch's own gradient scaler finds it, and its fused kernels read it
        if not self._halts:
            self._found_inf.zero_()
        torch._amp_foreach_non_finite_check_and_unscale_(sums, self._found_inf, self._one)
        self.inner.found_inf = self._found_inf
        for group in self._optimizer.param_groups:
            group["lr"] = lr * group.get(LR_SCALE, 1.0)
        initial = {} if self.averages is None else self.averages.before_step()
        self._optimizer.step()
        if self.averages is not None:
            self.averages.after_step(initial)
        return lr

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Use the weights' averages, if any, as the model's weights inside the block; all ranks
        enter together.
        """
        if self.averages is None:
            yield
            return
        self.before_step()
        with self.averages.applied():
            yield

    def _factor(self, tokens: Tensor, power: Tensor) -> Tensor:
        """Return the factor from summed gradients to clipped mean gradients."""
        tokens = tokens.clamp(min=1)
        return clip_factor(power.sqrt(), self._clip, tokens) if self._clip else tokens.reciprocal()
