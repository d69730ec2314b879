"""One step, one validation, one text: what a rank does with the objects that `build` made.

Losses are summed in every microbatch, gradients over microbatches and ranks; the number of
tokens is summed with them, and one factor at the end makes the mean and clips. One small
all-reduce a step carries loss, tokens and norm.
"""

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchdistpackage.comm import primitives
from torchdistpackage.comm.messages import Message
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.ddp.reducer import Reducer
from torchdistpackage.errors import DataError
from torchdistpackage.harness.stragglers.phases import Phases
from torchdistpackage.layout.derive import owns
from torchdistpackage.layout.layout import Layout
from torchdistpackage.optim.clip import local_power, scale_gradients
from torchdistpackage.optim.lr import warmup_cosine
from torchdistpackage.parallel.pipeline.executor import Executor, autograd
from torchdistpackage.train.data import DataSource, Split, check_fingerprints, fingerprint
from torchdistpackage.train.loss import LossFn
from torchdistpackage.train.plan import Plan

Wish = Callable[[], bool]
"""Whether this rank wants the run to end now."""


def never() -> bool:
    return False


@dataclass(frozen=True)
class StepResult:
    """One step of the whole run, equal on all ranks.

    loss: mean over the tokens of the global batch, in nats. bubble: share of the step, over all
    ranks, in which nothing was computed; None where it was not measured. save: rank 0 asks
    for a checkpoint. stop: some rank asks for the end of this start.
    """

    step: int
    loss: float
    grad_norm: float
    tokens: int
    time_s: float
    lr: float
    bubble: float | None
    save: bool
    stop: bool


@dataclass
class Issued:
    """A step whose numbers may still be on their way: `read()` waits for them."""

    step: int
    stats: Tensor
    time_s: float
    lr: float
    measured: bool

    def read(self) -> StepResult:
        loss, tokens, power, busy, save, stop = self.stats.tolist()
        return StepResult(
            self.step,
            loss / max(tokens, 1),
            power**0.5 / max(tokens, 1),
            int(tokens),
            self.time_s,
            self.lr,
            1 - busy / tpc.topology.world_size if self.measured else None,
            save > 0,
            stop > 0,
        )


