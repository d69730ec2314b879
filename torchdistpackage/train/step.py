"""One step, one validation: what a rank does with the objects that `build` made.

Losses are summed in every microbatch, gradients over microbatches and ranks; the number of
tokens is summed with them, and one factor at the end makes the mean and clips (update.py). One
small all-reduce a step carries loss, tokens and norm.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchdistpackage.comm import primitives
from torchdistpackage.comm.backends import is_queued
from torchdistpackage.comm.groups import on_cpu
from torchdistpackage.comm.moments import OnHost
from torchdistpackage.comm.tensor_meta import Message
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.ddp.naive_ddp import NaiveDDP
from torchdistpackage.ddp.reducer import Reducer
from torchdistpackage.ddp.zero.optimizer import ZeroOptimizer
from torchdistpackage.errors import DataError
from torchdistpackage.harness.stragglers.phases import Phases
from torchdistpackage.layout.layout import Layout
from torchdistpackage.parallel.pipeline.executor import Executor, Recording
from torchdistpackage.schedule.actions import ActionKind
from torchdistpackage.train.data import (
    Batch,
    Batches,
    DataSource,
    check_fingerprints,
    fingerprint,
)
from torchdistpackage.train.plan import Plan
from torchdistpackage.train.step_stats import PendingStep, Period, StepStats, busy_share
from torchdistpackage.train.update import Update

LossFn = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(outputs of the last stage, targets) -> (sum of losses, how many were summed)."""
IGNORE = -100

WantsSave = Callable[[], bool]
"""Whether this rank wants the run to end now."""


def never_save() -> bool:
    return False


class TrainStages(nn.ModuleDict):
    """The stages of one rank as one module: what optimizers, hooks and checkpoints see.

    Called with a stage and its input it runs that stage. Each has its number as its name, so that
    two of them may hold parts of one block; the names that outlive a run are those of the layouts.
    """

    def __init__(self, stages: Mapping[int, nn.Module]):
        super().__init__({str(stage): module for stage, module in stages.items()})
        self._of = dict(stages)

    def forward(self, stage: int, x: Message) -> Message:
        return self._of[stage](x)

    def trained(self) -> dict[int, list[nn.Parameter]]:
        """By stage the parameters that get a gradient; one that two stages share is in both."""
        return {s: [p for p in m.parameters() if p.requires_grad] for s, m in self._of.items()}


