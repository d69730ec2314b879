"""What a step says of itself: first as numbers that may still be on their way, then as values.

One rule: they are on their way to the host before the next step is issued, so whoever reads them
waits for this step and not for the next one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchdistpackage.comm import primitives
from torchdistpackage.comm.moments import Moment, clock_of, seconds
from torchdistpackage.comm.on_host import OnHost
from torchdistpackage.comm.primitives import Group
from torchdistpackage.parallel.pipeline.clock import Timing


@dataclass(frozen=True)
class StepResult:
    """One step of the whole run, equal on all ranks.

    loss: mean over the tokens of the global batch, in nats. time_s: on a device, that of its
    stream. bubble: share of the step, over all ranks, in which nothing was computed; None where it
    was not measured. save: rank 0 asks for a checkpoint. stop: some rank asks for the end of this
    start. skipped: the loss or a gradient of some rank was not finite, and no rank has updated
    anything.
    """

    step: int
    loss: float
    grad_norm: float
    tokens: int
    time_s: float
    lr: float
    bubble: float | None
    save: bool
    stop: bool
    skipped: bool = False


class Period:
    """The time of a step on `device`, which it may still be at. It begins when this is made."""

    def __init__(self, device: torch.device):
        self._now = clock_of(device)
        self._began = self._now()
        self._ended: Moment | None = None

    def end(self) -> None:
        """The step is over as far as this host knows."""
        self._ended = self._now()

    def end_with(self, following: "Period") -> None:
        """It lasts until the next one begins: a device that was idle between them counts."""
        self._ended = following._began

    def seconds(self) -> float:
        assert self._ended is not None
        return seconds(self._began, self._ended)


@dataclass
class PendingStep:
    """A step whose numbers may still be on their way: `read()` waits for them, on all ranks alike.

    stats: loss sum, tokens, sum of the squares of the gradients, busy time, save and stop, summed
    over all ranks. pass_timing: of a device, whose busy time was not known when they were summed;
    None where it was, or is not wanted. host: all ranks, for what is in host memory. names,
    norms: this rank's gradients after the sum. random: the states from which the step drew.
    """

    step: int
    stats: OnHost
    period: Period
    lr: float
    measured: bool
    pass_timing: Timing | None
    host: Group
    names: Sequence[str]
    norms: Tensor
    random: Sequence[Tensor]

    def wait(self) -> StepResult:
        loss, tokens, power, busy, save, stop = self.stats.read()
        if self.pass_timing is not None:
            mine = torch.tensor([busy_share(self.pass_timing)], dtype=torch.float64)
            busy = float(primitives.all_reduce(mine, self.host))
        return StepResult(
            self.step,
            loss / max(tokens, 1),
            power**0.5 / max(tokens, 1),
            int(tokens),
            self.period.seconds(),
            self.lr,
            1 - busy / self.host.size() if self.measured else None,
            save > 0,
            stop > 0,
            skipped=not all(map(math.isfinite, (loss, tokens, power))),
        )


def busy_share(timing: Timing) -> float:
    """Of a rank's time between the first and the last action of a pass, what it computed in."""
    return timing.computed_s() / timing.elapsed_s()
