"""What the numbers must show, computed from the results file alone."""

from collections.abc import Mapping

from benchmarks.judged import Judged
from benchmarks.turns import ratio

OURS_HF = "ours, model.hf"
OURS, TRANSFORMERS, BYTES = "ours", "transformers", "the bytes alone"
TRAINER, COMPUTATION, MESSAGES = "Trainer", "computation alone", "sum alone"
LOADING, TRAINING, GENERATING = "loading", "training", "generating"
MEMORY = {"peak_bytes": "peak memory", "private_bytes": "peak memory of its own"}
BAR, AIM = 1.00, 0.80
GENERATING_BAR, GENERATING_AIM = 1.30, 1.00


def judge(results: Mapping) -> list[Judged]:
    """Ours beside each peer is judged, limits are shown."""
    parts, found = results.get("parts", {}), list[Judged]()
    if LOADING in parts:
        loading = parts[LOADING]
        mine, theirs, least = (loading["time"][side] for side in (OURS, TRANSFORMERS, BYTES))
        found.append(_judged(f"{OURS} / {TRANSFORMERS}, loading, time", ratio(mine, theirs), True))
        for key, what in MEMORY.items():
            mine_bytes, their_bytes = (loading[key][side] for side in (OURS, TRANSFORMERS))
            text = f"{OURS} / {TRANSFORMERS}, loading, {what}"
            found.append(_judged(text, (mine_bytes / their_bytes, None), key == "peak_bytes"))
        found.append(_judged(f"{OURS} / {BYTES}, loading, time", ratio(mine, least), False))
    if TRAINING in parts:
        sides = parts[TRAINING]["time"]
        text = f"{OURS} / {TRAINER}, a step"
        found.append(_judged(text, ratio(sides[OURS], sides[TRAINER]), True))
        for side in (OURS, TRAINER):
            text = f"{side} / {COMPUTATION}, a step"
            found.append(_judged(text, ratio(sides[side], sides[COMPUTATION]), False))
    if GENERATING in parts:
        sides = parts[GENERATING]["time"]
        for side in (OURS, OURS_HF):
            value, half = ratio(sides[side], sides[TRANSFORMERS])
            text = f"{side} / {TRANSFORMERS}, generating"
            found.append(Judged(text, value, GENERATING_BAR, GENERATING_AIM, half))
    return found


def _judged(
    text: str, measured: tuple[float, tuple[float, float] | None], is_judged: bool
) -> Judged:
    value, half = measured
    return Judged(text, value, BAR if is_judged else None, AIM if is_judged else None, half)
