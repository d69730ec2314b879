"""torch DDP by the size of its buckets: which one the others are held against."""

from benchmarks.data_parallel import cases
from benchmarks.data_parallel.link import RATES, Link
from benchmarks.data_parallel.sides import CAPS

OWN = "torch DDP"
MODELS = ("mlp", "gpts")


def measure(link: Link, rounds: int) -> dict:
    """rows: ms a step of each size, by model and link."""
    rows = {}
    for model in MODELS:
        found = cases.measure(link, list(RATES), model, [*CAPS, OWN], rounds)
        for name, case in found.items():
            rows[f"{model}, {name}"] = {side: s["median"] for side, s in case["sides"].items()}
    return {"rows": rows}