@dataclass
class Trainer:
    """The objects of one rank. `stage`, all its stages, and `layouts` go by local names.

    replicas: sums the gradients over replicas. optimizer: None for a stage without parameters.
    name, seed: of the run of `num_steps`, each of `rounds` passes over the microbatches.
    sums_each_round: gradients are summed over ranks after every pass, not only after the last.
    runs_ahead: a step has been issued before it is done, so the host gets the next one ready before
    it reads the numbers of this one.
    """

    plan: Plan
    rank: int
    device: torch.device
    stage: TrainStages
    layouts: dict[str, Layout]
    loss: LossFn
    data: DataSource
    replicas: NaiveDDP | ZeroOptimizer
    optimizer: torch.optim.Optimizer | None
    update: Update
    executor: Executor
    evaluator: Executor
    autocast: torch.dtype | None
    name: str
    seed: int
    num_steps: int
    rounds: int
    sums_each_round: bool
    eval_batches: int

    def __post_init__(self) -> None:
        self.phases = Phases(self.device)
        self.reducer: Reducer = self.replicas.reducer
        self._checked = False
        self.recomputed: tuple[str, ...] = ()
        """Modules of `stage` whose forward is done again in the backward."""
        mesh, microbatches = self.plan.topology.dense, self.plan.schedule.num_microbatches
        coord = mesh.coord(self.rank)
        last = self.plan.schedule.placement[-1]
        # of the ranks that compute one loss, one tells it
        self._is_last_stage_rank = (
            coord["pipe"] == last and coord["tensor"] == 0 and coord["context"] == 0
        )
        self._world = tpc.groups.of(range(mesh.size))
        self._host_world = on_cpu(self._world)
        self._trained = self.stage.trained()
        self._has_first = coord["pipe"] == self.plan.schedule.placement[0]
        self._has_last = coord["pipe"] == last
        self.runs_ahead = self.device.type != "cpu" or is_queued(self._world)
        self.batches = Batches(
            self.data,
            self.seed,
            data_index=coord["data"],
            num_data=mesh.axis_size("data"),
            per_round=microbatches * self.plan.samples_per_microbatch,
            rounds=self.rounds,
            num_steps=self.num_steps,
            prepare=self._pinned,
            ahead=self.runs_ahead,
        )

    # -- training ----------------------------------------------------------------------

    def train_step(
        self,
        step: int,
        *,
        measure: bool = True,
        record: bool = False,
        save: bool = False,
        stop: WantsSave = never_save,
    ) -> PendingStep:
        """Forward, backward, reduction, clipping and update of step `step` (the first is 1).

        record: `executor.spans` is afterwards the timeline of the last round, and `recordings` has
            those of all rounds.
        stop: asked as late as the ranks can still agree on it: when the step's numbers are summed.
        """
        phases = self.phases
        period = Period(self.device)
        phases.begin(step)
        random = random_states(self.device)
        with phases("optimizer"):
            if self.optimizer is not None:
                self.optimizer.zero_grad()
            self.stage.train()
        totals = self.accumulate(step, record=record)
        timing = self.executor.clock.timing() if measure else None
        # a device is still at it, and its host does not wait: then it is summed when it is read
        later = timing if self.runs_ahead else None
        busy = busy_share(timing) if timing is not None and later is None else 0.0
        with phases("optimizer"):
            power, norms = self.update.measure()
        loss, tokens = totals
        own = StepStats(loss, tokens, power, busy, save=float(save), stop=float(stop()))
        stats = own.to_tensor(like=totals)
        with phases("reduce"):
            primitives.all_reduce(stats, self._world)
        on_host = OnHost(stats)  # ahead of the next step, which would else be waited for
        with phases("optimizer"):
            sums = StepStats.from_tensor(stats)
            lr = self.update.step(step, sums.loss, sums.tokens, sums.grad_sq_norm)
        phases.end()
        period.end()
        names, host = self.update.names, self._host_world
        return PendingStep(step, on_host, period, lr, measure, later, host, names, norms, random)

    def accumulate(self, step: int, *, reduce: bool = True, record: bool = False) -> Tensor:
        """Gradients of the sum of all losses of a step; (loss sum, count) if this rank
        reports them, else zeros.

        reduce: the sum over ranks begins in the last backward.
        """
        totals = totals_on(self.device)
        self.recordings: list[Recording] = []
        for index in range(self.rounds):
            with self.phases("data"):
                batch = self.batches.of_training(step, index)
            if not self._checked:  # the first of this process, of a resumed run too
                check_batch(*batch, self.device)
                self._checked = True
            due = index == self.rounds - 1 or self.sums_each_round
            reducer = self.reducer if reduce and due else None
            totals += self._pass(self.executor, batch, reducer, record)
            if record and self.executor.recording is not None:
                self.recordings.append(self.executor.recording)
            if reduce and due:
                with self.phases("reduce"):
                    self.reducer.finish()
        return totals

    def forward(self, stage: int, x: Message) -> Message:
        """One of this rank's stages, in the precision of the run."""
        with self.precision():
            return self.stage(stage, x)

    def sample(self) -> tuple[Tensor | None, Tensor | None]:
        """A microbatch of validation: inputs on the first stage's ranks, targets on the last's."""
        weight, size = next(self.stage.parameters(), None), self.plan.samples_per_microbatch
        inputs, targets = (self._rank_text(x[:size], weight) for x in self.batches.of_validation(0))
        return inputs if self._has_first else None, targets if self._has_last else None

    def close(self, *, wait: bool = True) -> None:
        """No more steps: end the thread that reads ahead, see `Batches.close`."""
        self.batches.close(wait=wait)

    def limit(self, seconds: float) -> None:
        """Time limit of every later collective and message."""
        tpc.groups.set_timeout(seconds)
        self.executor.timeout_s = self.evaluator.timeout_s = seconds

    # -- validation --------------------------------------------------------------------

    def evaluate(self, stop: WantsSave = never_save) -> float | None:
        """Mean loss over the validation batches, equal on all ranks. Leaves training as it was.

        None if a rank asked to stop on the way: all stop after the same batch.
        """
        totals = totals_on(self.device)
        self.stage.eval()
        devices = cuda_indices(self.device)
        with self.phases("validate"), torch.random.fork_rng(devices=devices):
            for index in range(self.eval_batches):
                with self.phases("data"):
                    batch = self.batches.of_validation(index)
                totals += self._pass(self.evaluator, batch, None)
                if stop is not never_save:
                    wish = torch.tensor([float(stop())], dtype=torch.float64)
                    if primitives.all_reduce(wish, self._host_world).item() > 0:
                        self.stage.train()
                        return None
            self.stage.train()
            total, count = primitives.all_reduce(totals, self._world).tolist()
        return total / max(count, 1)

    # -- one pass over the microbatches of a round -------------------------------------

    def _pinned(self, inputs: Tensor, targets: Tensor) -> Batch:
        """Those that are copied from here to a device, in memory that copies without waiting."""
        if self.device.type != "cuda":
            return inputs, targets
        # the current device of the thread that reads ahead is another one
        with torch.cuda.device(self.device):
            return (
                inputs.pin_memory() if self._has_first and not inputs.is_cuda else inputs,
                targets.pin_memory() if self._has_last and not targets.is_cuda else targets,
            )

    def _pass(
        self,
        executor: Executor,
        batch: Batch,
        reducer: Reducer | None,
        record: bool = False,
    ) -> Tensor:
        """(loss sum, count) of the round if this rank reports it, else zeros."""
        phases, size = self.phases, self.plan.samples_per_microbatch
        weight = next(self.stage.parameters(), None)
        with phases("data"):
            inputs = self._rank_text(batch[0], weight).split(size) if self._has_first else ()
            targets = self._rank_text(batch[1], weight).split(size) if self._has_last else ()
        totals = totals_on(self.device)

        def forward(stage: int, m: int, received: Message) -> Message:
            x = inputs[m] if executor.is_first_stage(stage) else received
            output = self.forward(stage, x)
            if not executor.is_last_stage(stage):
                return output
            with self.precision():
                total, count = self.loss(output, targets[m])
            if self._is_last_stage_rank:
                totals.add_(torch.stack([total.detach().to(totals), count.to(totals)]))
            return total

        # modules of ZeRO have hooks of their own, which would have every backward sum
        held = nullcontext() if reducer is not None else self.reducer.no_sync()
        with phases("messages"), held:
            executor.run(
                forward,
                parameters=self._trained,
                reducer=reducer,
                around=lambda kind: phases("forward" if kind is ActionKind.F else "backward"),
                record=record,
            )
        return totals

    def _rank_text(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """On my device; numbers that are not ids in the precision of the weights."""
        dtype = weight.dtype if weight is not None and x.is_floating_point() else x.dtype
        return x.to(self.device, non_blocking=True).to(dtype)

    def precision(self) -> AbstractContextManager[object]:
        """In which forwards run."""
        dtype = self.autocast
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype=dtype)


