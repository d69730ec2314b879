"""A pipelined step around functions of your own, over tpc's pipe group.

Every rank calls `forward_backward` with the functions and inputs of its stages. The gradient is
that of the mean over the batch, for any number of microbatches, even if they differ in size.
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
    """Run one step over the pipe group: forward and backward of all microbatches.

    optimizer: its gradients are zeroed first; None accumulates into what is there.
    fwd_fn: called with one object if there is one, else with a list: the previous stage's
        tensors first, then this stage's own `inputs`, cut along dim 0. Returns a tensor, tuple or
        dict for the next stage; on the last stage the loss of its microbatch: the mean as a scalar
        tensor, or (sum, count) if some targets do not count. A list has one function for each of
        this rank's stages, in ascending order; `bwd_fn` and `inputs` are then lists too.
    bwd_fn: `bwd_fn(output, gradient)`, gradient None on the last stage, where it may take the
        output alone; None uses autograd. A schedule that splits backwards runs all of it when the
        input's gradient is due.
    inputs: inputs of this stage: None or empty, an object, or a list. Tensors are cut into
        microbatches; every microbatch gets the other values as they are.
    forward_only: no graph, no backward.
    dtype: ignored, as messages carry their dtypes.
    scatter_gather_tensors: each tensor rank sends its slice of the tensors that all of them have,
        and the receiver gathers them over `tensor_group` (default tpc's), if the elements divide.
    schedule: as `Pipeline` takes it.
    reducer: `NaiveDDP(...).reducer` of a module that `fwd_fn` calls directly (`ddp.module`);
        its buckets then leave in the last backward of each parameter.
    dynamic_shapes: outputs of a stage may change shape while functions and inputs do not. By
        default all ranks agree on shapes in the first step with these functions and input shapes,
        and a change is refused before it is sent.

    Returns the mean loss over the batch on the rank of the last stage, None elsewhere; for
    (sum, count) the mean over all replicas. With a `bwd_fn` of the last stage, or `forward_only`,
    outputs that are not a loss are joined along dim 0, and scalars in them averaged over samples.

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
    sizes = call.sizes
    last = call.last
    counted = False if forward_only else call.counted
    holders = () if counted is False else _holders(optimizer, counted)
    division = LossDivision(counted, [] if reducer is None else [reducer], holders)
    losses = Losses(sizes, counted=call.counted, reads=not is_queued(group))
    functions = call.forwards
    weights = losses.weights
    microbatches = {s: cut(inputs_of_s, sizes) for s, inputs_of_s in call.inputs.items()}
    outputs: dict[int, object] = {}
    sent_whole: dict[tuple[int, int], Message] = {}

    def forward(s: int, m: int, received: Message) -> Message:
        if s and parts is not None:
            received = scatter_gather.join(received, parts)
        output = _called(functions[s], s, received, microbatches[s][m])
        if s == last:
            own_backward = call.backwards[s] is not None
            if not _is_loss(output, forward_only, own_backward):
                outputs[m] = detached(output)
                return output  # type: ignore[return-value]
            root = losses.put(m, output, microbatches[s][m])
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
                # only the last stage has seen a loss, so it tells the others
                counted = bool(
                    primitives.broadcast_object(bool(losses.counted), on_cpu(group), source)
                )
                call.remember(counted)
            if counted:
                _check_divisible(optimizer, reducer)
                totals = losses.totals
                if totals is None:
                    device = next((x.device for x in holders), device_of(group))
                    # float64, the dtype of the totals that the last stage broadcasts
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
    """Run the batch through the stages once, without a graph.

    Arguments as for `forward_backward`. Returns the output of this rank's stage, or a list of
    outputs if `fwd_fn` is a list.
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
    stage_outputs = [outputs[s] for s in call.forwards]
    return stage_outputs if isinstance(fwd_fn, list | tuple) else stage_outputs[0]


def _is_loss(output: object, forward_only: bool, has_own_backward: bool) -> bool:
    """Return whether an output is a loss.

    With `forward_only`, two numbers are (sum, count) only if the second is an integer.
    """
    if not (forward_only or has_own_backward):
        return True
    if not is_counted(output):
        return is_scalar(output)
    count = torch.as_tensor(cast(tuple, output)[1])
    return not (forward_only and count.is_floating_point())


def _called(function: FwdFn, stage: int, received: Message, inputs: Sequence[object]) -> object:
    """Call `function` with the received tensors and its inputs: an object, or a list of them."""
    if stage:
        tensors = (received,) if isinstance(received, dict) else tensors_of(received)
        inputs = [*tensors, *inputs]
    return function(inputs[0] if len(inputs) == 1 else inputs)


# -- (sum, count) --------------------------------------------------------------------------------


def _holders(optimizer: torch.optim.Optimizer | None, counted: bool | None) -> list[Tensor]:
    """Return the tensors with the step's gradients.

    A sharding optimizer has them in parameters and, until losses are known to count, in shards,
    which only the reduction fills.
    """
    if isinstance(optimizer, ShardedOptimizer):
        parameters = [h.spec.parameter for members in optimizer.partitions for h in members]
        return parameters if counted else [*parameters, *optimizer.reducer.holders]
    return [] if optimizer is None else [p for g in optimizer.param_groups for p in g["params"]]


def _check_divisible(optimizer: torch.optim.Optimizer | None, reducer: Reducer | None) -> None:
    """Check that the gradients to divide are known; raises CommError."""
    if optimizer is None:
        raise CommError(
            "the loss is (sum, count), and without the optimizer it is not known which gradients "
            "are to be divided by the count; pass optimizer, or accumulate with Pipeline"
        )
    zero = isinstance(optimizer, ShardedOptimizer)
    if zero if reducer is None else reducer.holders and not zero:
        raise CommError(
            "the loss is (sum, count), and a ZeroOptimizer holds gradients that are to be "
            "divided by the count; give both it and reducer=optimizer.reducer"
        )
