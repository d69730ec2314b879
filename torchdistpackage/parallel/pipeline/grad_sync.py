"""Which backward is the last of which parameters: the schedule knows, and the reducer is told.

One rule: after a stage's last I or B, all that can still give it gradients are the W that wait, and
each says of which parameters. Before, nothing is final. A parameter of several stages here is
final when it is so in all of them.
"""

from collections.abc import Mapping, Sequence
from functools import partial

from torch import nn

from torchdistpackage.ddp.ready import ScheduledReady
from torchdistpackage.parallel.pipeline.program import COMPUTES, Step
from torchdistpackage.parallel.pipeline.stage_runner import StageRunner
from torchdistpackage.schedule.actions import ActionKind


class LastBackwardNotifier:
    """Of one run. parameters: of each stage here, or None where that is not known: then any of
    `all_parameters` may be any stage's."""

    def __init__(
        self,
        steered: ScheduledReady,
        stages: Mapping[int, StageRunner],
        parameters: Mapping[int, Sequence[nn.Parameter]] | None,
        all_parameters: Sequence[nn.Parameter],
    ):
        self._scheduled, self._stages = steered, stages
        held = parameters or dict.fromkeys(stages, all_parameters)
        self._parameters = {s: {id(p): p for p in held.get(s, ())} for s in stages}
        self._unfinished = set(stages)  # those with an I or B to come

    def within(self, program: Sequence[Step]) -> list[Step]:
        """The same program, which tells."""
        last: dict[int, int] = {}
        for at, (_, _, action, what) in enumerate(program):
            if what == COMPUTES and action.kind.gives_gradient:
                last[action.stage] = at
        told = list(program)
        for at, (do, m, action, what) in enumerate(program):
            if what == COMPUTES and action.kind is not ActionKind.F and at >= last[action.stage]:
                told[at] = partial(self._run, do, action.stage), m, action, what
        return told

    def _run(self, do, stage: int, m: int) -> None:
        """One of the last backwards of a stage: its last I or B, or a W after that."""
        self._unfinished.discard(stage)
        mine = self._parameters[stage]
        elsewhere = {
            i
            for other in self._stages
            if other != stage
            for i in self._may_come(other)
            if i in mine
        }
        with self._scheduled.last_backward(self._may_come(stage, besides=m) | elsewhere):
            do(m)
        pending = self._may_come(stage) | elsewhere
        self._scheduled.complete(p for i, p in mine.items() if i not in pending)

    def _may_come(self, stage: int, besides: int | None = None) -> set[int]:
        """Ids of parameters to which other backwards of `stage` may add, apart from that of a
        microbatch."""
        if stage in self._unfinished:
            return set(self._parameters[stage])
        found: set[int] = set()
        for m, deferred in enumerate(self._stages[stage].deferred):
            if deferred is not None and m != besides:
                ids = deferred.parameters
                found.update(self._parameters[stage] if ids is None else ids)
        return found
