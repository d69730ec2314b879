"""One training step and one validation, using the objects that `build` made.

Losses are summed in every microbatch, gradients over microbatches and ranks; the number of tokens
is summed with them, and one factor at the end makes the mean and clips (update.py). One small
all-reduce a step carries loss, tokens and norm.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from torchdistpackage.comm import primitives
from torchdistpackage.comm.backends import is_queued
from torchdistpackage.comm.moments import OnHost
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.data.batches import Batches
from torchdistpackage.data.source import (
    DataBatch,
    DataSource,
    SequenceSource,
    Split,
    check_fingerprints,
    fingerprint,
)
from torchdistpackage.ddp.reducer import Reducer
from torchdistpackage.harness.stragglers.compare import Phases
from torchdistpackage.parallel.pipeline.executor import Executor, Recording
from torchdistpackage.parallel.pipeline.grad_sync import HasReducer, reducing
from torchdistpackage.parallel.pipeline.losses import totals_on
from torchdistpackage.schedule.actions import ActionKind
from torchdistpackage.tools.undisturbed import keep_random_states
from torchdistpackage.train.experts import ExpertCounts
from torchdistpackage.train.staged_model import Microbatches, MicrobatchLoss, StagedModel
from torchdistpackage.train.step_stats import PendingStep, Period, StepStats, busy_share
from torchdistpackage.train.task import TaskLoss
from torchdistpackage.train.update import Update
from torchdistpackage.train.votes import Votes

HEAD = 16
"""Number of positions of each sample that all ranks read once for comparison, if they read
different slices."""


class EvalSet(NamedTuple):
    """An evaluation set. batch: returns batch number b of this rank; all ranks have
    `num_batches`.
    """

    name: str
    num_batches: int
    batch: Callable[[int], DataBatch]


@dataclass
class Trainer(StagedModel):
    """The objects of one rank.

    replicas: sums the gradients over replicas. optimizer: None for a stage without parameters.
    name, seed: of the run of `num_steps`, each of `rounds` passes over the microbatches.
    sums_each_round: gradients are summed over ranks after every pass, not only after the last.
    task: decides the loss, where that is not the one of tokens. has_own_data: `data` is of this
    package, and may be asked for any batch at any time. validates_averages: a validation is of the
    averages that `update` keeps.
    runs_ahead: a step has been issued before it is done, so the host gets the next one ready before
    it reads the numbers of this one.
    """

    data: DataSource
    replicas: HasReducer
    optimizer: torch.optim.Optimizer | None
    update: Update
    executor: Executor
    evaluator: Executor
    name: str
    seed: int
    num_steps: int
    rounds: int
    sums_each_round: bool
    eval_batches: int
    eval_sets: Sequence[EvalSet] = ()
    task: TaskLoss | None = None
    has_own_data: bool = True
    validates_averages: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.phases = Phases(self.device)
        self.votes = Votes()
        """The flags that ranks agree on with each step; owners register their functions here."""
        self.reducer: Reducer = self.replicas.reducer
        self._reducers = (self.reducer,)
        self._checked, self._part = False, 0
        self.val_task: Mapping[str, float] = {}
        """Values of the task for the last validation."""
        self._shared: SequenceSource | None = None
        """The source, if this rank reads only the slice `_part` of its samples."""
        self.recomputed: tuple[str, ...] = ()
        """Modules of `stage` whose forward runs again in the backward."""
        self.offloaded: tuple[str, ...] = ()
        """Modules of `stage` whose saved tensors wait in host memory."""
        mesh, microbatches = self.plan.topology.dense, self.plan.schedule.num_microbatches
        coord = mesh.coord(self.rank)
        self._world = tpc.groups.of(range(mesh.size))
        self.stage.train()  # folders of transformers come in evaluation mode
        self._trained = self.stage.trained()
        # a model of the user's own is not known before it is built, and then all of it is here
        whole_layouts = (
            {x.name: x for x in self.layouts.values()} if mesh.axis_size("pipe") == 1 else {}
        )
        self.experts = ExpertCounts(
            self.plan.layouts or whole_layouts,
            self.stage,
            self.layouts,
            counts=coord["tensor"] == 0,
        )
        self.runs_ahead = self.device.type != "cpu" or is_queued(self._world)
        self._batches = partial(
            Batches,
            seed=self.seed,
            data_index=coord["data"],
            num_data=mesh.axis_size("data"),
            per_round=microbatches * self.plan.samples_per_microbatch,
            rounds=self.rounds,
            num_steps=self.num_steps,
        )
        source = self.data
        if mesh.axis_size("context") > 1 and isinstance(source, SequenceSource):
            self._shared, self._part = source, coord["context"]
            source = source.part(self.sequence.ranges(source.seq_len))
        self.batches = self._batches(
            source, prepare=self._pinned, ahead=self.runs_ahead, several=self.has_own_data
        )

    # -- training ----------------------------------------------------------------------

    def train_step(
        self,
        step: int,
        *,
        measure: bool = True,
        record: bool = False,
    ) -> PendingStep:
        """Run forward, backward, reduction, clipping and update of step `step` (the first is 1).

        record: afterwards `executor.spans` is the timeline of the last round, and `recordings` has
        those of all rounds.
        """
        phases = self.phases
        period = Period(self.device)
        phases.begin(step)
        random = random_states(self.device)
        self.update.zero_grad()
        if not self.stage.training:  # a walk through all modules, which few steps need
            self.stage.train()
        self.experts.reset()
        self._take_task()
        totals = self.accumulate(step, record=record)
        timing = self.executor.clock.timing() if measure else None
        # a device is still at it, and its host does not wait: then it is summed when it is read
        later = timing if self.runs_ahead else None
        busy = busy_share(timing) if timing is not None and later is None else 0.0
        with phases("optimizer"):
            power, norms = self.update.measure()
            # votes are asked here, as late as the ranks can still agree on them
            cast, names = self.votes.cast(step), self.votes.names
            local_stats = StepStats.to_tensor(totals, power, busy, cast, self._take_task())
            stats = self.experts.join(local_stats)
            with phases("reduce"):
                primitives.all_reduce(stats, self._world)
            on_host = OnHost(stats)  # ahead of the next step, which would else be waited for
            numbers, counts = self.experts.split(stats)
            lr = self.update.step(step, numbers)
            self.experts.follow(counts, numbers)
        phases.end()
        period.end()
        return PendingStep(
            step=step,
            stats=on_host,
            period=period,
            lr=lr,
            measured=measure,
            pass_timing=later,
            world=self._world,
            pipeline=tpc.get_group("pipe"),
            votes=names,
            names=self.update.names,
            norms=norms,
            random=random,
            loads=self.experts.loads,
            task=self.task,
        )

    def accumulate(self, step: int, *, reduce: bool = True, record: bool = False) -> Tensor:
        """Accumulate the gradients of a step's summed losses. ¶ Return (loss sum, count) if this
        rank reports them, else zeros.

        reduce: the sum over ranks begins in the last backward.
        """
        totals = totals_on(self.device)
        self.recordings: list[Recording] = []
        for index in range(self.rounds):
            batch = self._batch(step, index)
            self._begin_round("train", step, index)
            reduces = reduce and (index == self.rounds - 1 or self.sums_each_round)
            self._pass(self.executor, batch, totals, reduces=reduces, record=record)
            if record and self.executor.recording is not None:
                self.recordings.append(self.executor.recording)
            if reduces:
                with self.phases("reduce"):
                    self.reducer.finish()
        return totals

    def _batch(self, step: int, index: int) -> Microbatches:
        """Return a batch.

        The first one of this process, also in a resumed run, is compared with other ranks.
        """
        with self.phases("data"):
            # before a thread reads ahead: a source is asked for one batch at a time
            head = None if self._checked else self._head(step, index)
            batch = self.batches.of_training(step, index)
            microbatches = self.microbatches(batch, self._own)
        if not self._checked:
            if head is not None:
                check_batch(head, self.device)
            check_batch(batch, self.device, self._part)
            self._checked = True
        return microbatches

    def _head(self, step: int, index: int) -> DataBatch | None:
        """Return the beginning of each sample, if ranks read different slices of it."""
        if self._shared is None:
            return None
        source = self._shared.part((range(min(HEAD, self._shared.seq_len)),))
        return self._batches(source, prepare=DataBatch).of_training(step, index)

    def sample(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return a validation micro-batch: inputs on first-stage ranks, targets on last-stage
        ranks, and position_ids, if any, on all.
        """
        batch = self.microbatches(self.batches.of_validation(0, 0), self._own)
        inputs, targets, positions = batch if self.task is None else self.task.trained(batch)
        return (
            inputs[0] if self.has_first else None,
            targets[0] if self.has_last else None,
            None if positions is None else positions[0],
        )

    def close(self, *, wait: bool = True) -> None:
        """End the thread that reads ahead, as no more steps follow; see `Batches.close`."""
        self.batches.close(wait=wait)

    def limit(self, seconds: float) -> None:
        """Set the time limit of every later collective and message."""
        tpc.groups.set_timeout(seconds)
        others = () if self.task is None else self.task.executors
        for executor in (self.executor, self.evaluator, *others):
            executor.timeout_s = seconds

    # -- validation --------------------------------------------------------------------

    def evaluate(self, stop: Callable[[], bool] | None = None) -> float | None:
        """Return the mean loss over the validation batches, equal on all ranks. Training is left as
        it was.

        It returns None if a rank asked to stop; all ranks stop after the same batch.
        """
        batch = self.batches.of_validation
        means = self._mean_loss(self.eval_batches, self.rounds, batch, stop)
        if means is None:
            return None
        loss, self.val_task = means
        return loss

    def evaluate_sets(self, stop: Callable[[], bool] | None = None) -> dict[str, float] | None:
        """Return the mean loss over each of `eval_sets`, by name; otherwise like `evaluate`."""
        losses: dict[str, float] = {}
        for eval_set in self.eval_sets:
            means = self._mean_loss(
                eval_set.num_batches,
                1,
                lambda number, _, eval_set=eval_set: eval_set.batch(number),
                stop,
            )
            if means is None:
                return None
            losses[eval_set.name] = means[0]
        return losses

    def _mean_loss(
        self,
        num_batches: int,
        rounds: int,
        batch: Callable[[int, int], DataBatch],
        stop: Callable[[], bool] | None,
    ) -> tuple[float, Mapping[str, float]] | None:
        """Return the mean loss and the task's values; None if a rank asked to stop."""
        self._take_task()
        if self.task is not None:
            self.task.begin_validation()
        totals, votes_asked = totals_on(self.device), None
        self.stage.eval()
        with self._validating():
            for number in range(num_batches):
                for index in range(rounds):
                    with self.phases("data"):
                        microbatches = self.microbatches(batch(number, index), self._own)
                    self._begin_round("val", number, index)
                    self._pass(self.evaluator, microbatches, totals)
                if stop is not None:
                    votes_asked, previous = self._ask_to_stop(stop), votes_asked
                    # a device is still at this batch, so there the answer is that of the one before
                    answer = previous if self.runs_ahead else votes_asked
                    if answer is not None and answer.read()[0] > 0:
                        self.stage.train()
                        return None
            self.stage.train()
            task_sums = self._take_task()
            if task_sums is not None:
                totals = torch.cat([totals, task_sums])
            total, count, *sums = primitives.all_reduce(totals, self._world).tolist()
            values: dict[str, float] = {}
            if self.task is not None:
                values |= self.task.means(sums, count)
                values |= self.task.end_validation(self._world)
        return total / max(count, 1), values

    @contextmanager
    def _validating(self) -> Iterator[None]:
        averaged = self.update.averaged() if self.validates_averages else nullcontext()
        with self.phases("validate"), keep_random_states(self.device), averaged:
            yield

    def agree_to_stop(self, stop: Callable[[], bool]) -> bool:
        """Return whether `stop` is true on any rank; all ranks call it together."""
        return self._ask_to_stop(stop).read()[0] > 0

    def _ask_to_stop(self, stop: Callable[[], bool]) -> OnHost:
        """Return the number of ranks that ask to stop, in transit to the host."""
        number = torch.zeros(1, dtype=torch.float64, device=primitives.device_of(self._world))
        if stop():
            number.fill_(1.0)  # a copy from the host would wait for what the device is doing
        return OnHost(primitives.all_reduce(number, self._world))

    # -- one pass over the microbatches of a round -------------------------------------

    def _own(self, x: Tensor) -> Tensor:
        """Return this rank's slice of the inputs or targets, on its device."""
        return self.own_part(x) if self._shared is None else self.to_device(x)

    def _pinned(
        self, inputs: Tensor, targets: Tensor, position_ids: Tensor | None = None
    ) -> DataBatch:
        """Return tensors in pinned memory, from which a copy to a device does not block the
        host.
        """
        if self.device.type != "cuda":
            return DataBatch(inputs, targets, position_ids)
        # the current device of the thread that reads ahead is another one
        with torch.cuda.device(self.device):
            return DataBatch(
                inputs.pin_memory() if self.has_first and not inputs.is_cuda else inputs,
                targets.pin_memory() if self.has_last and not targets.is_cuda else targets,
                None if position_ids is None else position_ids.pin_memory(),
            )

    def _pass(
        self,
        executor: Executor,
        batch: Microbatches,
        totals: Tensor,
        *,
        reduces: bool = False,
        record: bool = False,
    ) -> None:
        """Add (loss sum, count) of the round to `totals` if this rank reports it."""
        phases, loss = self.phases, self._task_loss(batch)
        inputs, targets, positions = batch if self.task is None else self.task.trained(batch)
        with phases("messages"), reducing(self._reducers, reduces) as reducers:
            executor.run(
                self.forward_and_loss(executor, inputs, targets, totals, positions, loss),
                parameters=self._trained,
                reducer=reducers,
                around=lambda kind: phases("forward" if kind is ActionKind.F else "backward"),
                record=record,
            )

    def _task_loss(self, batch: Microbatches) -> MicrobatchLoss | None:
        """Return the task's loss, after the forwards that precede the model; None without a
        task.
        """
        if self.task is None:
            return None
        run = partial(self.evaluator.run, around=lambda _: self.phases("forward"))
        with self.phases("messages"), self.reducer.no_sync():
            return self.task.loss_of_batch(self, self.evaluator, run, batch)

    def _begin_round(self, split: Split, number: int, index: int) -> None:
        if self.task is not None:
            self.task.begin_round(split, number, index)

    def _take_task(self) -> Tensor | None:
        """Return this rank's sums of the task since the last call; None without a task."""
        return None if self.task is None else self.task.take()


def check_batch(batch: DataBatch, device: torch.device, part: int = 0) -> None:
    """Check that all ranks of one model (tensor, context and pipe peers) hold the same batch, or
    the same slice of it.
    """
    value = 0
    for x in batch:
        value = (value * 31 + (0 if x is None else fingerprint(x))) % 2**62
    check_fingerprints(value, tpc.get_group("model"), "model", device, part=part)


def random_states(device: torch.device) -> tuple[Tensor, ...]:
    """Return the states from which this rank draws next, without waiting for the device."""
    on_device = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return torch.get_rng_state(), *on_device
