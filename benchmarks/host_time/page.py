"""The measured part of docs/host_time.md: from the line that begins with "Measured" to that with
"Missed". What stands around it is written by hand.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "host_time.md"


def write_page(results: Mapping) -> None:
    """Put results, as they are in the JSON, in the place of those on the page."""
    measured = "\n".join(_measured(results))
    text = PAGE.read_text("utf-8")
    PAGE.write_text(re.sub(r"(?ms)^Measured .*^Missed: [^\n]*", lambda _: measured, text), "utf-8")


def _measured(results: Mapping) -> Iterator[str]:
    machine, own = results["machine"], results["train"]
    yield (
        f"Measured {results['date'][:10]} on {machine['cores']} cores, torch "
        f"{machine['torch'].partition('+')[0]}, {results['rounds']} rounds, at a load of "
        f"{machine['load'][0]:.0f} when it ended:\n"
    )
    yield "| step | side | us | of torch's | of by hand |\n|---|---|---|---|---|"
    for part, sides in results["parts"].items():
        for side, row in sides.items():
            ratios = [f"{row[x]:.2f}" if x in row else "" for x in ("of torch's", "of by hand")]
            yield f"| {part} | {side} | {row['us']:.0f} | {' | '.join(ratios)} |"
    whole = f"its own part, in a step of {own['whole']:.0f}"
    yield f"| step of `tdp train` | {whole} | {own['own']:.0f} |  |  |"
    if "by hand" in own:
        loop = "a bare loop that reads and logs as much, of its own"
        yield f"| step of `tdp train` | {loop} | {own['by hand']:.0f} |  |  |"
    yield "\nAims: at most 1.00 of torch's, 1.30 of by hand, 300 us for `tdp train`."
    yield f"Missed: {'; '.join(results['missed']) or 'none'}."
