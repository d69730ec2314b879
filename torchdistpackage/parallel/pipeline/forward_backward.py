"""A pipelined step around functions of your own: 1F1B over tpc's pipe group.

Every rank calls `forward_backward` with its own stage's function and inputs. What the gradient
then is does not depend on the number of microbatches: it is that of the mean over the whole
batch, also where the batch does not divide.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torchdistpackage.comm import primitives
from torchdistpackage.comm.messages import Message, tensors_of
from torchdistpackage.comm.primitives import Group
from torchdistpackage.comm.tpc import resolve_group
from torchdistpackage.ddp.reducer import Reducer
from torchdistpackage.errors import CommError
from torchdistpackage.parallel.pipeline.executor import Executor, autograd
from torchdistpackage.schedule.generate import build

FwdFn = Callable[..., object]
BwdFn = Callable[..., object]


def forward_backward(
    optimizer: torch.optim.Optimizer | None,
    fwd_fn: FwdFn,
    bwd_fn: BwdFn | None,
    inputs: object,
    num_microbatches: int = 1,
    forward_only: bool = False,
    dtype: torch.dtype | None = None,
    scatter_gather_tensors: bool = False,
    *,
    schedule: str = "1f1b",
    group: Group | None = None,
    reducer: Reducer | None = None,
    timeout_s: float | None = None,
) -> object:
    """One step over the pipe group: forward and backward of all microbatches.

    optimizer: its gradients are zeroed first; None accumulates into what is there.
    fwd_fn: called with one object if there is one, else with a list: the previous stage's
        tensors first, then this stage's own `inputs`, cut along dim 0. Returns a tensor, tuple or
        dict for the next stage; on the last stage the mean loss of its microbatch.
    bwd_fn: `bwd_fn(output, gradient)`, gradient None on the last stage; None uses autograd.
    inputs: this stage's own: None or empty, an object, or a list of them. Tensors are cut
        into microbatches; other values go to each whole.
    forward_only: no graph, no backward.
    dtype: not needed, messages say what they hold. scatter_gather_tensors: accepted; tensors are
        sent whole, so the result is the same.
    reducer: `NaiveDDP(...).reducer` of a module that `fwd_fn` calls directly (`ddp.module`);
        its buckets then leave during the last microbatch's backward.

    Returns the mean loss over the batch on the last stage (scalars are averaged by samples; other
    outputs are joined along dim 0), None on the others.

    Raises:
        CommError: the stages' inputs differ in their number of samples, or there are fewer
            samples than microbatches.
    """
    group = resolve_group(group, "pipe")
    own = _as_list(inputs)
    sizes = _microbatch_sizes(own, num_microbatches, group)
    if optimizer is not None and not forward_only:
        optimizer.zero_grad()
    cuts = [_cut(value, sizes) for value in own]
    executor = Executor(
        build("forward" if forward_only else schedule, group.size(), num_microbatches),
        group,
        device=_device(own, optimizer),
        timeout_s=timeout_s,
        dynamic_shapes=True,
    )
    outputs: list[Message] = []

    def forward(m: int, received: Message) -> Message:
        mine = [cut[m] for cut in cuts]
        before = [] if executor.is_first else _as_arguments(received)
        arguments = [*before, *mine]
        return fwd_fn(arguments[0] if len(arguments) == 1 else arguments)  # type: ignore[return-value]

    def backward(m: int, output: Message, gradients: tuple[Tensor | None, ...] | None) -> None:
        if gradients is None:
            output = _scaled(output, sizes[m] / sum(sizes))
        if bwd_fn is not None:
            single = gradients is not None and not isinstance(output, tuple | list | dict)
            bwd_fn(output, gradients[0] if single and gradients else gradients)
        else:
            autograd(m, output, gradients)

    def keep(m: int, output: Message) -> None:
        if executor.is_last:
            outputs.append(_detached(output))

    executor.run(forward, backward, reducer=reducer, keep=keep)
    if reducer is not None:
        reducer.finish()
    return _joined(outputs, sizes) if executor.is_last else None


def forward_eval(
    fwd_fn: FwdFn,
    inputs: object,
    dtype: torch.dtype | None = None,
    *,
    group: Group | None = None,
    timeout_s: float | None = None,
    **options: object,
) -> object:
    """One pass of the whole batch through the stages, without a graph.

    Arguments as for `forward_backward`. Returns this stage's output, on every stage.
    """
    group = resolve_group(group, "pipe")
    own = _as_list(inputs)
    executor = Executor(
        build("forward", group.size(), 1),
        group,
        device=_device(own, None),
        timeout_s=timeout_s,
        dynamic_shapes=True,
    )
    outputs: list[Message] = []

    def forward(m: int, received: Message) -> Message:
        arguments = [*([] if executor.is_first else _as_arguments(received)), *own]
        return fwd_fn(arguments[0] if len(arguments) == 1 else arguments)  # type: ignore[return-value]

    executor.run(forward, keep=lambda _, output: outputs.append(output))
    return outputs[0]


def _microbatch_sizes(own: Sequence[object], num_microbatches: int, group: Group) -> list[int]:
    """Samples in each microbatch, as the first stage that has tensors cuts them."""
    lengths = {x.shape[0] for x in own if isinstance(x, Tensor) and x.dim()}
    mine = next(iter(lengths)) if len(lengths) == 1 else -1 if lengths else 0
    seen = [int(n) for n in primitives.gather_objects(mine, group)]  # type: ignore[call-overload]
    known = {n for n in seen if n}
    if -1 in known or len(known) > 1:
        raise CommError(
            f"inputs of one step must have one number of samples along dim 0; by stage they have "
            f"{seen} (0: no tensors, -1: this stage's own inputs differ)"
        )
    total = known.pop() if known else num_microbatches
    if total < num_microbatches:
        raise CommError(
            f"{total} samples cannot fill {num_microbatches} microbatches; use at most {total}"
        )
    short, longer = divmod(total, num_microbatches)
    return [short + (m < longer) for m in range(num_microbatches)]


def _cut(value: object, sizes: Sequence[int]) -> Sequence[object]:
    if isinstance(value, Tensor) and value.dim():
        return value.split(list(sizes))
    return [value] * len(sizes)


def _as_list(inputs: object) -> list[object]:
    if inputs is None:
        return []
    return list(inputs) if isinstance(inputs, list | tuple) else [inputs]


def _as_arguments(received: Message) -> list[object]:
    return [received] if isinstance(received, dict) else list(tensors_of(received))


def _device(own: Sequence[object], optimizer: torch.optim.Optimizer | None) -> torch.device:
    """Where this stage lives: its inputs say, else its parameters, else the current device."""
    tensors = [x for x in own if isinstance(x, Tensor)]
    if not tensors and optimizer is not None:
        tensors = [p for g in optimizer.param_groups for p in g["params"]]
    if tensors:
        return tensors[0].device
    on_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    return torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")


def _is_scalar(x: object) -> bool:
    return isinstance(x, Tensor) and x.numel() == 1 and x.is_floating_point()


def _scaled(output: Message, share: float) -> Message:
    """A mean loss as its share of the batch's."""
    return output * share if _is_scalar(output) and share != 1 else output  # type: ignore[operator]


def _detached(output: object) -> object:
    if isinstance(output, Tensor):
        return output.detach()
    if isinstance(output, dict):
        return {key: _detached(value) for key, value in output.items()}
    if isinstance(output, tuple | list):
        return tuple(_detached(value) for value in output)
    return output


def _joined(outputs: Sequence[object], sizes: Sequence[int]) -> object:
    """Scalars averaged by samples, batches joined along dim 0, members one by one."""
    first = outputs[0]
    if isinstance(first, dict):
        return {key: _joined([o[key] for o in outputs], sizes) for key in first}
    if isinstance(first, tuple):
        return tuple(_joined(list(members), sizes) for members in zip(*outputs, strict=True))
    if _is_scalar(first):
        weighted = [o * (n / sum(sizes)) for o, n in zip(outputs, sizes, strict=True)]
        return torch.stack(weighted).sum(0)
    if isinstance(first, Tensor) and first.dim():
        return torch.cat(list(outputs))
    return first if len(outputs) == 1 else list(outputs)
