"""One step, one validation: what a rank does with the objects that `build` made.

Losses are summed in every microbatch, gradients over microbatches and ranks; the number of
tokens is summed with them, and one factor at the end makes the mean and clips (update.py). One
small all-reduce a step carries loss, tokens and norm.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from torchdistpackage.checkpoint.parts import Place
from torchdistpackage.comm import primitives
from torchdistpackage.comm.messages import Message
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.ddp.reducer import Reducer
from torchdistpackage.errors import DataError
from torchdistpackage.harness.stragglers.phases import Phases
from torchdistpackage.layout.layout import Layout
from torchdistpackage.parallel.pipeline.executor import Executor
from torchdistpackage.schedule.actions import Kind
from torchdistpackage.train.chunks import Chunks
from torchdistpackage.train.data import DataSource, Split, check_fingerprints, fingerprint
from torchdistpackage.train.loss import LossFn
from torchdistpackage.train.plan import Plan
from torchdistpackage.train.result import Issued
from torchdistpackage.train.update import Update, summed

Wish = Callable[[], bool]
"""Whether this rank wants the run to end now."""


def never() -> bool:
    return False


@dataclass
class Trainer:
    """The objects of one rank. `stage`, all its stages, and `layouts` go by local names.

    optimizer: None for a stage without parameters. inner: the one that updates, which is
    `optimizer` itself unless that shards for it.
    """

    plan: Plan
    rank: int
    device: torch.device
    stage: Chunks
    layouts: dict[str, Layout]
    loss: LossFn
    data: DataSource
    reducer: Reducer
    optimizer: torch.optim.Optimizer | None
    inner: torch.optim.Optimizer | None
    executor: Executor
    evaluator: Executor
    autocast: torch.dtype | None

    def __post_init__(self) -> None:
        self.phases = Phases(self.device)
        config = self.plan.config
        mesh = self.plan.topology.dense
        place = Place(self.plan.topology, self.rank)
        gradients = summed(self.stage, self.layouts, place, self.optimizer)
        self.update = Update(config, gradients, self.optimizer, self.inner, self.device)
        coord = mesh.coord(self.rank)
        last = self.plan.schedule.placement[-1]
        # of the ranks that compute one loss, one tells it
        self._tells = coord["pipe"] == last and coord["tensor"] == 0 and coord["context"] == 0
        self._data_index, self._num_data = coord["data"], mesh.axis_size("data")
        self._per_round = config.pipeline.microbatches * self.plan.samples_per_microbatch
        self._world = tpc.groups.of(range(mesh.size))
        self._trained = self.stage.trained()

    # -- training ----------------------------------------------------------------------

    def train_step(
        self,
        step: int,
        *,
        measure: bool = True,
        record: bool = False,
        save: bool = False,
        stop: Wish = never,
    ) -> Issued:
        """Forward, backward, reduction, clipping and update of step `step` (the first is 1).

        record: `executor.spans` is afterwards the timeline of the last round.
        stop: asked as late as the ranks can still agree on it: when the step's numbers are summed.
        """
        phases = self.phases
        began = time.perf_counter()
        phases.begin(step)
        random = random_states(self.device)
        with phases("optimizer"):
            if self.optimizer is not None:
                self.optimizer.zero_grad()
            self.stage.train()
        totals = self.accumulate(step, record=record)
        clock = self.executor.clock
        busy = clock.computed_s() / clock.elapsed_s() if measure else 0.0
        with phases("optimizer"):
            power, norms = self.update.measure()
        # filled on the device: a copy from the host would wait for it
        rest = [power.new_full((), value) for value in (busy, float(save), float(stop()))]
        stats = torch.stack([*totals.to(power.dtype), power, *rest])
        with phases("reduce"):
            primitives.all_reduce(stats, self._world)
        with phases("optimizer"):
            lr = self.update.step(step, *stats[:3])
        phases.end()
        time_s = time.perf_counter() - began
        return Issued(step, stats, time_s, lr, measure, self.update.names, norms, random)

    def accumulate(self, step: int, *, reduce: bool = True, record: bool = False) -> Tensor:
        """Gradients of the sum of all losses of a step; (loss sum, count) of what I tell.

        reduce: the sum over ranks begins in the last backward.
        """
        rounds = self.plan.config.train.accumulate
        totals = self._zeros()
        for index in range(rounds):
            batch = self._batch("train", step, index)
            if step == 1 and index == 0:
                check_batch(*batch, self.device)
            # from stage 2 on there is no room for whole gradients beyond a round
            due = index == rounds - 1 or self.plan.config.parallel.zero >= 2
            reducer = self.reducer if reduce and due else None
            totals += self._pass(self.executor, batch, reducer, record)
            if reduce and due:
                with self.phases("reduce"):
                    self.reducer.finish()
        return totals

    def forward(self, stage: int, x: Message) -> Message:
        """One of my stages, in the precision of the run."""
        with self._autocast():
            return self.stage(stage, x)

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
        self,
        executor: Executor,
        batch: tuple[Tensor, Tensor],
        reducer: Reducer | None,
        record: bool = False,
    ) -> Tensor:
        """(loss sum, count) of the round if I tell it, else zeros."""
        phases, size = self.phases, self.plan.samples_per_microbatch
        weight = next(self.stage.parameters(), None)
        with phases("data"):
            inputs, targets = (self._place(x, weight).split(size) for x in batch)
        totals = self._zeros()

        def forward(stage: int, m: int, received: Message) -> Message:
            x = inputs[m] if executor.is_first_stage(stage) else received
            output = self.forward(stage, x)
            if not executor.is_last_stage(stage):
                return output
            with self._autocast():
                total, count = self.loss(output, targets[m])
            if self._tells:
                totals.add_(torch.stack([total.detach().to(totals), count.to(totals)]))
            return total

        # modules of ZeRO have hooks of their own, which would have every backward sum
        held = nullcontext() if reducer is not None else self.reducer.no_sync()
        with phases("messages"), held:
            executor.run(
                forward,
                parameters=self._trained,
                reducer=reducer,
                around=self._around,
                record=record,
            )
        return totals

    def _around(self, kind: Kind) -> AbstractContextManager[None]:
        return self.phases("forward" if kind is Kind.F else "backward")

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


def random_states(device: torch.device) -> tuple[Tensor, ...]:
    """From which this rank draws next, without waiting for the device."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return tuple(states)


def _cuda_indices(device: torch.device) -> list[int]:
    return [] if device.index is None else [device.index]
