"""Micro-batches: a batch is cut along dim 0, run through the stages of a rank, and joined again.

Samples are dealt out as evenly as possible, larger micro-batches first. A mean over micro-batches
is weighted by their samples, so it is the mean over the batch. Everything is cut before the first
micro-batch starts, so each micro-batch only looks up lists and calls the stage.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, cast

import torch
from torch import Tensor

from torchdistpackage.comm import nested
from torchdistpackage.comm.groups import step_over
from torchdistpackage.comm.nested import map_leaves, map_trees
from torchdistpackage.comm.tensor_meta import Members, Message
from torchdistpackage.ddp.reducer import Reducer
from torchdistpackage.errors import CommError
from torchdistpackage.layout.partition import even_sizes
from torchdistpackage.parallel.pipeline.executor import Executor
from torchdistpackage.parallel.pipeline.stage_runner import Weight
from torchdistpackage.parallel.pipeline.stages import OwnedStages, Signature

Named = dict[str, object]
Finish = Callable[[int, object], Tensor]
"""A function (micro-batch, output of the last stage) -> its loss."""


@dataclass
class StepInputs:
    """The inputs of a step.

    sizes: samples of each micro-batch. whole: names of inputs that are not cut.
    settle: waits for the other ranks' agreement, at the last moment before computing or sending.
    before: functions to call when the step begins.
    """

    args: tuple[object, ...]
    inputs: Named
    sizes: Sequence[int]
    whole: frozenset[str]
    settle: Callable[[], object] | None = None
    before: list[Callable[[], object]] = field(default_factory=list)

    def args_of_first(self) -> Sequence[tuple[object, ...]]:
        """Return the positional arguments of the first stage, for each micro-batch."""
        return cast(Sequence[tuple[object, ...]], cut(self.args, self.sizes))

    def inputs_of(self, takes: Callable[[str], bool]) -> Sequence[Named]:
        """Return the keyword inputs that a stage takes, for each micro-batch."""
        uncut = {n: x for n, x in self.inputs.items() if n in self.whole and takes(n)}
        parts = {n: x for n, x in self.inputs.items() if n not in self.whole and takes(n)}
        if not parts:
            return [uncut] * len(self.sizes)
        cuts = cast(Sequence[Named], cut(parts, self.sizes))
        return [part | uncut for part in cuts] if uncut else cuts


def run_microbatches(
    executor: Executor,
    owned_stages: OwnedStages,
    batch: StepInputs,
    finish: Finish | None,
    *,
    reducers: Sequence[Reducer] = (),
    weights: Sequence[Weight] | None = None,
    keep_outputs: bool = False,
) -> object:
    """Run all micro-batches; return the last stage's outputs, joined, if `keep_outputs`.

    finish: computes the loss; None without one. weights: weight of each micro-batch's loss.
    """
    last, calls, skipping = (
        owned_stages.num_stages - 1,
        owned_stages.calls,
        bool(owned_stages.skips),
    )
    named = {s: batch.inputs_of(owned_stages.signatures[s].takes) for s in calls}
    args = batch.args_of_first() if owned_stages.has_first else ()
    outputs: dict[int, object] = {}

    def forward(s: int, m: int, received: Message) -> Message:
        call, inputs = calls[s], named[s][m]
        passing: Members = {}
        if s == 0:
            output = call.first(args[m], inputs)
        elif skipping:
            message, taken_skips, passing = call.unpack(received)
            output = call.later(message, {**taken_skips, **inputs})
        else:
            output = call.later(received, inputs)
        if s < last:
            message = cast(Message, output)
            return call.pack(message, passing) if skipping else message
        if keep_outputs:
            outputs[m] = detached(output)
        return None if finish is None else finish(m, output)

    parameters = owned_stages.parameters() if reducers else None
    if batch.settle is not None:
        batch.settle()
    with step_over(executor.group):
        for call in batch.before:
            call()
        executor.run(forward, parameters=parameters, reducer=reducers, weights=weights)
    return joined([outputs[m] for m in sorted(outputs)], batch.sizes) if outputs else None


def input_problem(
    args: Sequence[object], inputs: Mapping[str, object], owned_stages: OwnedStages
) -> str:
    """Return the mistake in these inputs for any stage, or for a first stage on this rank;
    or "".
    """
    if unknown := sorted(name for name in inputs if not owned_stages.is_taken(name)):
        names = ", ".join(owned_stages.names())
        return f"no stage has a parameter {', '.join(unknown)}; their parameters are {names}"
    if not owned_stages.has_first:
        return ""
    first = owned_stages.signatures[0]
    misfit = first.misfit(len(args), [name for name in inputs if first.takes(name)])
    return f"stage 0 {misfit} (what the loss needs goes to targets=)" if misfit else ""


def loss_problem(loss: Signature | None, targets: object, owned_stages: OwnedStages) -> str:
    """Return the mistake in `targets` for the loss, if the last stage is on this rank; or "".

    loss: signature of the loss; None: the last stage returns the loss.
    """
    if not owned_stages.has_last or (
        loss is None and (targets is None or owned_stages.last_names_targets)
    ):
        return ""
    if loss is None:
        return "nothing takes the targets: there is no loss= and the last stage does not name them"
    misfit = loss.misfit(1 if targets is None else 2)
    arguments = "output" if targets is None else "output and targets"
    return f"the loss {misfit}; it is called with {arguments}" if misfit else ""


# -- cutting and joining -------------------------------------------------------------------------

_CONTAINERS: dict[str, Any] = {"mapping": Mapping, "dataclasses": False}


def sizes_of(num_samples: int, num_microbatches: int) -> list[int]:
    """Return the samples in each micro-batch; raise CommError if they are fewer than
    micro-batches.
    """
    if num_samples < num_microbatches:
        raise CommError(
            f"{num_samples} samples cannot fill {num_microbatches} microbatches; "
            f"use at most {num_samples}"
        )
    return list(even_sizes(num_samples, num_microbatches))


def leaves_of(tree: object) -> Iterator[object]:
    """Yield the leaves of tuples, lists and mappings, in order; a dataclass is one leaf."""
    return nested.leaves_of(tree, **_CONTAINERS)


def tensors_in(value: object) -> Iterator[Tensor]:
    """Yield the tensors that have samples."""
    return (x for x in leaves_of(value) if isinstance(x, Tensor) and x.dim())


def form_of(value: object) -> object:
    """Return shapes, dtypes and types of a value, without its contents."""
    return map_trees(_form, value)


def _form(x: object) -> object:
    """Return the form of one leaf."""
    if isinstance(x, Tensor):
        return [*x.shape], x.dtype, x.requires_grad
    return x if isinstance(x, int | str | None) else type(x).__name__


def samples_in(named: Sequence[tuple[str, object]]) -> tuple[int, str]:
    """Return the length of all tensors along dim 0, and an error message or "".

    The length is 0 if there are no tensors. named: pairs of a name, for the message, and a value.
    """
    named_lengths = [(name, x.shape[0]) for name, value in named for x in tensors_in(value)]
    lengths = {length for _, length in named_lengths}
    if len(lengths) > 1:
        seen = ", ".join(f"{name} {length}" for name, length in dict.fromkeys(named_lengths))
        return 0, f"inputs of one step must have one number of samples along dim 0, not {seen}"
    if 0 in lengths:
        return 0, "the batch has 0 samples; give 1 or more"
    return (lengths.pop() if lengths else 0), ""


def cut_tensor(x: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """Return the samples of each microbatch: views of `x`, one after another along dim 0."""
    return x.split([*sizes])


def cut(value: object, sizes: Sequence[int]) -> Sequence[object]:
    """Return the part of each micro-batch: slices of tensors, and other values unchanged.

    Containers keep their class. A single micro-batch is the value itself.
    """
    if len(sizes) == 1:
        return [value]
    parts = {id(x): cut_tensor(x, sizes) for x in tensors_in(value)}

    def part_of(m: int) -> object:
        return map_leaves(lambda x: parts[id(x)][m], value, lambda x: id(x) in parts, **_CONTAINERS)

    return [part_of(m) for m in range(len(sizes))]


def detached(output: object) -> object:
    """Return the same value without its graph."""
    return map_trees(lambda x: x.detach() if isinstance(x, Tensor) else x, output)


def is_scalar(x: object) -> bool:
    """Return whether a value is one number for a micro-batch; values per sample have a dim."""
    return isinstance(x, Tensor) and x.dim() == 0 and x.is_floating_point()


def joined(outputs: Sequence[object], sizes: Sequence[int]) -> object:
    """Join the outputs of micro-batches: scalars averaged by samples, others along dim 0."""
    return map_trees(lambda *leaves: _joined(leaves, sizes), *outputs)


def _joined(leaves: tuple[Any, ...], sizes: Sequence[int]) -> object:
    """Join one leaf of all micro-batches."""
    first = leaves[0]
    if is_scalar(first):
        shares = (n / sum(sizes) for n in sizes)
        sum_dtype = reduce(torch.promote_types, (x.dtype for x in leaves), torch.float32)
        # means of micro-batches are added in float32 or wider, and not rounded again at each
        return sum(x.to(sum_dtype) * share for x, share in zip(leaves, shares, strict=True))
    if isinstance(first, Tensor) and first.dim():
        return torch.cat(leaves)
    return first if len(leaves) == 1 or first is None else list(leaves)
