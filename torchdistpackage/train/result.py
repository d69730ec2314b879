"""What a step says of itself: first as numbers that may still be on their way, then as values."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from torchdistpackage.comm.tpc import tpc


@dataclass(frozen=True)
class StepResult:
    """One step of the whole run, equal on all ranks.

    loss: mean over the tokens of the global batch, in nats. bubble: share of the step, over all
    ranks, in which nothing was computed; None where it was not measured. save: rank 0 asks
    for a checkpoint. stop: some rank asks for the end of this start. skipped: the loss or a
    gradient of some rank was not finite, and no rank has updated anything.
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


@dataclass
class Issued:
    """A step whose numbers may still be on their way: `read()` waits for them.

    stats: loss sum, tokens, sum of the squares of the gradients, busy time, save and stop, summed
    over all ranks. names, norms: this rank's gradients after the sum. random: the states from
    which the step drew.
    """

    step: int
    stats: Tensor
    time_s: float
    lr: float
    measured: bool
    names: Sequence[str]
    norms: Tensor
    random: Sequence[Tensor]

    def read(self) -> StepResult:
        loss, tokens, power, busy, save, stop = self.stats.tolist()
        return StepResult(
            self.step,
            loss / max(tokens, 1),
            power**0.5 / max(tokens, 1),
            int(tokens),
            self.time_s,
            self.lr,
            1 - busy / tpc.topology.world_size if self.measured else None,
            save > 0,
            stop > 0,
            skipped=not all(map(math.isfinite, (loss, tokens, power))),
        )
