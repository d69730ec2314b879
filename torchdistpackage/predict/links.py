"""The time that bytes take over a link: latency and bandwidth, and the line through measured times.

The alpha-beta model (Hockney 1994, doi:10.1016/S0167-8191(06)80021-9). Everything here that prices
a message, a bucket or a transfer takes a `LinkModel`; each measures its own, since what counts as a
call differs: a message of a pipeline, a bucket's all-reduce, a collective at sizes from KiB to GiB.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, slots=True)
class LinkModel:
    """A call of n bytes takes latency_s + n / bytes_per_s.

    latency_s: of a call without bytes. bytes_per_s: inf where size makes no difference.
    """

    latency_s: float = 0.0
    bytes_per_s: float = inf

    def seconds(self, num_bytes: float) -> float:
        """Seconds of a call of so many bytes."""
        return self.latency_s + num_bytes / self.bytes_per_s


def fit_line(points: Sequence[tuple[float, float]]) -> tuple[LinkModel, float] | None:
    """The line through (bytes, seconds) points, and the mean of |measured - fitted| / measured.

    None unless they are of two sizes or more. Neither part is negative, and the line is the nearest
    by the sum of *relative* deviations, so that small messages count as much as large ones and a
    few odd points do not move it. Such a line goes through two of the points, or through one and
    the origin, or is flat: all are tried. A bandwidth whose share of the longest time is less than
    the points deviate by is noise, and the line is flat then.
    """
    points = [(x, t) for x, t in points if x > 0 and t > 0]
    largest = max((x for x, _ in points), default=0.0)
    if len({x for x, _ in points}) < 2:
        return None
    fits = sorted((_off(line, points) / len(points), line) for line in _lines(points))
    off, (latency_s, per_byte_s) = fits[0]
    if per_byte_s * largest < off * (latency_s + per_byte_s * largest):
        off, (latency_s, per_byte_s) = next(ranked for ranked in fits if ranked[1][1] == 0.0)
    return LinkModel(latency_s, 1 / per_byte_s if per_byte_s > 0 else inf), off


def _lines(points: Sequence[tuple[float, float]]) -> Iterable[tuple[float, float]]:
    """Yield (latency, seconds per byte) of each line that could be the best."""
    for x, t in points:
        yield 0.0, t / x
        yield t, 0.0
    for (x, t), (x2, t2) in itertools.combinations(points, 2):
        if x != x2:
            slope = (t2 - t) / (x2 - x)
            if slope >= 0 and t - slope * x >= 0:
                yield t - slope * x, slope


def _off(model: tuple[float, float], points: Sequence[tuple[float, float]]) -> float:
    latency_s, per_byte_s = model
    return sum(abs(t - latency_s - per_byte_s * x) / t for x, t in points)
