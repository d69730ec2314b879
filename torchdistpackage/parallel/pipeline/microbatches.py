"""A batch as microbatches: cut along dim 0, run through the stages of a rank, and joined again.

Samples are dealt out as evenly as can be, the longer microbatches first, and a mean over
microbatches is weighted by their samples, so that it is the mean over the batch. Everything is cut
before the first microbatch starts; what runs for each looks up lists and calls the stage.
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
from torchdistpackage.comm.tensor_meta import Message
from torchdistpackage.ddp.reducer import Reducer
from torchdistpackage.errors import CommError
from torchdistpackage.layout.partition import even_sizes
from torchdistpackage.parallel.pipeline.executor import Executor
from torchdistpackage.parallel.pipeline.stage_runner import Weight
from torchdistpackage.parallel.pipeline.stages import OwnedStages, Signature

Named = dict[str, object]
Finish = Callable[[int, object], Tensor]
"""(microbatch, output of the last stage) -> its loss."""


@dataclass
class StepInputs:
    """The inputs of a step. sizes: samples of each microbatch. whole: inputs not cut.

    settle: waits for the others' agreement, at the last moment before anything is computed or sent.
    before: called when the step begins.
    """

    args: tuple[object, ...]
    inputs: Named
    sizes: Sequence[int]
    whole: frozenset[str]
    settle: Callable[[], object] | None = None
    before: list[Callable[[], object]] = field(default_factory=list)

    def args_of_first(self) -> Sequence[tuple[object, ...]]:
        return cast(Sequence[tuple[object, ...]], cut(self.args, self.sizes))

    def inputs_of(self, takes: Callable[[str], bool]) -> Sequence[Named]:
        """The keyword inputs that a stage takes, for each microbatch."""
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
    reducers: Sequence[Reducer] = (),
    weights: Sequence[Weight] | None = None,
    keep_outputs: bool = False,
) -> object:
    """Run all microbatches; returns the last stage's outputs, joined, if they are to be kept.

    finish: None where there is no loss. weights: of each microbatch's loss.
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

    parameters = own.parameters() if reducers else None
    if batch.settle is not None:
        batch.settle()
    with step_over(executor.group):
        for call in batch.before:
            call()
        executor.run(forward, parameters=parameters, reducer=reducers, weights=weights)
    return joined([outputs[m] for m in sorted(outputs)], batch.sizes) if outputs else None


def input_problem(args: Sequence[object], inputs: Mapping[str, object], own: OwnedStages) -> str:
    """The mistake in these inputs for any stage, or for the first where it is here; or ""."""
    if unknown := sorted(name for name in inputs if not own.is_taken(name)):
        return f"no stage has a parameter {', '.join(unknown)}; they have {', '.join(own.names())}"
    if not own.has_first:
        return ""
    first = own.signatures[0]
    misfit = first.misfit(len(args), [name for name in inputs if first.takes(name)])
    return f"stage 0 {misfit} (what the loss needs goes to targets=)" if misfit else ""


def loss_problem(loss: Signature | None, targets: object, own: OwnedStages) -> str:
    """The mistake in `targets` for the loss, where the last stage is here; or "".

    loss: None: the last stage returns it.
    """
    if not own.has_last or (loss is None and (targets is None or own.last_names_targets)):
        return ""
    if loss is None:
        return "nothing takes the targets: there is no loss= and the last stage does not name them"
    misfit = loss.misfit(1 if targets is None else 2)
    given = "output" if targets is None else "output and targets"
    return f"the loss {misfit}; it is called with {given}" if misfit else ""


# -- cut and joined ------------------------------------------------------------------------------

_CONTAINERS: dict[str, Any] = {"mapping": Mapping, "dataclasses": False}


def sizes_of(num_samples: int, num_microbatches: int) -> list[int]:
    """Samples in each microbatch; raises CommError if they are fewer than microbatches."""
    if num_samples < num_microbatches:
        raise CommError(
            f"{num_samples} samples cannot fill {num_microbatches} microbatches; "
            f"use at most {num_samples}"
        )
    return list(even_sizes(num_samples, num_microbatches))


def leaves_of(tree: object) -> Iterator[object]:
    """Leaves of tuples, lists and mappings, in order; a dataclass is one, and is not cut."""
    return nested.leaves_of(tree, **_CONTAINERS)


def tensors_in(value: object) -> Iterator[Tensor]:
    """Tensors that have samples."""
    return (x for x in leaves_of(value) if isinstance(x, Tensor) and x.dim())


def form_of(value: object) -> object:
    """Plain values, without contents, from which the form of a stage's output follows."""
    return map_trees(_form, value)


def _form(x: object) -> object:
    if isinstance(x, Tensor):
        return [*x.shape], x.dtype, x.requires_grad
    return x if isinstance(x, int | str | None) else type(x).__name__


def samples_in(named: Sequence[tuple[str, object]]) -> tuple[int, str]:
    """(length along dim 0 of all tensors in the values, 0 without any; what is wrong, or "").

    named: (what an error calls it, value).
    """
    found = [(name, x.shape[0]) for name, value in named for x in tensors_in(value)]
    lengths = {length for _, length in found}
    if len(lengths) > 1:
        seen = ", ".join(f"{name} {length}" for name, length in dict.fromkeys(found))
        return 0, f"inputs of one step must have one number of samples along dim 0, not {seen}"
    if 0 in lengths:
        return 0, "the batch has 0 samples; give 1 or more"
    return (lengths.pop() if lengths else 0), ""


def cut(value: object, sizes: Sequence[int]) -> Sequence[object]:
    """The part of each microbatch: views of tensors, other values as they are.

    Containers stay of their class. One microbatch is the value as it is.
    """
    if len(sizes) == 1:
        return [value]
    parts = {id(x): x.split([*sizes]) for x in tensors_in(value)}

    def of(m: int) -> object:
        return map_leaves(lambda x: parts[id(x)][m], value, lambda x: id(x) in parts, **_CONTAINERS)

    return [of(m) for m in range(len(sizes))]


def detached(output: object) -> object:
    """The same without its graph."""
    return map_trees(lambda x: x.detach() if isinstance(x, Tensor) else x, output)


def is_scalar(x: object) -> bool:
    """Whether it is a number for a microbatch. One of a sample has a dim, if of length 1."""
    return isinstance(x, Tensor) and x.dim() == 0 and x.is_floating_point()


def joined(outputs: Sequence[object], sizes: Sequence[int]) -> object:
    """Scalars averaged by samples, batches joined along dim 0, members one by one."""
    return map_trees(lambda *leaves: _joined(leaves, sizes), *outputs)


def _joined(leaves: tuple[Any, ...], sizes: Sequence[int]) -> object:
    first = leaves[0]
    if is_scalar(first):
        shares = (n / sum(sizes) for n in sizes)
        wide = reduce(torch.promote_types, (x.dtype for x in leaves), torch.float32)
        return sum(x.to(wide) * share for x, share in zip(leaves, shares, strict=True))
    if isinstance(first, Tensor) and first.dim():
        return torch.cat(leaves)
    return first if len(leaves) == 1 or first is None else list(leaves)
