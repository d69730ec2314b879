"""Where to cut a chain of pieces into stages: arithmetic on costs.

The slowest stage sets the pace, so a cut is judged by its largest sum of costs. This file
imports no torch.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

from torchdistpackage.errors import ScheduleError


def split_by_cost(costs: Sequence[float], num_stages: int) -> tuple[range, ...]:
    """Cut pieces 0..n-1 into consecutive ranges, the largest sum of costs as small as can be.

    Exact, by dynamic programming over (stages, pieces). Among equal cuts, one whose stages
    differ least is taken. With fewer pieces than stages, stages without a piece stand last.

    Raises:
        ScheduleError: fewer than one stage, or a negative cost.
    """
    if num_stages < 1 or any(cost < 0 for cost in costs):
        raise ScheduleError(
            f"cannot cut {len(costs)} pieces into {num_stages} stages; use one stage or more and "
            f"costs of zero or more (lowest: {min(costs, default=0):g})"
        )
    used = min(num_stages, len(costs))
    total = list(accumulate(costs, initial=0.0))
    # best[i]: (largest sum, sum of squares) of the first i pieces in the stages so far, all used
    best: list[tuple[float, float]] = [(0.0, 0.0)] + [(float("inf"), 0.0)] * len(costs)
    starts: list[list[int]] = []
    for _ in range(used):
        row, start = [(float("inf"), 0.0)] * len(best), [0] * len(best)
        for end in range(1, len(best)):
            for at in range(end):
                here = total[end] - total[at]
                value = (max(best[at][0], here), best[at][1] + here * here)
                if value < row[end]:
                    row[end], start[end] = value, at
        best = row
        starts.append(start)
    ranges: list[range] = []
    end = len(costs)
    for start in reversed(starts):
        ranges.append(range(start[end], end))
        end = start[end]
    ranges.reverse()
    return (*ranges, *(range(len(costs), len(costs)) for _ in range(num_stages - used)))


def split_evenly(num_pieces: int, num_stages: int) -> tuple[range, ...]:
    """Ranges whose lengths differ by at most one, longer ones first."""
    short, longer = divmod(num_pieces, num_stages)
    ends = list(accumulate((short + (i < longer) for i in range(num_stages)), initial=0))
    return tuple(range(a, b) for a, b in pairwise(ends))
