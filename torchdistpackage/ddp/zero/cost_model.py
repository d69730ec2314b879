"""Whether a step is shorter with all-reduces in the backward or with ZeRO's traffic.

One rule: each design is as slow as its longest chain. All-reduces begin with the first bucket of
the backward and the optimizer waits for the last; ZeRO's sums and gathers use the whole step but
meet at its boundary, where one bucket's sum and gather are waited for. So slow links want ZeRO and
fast ones all-reduces. No torch.
"""

from dataclasses import dataclass

WORTH_IT = 0.03
"""Part of a step that ZeRO must save to be taken: the model is no closer to the truth."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """One step of one rank: seconds of computing, bytes of gradients on the wire, and of a bucket.

    exchange_s: of this rank's processor for all the messages of a step; ZeRO adds and copies more,
    by about a half.
    """

    forward_s: float
    backward_s: float
    optimizer_s: float
    num_bytes: int
    bucket_bytes: int
    exchange_s: float = 0.0


def all_reduced_s(work: StepCost, bytes_per_s: float) -> float:
    """Seconds a step with all-reduces; bytes_per_s: at which gradients are all-reduced."""
    part = min(1.0, work.bucket_bytes / max(1, work.num_bytes))
    computed_s = work.forward_s + work.backward_s + work.exchange_s
    first_s = work.forward_s + work.backward_s * part
    last_s = work.bucket_bytes / bytes_per_s
    arrived_s = max(first_s + work.num_bytes / bytes_per_s, computed_s + last_s)
    return arrived_s + work.optimizer_s


def scattered_s(work: StepCost, bytes_per_s: float, num_ranks: int) -> float:
    """Seconds a step with ZeRO at the same rate: a sum and a gather are an all-reduce."""
    part = min(1.0, work.bucket_bytes / max(1, work.num_bytes))
    computed_s = work.forward_s + work.backward_s + work.optimizer_s / num_ranks
    boundary_s = work.bucket_bytes / bytes_per_s
    one_bucket_s = (work.forward_s + work.backward_s) * part
    return max(
        computed_s + 1.5 * work.exchange_s + boundary_s,
        work.num_bytes / bytes_per_s + one_bucket_s,
    )


def scatters(work: StepCost, bytes_per_s: float, num_ranks: int) -> bool:
    """Whether ZeRO's step is the shorter one, by more than is in doubt."""
    most_s = (1 - WORTH_IT) * all_reduced_s(work, bytes_per_s)
    return num_ranks > 1 and scattered_s(work, bytes_per_s, num_ranks) < most_s
