"""The numbers of a step: summed over ranks, on their way to the host, and as the log has them.

They leave for the host before the next step is issued, so reading them waits for this step alone.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from torchdistpackage.comm import primitives
from torchdistpackage.comm.moments import Moment, OnHost, Timing, clock_of, seconds
from torchdistpackage.comm.primitives import Group
from torchdistpackage.parallel.expert.balance import ExpertLoad


class PairSums(NamedTuple):
    """Sums over pairs. accuracy: of the pairs whose chosen answer has the larger reward."""

    chosen: float
    rejected: float
    accuracy: float
    chosen_logp: float
    rejected_logp: float

    def means(self, num_pairs: float) -> dict[str, float]:
        """By trl's names."""
        x = PairSums(*(total / max(num_pairs, 1) for total in self))
        return {
            "rewards/chosen": x.chosen,
            "rewards/rejected": x.rejected,
            "rewards/accuracies": x.accuracy,
            "rewards/margins": x.chosen - x.rejected,
            "logps/chosen": x.chosen_logp,
            "logps/rejected": x.rejected_logp,
        }

    @classmethod
    def of(cls, sums: "StepStats") -> "PairSums":
        return cls(*(getattr(sums, name) for name in cls._fields))


_NO_PAIRS = PairSums(0.0, 0.0, 0.0, 0.0, 0.0)


class HostWords(NamedTuple):
    """What the host of a rank says of a step.

    busy: share of its time in which it computed. save: rank 0 asks for a checkpoint. stop: a rank
    asks for the end of this start. save_done, save_failed: it has done its part of the save under
    way, or could not. local_done, local_failed: the same of the local copy.
    """

    busy: float
    save: float
    stop: float
    save_done: float
    save_failed: float
    local_done: float
    local_failed: float


class StepStats(NamedTuple):
    """What the ranks add up in a step, in one all-reduce, when it is there.

    grad_sq_norm: sum of the squares of the gradients. busy to local_failed: sums of `HostWords`.
    chosen to rejected_logp: of pairs of answers, `PairSums`.
    """

    loss: float
    tokens: float
    grad_sq_norm: float
    busy: float
    save: float
    stop: float
    save_done: float
    save_failed: float
    local_done: float
    local_failed: float
    chosen: float
    rejected: float
    accuracy: float
    chosen_logp: float
    rejected_logp: float

    def is_finite(self) -> bool:
        return all(map(math.isfinite, (self.loss, self.tokens, self.grad_sq_norm)))

    @staticmethod
    def to_tensor(
        totals: Tensor, grad_sq_norm: Tensor, words: HostWords, pairs: Tensor | None = None
    ) -> Tensor:
        """Those of this rank, in the type and on the device of `totals`: (loss, tokens).

        pairs: `PairSums`; None: zeros.
        """
        known = [*words] if pairs is not None else [*words, *_NO_PAIRS]
        parts = [totals, grad_sq_norm.view(1).to(totals), _on_device(known, totals)]
        return torch.cat(parts if pairs is None else [*parts, pairs])


def _on_device(numbers: Sequence[float], like: Tensor) -> Tensor:
    """On a GPU they are filled in: a copy from the host would wait for what it is doing."""
    if like.device.type == "cpu":
        return torch.tensor(numbers, dtype=like.dtype)
    found = like.new_zeros(len(numbers))
    for index, number in enumerate(numbers):
        if number:
            found[index] = number
    return found


@dataclass(frozen=True)
class StepResult:
    """One step of the entire run, equal on all ranks.

    loss: mean over the tokens of the global batch, in nats. time_s: on a device, that of its
    stream. bubble: share of the step, over all ranks, in which nothing was computed; None where it
    was not measured. save, stop: as `StepStats`. skipped: the loss or a gradient of some rank was
    not finite, and no rank has updated anything. save_done to local_failed: as `StepStats`.
    experts: by layer the load of its experts. pairs: what `PairSums.means` says of pairs.
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
    save_done: int = 0
    save_failed: int = 0
    local_done: int = 0
    local_failed: int = 0
    experts: Mapping[str, ExpertLoad] = field(default_factory=dict[str, ExpertLoad])
    pairs: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def expert_imbalance(self) -> float | None:
        """The busiest expert's choices over the mean, in the layer where that is most."""
        return max((load.imbalance for load in self.experts.values()), default=None)

    def logged(self) -> dict[str, float | dict[str, float] | None]:
        """What a row of the log has of the step."""
        more: dict[str, float | dict[str, float] | None] = {}
        if self.experts:
            more["experts"] = {name: x.imbalance for name, x in self.experts.items()}
        if any(x.dropped for x in self.experts.values()):
            more["experts_dropped"] = {n: x.dropped_share for n, x in self.experts.items()}
        return more | {
            **self.pairs,
            "loss": self.loss,
            "grad_norm": self.grad_norm,
            "lr": self.lr,
            "time_s": self.time_s,
            "tokens_per_s": self.tokens_per_s,
            "bubble": self.bubble,
        }

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.time_s


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
    """A step whose numbers may still be on their way: `wait()` waits for them, on all ranks alike.

    stats: `StepStats`, summed over all ranks. pass_timing: of a device, whose busy time was not
    known when they were summed, else None. host: all ranks, for what is in host memory. names,
    norms: this rank's gradients after the sum. random: the states from which the step drew. loads:
    what the counts of experts say, which follow the others in `stats`. has_pairs: losses are of
    pairs of answers.
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
    loads: Callable[[Sequence[float]], Mapping[str, ExpertLoad]] = lambda _: {}
    has_pairs: bool = False

    def wait(self) -> StepResult:
        numbers = self.stats.read()
        number = len(StepStats._fields)
        sums = StepStats(*numbers[:number])
        tokens, busy = max(sums.tokens, 1), sums.busy
        if self.pass_timing is not None:
            mine = torch.tensor([busy_share(self.pass_timing)], dtype=torch.float64)
            busy = float(primitives.all_reduce(mine, self.host))
        return StepResult(
            step=self.step,
            loss=sums.loss / tokens,
            grad_norm=sums.grad_sq_norm**0.5 / tokens,
            tokens=int(sums.tokens),
            time_s=self.period.seconds(),
            lr=self.lr,
            bubble=1 - busy / self.host.size() if self.measured else None,
            save=sums.save > 0,
            stop=sums.stop > 0,
            skipped=not sums.is_finite(),
            save_done=round(sums.save_done),
            save_failed=round(sums.save_failed),
            local_done=round(sums.local_done),
            local_failed=round(sums.local_failed),
            experts=self.loads(numbers[number:]),
            pairs=PairSums.of(sums).means(tokens) if self.has_pairs else {},
        )


def busy_share(timing: Timing) -> float:
    """Of a rank's time between the first and the last action of a pass, what it computed in."""
    return timing.computed_s() / timing.elapsed_s()
