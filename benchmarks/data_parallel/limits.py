"""What no implementation can beat: of any design, and of one that all-reduces in the backward.

Both take what was measured in the same run: the step without communication, the rate of an
all-reduce alone on the link, and when each gradient of one traced step was there.
"""

from collections.abc import Iterator, Sequence
from typing import TypedDict

CAP_BYTES = 4 * 2**20


class Trace(TypedDict):
    """See rounds.trace."""

    ready: Sequence[tuple[float, int]]
    optimizer_s: float


def num_bytes(trace: Trace) -> int:
    """Of all gradients."""
    return sum(size for _, size in trace["ready"])


def roofline_s(compute_s: float, wire_bytes: float, bytes_per_s: float) -> float:
    """max(compute, bytes / rate): processor and link both at work all the time."""
    return max(compute_s, wire_bytes / bytes_per_s)


def bound_s(trace: Trace, bytes_per_s: float, share: float = 1.0) -> float:
    """First bucket ready + wire + optimizer, for buckets of 4 MiB of which `share` travels.

    On a fast link the wire waits for later buckets; the latest of all such ends counts.
    """
    left, end_s = num_bytes(trace), 0.0
    for at_s, size in buckets(trace):
        end_s = max(end_s, at_s + left * share / bytes_per_s)
        left -= size
    return end_s + trace["optimizer_s"]


def buckets(trace: Trace) -> Iterator[tuple[float, int]]:
    """(seconds at which it is full, bytes) of each, gradients taken as they come."""
    left, filled = num_bytes(trace), 0
    for at_s, size in trace["ready"]:
        filled += size
        if filled >= CAP_BYTES or filled == left:
            yield at_s, filled
            left, filled = left - filled, 0