def check_batch(inputs: Tensor, targets: Tensor, device: torch.device) -> None:
    """All ranks of one model must hold the same batch (tensor, context and pipe peers)."""
    value = (fingerprint(inputs) * 31 + fingerprint(targets)) % 2**62
    check_fingerprints(value, tpc.get_group("model"), "model", device)


def totals_on(device: torch.device) -> Tensor:
    """Room for (loss sum, count): 2**24 tokens and one more are one number in float32."""
    return torch.zeros(2, dtype=torch.float64, device=device)


def random_states(device: torch.device) -> tuple[Tensor, ...]:
    """From which this rank draws next, without waiting for the device."""
    on_device = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return torch.get_rng_state(), *on_device


def cuda_indices(device: torch.device) -> list[int]:
    return [] if device.index is None else [device.index]


def token_cross_entropy(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Cross entropy of outputs (..., V) and targets (...) int64; targets of -100 do not count."""
    total = F.cross_entropy(
        outputs.flatten(0, -2), targets.flatten(), ignore_index=IGNORE, reduction="sum"
    )
    return total, (targets != IGNORE).sum()


def from_user(fn: Callable[[Tensor, Tensor], object]) -> LossFn:
    """A user's loss(outputs, targets): either (sum, count) as it is, or a mean over dim 0."""

    def loss(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        value = fn(outputs, targets)
        if isinstance(value, tuple) and len(value) == 2:
            total, count = value
            if isinstance(count, Tensor):
                return total, count.to(outputs.device, non_blocking=True)
            return total, _on(outputs.device, count)
        if isinstance(value, Tensor) and value.dim() == 0:
            count = _on(outputs.device, targets.shape[0])
            return value * count, count
        shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise DataError(
            f"model.loss returned {shape}; return the mean over the samples as a scalar tensor, "
            f"or (sum of losses, count)"
        )

    return loss


def _on(device: torch.device, number: float) -> Tensor:
    """Filled there: a copy from the host would wait for all that the device is at."""
    return torch.full((), number, device=device)
