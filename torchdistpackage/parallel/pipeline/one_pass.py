"""One pass of a batch through the stages of a rank: what each is called with, microbatch by
microbatch.

One rule: everything is cut before the first microbatch starts, so that what runs for each looks
up lists and calls the stage.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from torch import Tensor

from torchdistpackage.comm.messages import Message
from torchdistpackage.ddp.reducer import Reducer
from torchdistpackage.parallel.pipeline.executor import Executor
from torchdistpackage.parallel.pipeline.interrupted import step_over
from torchdistpackage.parallel.pipeline.microbatches import cut, detached, joined
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
