"""A batch as microbatches: cut along dim 0, run through the stages of a rank, and joined again.

One rule: samples are dealt out as evenly as can be, the longer microbatches first, and a mean
over microbatches is weighted by their samples, so that it is the mean over the batch. Everything is
cut before the first microbatch starts, so that what runs for each looks up lists and calls the
stage.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from torchdistpackage.comm.tensor_meta import Message
from torchdistpackage.ddp.reducer import Reducer
from torchdistpackage.errors import CommError
from torchdistpackage.layout.partition import even_sizes
from torchdistpackage.parallel.pipeline.agreement import step_over
from torchdistpackage.parallel.pipeline.executor import Executor
from torchdistpackage.parallel.pipeline.stage_runner import Weight
from torchdistpackage.parallel.pipeline.stages import OwnedStages, Signature

Named = dict[str, object]
Finish = Callable[[int, object], Tensor]
"""(microbatch, output of the last stage) -> its loss."""


@dataclass
class StepInputs:
    """What a step is called with. sizes: samples of each microbatch. whole: inputs not cut.

    settle: hears that the others agree, in the last moment before anything is computed or sent.
    before: what the step begins with.
    """

    args: tuple[object, ...]
    inputs: Named
    sizes: Sequence[int]
    whole: frozenset[str]
    settle: Callable[[], object] | None = None
    before: list[Callable[[], object]] = field(default_factory=list)

    def args_of_first(self) -> Sequence[tuple[object, ...]]:
        if not self.args:
            return [()] * len(self.sizes)
        return cast(Sequence[tuple[object, ...]], cut(self.args, self.sizes))

    def inputs_of(self, takes: Callable[[str], bool]) -> Sequence[Named]:
        """Of each microbatch the keyword inputs that a stage takes."""
        whole = {n: x for n, x in self.inputs.items() if n in self.whole and takes(n)}
        parts = {n: x for n, x in self.inputs.items() if n not in self.whole and takes(n)}
        if not parts:
            return [whole] * len(self.sizes)
        cuts = cast(Sequence[Named], cut(parts, self.sizes))
        return [part | whole for part in cuts] if whole else cuts


def run_microbatches(
    executor: Executor,
    own: OwnedStages,
    batch: StepInputs,
    finish: Finish | None,
    *,
    reducer: Reducer | None = None,
    weights: Sequence[Weight] | None = None,
    keep_outputs: bool = False,
) -> object:
    """All microbatches; returns the last stage's outputs, joined, if they are to be kept.

    finish: None: outputs are all that is wanted. weights: of each microbatch's loss.
    """
    last, calls, skipping = own.num_stages - 1, own.calls, bool(own.skips)
    named = {s: batch.inputs_of(own.signatures[s].takes) for s in calls}
    args = batch.args_of_first() if own.has_first else ()
    outputs: dict[int, object] = {}

    def forward(s: int, m: int, received: Message) -> Message:
        call, given = calls[s], named[s][m]
        if s == 0:
            output, passing = call.first(args[m], given), {}
        elif skipping:
            message, mine, passing = call.unpack(received)
            output = call.later(message, {**mine, **given})
        else:
            output, passing = call.later(received, given), {}
        if s < last:
            message = cast(Message, output)
            return call.pack(message, passing) if skipping else message
        if keep_outputs:
            outputs[m] = detached(output)
        return None if finish is None else finish(m, output)

    parameters = None if reducer is None else own.parameters()
    if batch.settle is not None:
        batch.settle()
    with step_over(executor.group):
        for call in batch.before:
            call()
        executor.run(forward, parameters=parameters, reducer=reducer, weights=weights)
    return joined([outputs[m] for m in sorted(outputs)], batch.sizes) if outputs else None


def input_problem(args: Sequence[object], inputs: Mapping[str, object], own: OwnedStages) -> str:
    """What is wrong with these inputs for any stage, or for the first where it is; or nothing."""
    unknown = sorted(name for name in inputs if not own.is_taken(name))
    if unknown:
        return f"no stage has a parameter {', '.join(unknown)}; they have {', '.join(own.names())}"
    if not own.has_first:
        return ""
    first = own.signatures[0]
    misfit = first.misfit(len(args), [name for name in inputs if first.takes(name)])
    return f"stage 0 {misfit} (what the loss needs goes to targets=)" if misfit else ""


def loss_problem(loss: Signature | None, targets: object, own: OwnedStages) -> str:
    """What is wrong with `targets` for the loss where the last stage is; or nothing.

    loss: None: the last stage returns it.
    """
    if not own.has_last:
        return ""
    if loss is None:
        if targets is None or own.last_names_targets:
            return ""
        return "nobody takes the targets: there is no loss= and the last stage does not name them"
    misfit = loss.misfit(1 if targets is None else 2)
    given = "output" if targets is None else "output and targets"
    return f"the loss {misfit}; it is called with {given}" if misfit else ""


# -- cut and joined ------------------------------------------------------------------------------


def sizes_of(num_samples: int, num_microbatches: int) -> list[int]:
    """Samples in each microbatch.

    Raises:
        CommError: fewer samples than microbatches.
    """
    if num_samples < num_microbatches:
        raise CommError(
            f"{num_samples} samples cannot fill {num_microbatches} microbatches; "
            f"use at most {num_samples}"
        )
    return list(even_sizes(num_samples, num_microbatches))


def tensors_in(value: object) -> Iterator[Tensor]:
    """Tensors that have samples, through tuples, lists and dicts."""
    if isinstance(value, Tensor):
        if value.dim():
            yield value
    elif isinstance(value, Mapping):
        for member in value.values():
            yield from tensors_in(member)
    elif isinstance(value, tuple | list):
        for member in value:
            yield from tensors_in(member)


def samples_in(named: Sequence[tuple[str, object]]) -> tuple[int, str]:
    """(length along dim 0 of all tensors in the values, 0 without any; what is wrong, or nothing).

    named: (what an error calls it, value).
    """
    found = [(name, x.shape[0]) for name, value in named for x in tensors_in(value)]
    lengths = {length for _, length in found}
    if len(lengths) > 1:
        told = ", ".join(f"{name} {length}" for name, length in dict.fromkeys(found))
        return 0, f"inputs of one step must have one number of samples along dim 0, not {told}"
    if 0 in lengths:
        return 0, "the batch has 0 samples; give 1 or more"
    return (lengths.pop() if lengths else 0), ""


def cut(value: object, sizes: Sequence[int]) -> Sequence[object]:
    """For each microbatch its part: views of tensors, other values whole.

    Tuples, lists and dicts are cut member by member. One microbatch is the value as it is.
    """
    if len(sizes) == 1:
        return [value]
    if isinstance(value, Tensor) and value.dim():
        return value.split(list(sizes))
    if isinstance(value, Mapping) and value:
        parts = zip(*(cut(member, sizes) for member in value.values()), strict=True)
        return [dict(zip(value, members, strict=True)) for members in parts]
    if isinstance(value, tuple | list) and value:
        parts = zip(*(cut(member, sizes) for member in value), strict=True)
        return [list(part) if isinstance(value, list) else part for part in parts]
    return [value] * len(sizes)


def detached(output: object) -> object:
    """The same without its graph."""
    if isinstance(output, Tensor):
        return output.detach()
    if isinstance(output, Mapping):
        return {key: detached(value) for key, value in output.items()}
    if isinstance(output, tuple | list):
        return tuple(detached(value) for value in output)
    return output


def is_scalar(x: object) -> bool:
    """Whether it is a number for a whole microbatch. One of a sample has a dim, if of length 1."""
    return isinstance(x, Tensor) and x.dim() == 0 and x.is_floating_point()


def joined(outputs: Sequence[object], sizes: Sequence[int]) -> object:
    """Scalars averaged by samples, batches joined along dim 0, members one by one."""
    first = outputs[0]
    if isinstance(first, Mapping):
        return {key: joined([o[key] for o in outputs], sizes) for key in first}  # type: ignore[index]
    if isinstance(first, tuple | list):
        return tuple(joined(list(members), sizes) for members in zip(*outputs, strict=True))  # type: ignore[call-overload]
    if is_scalar(first):
        return mean(outputs, sizes)  # type: ignore[arg-type]
    if isinstance(first, Tensor) and first.dim():
        return torch.cat(list(outputs))  # type: ignore[arg-type]
    return first if len(outputs) == 1 or first is None else list(outputs)


def mean(values: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Of one mean for each microbatch, the mean over the batch, in float32 or what is wider."""
    found = Mean(sizes)
    for m, value in enumerate(values):
        found.put(m, value)
    return found.value()


class Mean:
    """The mean over a batch, from one mean for each microbatch, in any order.

    They go into one place: a number with memory of its own, made beside the large tensors of its
    microbatch, would break up what these leave, and the next microbatch would not fit in there.
    """

    def __init__(self, sizes: Sequence[int]):
        self._sizes, self._total = sizes, sum(sizes)
        self._parts: Tensor | None = None

    def put(self, m: int, value: Tensor) -> None:
        """That of microbatch `m`."""
        value, parts = value.detach(), self._parts
        dtype = torch.promote_types(value.dtype, torch.float32 if parts is None else parts.dtype)
        if parts is None:
            parts = value.new_zeros((len(self._sizes), *value.shape), dtype=dtype)
        self._parts = parts = parts.to(dtype)
        parts[m].copy_(value.reshape(parts.shape[1:])).mul_(self._sizes[m] / self._total)

    def value(self) -> Tensor:
        """When all have come."""
        assert self._parts is not None
        return self._parts.sum(0)
