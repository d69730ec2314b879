"""What became of the bars of a benchmark: values, a table, and lines for a terminal."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Judged:
    """A bar's text, and the ratio that was measured; bar None: shown, not judged.

    half: the middle half of what was measured, where there is more than one number.
    """

    what: str
    ratio: float
    bar: float | None
    aim: float | None
    half: tuple[float, float] | None = None

    @property
    def holds(self) -> bool:
        return self.bar is None or self.ratio <= self.bar


def bars_table(found: Iterable[Judged]) -> Iterator[str]:
    """A section of a page."""
    yield "\n## Bars\n"
    yield "| | measured | middle half | bar | aim | |\n|---|---|---|---|---|---|"
    for each in found:
        bar, aim = (f"{x:.2f}" if x is not None else "" for x in (each.bar, each.aim))
        verdict = "" if each.bar is None else ("holds" if each.holds else "**fails**")
        half = "" if each.half is None else "{:.3f} to {:.3f}".format(*each.half)
        yield f"| {each.what} | {each.ratio:.3f} | {half} | {bar} | {aim} | {verdict} |"


def any_fails(found: Iterable[Judged]) -> bool:
    """Print each; whether one fails."""
    fails = False
    for each in found:
        limit = "shown " if each.bar is None else f"<= {each.bar:.2f}"
        aim = "" if each.aim is None else f"aim {each.aim:.2f}"
        print(f"{each.ratio:7.3f} {limit} {'ok  ' if each.holds else 'FAIL'} {aim:9} {each.what}")
        fails = fails or not each.holds
    return fails
