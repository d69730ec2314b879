"""Learning-rate factors by step: our schedule, and transformers' schedules by their names.

Steps count from 0. The latter equal `transformers.get_scheduler`, whose warm-up begins at 0; their
sources are in its documentation (inverse square root: Zhai et al., arXiv:2106.04560; restarts:
Loshchilov and Hutter, arXiv:1608.03983; warm-up, stable, decay: Hu et al., arXiv:2404.06395).
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from torchdistpackage.config.optim_section import OptimSection

Factor = Callable[[int], float]


def learning_rate(section: OptimSection, num_steps: int) -> Factor:
    """Return the learning rate of each step of a run of `num_steps`."""
    warmup, schedule_args = section.warmup(num_steps), dict(section.schedule_args)
    if section.schedule == "warmup_cosine":
        factor = partial(
            warmup_cosine,
            warmup_steps=warmup,
            num_steps=num_steps,
            min_ratio=section.min_lr_ratio,
        )
    else:
        factor = _transformers(section.schedule, section.lr, warmup, num_steps, schedule_args)
    return lambda step: section.lr * factor(step)


def warmup_notes(section: OptimSection, num_steps: int) -> tuple[str, ...]:
    """Return a warning if the warm-up is longer than the `num_steps` of a run, such as a short
    trial.
    """
    warmup = section.warmup(num_steps)
    if warmup <= num_steps:
        return ()
    return (
        f"optim.warmup_steps={warmup} is longer than the run of {num_steps} steps, so the learning "
        f"rate ends at {num_steps / warmup:.0%} of optim.lr; leave warmup_steps out for one that "
        "follows train.steps",
    )


def warmup_cosine(step: int, *, warmup_steps: int, num_steps: int, min_ratio: float) -> float:
    """Return the factor on the learning rate in step `step` (0 is the first) of `num_steps`:
    warm-up, then cosine.

    Rises to 1 over `warmup_steps`, starting above 0, then falls as a cosine to `min_ratio` in
    the last step and stays there.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    length = max(num_steps - 1 - warmup_steps, 1)
    progress = min((step - warmup_steps) / length, 1.0)
    return min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * progress))


def _transformers(name: str, lr: float, warmup: int, num_steps: int, arguments: dict) -> Factor:
    if name == "constant":
        return lambda step: 1.0
    if name == "warmup_stable_decay":
        return _stable(warmup, num_steps, **arguments)
    schedule = _AFTER_WARMUP[name](lr=lr, warmup=warmup, num_steps=num_steps, **arguments)
    return lambda step: step / max(1, warmup) if step < warmup else schedule(step)


def _done(step: int, warmup: int, num_steps: int) -> float:
    """Return the completed fraction of the steps after the warm-up."""
    return (step - warmup) / max(1, num_steps - warmup)


def _wave(progress: float, num_cycles: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * num_cycles * 2 * progress))


def _stays(**_: Any) -> Factor:
    return lambda step: 1.0


def _linear(*, warmup: int, num_steps: int, **_: Any) -> Factor:
    return lambda step: max(0.0, (num_steps - step) / max(1, num_steps - warmup))


def _cosine(*, warmup: int, num_steps: int, num_cycles: float = 0.5, **_: Any) -> Factor:
    return lambda step: max(0.0, _wave(_done(step, warmup, num_steps), num_cycles))


def _restarts(*, warmup: int, num_steps: int, num_cycles: float = 1, **_: Any) -> Factor:
    def factor(step: int) -> float:
        progress = _done(step, warmup, num_steps)
        return 0.0 if progress >= 1 else max(0.0, _wave(num_cycles * progress % 1, 0.5))

    return factor


def _min_lr(
    *,
    lr: float,
    warmup: int,
    num_steps: int,
    num_cycles: float = 0.5,
    min_lr: float | None = None,
    min_lr_rate: float | None = None,
) -> Factor:
    lowest = min_lr / lr if min_lr is not None else min_lr_rate or 0.0

    def factor(step: int) -> float:
        wave = _wave(_done(step, warmup, num_steps), num_cycles)
        return max(0.0, wave * (1 - lowest) + lowest)

    return factor


def _polynomial(
    *, lr: float, warmup: int, num_steps: int, lr_end: float = 1e-7, power: float = 1.0
) -> Factor:
    def factor(step: int) -> float:
        if step > num_steps:
            return lr_end / lr
        remaining = 1 - (step - warmup) / max(1, num_steps - warmup)
        return ((lr - lr_end) * remaining**power + lr_end) / lr

    return factor


def _inverse_sqrt(*, warmup: int, timescale: float | None = None, **_: Any) -> Factor:
    scale = timescale or warmup or 10_000
    return lambda step: 1 / math.sqrt((step + scale - warmup) / scale)


_AFTER_WARMUP: dict[str, Callable[..., Factor]] = {
    "constant_with_warmup": _stays,
    "linear": _linear,
    "cosine": _cosine,
    "cosine_with_restarts": _restarts,
    "cosine_with_min_lr": _min_lr,
    "polynomial": _polynomial,
    "inverse_sqrt": _inverse_sqrt,
}


def _stable(
    warmup: int,
    num_steps: int,
    *,
    num_decay_steps: int,
    num_stable_steps: int | None = None,
    warmup_type: str = "linear",
    decay_type: str = "cosine",
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
) -> Factor:
    stable = num_steps - warmup - num_decay_steps if num_stable_steps is None else num_stable_steps

    def factor(step: int) -> float:
        if step < warmup:
            progress = step / max(1, warmup)
            risen = {
                "linear": lambda: progress,
                "cosine": lambda: 0.5 * (1 - math.cos(math.pi * progress)),
                "1-sqrt": lambda: 1 - math.sqrt(1 - progress),
            }[warmup_type]()
            return max(0.0, risen * (1 - min_lr_ratio) + min_lr_ratio)
        if step < warmup + stable:
            return 1.0
        if step >= warmup + stable + num_decay_steps:
            return min_lr_ratio
        progress = (step - warmup - stable) / max(1, num_decay_steps)
        remaining = {
            "linear": lambda: 1 - progress,
            "cosine": lambda: _wave(progress, num_cycles),
            "1-sqrt": lambda: 1 - math.sqrt(progress),
        }[decay_type]()
        return max(0.0, remaining * (1 - min_lr_ratio) + min_lr_ratio)

    return factor
