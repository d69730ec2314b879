"""The pipeline in a training loop of your own.

    pipe = Pipeline(stage, loss=loss_fn, schedule="1f1b", num_microbatches=8)
    for x, y in batches:
        optimizer.zero_grad()
        loss = pipe.step(x, targets=y)
        optimizer.step()

One rule: a step computes the mean loss of its batch, and leaves the gradient of that, whatever the
schedule and the number of microbatches, also where the batch does not divide, and with a loss of
(sum, count) where targets do not all count. All pipe ranks make the same calls; each may bring the
whole batch or only what its own stages need.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor
from torch.nn import Module

from torchdistpackage.comm.primitives import Group, is_queued, ranks_of
from torchdistpackage.comm.tpc import resolve_group
from torchdistpackage.ddp.reducer import Reducer
from torchdistpackage.errors import CommError
from torchdistpackage.parallel.pipeline.agreement import (
    StepAgreement,
    common_samples,
    refuse_interrupted,
    step_over,
)
from torchdistpackage.parallel.pipeline.executor import Executor
from torchdistpackage.parallel.pipeline.grad_sync import HasReducer, StageReducers
from torchdistpackage.parallel.pipeline.losses import (
    Addition,
    LossBroadcast,
    Losses,
    mean_of,
    over_replicas,
    replicas,
)
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
from torchdistpackage.parallel.pipeline.resolve_schedule import CostsOrder, Order, has_backward
from torchdistpackage.parallel.pipeline.stages import Signature, Stages, agree_on_stages, listed
from torchdistpackage.schedule.actions import Schedule
from torchdistpackage.schedule.generators.registry import evaluation

Loss = Tensor | tuple[Tensor, Tensor | float]


class Pipeline:
    """This rank's stages of a model, trained by any schedule.

    stages: my stage, or the list of my stages in ascending order, or {number: stage}; modules or
        functions, on their device, NaiveDDP around them or not. `schedule.stages_of` says which.
    loss: `loss(output, targets)` of the last stage's output, or `loss(output)` without targets: the
        mean over its samples as a number without dims, or (sum of losses, how many were summed),
        which is divided by all counts together. None: the last stage returns that itself, and may
        name `targets`.
    schedule: a name (`tdp schedule --help` lists them), a Schedule, a CSV file or its text, or
        `auto` with `costs` (or the file of them). chunks: stages on a rank; None: the
        schedule's own number.
    group: pipe ranks in order; default tpc's.
    reducer: what sums gradients over replicas (a NaiveDDP, a ZeroOptimizer, or their reducer), in
        the last backward of each parameter; default that of the NaiveDDP around the stages.
    dynamic_shapes: shapes may change with every microbatch and step; else they are agreed in the
        first step, and a change is refused before it is sent.
    skips: members of a dict that a stage gives to stages further on, by name: they go to stages
        whose forward names them, the others hand them on unseen.
    whole: keyword inputs that are not cut into microbatches.
    device: where messages arrive; default that of the stages.
    timeout_s: how long a message may take (gloo).
    check: compare what the ranks bring before anything is sent, by one small collective a call of
        the host; False leaves mistakes to whoever waits.

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
        alike = (("dynamic_shapes", dynamic_shapes), ("check", check))
        self.schedule, self._own = agree_on_stages(self._group, stages, order, skips, alike, device)
        self._reducers = StageReducers(reducer, self._own.modules.values())
        self._loss, self._loss_takes = loss, None if loss is None else Signature.of(loss)
        self._whole, self._timeout_s = frozenset(listed("whole", whole)), timeout_s
        self._dynamic, self._check, self._held = dynamic_shapes, check, False
        self.executor = self._make(self.schedule, dynamic_shapes)
        self._reads = not is_queued(self._group)
        self._evaluators: dict[int, Executor] = {}
        self._first_sizes: list[int] | None = None
        source = ranks_of(self._group)[self.schedule.placement[-1]]
        self._loss_broadcast = LossBroadcast(self._group, source, self._own.device, timeout_s)
        self.outputs: object = None
        """Of the last stage, joined along dim 0, on its rank; of a call with `keep_outputs`."""

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
        """Forward and backward of a batch; gradients add to what is there.

        args: of the first stage. targets: of the loss. inputs: of the stages that name them. All
            tensors in them are cut along dim 0; ranks without such a stage may leave them out.
        loss_scale: factor of the gradient, not of what is returned: a loss scale, or 1 / (number of
            steps that accumulate).
        keep_outputs: keep the last stage's outputs in `outputs`.

        Returns the mean loss over the batch, without graph, on every pipe rank.

        Raises:
            CommError: on every rank: samples do not fit, nobody names an input, or ranks differ; on
                the sender: a shape changed without `dynamic_shapes`; on a rank where an exception
                ended an earlier step over the group.
        """
        has_backward(self.schedule)
        batch = self._batch("step", args, targets, inputs, None)
        counted, reducer = self._loss_broadcast.counted, self._reducers.reducer
        sums = reducer is not None and not self._held
        if sums:
            batch.before.append(self._reducers.follow_buffers)
        addition = None if counted is False else Addition(self._holders())
        early = reducer if sums and not counted else None
        with nullcontext() if reducer is None or early is not None else reducer.no_sync():
            loss = self._loss_over(self.executor, batch, targets, loss_scale, keep_outputs, early)
        if early is not None:
            early.finish()
        if self._loss_broadcast.counted:
            loss = self._divided(loss, addition, batch, early)
        if reducer is not None and sums and counted:
            # what is counted is divided before it is summed: steps before may wait for the sum too
            with reducer.scheduled():
                pass
            reducer.finish()
        return loss

    def eval_step(
        self,
        *args: object,
        targets: object = None,
        num_microbatches: int | None = None,
        keep_outputs: bool = False,
        **inputs: object,
    ) -> Tensor:
        """Mean loss over a batch, on every pipe rank, with stages in `eval()` and no graph.

        num_microbatches: default as in training, or as many as there are samples. The other
        arguments are those of `step`. Leaves training as it was: random states, modes, shapes.

        Raises:
            CommError: as `step`.
        """
        batch = self._batch("eval_step", args, targets, inputs, num_microbatches)
        with self._own.evaluating():
            found = self._loss_over(self._evaluator(batch), batch, targets, 1.0, keep_outputs)
            return self._mean(found)

    def predict(
        self, *args: object, num_microbatches: int | None = None, **inputs: object
    ) -> object:
        """Outputs of the last stage over a batch, joined along dim 0, on its rank; else None.

        Stages are in `eval()`; the other arguments are those of `eval_step`.
        """
        batch = self._batch("predict", args, None, inputs, num_microbatches)
        with self._own.evaluating():
            executor = self._evaluator(batch)
            return run_microbatches(executor, self._own, batch, None, keep_outputs=True)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Steps inside only accumulate; the first one after it reduces all."""
        before, self._held = self._held, True
        try:
            yield
        finally:
            self._held = before

    # -- one pass ------------------------------------------------------------------------

    def _loss_over(
        self,
        executor: Executor,
        batch: StepInputs,
        targets: object,
        loss_scale: float | Tensor,
        keep_outputs: bool,
        reducer: Reducer | None = None,
    ) -> Tensor:
        """The mean, or [sum, count] of this replica."""
        telling = self._loss_broadcast
        losses = Losses(batch.sizes, loss_scale, telling.counted, reads=self._reads)
        batch.before.append(telling.begin)
        parts = cut(targets, batch.sizes) if self._own.has_last else ()

        def finish(m: int, output: object) -> Tensor:
            value = output if self._loss is None else self._call_loss(output, parts[m])
            root = losses.put(m, value, parts[m], self._loss)
            if losses.is_whole:
                telling.publish(losses.value(), losses.dtype)
            return root

        self.outputs = run_microbatches(
            executor,
            self._own,
            batch,
            finish,
            reducer=reducer,
            weights=losses.weights,
            keep_outputs=keep_outputs,
        )
        with step_over(self._group):
            return telling.result()

    def _holders(self) -> list[Tensor]:
        """Where gradients of this rank are at the end of a step, in the first one summed ones."""
        own = [p for mine in self._own.parameters().values() for p in mine]
        return own if self._loss_broadcast.counted else [*own, *self._reducers.holders]

    def _divided(
        self, totals: Tensor, addition: Addition | None, batch: StepInputs, reducer: Reducer | None
    ) -> Tensor:
        """The mean of [sum, count], after gradients are divided too. reducer: which has summed."""
        functions = [s for s, stage in self._own.modules.items() if not isinstance(stage, Module)]
        if functions:
            raise CommError(
                f"the loss is (sum, count), and stage {functions[0]} is a function, of which no "
                f"parameters are known whose gradients could be divided; give a module"
            )
        if reducer is not None:
            self._reducers.check_holders()
        assert addition is not None
        totals, num = over_replicas(totals, replicas(self._reducers.reducer))
        addition.divide(totals, sum(batch.sizes), num)
        return self._mean(totals)

    def _mean(self, loss: Tensor) -> Tensor:
        return (
            mean_of(loss).to(self._loss_broadcast.dtype) if self._loss_broadcast.counted else loss
        )

    def _call_loss(self, output: object, targets: object) -> Loss:
        assert self._loss is not None
        return self._loss(output) if targets is None else self._loss(output, targets)

    # -- what is agreed on -----------------------------------------------------------------

    def _batch(
        self,
        name: str,
        args: tuple[object, ...],
        targets: object,
        inputs: Named,
        num_microbatches: int | None,
    ) -> StepInputs:
        """What the call was given, cut alike on all ranks; or the same error on all."""
        refuse_interrupted(self._group)
        if self._loss is None and targets is not None and self._own.last_names_targets:
            inputs = {**inputs, "targets": targets}
        problem = input_problem(args, inputs, self._own)
        if name != "predict" and not problem:
            problem = loss_problem(self._loss_takes, targets, self._own)
        if num_microbatches is not None and num_microbatches < 1:
            problem = f"{num_microbatches} microbatches; use 1 or more"
        parts = [(key, x) for key, x in inputs.items() if key not in self._whole]
        what = name if num_microbatches is None else f"{name} of {num_microbatches} microbatches"
        seen, differing = samples_in((("arguments", args), ("targets", targets), *parts))
        problem = problem or differing
        if not self._check:
            if problem:
                raise CommError(problem)
            sizes = self._sizes(name, common_samples([seen]), num_microbatches)
            return StepInputs(args, inputs, sizes, self._whole)
        agreement = StepAgreement(self._group, what, seen, problem)
        settle = lambda: self._sizes(name, agreement.settle(), num_microbatches)  # noqa: E731
        first = self._first_sizes
        if name == "step" and first is not None and seen in (0, sum(first)) and not problem:
            # as ever, so the others' word is waited for when this rank is ready to send
            return StepInputs(args, inputs, first, self._whole, settle)
        return StepInputs(args, inputs, settle(), self._whole)

    def _sizes(self, name: str, total: int, num_microbatches: int | None) -> list[int]:
        """Of the microbatches of `total` samples."""
        number = num_microbatches or self.schedule.num_microbatches
        if name != "step" and num_microbatches is None and total:
            number = min(number, total)
        sizes = sizes_of(total or number, number)
        if name == "step" and not self._dynamic:
            self._check_sizes(sizes)
        return sizes

    def _check_sizes(self, sizes: list[int]) -> None:
        """A batch of another size would change shapes; all ranks know it, so all refuse it."""
        first = self._first_sizes = self._first_sizes or sizes
        changed = [m for m, (a, b) in enumerate(zip(first, sizes, strict=True)) if a != b]
        if changed:
            m = changed[0]
            raise CommError(
                f"stage 0 has {sizes[m]} samples in microbatch {m}, but {first[m]} were agreed on "
                f"in the first step ({sum(sizes)} in the batch, {sum(first)} then); keep the "
                f"number, or set dynamic_shapes=True"
            )

    def _make(self, schedule: Schedule, dynamic_shapes: bool) -> Executor:
        return Executor(
            schedule,
            self._group,
            device=self._own.device,
            timeout_s=self._timeout_s,
            dynamic_shapes=dynamic_shapes,
        )

    def _evaluator(self, batch: StepInputs) -> Executor:
        """Shapes of an evaluation may change with every call."""
        number = len(batch.sizes)
        if number not in self._evaluators:
            self._evaluators[number] = self._make(evaluation(self.schedule, number), True)
        return self._evaluators[number]
