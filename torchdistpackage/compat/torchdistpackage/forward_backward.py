"""A pipelined step around functions of your own, over tpc's pipe group.

Every rank calls `forward_backward` with its own stages' functions and inputs. The gradient is that
of the mean over the batch, whatever the number of microbatches, also where the batch does not
divide.
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from torchdistpackage.comm import primitives
from torchdistpackage.comm.groups import on_cpu, step_over
from torchdistpackage.comm.primitives import Group, device_of, is_queued, ranks_of
from torchdistpackage.comm.tensor_meta import Message, tensors_of
from torchdistpackage.comm.tpc import resolve_group
from torchdistpackage.compat.torchdistpackage import scatter_gather
from torchdistpackage.compat.torchdistpackage.function_call import BwdFn, FunctionCall, FwdFn
from torchdistpackage.ddp.reducer import Reducer
from torchdistpackage.ddp.sharded import ShardedOptimizer
from torchdistpackage.errors import CommError
from torchdistpackage.parallel.pipeline.executor import autograd
from torchdistpackage.parallel.pipeline.losses import LossDivision, Losses, is_counted, mean_of
from torchdistpackage.parallel.pipeline.microbatches import cut, detached, is_scalar, joined
from torchdistpackage.schedule.resolve import Order

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
        into microbatches; other values go to each as they are.
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
    call = FunctionCall(
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
    if optimizer is not None and not forward_only:
        optimizer.zero_grad()
    sizes, last, counted = call.sizes, call.last, False if forward_only else call.counted
    holders = () if counted is False else _holders(optimizer, counted)
    division = LossDivision(counted, [] if reducer is None else [reducer], holders)
    losses = Losses(sizes, counted=call.counted, reads=not is_queued(group))
    functions, weights = call.forwards, losses.weights
    own = {s: cut(mine, sizes) for s, mine in call.inputs.items()}
    outputs: dict[int, object] = {}
    sent_whole: dict[tuple[int, int], Message] = {}

    def forward(s: int, m: int, received: Message) -> Message:
        if s and parts is not None:
            received = scatter_gather.join(received, parts)
        output = _called(functions[s], s, received, own[s][m])
        if s == last:
            own_backward = call.backwards[s] is not None
            if not _is_loss(output, forward_only, own_backward):
                outputs[m] = detached(output)
                return output  # type: ignore[return-value]
            root = losses.put(m, output, own[s][m])
            return root * weights[m] if own_backward else root
        if parts is None:
            return cast(Message, output)
        if call.backwards[s] is not None:
            sent_whole[s, m] = cast(Message, output)
        return scatter_gather.part(cast(Message, output), parts)

    def backward(s: int, m: int, output: Message, gradients: Gradients) -> None:
        own_backward = call.backwards[s]
        if own_backward is None:
            autograd(s, m, output, gradients, weights[m])
            return
        if gradients is not None and parts is not None:
            gradients = scatter_gather.join_gradients(output, gradients, parts)
            output = sent_whole.pop((s, m))
        single = gradients is not None and not isinstance(output, tuple | list | dict)
        own_backward(output, gradients[0] if single and gradients else gradients)

    has_own = any(call.backwards.values())
    with division.run() as early:
        call.run(forward, backward if has_own else None, early, weights)
    if counted is not False:
        with step_over(group):
            source = ranks_of(group)[call.schedule.placement[last]]
            if counted is None:
                found = bool(losses.counted)
                counted = bool(primitives.broadcast_object(found, on_cpu(group), source))
                call.remember(counted)
            if counted:
                _check_divisible(optimizer, reducer)
                totals = losses.totals
                if totals is None:
                    device = next((x.device for x in holders), device_of(group))
                    totals = torch.zeros(2, dtype=torch.float64, device=device)
                totals = division.divide(primitives.broadcast(totals, group, source), sum(sizes))
                losses.totals = None if losses.totals is None else totals
    if losses.totals is not None and losses.is_complete:
        return mean_of(losses.totals, losses.dtype, losses.counted)
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
    """One pass of the batch through the stages, without a graph.

    Arguments as for `forward_backward`. Returns this stage's output, on every stage; with several
    functions a list of theirs.
    """
    call = FunctionCall(
        fwd_fn,
        None,
        inputs,
        schedule,
        resolve_group(group, "pipe"),
        1,
        True,
        timeout_s=timeout_s,
        dynamic_shapes=dynamic_shapes,
    )
    outputs: dict[int, object] = {}

    def forward(s: int, m: int, received: Message) -> Message:
        outputs[s] = _called(call.forwards[s], s, received, call.inputs[s])
        return cast(Message, outputs[s])

    call.run(forward)
    found = [outputs[s] for s in call.forwards]
    return found if isinstance(fwd_fn, list | tuple) else found[0]


def _is_loss(output: object, forward_only: bool, has_own_backward: bool) -> bool:
    """Whether an output is a loss. Without a backward two numbers are one if the second counts."""
    if not (forward_only or has_own_backward):
        return True
    if not is_counted(output):
        return is_scalar(output)
    count = torch.as_tensor(cast(tuple, output)[1])
    return not (forward_only and count.is_floating_point())


def _called(function: FwdFn, stage: int, received: Message, own: Sequence[object]) -> object:
    """`function` of what it received and its own inputs: one object as it is, several in a list."""
    if stage:
        before = (received,) if isinstance(received, dict) else tensors_of(received)
        own = [*before, *own]
    return function(own[0] if len(own) == 1 else own)


# -- (sum, count) --------------------------------------------------------------------------------


def _holders(optimizer: torch.optim.Optimizer | None, counted: bool | None) -> list[Tensor]:
    """The tensors that hold the step's gradients.

    Those of an optimizer that shards are parameters and shards, which the sums alone fill.
    """
    if isinstance(optimizer, ShardedOptimizer):
        own = [h.spec.parameter for members in optimizer.partitions for h in members]
        return own if counted else [*own, *optimizer.reducer.holders]
    return [] if optimizer is None else [p for g in optimizer.param_groups for p in g["params"]]


def _check_divisible(optimizer: torch.optim.Optimizer | None, reducer: Reducer | None) -> None:
    """Raises CommError: which gradients is not known, or they are not where they could be."""
    if optimizer is None:
        raise CommError(
            "the loss is (sum, count), and without the optimizer it is not known which gradients "
            "are to be divided by the count; give it, or accumulate with Pipeline"
        )
    zero = isinstance(optimizer, ShardedOptimizer)
    if zero if reducer is None else reducer.holders and not zero:
        raise CommError(
            "the loss is (sum, count), and a ZeroOptimizer holds gradients that are to be "
            "divided by the count; give both it and reducer=optimizer.reducer"
        )
