"""The numbers of a step: summed over ranks, in transit to the host, and in log form.

They leave for the host before the next step is issued, so reading them waits for this step only.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchdistpackage.comm import primitives
from torchdistpackage.comm.groups import on_cpu
from torchdistpackage.comm.moments import Moment, OnHost, Timing, clock_of, seconds
from torchdistpackage.comm.primitives import Group
from torchdistpackage.parallel.expert.balance import ExpertLoad
from torchdistpackage.plan.logged_values import logged, reduced
from torchdistpackage.plan.run_plan import TASK_ROOM, VOTE_ROOM
from torchdistpackage.train.task import TaskLoss


class StepStats(NamedTuple):
    """The sums over all ranks from the step's one all-reduce.

    grad_sq_norm: sum of the squares of the gradients. busy: sum of the ranks' busy fractions.
    votes: sums of the ranks' `Votes`, by name. task: from `TaskLoss.take`.
    """

    loss: float
    tokens: float
    grad_sq_norm: float
    busy: float
    votes: Mapping[str, float]
    task: Sequence[float]

    def is_finite(self) -> bool:
        return all(map(math.isfinite, (self.loss, self.tokens, self.grad_sq_norm)))

    @staticmethod
    def to_tensor(
        totals: Tensor,
        grad_sq_norm: Tensor,
        busy: float,
        votes: Sequence[float],
        task: Tensor | None = None,
    ) -> Tensor:
        """Return this rank's numbers in the type and on the device of `totals`: (loss, tokens).

        votes: from `Votes.cast`. task: from `TaskLoss.take`; None: zeros.
        """
        numbers = [busy, *votes] if task is not None else [busy, *votes, *[0.0] * TASK_ROOM]
        parts = [totals, grad_sq_norm.view(1).to(totals), _on_device(numbers, totals)]
        return torch.cat(parts if task is None else [*parts, task])

    @staticmethod
    def length(names: Sequence[str]) -> int:
        """Return the length of `to_tensor`'s result with these votes."""
        return 4 + max(len(names), VOTE_ROOM) + TASK_ROOM

    @classmethod
    def from_numbers(cls, numbers: Sequence[float], names: Sequence[str]) -> "StepStats":
        """Read the sums of `to_tensor` results. names: of the cast votes."""
        votes_end = len(numbers) - TASK_ROOM
        votes = dict(zip(names, numbers[4:votes_end], strict=False))
        return cls(*numbers[:4], votes, tuple(numbers[votes_end:]))


def _on_device(numbers: Sequence[float], like: Tensor) -> Tensor:
    """Return numbers on the device.

    A GPU fills them in, because a copy from the host would wait for its queue.
    """
    if like.device.type == "cpu":
        return torch.tensor(numbers, dtype=like.dtype)
    on_device = like.new_zeros(len(numbers))
    for index, number in enumerate(numbers):
        if number:
            on_device[index] = number
    return on_device


@dataclass(frozen=True)
class StepResult:
    """One step of the entire run, equal on all ranks.

    loss: mean over the tokens of the global batch, in nats. time_s: on a device, that of its
    stream. bubble: share of the step, over all ranks, in which nothing was computed; on a device
    over the ranks of this rank's pipeline, so it differs; None where it was not measured. votes: as
    `StepStats`. skipped: the loss or a gradient of some rank was not finite, and no rank has
    updated anything.
    experts: by layer the load of its experts. task, task_text: of
    `TaskLoss.means`, and what of it the log line has.
    measured: logged values that each rank was asked for, reduced over the ranks.
    """

    step: int
    loss: float
    grad_norm: float
    tokens: int
    time_s: float
    lr: float
    bubble: float | None
    skipped: bool = False
    votes: Mapping[str, float] = field(default_factory=dict[str, float])
    experts: Mapping[str, ExpertLoad] = field(default_factory=dict[str, ExpertLoad])
    task: Mapping[str, float] = field(default_factory=dict[str, float])
    task_text: str = ""
    measured: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def expert_imbalance(self) -> float | None:
        """The busiest expert's load over the mean, in the layer with the largest ratio."""
        return max((load.imbalance for load in self.experts.values()), default=None)

    def logged(self) -> dict[str, Any]:
        """Return the step's values for a row of the log (plan/logged_values.py)."""
        return logged(self)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.time_s


class Period:
    """The time of a step on `device`, which may still be running. It begins when this object is
    made.
    """

    def __init__(self, device: torch.device):
        self._now = clock_of(device)
        self._began = self._now()
        self._ended: Moment | None = None

    def end(self) -> None:
        """End the step, as far as this host knows."""
        self._ended = self._now()

    def end_with(self, following: "Period") -> None:
        """Extend the step to the beginning of the next one, so that a device's idle time between
        them counts.
        """
        self._ended = following._began

    def seconds(self) -> float:
        assert self._ended is not None
        return seconds(self._began, self._ended)


@dataclass
class PendingStep:
    """A step whose numbers may still be in transit: `wait()` waits for them, on all ranks alike.

    stats: `StepStats`, summed over all ranks of `world`. pass_timing: of a device, whose busy time
    was not known when they were summed, else None: then the bubble is that of this rank's
    `pipeline`. votes: names of those in `stats`. names, norms: this rank's gradients after the sum.
    random: the states from which the step drew. loads: what the counts of experts say, which follow
    the others in `stats`. task: of a run that has one.
    """

    step: int
    stats: OnHost
    period: Period
    lr: float
    measured: bool
    pass_timing: Timing | None
    world: Group
    pipeline: Group
    votes: Sequence[str]
    names: Sequence[str]
    norms: Tensor
    random: Sequence[Tensor]
    loads: Callable[[Sequence[float]], Mapping[str, ExpertLoad]] = lambda _: {}
    task: TaskLoss | None = None

    def wait(self) -> StepResult:
        numbers = self.stats.read()
        number = StepStats.length(self.votes)
        sums = StepStats.from_numbers(numbers[:number], self.votes)
        tokens, busy, among, task = max(sums.tokens, 1), sums.busy, self.world, self.task
        if self.pass_timing is not None:
            local_busy = torch.tensor([busy_share(self.pass_timing)], dtype=torch.float64)
            among = self.pipeline if self.pipeline.size() == 1 else on_cpu(self.pipeline)
            busy = float(primitives.all_reduce(local_busy, among))
        means = {} if task is None else task.means(sums.task, tokens)
        return StepResult(
            step=self.step,
            loss=sums.loss / tokens,
            grad_norm=sums.grad_sq_norm**0.5 / tokens,
            tokens=int(sums.tokens) if task is None else task.num_samples(sums.task, sums.tokens),
            time_s=self.period.seconds(),
            lr=self.lr,
            bubble=1 - busy / among.size() if self.measured else None,
            skipped=not sums.is_finite(),
            votes=sums.votes,
            experts=self.loads(numbers[number:]),
            task=means,
            task_text="" if task is None else task.text(means),
            measured=reduced(sums.votes, self.world.size()),
        )


def busy_share(timing: Timing) -> float:
    """Return the fraction of a pass, from its first to its last action, in which the rank
    computed.
    """
    return timing.computed_s() / timing.elapsed_s()
