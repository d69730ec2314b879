"""Which rank sends what to which rank in a placed program: arithmetic only, no processes.

The order of all messages is a pure function of the operations, which every rank numbers alike: by
operation, then by source of the operation, then by receiver; in a backward the operations come in
reverse. Every rank posts its own messages in that order. So no rank ever waits in a circle, even if
each send waits for its receive: the rank whose next message is the first of all finds its peer
there.
"""

Ranks = tuple[int, ...]
"""Ranks of a place, each of which holds all that is placed there."""


def forward_routes(source: Ranks, target: Ranks) -> list[tuple[int, int]]:
    """(from, to) for each rank of `target` that is not in `source`, spread over `source`."""
    return [(source[i % len(source)], rank) for i, rank in enumerate(target) if rank not in source]


def backward_routes(source: Ranks, target: Ranks) -> list[tuple[int, int]]:
    """(from, to) of the gradients that go back from `target` for what came from `source`."""
    return [(start, end) for start, end in forward_routes(target, source)]
