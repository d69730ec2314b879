"""Two pages for each benchmark, written from its results file: a record and a summary.

The record (benchmarks/results/*.md) says how it was measured and has every number, the summary
(docs/*_benchmarks.md) one table. No number is typed by hand; only prose stands before the marker.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.judged import Judged

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Pages:
    """Of the benchmark `name`. in_summary: the bars of its table, by their text."""

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
    def summary(self) -> Path:
        return ROOT / "docs" / f"{self.name}_benchmarks.md"

    @property
    def marker(self) -> str:
        return f"<!-- benchmarks/{self.name}/table.py writes everything below this line -->\n"

    def texts(self, results: Mapping) -> dict[Path, str]:
        """What stands below the marker of each page."""
        return {self.record: self.page(results), self.summary: self._summary(results)}

    def write(self, results: Mapping) -> None:
        for path, text in self.texts(results).items():
            before = path.read_text("utf-8").partition(self.marker)[0] if path.exists() else ""
            path.write_text(f"{before}{self.marker}\n{text}", "utf-8")

    def _summary(self, results: Mapping) -> str:
        found = {each.what: each for each in self.judge(results)}
        shown = [what for what in self.in_summary if what in found]
        return "\n".join([measured(results), "", *_table(found[x] for x in shown)]) + "\n"


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
