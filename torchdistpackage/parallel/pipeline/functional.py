"""A pipelined step around functions of your own, over tpc's pipe group.

Every rank calls `forward_backward` with its own stages' functions and inputs. What the gradient
then is does not depend on the number of microbatches: it is that of the mean over the whole
batch, also where the batch does not divide.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import cast

import torch
from torch import Tensor

from torchdistpackage.comm import primitives
from torchdistpackage.comm.companions import on_cpu
from torchdistpackage.comm.primitives import Group, device_of, is_queued, ranks_of
from torchdistpackage.comm.tensor_meta import Message, tensors_of
from torchdistpackage.comm.tpc import resolve_group
from torchdistpackage.ddp.reducer import Reducer
from torchdistpackage.ddp.zero.optimizer import ZeroOptimizer
from torchdistpackage.errors import CommError
from torchdistpackage.parallel.pipeline import scatter_gather
from torchdistpackage.parallel.pipeline.agreement import step_over
from torchdistpackage.parallel.pipeline.executor import autograd
from torchdistpackage.parallel.pipeline.function_call import BwdFn, FunctionCall, FwdFn
from torchdistpackage.parallel.pipeline.grad_sync import scatters
from torchdistpackage.parallel.pipeline.losses import (
    Addition,
    Losses,
    is_counted,
    over_replicas,
    replicas,
)
from torchdistpackage.parallel.pipeline.microbatches import cut, detached, is_scalar, joined
from torchdistpackage.parallel.pipeline.resolve_schedule import Order

Gradients = tuple[Tensor | None, ...] | None


def forward_backward(
    optimizer: torch.optim.Optimizer | None,
    fwd_fn: FwdFn | Sequence[FwdFn],
    bwd_fn: BwdFn | Sequence[BwdFn | None] | None,
    inputs: object,
    num_microbatches: int = 1,
    forward_only: bool = False,
    dtype: torch.dtype | None = None,
    scatter_gather_tensors: bool = False,
    *,
    schedule: Order = "1f1b",
    group: Group | None = None,
    tensor_group: Group | None = None,
    reducer: Reducer | None = None,
    timeout_s: float | None = None,
    dynamic_shapes: bool = False,
) -> object:
    """One step over the pipe group: forward and backward of all microbatches.

    optimizer: its gradients are zeroed first; None accumulates into what is there.
    fwd_fn: called with one object if there is one, else with a list: the previous stage's
        tensors first, then this stage's own `inputs`, cut along dim 0. Returns a tensor, tuple or
        dict for the next stage; on the last stage the loss of its microbatch: the mean as a number
        without dims, or (sum, how many were summed), for targets that do not all count. A list has
        one for each of this rank's stages, in ascending order, and so have `bwd_fn` and `inputs`
        then.
    bwd_fn: `bwd_fn(output, gradient)`, gradient None on the last stage, where it may take the
        output alone; None uses autograd. A schedule that splits backwards runs all of it where
        the input's gradient is due.
    inputs: this stage's own: None or empty, an object, or a list of them. Tensors are cut
        into microbatches; other values go to each whole.
    forward_only: no graph, no backward.
    dtype: not needed, messages say what they hold.
    scatter_gather_tensors: each tensor rank sends its part of what all of them hold, and the
        receiver joins the parts over `tensor_group` (default tpc's), where elements divide.
    schedule: as `Pipeline` takes it.
    reducer: `NaiveDDP(...).reducer` of a module that `fwd_fn` calls directly (`ddp.module`);
        its buckets then leave in the last backward of each parameter.
    dynamic_shapes: what a stage gives may change its form while functions and inputs do not. Else
        it is agreed on in the first step of these functions with inputs of these shapes on all
        ranks, and a change is refused before it is sent.

    Returns the mean loss over the batch where the last stage is, None elsewhere; of (sum, count) it
    is that of all replicas, whose counts are added up. With a backward of the last stage's own, or
    `forward_only`, what is no loss is joined along dim 0, and numbers in it are means over samples.

    Raises:
        CommError: on every rank: there is no such schedule or it has no backwards, functions and
            inputs do not match, the stages' inputs differ in their number of samples, or there
            are fewer than microbatches. Where it happens: the last stage returns something else
            than a loss, or (sum, count) without the optimizer whose gradients are to be divided; a
            stage gives another form than agreed on; an exception ended an earlier step over the
            group of several ranks.
    """
    group = resolve_group(group, "pipe")
    parts = resolve_group(tensor_group, "tensor") if scatter_gather_tensors else None
    job = FunctionCall.of(
        fwd_fn,
        bwd_fn,
        inputs,
        schedule,
        group,
        num_microbatches,
        forward_only,
        optimizer=optimizer,
        timeout_s=timeout_s,
        dynamic_shapes=dynamic_shapes,
        num_parts=None if parts is None else parts.size(),
    )
    sizes = job.sizes
    if optimizer is not None and not forward_only:
        optimizer.zero_grad()
    dividing = None
    if not forward_only and job.counted is not False:
        dividing = LossDivision(group, job.schedule.placement[-1], job.counted, optimizer, reducer)
    cuts = {s: [cut(x, sizes) for x in mine] for s, mine in job.inputs.items()}
    outputs: dict[int, object] = {}
    losses = Losses(sizes, 1.0, job.counted, reads=not is_queued(group))
    last = job.schedule.num_stages - 1
    sent_whole: dict[tuple[int, int], Message] = {}

    def forward(s: int, m: int, received: Message) -> Message:
        if s and parts is not None:
            received = scatter_gather.join(received, parts)
        output = _called(job.forwards[s], s, received, [x[m] for x in cuts[s]])
        if s == last:
            if not _is_loss(output, forward_only, job.backwards[s] is not None):
                outputs[m] = detached(output)
                return output  # type: ignore[return-value]
            root = losses.put(m, output, [x[m] for x in cuts[s]])
            weight = losses.weights[m]
            return root if isinstance(weight, float) and weight == 1 else root * weight
        if parts is None:
            return cast(Message, output)
        if job.backwards[s] is not None:
            sent_whole[s, m] = cast(Message, output)
        return scatter_gather.part(cast(Message, output), parts)

    def backward(s: int, m: int, output: Message, gradients: Gradients) -> None:
        own_backward = job.backwards[s]
        if own_backward is None:
            autograd(s, m, output, gradients)
            return
        if gradients is not None and parts is not None:
            gradients = scatter_gather.join_gradients(output, gradients, parts)
            output = sent_whole.pop((s, m))
        single = gradients is not None and not isinstance(output, tuple | list | dict)
        own_backward(output, gradients[0] if single and gradients else gradients)

    own = backward if job.has_own_backward else None
    if dividing is None:
        job.run(forward, own, reducer)
        if reducer is not None:
            reducer.finish()
    else:
        with dividing.held() as early:
            job.run(forward, own, early)
        with step_over(group):
            job.remember(dividing.finish(losses))
    if losses.counted is not None and losses.is_whole:
        return losses.mean()
    return joined([outputs[m] for m in sorted(outputs)], sizes) if outputs else None


def forward_eval(
    fwd_fn: FwdFn | Sequence[FwdFn],
    inputs: object,
    dtype: torch.dtype | None = None,
    *,
    schedule: Order = "1f1b",
    group: Group | None = None,
    timeout_s: float | None = None,
    dynamic_shapes: bool = False,
    **options: object,
) -> object:
    """One pass of the whole batch through the stages, without a graph.

    Arguments as for `forward_backward`. Returns this stage's output, on every stage; with several
    functions a list of theirs.
    """
    group = resolve_group(group, "pipe")
    job = FunctionCall.of(
        fwd_fn,
        None,
        inputs,
        schedule,
        group,
        1,
        True,
        timeout_s=timeout_s,
        dynamic_shapes=dynamic_shapes,
    )
    outputs: dict[int, object] = {}

    def forward(s: int, m: int, received: Message) -> Message:
        outputs[s] = _called(job.forwards[s], s, received, job.inputs[s])
        return cast(Message, outputs[s])

    job.run(forward)
    found = [outputs[s] for s in job.forwards]
    return found if isinstance(fwd_fn, list | tuple) else found[0]


def _is_loss(output: object, forward_only: bool, has_own_backward: bool) -> bool:
    """Without a backward two numbers may as well be two means, unless the second one counts."""
    if not (forward_only or has_own_backward):
        return True
    if is_counted(output):
        count = cast(tuple, output)[1]
        is_whole = not isinstance(count, float | Tensor) or (
            isinstance(count, Tensor) and not count.is_floating_point()
        )
        return is_whole or not forward_only
    return is_scalar(output)


def _called(function: FwdFn, stage: int, received: Message, own: Sequence[object]) -> object:
    """`function` of what came and what is its own: one object as it is, several in a list."""
    before: Sequence[object] = ()
    if stage:
        before = (received,) if isinstance(received, dict) else tensors_of(received)
    arguments = [*before, *own]
    return function(arguments[0] if len(arguments) == 1 else arguments)


class LossDivision:
    """Gradients of a step around functions, divided at its end if its losses are (sum, count).

    All ranks hear from the last stage whether there is a count before any of them divides. They
    know it beforehand once a function has returned one; what is to be summed over replicas then
    waits for the division, as steps before it may have left gradients that are not summed yet.

    source: pipe index of the last stage. counted: None before the first step.
    """

    def __init__(
        self,
        group: Group,
        source: int,
        counted: bool | None,
        optimizer: torch.optim.Optimizer | None,
        reducer: Reducer | None,
    ):
        self._group, self._source, self._counted = group, ranks_of(group)[source], counted
        self._is_source = group.rank() == source
        self._optimizer, self._reducer = optimizer, reducer
        groups = [] if optimizer is None else optimizer.param_groups
        self._holders: list[Tensor] = [p for g in groups for p in g["params"]]
        if isinstance(optimizer, ZeroOptimizer):
            # its groups are of shards, which get the sums; before the sums gradients are elsewhere
            shards = [] if counted else [shard.tensor for shard in optimizer.shards]
            self._holders = [*optimizer.reducer.parameters, *shards]
        self._addition = Addition(self._holders)

    @contextmanager
    def held(self) -> Iterator[Reducer | None]:
        """The reducer that may sum in this run."""
        reducer = self._reducer
        is_held = self._counted is True and reducer is not None
        with reducer.no_sync() if is_held and reducer is not None else nullcontext():
            yield None if is_held else reducer

    def finish(self, losses: Losses) -> bool:
        """After the run; `losses` are those of all replicas then. Whether they have a count."""
        reducer, known = self._reducer, self._counted
        if known is None:
            if reducer is not None:
                reducer.finish()
            told = primitives.broadcast_object(
                bool(losses.counted), on_cpu(self._group), self._source
            )
            if not told:
                return False
        self._check()
        totals = losses.totals
        if totals is None:
            totals = torch.zeros(2, dtype=torch.float64, device=self._device())
        totals = primitives.broadcast(totals, self._group, self._source)
        totals, num = over_replicas(totals, replicas(reducer))
        self._addition.divide(totals, losses.num_samples, num)
        if self._is_source:
            losses.totals = totals
        if known and reducer is not None:
            with reducer.scheduled():
                pass
            reducer.finish()
        return True

    def _device(self) -> torch.device:
        return self._holders[0].device if self._holders else device_of(self._group)

    def _check(self) -> None:
        """Raises CommError: which gradients is not known, or they are not where they could be."""
        zero = isinstance(self._optimizer, ZeroOptimizer)
        if self._optimizer is None:
            raise CommError(
                "the loss is (sum, count), and without the optimizer nobody says which gradients "
                "are to be divided by the count; give it, or accumulate with Pipeline"
            )
        if (zero and self._reducer is None) or (
            self._reducer is not None and scatters(self._reducer) and not zero
        ):
            raise CommError(
                "the loss is (sum, count), and a ZeroOptimizer holds gradients that are to be "
                "divided by the count; give both it and reducer=optimizer.reducer"
            )