@dataclass
class Trainer:
    """The objects of one rank. `stage` and `layouts` go by local parameter names."""

    plan: Plan
    rank: int
    device: torch.device
    stage: nn.Module
    layouts: dict[str, Layout]
    loss: LossFn
    data: DataSource
    reducer: Reducer
    optimizer: torch.optim.Optimizer | None
    executor: Executor
    evaluator: Executor
    autocast: torch.dtype | None

    def __post_init__(self) -> None:
        self.phases = Phases(self.device)
        config = self.plan.config
        mesh = self.plan.topology.dense
        self._mine = [
            p
            for name, p in self.stage.named_parameters()
            if owns(self.layouts[name], self.plan.topology.view(self.layouts[name].view), self.rank)
        ]
        coord = mesh.coord(self.rank)
        last = config.parallel.pipe - 1
        # of the ranks that compute one loss, one tells it
        self._tells = coord["pipe"] == last and coord["tensor"] == 0 and coord["context"] == 0
        self._data_index, self._num_data = coord["data"], mesh.axis_size("data")
        self._per_round = config.pipeline.microbatches * self.plan.samples_per_microbatch
        self._world = tpc.groups.of(range(mesh.size))

    # -- training ----------------------------------------------------------------------

    def train_step(
        self, step: int, *, measure: bool = True, save: bool = False, stop: Wish = never
    ) -> Issued:
        """Forward, backward, reduction, clipping and update of step `step` (the first is 1).

        stop: asked as late as the ranks can still agree on it: when the step's numbers are summed.
        """
        phases = self.phases
        began = time.perf_counter()
        phases.begin(step)
        with phases("optimizer"):
            if self.optimizer is not None:
                self.optimizer.zero_grad()
            self.stage.train()
        totals = self.accumulate(step)
        with phases("reduce"):
            self.reducer.finish()
        clock = self.executor.clock
        busy = clock.computed_s() / clock.elapsed_s() if measure else 0.0
        with phases("optimizer"):
            power = local_power(self._mine, 2.0, self.device)
        # filled on the device: a copy from the host would wait for it
        rest = [power.new_full((), value) for value in (busy, float(save), float(stop()))]
        stats = torch.stack([*totals.to(power.dtype), power, *rest])
        with phases("reduce"):
            primitives.all_reduce(stats, self._world)
        with phases("optimizer"):
            lr = self._update(step, stats)
        phases.end()
        return Issued(step, stats, time.perf_counter() - began, lr, measure)

    def _update(self, step: int, stats: Tensor) -> float:
        """Scale the gradients and follow them; the learning rate of the step."""
        self.scale(stats[1], stats[2])
        config = self.plan.config
        lr = config.optim.lr * warmup_cosine(
            step - 1,
            warmup_steps=config.optim.warmup_steps,
            num_steps=config.train.steps,
            min_ratio=config.optim.min_lr_ratio,
        )
        if self.optimizer is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        return lr

    def accumulate(self, step: int) -> Tensor:
        """Gradients of the sum of all losses of a step; (loss sum, count) of what I tell."""
        rounds = self.plan.config.train.accumulate
        totals = self._zeros()
        for index in range(rounds):
            batch = self._batch("train", step, index)
            if step == 1 and index == 0:
                check_batch(*batch, self.device)
            reducer = self.reducer if index == rounds - 1 else None
            totals += self._pass(self.executor, batch, reducer)
        return totals

    def scale(self, tokens: Tensor, power: Tensor) -> None:
        """Make gradients of sums those of the mean, clipped to optim.clip."""
        factor = 1.0 / tokens.clamp(min=1)
        clip = self.plan.config.optim.clip
        if clip:
            norm = power.sqrt() * factor
            factor = factor * (clip / (norm + 1e-6)).clamp(max=1.0)
        scale_gradients(self.stage.parameters(), factor)

    def forward(self, x: Message) -> Tensor:
        """My stage, in the precision of the run."""
        with self._autocast():
            return self.stage(x)

    def limit(self, seconds: float) -> None:
        """Time limit of every later collective and message."""
        tpc.groups.set_timeout(seconds)
        self.executor.timeout_s = self.evaluator.timeout_s = seconds

    # -- validation --------------------------------------------------------------------

    def evaluate(self, stop: Wish = never) -> float | None:
        """Mean loss over the validation batches, equal on all ranks. Leaves training as it was.

        None if a rank asked to stop on the way: all stop after the same batch.
        """
        with self.phases("validate"):
            return self._evaluate(stop)

    def _evaluate(self, stop: Wish) -> float | None:
        totals = self._zeros()
        self.stage.eval()
        with torch.random.fork_rng(devices=_cuda_indices(self.device)):
            for index in range(self.plan.config.train.eval_batches):
                totals += self._pass(self.evaluator, self._batch("val", index, 0), None)
                if stop is not never and self._anyone(stop()):
                    self.stage.train()
                    return None
        self.stage.train()
        total, count = primitives.all_reduce(totals, self._world).tolist()
        return total / max(count, 1)

    def _anyone(self, wish: bool) -> bool:
        flag = self._zeros()[:1] + float(wish)
        return primitives.all_reduce(flag, self._world).item() > 0

    # -- one pass over the microbatches of a round -------------------------------------

    def _batch(self, split: Split, step: int, index: int) -> tuple[Tensor, Tensor]:
        first = index * self._num_data * self._per_round
        with self.phases("data"):
            inputs, targets = self.data.batch(
                split,
                self.plan.config.run.seed,
                step,
                self._data_index,
                self._num_data,
                self._per_round,
                first=first,
            )
        if inputs.shape[0] != self._per_round or targets.shape[0] != self._per_round:
            raise DataError(
                f"the data source gave {inputs.shape[0]} inputs and {targets.shape[0]} targets "
                f"where {self._per_round} samples were asked of data index {self._data_index}"
            )
        return inputs, targets

    def _pass(
        self, executor: Executor, batch: tuple[Tensor, Tensor], reducer: Reducer | None
    ) -> Tensor:
        """(loss sum, count) of the round if I tell it, else zeros."""
        phases, size = self.phases, self.plan.samples_per_microbatch
        weight = next(self.stage.parameters(), None)
        with phases("data"):
            inputs, targets = (self._place(x, weight).split(size) for x in batch)
        totals = self._zeros()

        def forward(m: int, received: Message) -> Message:
            with phases("forward"):
                x = inputs[m] if executor.is_first else received
                output = self.forward(x)
                if not executor.is_last:
                    return output
                with self._autocast():
                    total, count = self.loss(output, targets[m])
                if self._tells:
                    totals.add_(torch.stack([total.detach().to(totals), count.to(totals)]))
                return total

        def backward(m: int, output: Message, gradients: tuple[Tensor | None, ...] | None) -> None:
            with phases("backward"):
                autograd(m, output, gradients)

        with phases("messages"):
            executor.run(forward, backward, reducer=reducer)
        return totals

    def _zeros(self) -> Tensor:
        wide = torch.float64 if self.device.type == "cpu" else torch.float32
        return torch.zeros(2, dtype=wide, device=self.device)

    def _place(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """On my device; numbers that are not ids in the precision of the weights."""
        dtype = weight.dtype if weight is not None and x.is_floating_point() else x.dtype
        return x.to(self.device, dtype, non_blocking=True)

    def _autocast(self):
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.autocast)


def check_batch(inputs: Tensor, targets: Tensor, device: torch.device) -> None:
    """All ranks of one model must hold the same batch (tensor, context and pipe peers)."""
    value = (fingerprint(inputs) * 31 + fingerprint(targets)) % 2**62
    check_fingerprints(value, tpc.get_group("model"), "model", device)


def _cuda_indices(device: torch.device) -> list[int]:
    return [] if device.index is None else [device.index]
