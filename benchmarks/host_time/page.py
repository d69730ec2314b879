"""Write the measured part of benchmarks/results/host_time.md, and its section of docs/results.md.

The measured part goes from the line that begins with "Measured" to the one with "Missed"; what
stands around it is written by hand. `python -m` this module writes both again from the results.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.pages import write_section

NAME = "host_time"
RESULTS = Path(__file__).parents[1] / "results" / "host_time.json"
PAGE = RESULTS.with_suffix(".md")
OURS = ("NaiveDDP", "ZeRO-1", "ZeRO-2", "ZeRO-3", "ours", "Pipeline")


def write_page(results: Mapping) -> None:
    """Replace the results on both pages by `results`, which are as in the JSON."""
    text = PAGE.read_text("utf-8")
    new = measured(results)
    PAGE.write_text(re.sub(r"(?ms)^Measured .*^Missed: [^\n]*", lambda _: new, text), "utf-8")
    write_section(NAME, summary(results))


def measured(results: Mapping) -> str:
    return "\n".join(_measured(results))


def summary(results: Mapping) -> str:
    """Return the section of docs/results.md: our sides, and what missed its aim."""
    machine, own = results["machine"], results["train"]["own"]
    lines = [
        f"{_when(results)} on {machine['cores']} cores, {_rest(results)}.\n",
        "| | us | of torch's | of by hand |\n|---|---|---|---|",
    ]
    for part, sides in results["parts"].items():
        lines += [_row(f"{part}, {side}", sides[side]) for side in OURS if side in sides]
    lines += [f"| what `tdp train` adds to a step | {own:.0f} |  |  |", f"\n{_missed(results)}"]
    return "\n".join(lines)


def _measured(results: Mapping) -> Iterator[str]:
    machine, own = results["machine"], results["train"]
    yield f"{_when(results)} on {machine['cores']} cores, {_rest(results)}:\n"
    yield "| step | side | us | of torch's | of by hand |\n|---|---|---|---|---|"
    for part, sides in results["parts"].items():
        yield from (_row(f"{part} | {side}", row) for side, row in sides.items())
    whole = f"its own part, in a step of {own['whole']:.0f}"
    yield f"| step of `tdp train` | {whole} | {own['own']:.0f} |  |  |"
    if "by hand" in own:
        loop = "a bare loop that reads and logs as much, of its own"
        yield f"| step of `tdp train` | {loop} | {own['by hand']:.0f} |  |  |"
    yield "\nAims: at most 1.00 of torch's, 1.30 of by hand, 300 us for `tdp train`."
    yield _missed(results)


def _when(results: Mapping) -> str:
    return f"Measured {results['date'][:10]}"


def _rest(results: Mapping) -> str:
    machine = results["machine"]
    return (
        f"torch {machine['torch'].partition('+')[0]}, {results['rounds']} rounds, at a load of "
        f"{machine['load'][0]:.0f} when it ended"
    )


def _row(name: str, row: Mapping[str, float]) -> str:
    ratios = [f"{row[x]:.2f}" if x in row else "" for x in ("of torch's", "of by hand")]
    return f"| {name} | {row['us']:.0f} | {' | '.join(ratios)} |"


def _missed(results: Mapping) -> str:
    return f"Missed: {'; '.join(results['missed']) or 'none'}."


if __name__ == "__main__":
    write_page(json.loads(RESULTS.read_text("utf-8")))
