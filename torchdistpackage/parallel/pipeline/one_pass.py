"""One pass of a batch through the stages of a rank: what each is called with, microbatch by
microbatch.

One rule: everything is cut before the first microbatch starts, so that what runs for each looks
up lists and calls the stage.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from torch import Tensor

from torchdistpackage.comm.messages import Message
from torchdistpackage.ddp.reducer import Reducer
from torchdistpackage.parallel.pipeline.executor import Executor
from torchdistpackage.parallel.pipeline.microbatches import cut, detached, joined
from torchdistpackage.parallel.pipeline.own_stages import OwnStages

Named = dict[str, object]
Finish = Callable[[int, object], Tensor]
"""(microbatch, output of the last stage) -> its part of the loss."""


@dataclass
class Batch:
    """What a step is called with. sizes: samples of each microbatch. whole: inputs not cut."""

    args: tuple[object, ...]
    inputs: Named
    sizes: Sequence[int]
    whole: frozenset[str]

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


def run(
    executor: Executor,
    own: OwnStages,
    batch: Batch,
    finish: Finish | None,
    *,
    train: bool,
    reducer: Reducer | None = None,
    keep_outputs: bool = False,
) -> object:
    """All microbatches; returns the last stage's outputs, joined, if they are to be kept.

    finish: None: outputs are all that is wanted.
    """
    last, calls, skipping = own.num_stages - 1, own.calls, bool(own.skips)
    named = {s: batch.inputs_of(own.signatures[s].takes) for s in calls}
    args = batch.args_of_first() if own.has_first else ()
    outputs: list[object] = []

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
            outputs.append(detached(output))
        return None if finish is None else finish(m, output)

    executor.run(forward, parameters=own.parameters() if train else None, reducer=reducer)
    return joined(outputs, batch.sizes) if outputs else None


def told(inputs: Mapping[str, object], own: OwnStages) -> str:
    """What is wrong with the names of keyword inputs, or nothing."""
    unknown = sorted(name for name in inputs if not own.is_taken(name))
    if not unknown:
        return ""
    return f"no stage has a parameter {', '.join(unknown)}; they have {', '.join(own.names())}"
