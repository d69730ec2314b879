"""Write the section of docs/results.md on one H100 from its results file: `python -m` this module.

benchmarks/results/gpu_h100.md, written by hand, has the rest.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.pages import write_section

NAME = "gpu"
RESULTS = Path(__file__).parents[1] / "results" / "gpu_h100.json"


def summary(results: Mapping) -> str:
    return "\n".join(_lines(results))


def _lines(results: Mapping) -> Iterator[str]:
    first, second = results["compiled_before_first_step_s"].values()
    yield f"Measured on {results['device']}.\n\n| time of a step | ratio |\n|---|---|"
    for size, ratio in results["over_bare_loop"].items():
        yield f"| `tdp train` / a bare loop, GPT of {size} | {ratio} |"
    for size, ratio in results["compiled_over_eager"].items():
        yield f"| `train.compile: blocks` / eager, GPT of {size} | {ratio} |"
    for name, ratio in results["over_bare_step"].items():
        yield f"| {name} over one rank / the bare step | {ratio} |"
    yield (
        f"\nWith `train.compile` the first start of the 124M takes {first} s before its first "
        f"step, the second {second} s."
    )


if __name__ == "__main__":
    write_section(NAME, summary(json.loads(RESULTS.read_text("utf-8"))))
