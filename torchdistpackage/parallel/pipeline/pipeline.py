"""The class Pipeline, for a training loop of your own.

    pipe = Pipeline(stage, loss=loss_fn, schedule="1f1b", num_microbatches=8)
    for x, y in batches:
        optimizer.zero_grad()
        loss = pipe.step(x, targets=y)
        optimizer.step()

A step computes the mean loss of its batch and its gradient, for any schedule and any number of
micro-batches, even if the batch does not divide evenly. With a loss of (sum, count) some targets
may not count. All pipe ranks make the same calls; each may pass the full batch or only what its own
stages need.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import Module

from torchdistpackage.comm.groups import refuse_interrupted, step_over
from torchdistpackage.comm.primitives import Group, is_queued, ranks_of
from torchdistpackage.comm.tpc import resolve_group
from torchdistpackage.ddp.reducer import Reducer
from torchdistpackage.errors import CommError
from torchdistpackage.parallel.pipeline.agreement import StepAgreement
from torchdistpackage.parallel.pipeline.executor import Executor
from torchdistpackage.parallel.pipeline.grad_sync import HasReducer, StageReducers
from torchdistpackage.parallel.pipeline.losses import LossBroadcast, LossDivision, Losses, mean_of
from torchdistpackage.parallel.pipeline.microbatches import (
    Named,
    StepInputs,
    cut,
    input_problem,
    loss_problem,
    run_microbatches,
    samples_in,
    sizes_of,
)
from torchdistpackage.parallel.pipeline.stages import Signature, Stages, agree_on_stages
from torchdistpackage.schedule.generators import evaluation
from torchdistpackage.schedule.resolve import CostsOrder, Order, has_backward

Loss = Tensor | tuple[Tensor, Tensor | float]


class Pipeline:
    """This rank's stages of a model, trained by any schedule.

    stages: this rank's stage, or the list of its stages in ascending order, or {number: stage}
        (`schedule.stages_of`); modules or functions, on their device, with or without NaiveDDP.
    loss: `loss(output, targets)` of the last stage's output, or `loss(output)` without targets. It
        returns the mean over its samples as a number without dims, or (sum of losses, number
        summed), which is divided by the total count. None: the last stage returns that itself, and
        may have a parameter `targets`.
    schedule: a name (`tdp schedule --help` lists them), a Schedule, a CSV file or its text, or
        `auto` with `costs` (or a file of them).
    chunks: stages on a rank; None: the schedule's default.
    group: pipe ranks in order; default: tpc's.
    reducer: reducer of gradients over replicas (a NaiveDDP, a ZeroOptimizer, or their reducer), in
        the last backward of each parameter; default: that of the NaiveDDP around the stages.
    dynamic_shapes: allow shapes to change with every micro-batch and step. Otherwise ranks agree on
        shapes in the first step, and a change is refused before it is sent.
    skips: names of dict members that a stage gives to later stages. They go to stages whose forward
        names them; stages between pass them on.
    whole: keyword inputs that are not cut into micro-batches.
    device: device that messages arrive on; default: that of the stages.
    timeout_s: limit of a message on gloo.
    check: compare the ranks' inputs before anything is sent, with one small collective a call on
        the host. Without it a mistake shows only when a message times out.

    Raises:
        ScheduleError: on every rank: no such schedule, or stages and schedule do not fit.
        CommError: on a rank where an exception ended an earlier step over the group.
    """

    def __init__(
        self,
        stages: Stages,
        *,
        loss: Callable[..., Loss] | None = None,
        schedule: Order = "1f1b",
        num_microbatches: int | None = None,
        chunks: int | None = None,
        group: Group | None = None,
        reducer: Reducer | HasReducer | None = None,
        dynamic_shapes: bool = False,
        skips: Sequence[str] = (),
        whole: Sequence[str] = (),
        costs: CostsOrder | None = None,
        device: torch.device | str | None = None,
        timeout_s: float | None = None,
        check: bool = True,
    ):
        self._group = resolve_group(group, "pipe")
        refuse_interrupted(self._group)
        order = (schedule, num_microbatches, chunks, costs)
        equal_settings = (("dynamic_shapes", dynamic_shapes), ("check", check))
        lists = {"skips": skips, "whole": whole}
        self.schedule, self._own = agree_on_stages(
            self._group, stages, order, lists, equal_settings, device, loss
        )
        # The fields down to `_reads` never change.
        self._reducers = StageReducers(reducer, self._own.modules.values())
        self._loss, self._loss_takes = loss, None if loss is None else Signature.of(loss)
        self._whole, self._timeout_s = frozenset(whole), timeout_s
        self._dynamic, self._check = dynamic_shapes, check
        options = {"device": self._own.device, "timeout_s": timeout_s}
        self.executor = Executor(
            self.schedule, self._group, dynamic_shapes=dynamic_shapes, **options
        )
        """The executor of training steps, which owns the channels and the messages in flight."""
        # Reading a loss would wait for a queued device, so NaN is looked for only without a queue.
        self._reads = not is_queued(self._group)
        source = ranks_of(self._group)[self.schedule.placement[-1]]
        self._loss_broadcast = LossBroadcast(self._group, source, self._own.device, timeout_s)
        """The broadcast of the loss to all ranks; it alone knows whether losses are (sum,
        count).
        """
        self._accumulates = False
        """True if steps leave gradients for a later one to reduce; only `no_sync` sets it."""
        self._evaluators: dict[int, Executor] = {}
        """Executors of evaluations, by number of micro-batches; `_evaluator` creates them."""
        self._first_sizes: list[int] | None = None
        """Samples in the micro-batches of the first step, which `_sizes` sets and then requires."""
        self.outputs: object = None
        """The last stage's outputs of a call with `keep_outputs`, joined along dim 0, on its rank;
        None after a call without. Each call sets it."""

    @property
    def stages(self) -> tuple[int, ...]:
        """Numbers of the stages on this rank."""
        return tuple(self._own.modules)

    def step(
        self,
        *args: object,
        targets: object = None,
        loss_scale: float | Tensor = 1.0,
        keep_outputs: bool = False,
        **inputs: object,
    ) -> Tensor:
        """Run forward and backward of a batch; return the mean loss, without graph, on every rank.

        Gradients are added to existing ones.

        args: arguments of the first stage. targets: targets of the loss. inputs: inputs of the
            stages that name them. All tensors in them are cut along dim 0. Ranks without such a
            stage may leave them out.
        loss_scale: factor of the gradient alone, such as 1 / (number of steps that accumulate).
        keep_outputs: keep the last stage's outputs in `outputs`.

        Raises:
            CommError: on every rank: samples do not fit, no stage names an input, or ranks differ.
                On the sender: a shape changed without `dynamic_shapes`. Also on a rank where an
                exception ended an earlier step over the group.
        """
        has_backward(self.schedule)
        batch = self._batch("step", args, targets, inputs, None)
        counted, reducers = self._loss_broadcast.counted, self._reducers.reducers
        reduces = bool(reducers) and not self._accumulates
        if reduces:
            batch.before.append(self._reducers.follow_buffers)
        division = LossDivision(counted, reducers, self._holders(counted), reduces)
        with division.run() as early:
            loss = self._loss_over(self.executor, batch, targets, loss_scale, keep_outputs, early)
        if self._loss_broadcast.counted:
            self._check_divisible()
            loss = division.divide(loss, sum(batch.sizes))
        return mean_of(loss, self._loss_broadcast.dtype, self._loss_broadcast.counted)

    def eval_step(
        self,
        *args: object,
        targets: object = None,
        num_microbatches: int | None = None,
        keep_outputs: bool = False,
        **inputs: object,
    ) -> Tensor:
        """Return the mean loss over a batch, on every rank, with stages in `eval()` and no graph.

        Random states, modes and the agreed shapes of training are unchanged.

        num_microbatches: default: as in training, at most the number of samples. The other
            arguments are those of `step`.

        Raises:
            CommError: as in `step`.
        """
        batch = self._batch("eval_step", args, targets, inputs, num_microbatches)
        with self._own.evaluating():
            loss = self._loss_over(self._evaluator(batch), batch, targets, 1.0, keep_outputs)
            return mean_of(loss, self._loss_broadcast.dtype, self._loss_broadcast.counted)

    def predict(
        self, *args: object, num_microbatches: int | None = None, **inputs: object
    ) -> object:
        """Return the last stage's outputs over a batch, joined along dim 0, on its rank; else None.

        Stages are in `eval()`; the other arguments are those of `eval_step`.
        """
        batch = self._batch("predict", args, None, inputs, num_microbatches)
        with self._own.evaluating():
            executor = self._evaluator(batch)
            return run_microbatches(executor, self._own, batch, None, keep_outputs=True)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let steps in the block only accumulate; the first step after it reduces everything."""
        previous, self._accumulates = self._accumulates, True
        try:
            yield
        finally:
            self._accumulates = previous

    # -- one pass ------------------------------------------------------------------------

    def _loss_over(
        self,
        executor: Executor,
        batch: StepInputs,
        targets: object,
        loss_scale: float | Tensor,
        keep_outputs: bool,
        reducers: Sequence[Reducer] = (),
    ) -> Tensor:
        """Run all micro-batches; return this replica's [sum, count], or [mean, 1] for means."""
        broadcast, loss = self._loss_broadcast, self._loss
        losses = Losses(batch.sizes, loss_scale, broadcast.counted, reads=self._reads)
        batch.before.append(broadcast.begin)
        parts = cut(targets, batch.sizes) if self._own.has_last else ()

        def finish(m: int, output: object) -> Tensor:
            target = parts[m]
            if loss is None:
                value = output
            else:
                value = loss(output) if target is None else loss(output, target)
            root = losses.put(m, value, target, loss)
            if losses.is_complete:
                broadcast.publish(losses)
            return root

        self.outputs = run_microbatches(
            executor,
            self._own,
            batch,
            finish,
            reducers=reducers,
            weights=losses.weights,
            keep_outputs=keep_outputs,
        )
        with step_over(self._group):
            return broadcast.result()

    def _holders(self, counted: bool | None) -> list[Tensor]:
        """Return the tensors whose gradients a (sum, count) loss divides at the end of a step.

        The first step, in which reducers may have run already, includes holders of reduced
        gradients.
        """
        if counted is False:
            return []
        own_parameters = [p for members in self._own.parameters().values() for p in members]
        return own_parameters if counted else [*own_parameters, *self._reducers.holders]

    def _check_divisible(self) -> None:
        """Raise CommError if a stage is a function, because its parameters are not known."""
        functions = [s for s, stage in self._own.modules.items() if not isinstance(stage, Module)]
        if functions:
            raise CommError(
                f"the loss is (sum, count), but stage {functions[0]} is a function, so the "
                "parameters whose gradients must be divided are not known; pass a module"
            )

    # -- agreement of the ranks ------------------------------------------------------------

    def _batch(
        self,
        name: str,
        args: tuple[object, ...],
        targets: object,
        inputs: Named,
        num_microbatches: int | None,
    ) -> StepInputs:
        """Return the inputs of a call with sizes that all ranks agree on; errors are equal
        on all.
        """
        refuse_interrupted(self._group)
        if self._loss is None and targets is not None and self._own.last_names_targets:
            inputs = {**inputs, "targets": targets}
        problem = input_problem(args, inputs, self._own)
        if name != "predict" and not problem:
            problem = loss_problem(self._loss_takes, targets, self._own)
        is_number = isinstance(num_microbatches, int) and num_microbatches >= 1
        if num_microbatches is not None and not is_number:
            problem = f"{num_microbatches!r} microbatches; use a whole number of 1 or more"
            num_microbatches = None
        parts = [(key, x) for key, x in inputs.items() if key not in self._whole]
        call_name = (
            name if num_microbatches is None else f"{name} of {num_microbatches} microbatches"
        )
        samples, differing = samples_in((("arguments", args), ("targets", targets), *parts))
        problem = problem or differing
        if not self._check:
            if problem:
                raise CommError(problem)
            return StepInputs(
                args, inputs, self._sizes(name, samples, num_microbatches), self._whole
            )
        agreement = StepAgreement(self._group, call_name, samples, problem)
        settle = lambda: self._sizes(name, agreement.settle(), num_microbatches)  # noqa: E731
        first = self._first_sizes
        if name == "step" and first is not None and samples in (0, sum(first)) and not problem:
            # equal to the first step, so wait for the others' answer only when ready to send
            return StepInputs(args, inputs, first, self._whole, settle)
        return StepInputs(args, inputs, settle(), self._whole)

    def _sizes(self, name: str, total: int, num_microbatches: int | None) -> list[int]:
        """Return the samples in each micro-batch of `total` samples.

        Raises:
            CommError: on every rank: too few samples, or another number than in the first step.
        """
        number = num_microbatches or self.schedule.num_microbatches
        if name != "step" and num_microbatches is None and total:
            number = min(number, total)
        sizes = sizes_of(total or number, number)
        if name != "step" or self._dynamic:
            return sizes
        first = self._first_sizes = self._first_sizes or sizes
        changed = [m for m, (a, b) in enumerate(zip(first, sizes, strict=True)) if a != b]
        if changed:
            m = changed[0]
            raise CommError(
                f"stage 0 has {sizes[m]} samples in microbatch {m}, but {first[m]} were agreed on "
                f"in the first step ({sum(sizes)} in the batch, {sum(first)} then); keep the "
                f"number, or set dynamic_shapes=True"
            )
        return sizes

    def _evaluator(self, batch: StepInputs) -> Executor:
        """Return the executor of an evaluation, whose shapes may change with every call."""
        number = len(batch.sizes)
        if number not in self._evaluators:
            options = {"device": self._own.device, "timeout_s": self._timeout_s}
            self._evaluators[number] = Executor(
                evaluation(self.schedule, number), self._group, dynamic_shapes=True, **options
            )
        return self._evaluators[number]
