"""A record for each benchmark and its section of docs/results.md, written from its results file.

The record (benchmarks/results/*.md) says how it was measured and has every number, the section one
table. No number is typed by hand; only prose stands outside the markers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.judged import Judged

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results.md"


@dataclass(frozen=True)
class Pages:
    """The pages of the benchmark `name`. in_summary: the bars of its table, by their text."""

    name: str
    page: Callable[[Mapping], str]
    judge: Callable[[Mapping], Sequence[Judged]]
    in_summary: tuple[str, ...]

    @property
    def results(self) -> Path:
        return ROOT / "benchmarks" / "results" / f"{self.name}.json"

    @property
    def record(self) -> Path:
        return self.results.with_suffix(".md")

    @property
    def marker(self) -> str:
        return f"<!-- benchmarks/{self.name}/table.py writes everything below this line -->\n"

    def write(self, results: Mapping) -> None:
        path = self.record
        before = path.read_text("utf-8").partition(self.marker)[0] if path.exists() else ""
        path.write_text(f"{before}{self.marker}\n{self.page(results)}", "utf-8")
        write_section(self.name, self.summary(results))

    def summary(self, results: Mapping) -> str:
        """Return the section of docs/results.md."""
        by_text = {each.what: each for each in self.judge(results)}
        shown = [what for what in self.in_summary if what in by_text]
        return "\n".join([measured(results), "", *_table(by_text[what] for what in shown)])


def section(name: str) -> str:
    """Return what stands between the two markers of `name` in docs/results.md."""
    begin, end = _markers(name)
    return RESULTS.read_text("utf-8").partition(begin)[2].partition(end)[0].strip("\n")


def write_section(name: str, text: str) -> None:
    """Put `text` between the two markers of `name` in docs/results.md."""
    begin, end = _markers(name)
    before, _, rest = RESULTS.read_text("utf-8").partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"{RESULTS}: no lines {begin!r} and {end!r}")
    RESULTS.write_text(f"{before}{begin}\n{text}\n\n{end}{after}", "utf-8")


def _markers(name: str) -> tuple[str, str]:
    return (
        f"<!-- benchmarks/{name} writes from here -->\n",
        f"<!-- benchmarks/{name}: to here -->\n",
    )


def _table(found: Iterator[Judged]) -> Iterator[str]:
    yield "| | ratio | middle half |\n|---|---|---|"
    for each in found:
        half = "" if each.half is None else "{:.2f} to {:.2f}".format(*each.half)
        yield f"| {each.what} | {each.ratio:.3f} | {half} |"


def _days(results: Mapping) -> Iterator[str]:
    """Those of the parts too: a run may measure some of them anew."""
    for key, value in results.items():
        if key == "date":
            yield value[:10]
        elif isinstance(value, Mapping):
            yield from _days(value)


def measured(results: Mapping) -> str:
    """When, and on what."""
    machine, days = results["machine"], sorted(_days(results))
    when = " to ".join(dict.fromkeys((days[0], days[-1])))
    return (
        f"Measured {when} on {machine['system']}, {machine['cores']} cores, "
        f"torch {machine['torch']}, load {machine['load'][0]:.1f} when it ended."
    )
