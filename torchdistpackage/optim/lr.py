"""Learning rate over time: linear warm-up, then half a cosine down to a floor. No torch."""

import math


def warmup_cosine(step: int, *, warmup_steps: int, num_steps: int, min_ratio: float) -> float:
    """Factor on the learning rate in step `step` (0 is the first) of `num_steps`.

    Rises to 1 over `warmup_steps`, starting above 0, then falls as a cosine to `min_ratio` in
    the last step and stays there.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    length = max(num_steps - 1 - warmup_steps, 1)
    done = min((step - warmup_steps) / length, 1.0)
    return min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * done))
