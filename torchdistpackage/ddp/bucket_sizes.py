"""How large buckets of gradients are, by what carries them. No torch.

One rule: `NaiveDDP`, `ZeroOptimizer` and `tdp train` take their sizes from here, by the transport
of the job's default group, so that all ranks pack alike. `Fit` chooses among the candidates by
what it measures.
"""

from dataclasses import dataclass

MIB = 2**20


@dataclass(frozen=True, slots=True)
class BucketSizes:
    """default_bytes: where nothing is measured, or not yet. candidates_bytes: what `Fit` tries."""

    default_bytes: int
    candidates_bytes: tuple[int, ...]


_SMALL = tuple(n * MIB for n in (1, 2, 4, 8, 16, 32))
"""Below these the processor's work for one more call costs what its bytes save."""
HOST = BucketSizes(4 * MIB, _SMALL)
QUEUED = BucketSizes(32 * MIB, (*_SMALL, 64 * MIB, 128 * MIB))
"""A link between devices carries 4 MiB in less time than the host takes to issue the call."""


def bucket_sizes(*, queued: bool) -> BucketSizes:
    """queued: whether calls run on a stream of their group, as NCCL's do (`Transport.queued`)."""
    return QUEUED if queued else HOST
