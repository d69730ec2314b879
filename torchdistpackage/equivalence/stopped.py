"""Comparison of a run that is stopped and resumed, twice, with the same run without a stop.

Both are of one layout, so they must have the same bits, with dropout too. A second stop shows what
the first one does not: what a resumed run forgets to save again.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from torchdistpackage.equivalence.placed import STATE, Placed
from torchdistpackage.equivalence.record import ResumeGap


@dataclass
class RunMoment:
    """The state of one rank between two steps, and the data of the last of them.

    tensors: weights and optimizer states by name. random: the states that it draws from next.
    """

    tensors: Placed
    random: Mapping[str, Tensor]
    loss: float | None = None
    norm: float | None = None
    samples: list[int] = field(default_factory=list[int])


class StoppableRun(Protocol):
    """A run on one rank that can save, and continue from a save in another object of its kind."""

    def take_step(self, step: int) -> RunMoment:
        """Take a step with dropout, and return the state after it."""
        ...

    def moment(self) -> RunMoment:
        """Return the current state."""
        ...

    def save(self, step: int) -> None:
        """Save the state after `step`."""
        ...

    def load(self) -> int | None:
        """Load the newest save; return the step that it was made after, None if that is not
        known.
        """
        ...

    def close(self) -> None:
        """End everything that runs beside the steps."""
        ...


def resume_gaps(
    fresh: Callable[[], StoppableRun], first: int, stopped: RunMoment, straight: Sequence[RunMoment]
) -> list[ResumeGap]:
    """Go on from the save after step `first`, a step, and from a save of that, another; return what
    is not as in the run without a stop, what happens first at the front.

    stopped: what was there at the save. straight: what was there after each further step.
    """
    stopped_moment, gaps = stopped, list[ResumeGap]()
    for number, expected in enumerate(straight, 1):
        run = fresh()
        loaded = run.load()
        gaps += _kept_gaps(run.moment(), stopped_moment, f"after stop {number}")
        step = first + number
        if loaded not in (None, step - 1):
            gaps.append(ResumeGap("step after a resume", "the step", f"after stop {number}", None))
        gaps += _step_gaps(run.take_step(step), expected, f"a step after stop {number}")
        if number < len(straight):
            run.save(step)
        run.close()
        # ranks go on together, also where one of them has found something
        stopped_moment = expected
    return gaps


def _step_gaps(resumed: RunMoment, expected: RunMoment, when: str) -> list[ResumeGap]:
    """Return the differences after a step: its data, its state, its loss and its norm."""
    gaps = _kept_gaps(resumed, expected, when)
    if resumed.samples != expected.samples:
        gaps.insert(0, ResumeGap("data after a resume", "samples", when, None))
    if not gaps and (resumed.loss, resumed.norm) != (expected.loss, expected.norm):
        gaps.append(ResumeGap("weights after a resume", "the loss or the norm", when, None))
    return gaps


def _kept_gaps(resumed: RunMoment, expected: RunMoment, when: str) -> list[ResumeGap]:
    """Return the differences in the saved state: random states, optimizer states and weights."""
    gaps: list[ResumeGap] = []
    if any(not torch.equal(resumed.random[x], expected.random[x]) for x in expected.random):
        gaps.append(ResumeGap("random state after a resume", "random states", when, None))
    for name, apart in _apart(resumed.tensors, expected.tensors):
        _, _, key = name.partition(STATE)
        kind = "state after a resume" if key else "weights after a resume"
        gaps.append(ResumeGap(kind, name, when, apart))
    # wrong states make wrong weights a step later, so they are told first
    gaps.sort(key=lambda gap: gap.kind == "weights after a resume")
    return gaps


def _apart(resumed: Placed, expected: Placed) -> Iterator[tuple[str, float | None]]:
    """Yield the names whose bits differ, and by how much of the largest number; None: missing."""
    for name, boxes in expected.items():
        boxes_of_name = resumed.get(name, [])
        if len(boxes_of_name) != len(boxes) or any(
            a.shape != b.shape for (_, a), (_, b) in zip(boxes_of_name, boxes, strict=True)
        ):
            yield name, None
            continue
        wrong = [
            (a, b)
            for (_, a), (_, b) in zip(boxes_of_name, boxes, strict=True)
            if not torch.equal(a, b)
        ]
        if wrong:
            yield name, max(_gap(a, b) for a, b in wrong)


def _gap(resumed: Tensor, expected: Tensor) -> float:
    # in float64, in which differences of narrower numbers are exact
    scale = max(float(expected.double().abs().max()), 1e-30)
    return float((resumed.double() - expected.double()).abs().max()) / scale
