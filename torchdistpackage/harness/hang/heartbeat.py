"""The progress of a loop, and how long the step under way has taken. No torch.

One rule: a mark is an assignment. Who loops pays for nothing else; a watch reads the marks when it
likes.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

_SUSPENDED_S = 5.0
"""A watch that did not run for so long was suspended with its job, which is no hang."""

_now_s = time.monotonic


class Heartbeat:
    """`step()` at the beginning of each step, `with allow_slow():` around what may take longer."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_slow = 0
        self.since_s = _now_s()

    def step(self) -> None:
        """A step begins, so the one before is over."""
        self.num_steps += 1
        self.since_s = _now_s()

    @contextmanager
    def allow_slow(self) -> Iterator[None]:
        """Inside, a step may take longer: a validation, a save."""
        self.num_slow += 1
        self.since_s = _now_s()
        try:
            yield
        finally:
            self.num_slow -= 1
            self.since_s = _now_s()


class StepClock:
    """How long the step under way has taken, asked often, without times of suspension."""

    def __init__(self, marks: Heartbeat) -> None:
        self._marks, self._lost_s = marks, 0.0
        self._mark_s = self._last_s = marks.since_s

    def over_s(self) -> float:
        now_s = _now_s()
        gap_s, self._last_s = now_s - self._last_s, now_s
        if self._marks.since_s != self._mark_s:
            # the mark may have come in the gap, just before the suspension
            self._mark_s = self._marks.since_s
            self._lost_s = min(gap_s, now_s - self._mark_s) if gap_s > _SUSPENDED_S else 0.0
        elif gap_s > _SUSPENDED_S:
            self._lost_s += gap_s
        return now_s - self._mark_s - self._lost_s
