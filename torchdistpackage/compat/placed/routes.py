"""The routes of messages between ranks of a placed program: arithmetic only, no torch.

The order of all messages is a pure function of the operations, which every rank numbers the same:
by operation, then by source, then by receiver; a backward reverses the operations. Every rank posts
its messages in that order. So no ranks deadlock, even if each send waits for its receive: the two
ranks of the first message that has not been exchanged both have it as their next one.
"""

Ranks = tuple[int, ...]
"""Ranks of a place; each holds everything on it."""


def forward_routes(source: Ranks, target: Ranks) -> list[tuple[int, int]]:
    """Return (from, to) for each rank of `target` outside `source`, spread over `source`."""
    return [(source[i % len(source)], rank) for i, rank in enumerate(target) if rank not in source]


def backward_routes(source: Ranks, target: Ranks) -> list[tuple[int, int]]:
    """Return (from, to) of the gradients from `target` for tensors that came from `source`."""
    return [(start, end) for start, end in forward_routes(target, source)]
