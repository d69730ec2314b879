"""Latency and bandwidth from times at several sizes. No torch.

One rule: time = latency + bytes / bandwidth, neither negative, and the line that is nearest by the
sum of *relative* deviations, so that small messages count as much as large ones and a few odd
points do not move it. Such a line goes through two of the points, or through one and the origin, or
is flat; there are few of those, so all are tried and the best is exact. A bandwidth whose share of
the longest time is less than the points deviate by is noise and not told: the line is flat then.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinkFit:
    """time_s = latency_s + bytes / bytes_per_s.

    bytes_per_s: None where size made no difference that stands out of the deviation.
    deviation: mean of |measured - fitted| / measured; None of two sizes, where any line fits.
    """

    latency_s: float
    bytes_per_s: float | None
    deviation: float | None

    def time_s(self, num_bytes: float) -> float:
        return self.latency_s + (num_bytes / self.bytes_per_s if self.bytes_per_s else 0.0)


def fit(points: Sequence[tuple[float, float]]) -> LinkFit | None:
    """The line through (bytes, seconds) points; None unless they are of two sizes or more."""
    points = [(x, t) for x, t in points if x > 0 and t > 0]
    num_sizes, largest = len({x for x, _ in points}), max((x for x, _ in points), default=0.0)
    if num_sizes < 2:
        return None
    found = sorted((_off(line, points) / len(points), line) for line in _lines(points))
    off, (latency_s, per_byte_s) = found[0]
    if per_byte_s * largest < off * (latency_s + per_byte_s * largest):
        off, (latency_s, per_byte_s) = next(one for one in found if one[1][1] == 0.0)
    bytes_per_s = 1 / per_byte_s if per_byte_s > 0 else None
    return LinkFit(latency_s, bytes_per_s, off if num_sizes > 2 else None)


def _lines(points: Sequence[tuple[float, float]]) -> Iterable[tuple[float, float]]:
    """(latency, seconds a byte) of every line that could be the best."""
    for x, t in points:
        yield 0.0, t / x
        yield t, 0.0
    for (x, t), (x2, t2) in itertools.combinations(points, 2):
        if x != x2:
            slope = (t2 - t) / (x2 - x)
            if slope >= 0 and t - slope * x >= 0:
                yield t - slope * x, slope


def _off(line: tuple[float, float], points: Sequence[tuple[float, float]]) -> float:
    latency_s, per_byte_s = line
    return sum(abs(t - latency_s - per_byte_s * x) / t for x, t in points)
