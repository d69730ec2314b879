"""Latency and bandwidth from times at several sizes. No torch.

One rule: time = latency + bytes / bandwidth, neither negative, and the line that is nearest by the
sum of *relative* deviations, so that small messages count as much as large ones and a few odd
points do not move it. Such a line goes through two of the points, or through one and the origin, or
is flat; there are few of those, so all are tried and the best is exact.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fit:
    """time_s = latency_s + bytes / bytes_per_s; bytes_per_s is None where size made no difference.

    deviation: mean of |measured - fitted| / measured.
    """

    latency_s: float
    bytes_per_s: float | None
    deviation: float

    def time_s(self, num_bytes: float) -> float:
        return self.latency_s + (num_bytes / self.bytes_per_s if self.bytes_per_s else 0.0)


def fit(points: Sequence[tuple[float, float]]) -> Fit | None:
    """The line through (bytes, seconds) points; None unless they are of two sizes or more."""
    points = [(x, t) for x, t in points if x > 0 and t > 0]
    if len({x for x, _ in points}) < 2:
        return None
    off, (latency_s, per_byte_s) = min((_off(line, points), line) for line in _lines(points))
    return Fit(latency_s, 1 / per_byte_s if per_byte_s > 0 else None, off / len(points))


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
