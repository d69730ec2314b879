"""`scripts/replay`: run the published bugs through the prover, and write the page of the score."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.replay import sweep
from tests.replay.blind import BLIND
from tests.replay.replay import Outcome, alarms, replay
from tests.replay.reports import KINDS, REPORTS, Report

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "replay.json"
PAGE = ROOT / "docs" / "replay.md"
MARKER = "<!-- scripts/replay writes everything below this line -->\n"
_SWEEP_S = 320.0
"""Seconds after which no further case of the sweep begins; the next call goes on."""
Row = Mapping[str, Any]


def share(rows: Sequence[Row], is_met: str) -> str:
    met = sum(bool(row[is_met]) for row in rows)
    return f"{met} of {len(rows)} ({met / len(rows):.0%})" if rows else "none"


def score(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of the table of what was reached."""
    for kind in (*KINDS, ""):
        names = {x.name for x in REPORTS if not kind or x.kind == kind}
        chosen = [
            dict(row, found=row["result"] != "missed") for row in rows if row["name"] in names
        ]
        yield (
            f"| {kind or 'all'} | {share(chosen, 'found')} | {share(chosen, 'is_named')} | "
            f"{share(chosen, 'is_told')} |"
        )


def page(results: Mapping[str, Any]) -> str:
    """Return what follows the marker of the page."""
    rows = {row["name"]: row for row in results["reports"]}
    blind = {row["name"]: row for row in results["blind"]}
    wrong = {key: text for key, text in results["alarms"].items() if text}
    lines = [
        "\n## Score\n",
        "| kind | caught before step 1 | axis and module right | kind of mistake told |",
        "|---|---|---|---|",
        *score([*rows.values()]),
        "",
        f"{len(rows)} of {len(REPORTS)} were run. False alarms: {len(wrong)} in "
        f"{len(results['alarms'])} runs and loops without a plant"
        + "".join(f"; {key}: {text}" for key, text in wrong.items())
        + ".",
        "",
        *_sweep(),
        "\n## The reports\n",
        "| report | what was wrong | axis | result | what `tdp prove` says |",
        "|---|---|---|---|---|",
        *(_line(report, rows.get(report.name)) for report in REPORTS),
        "\n## Chosen blind\n",
        "These mistakes are in no report. They were chosen in two sets of ten before the prover "
        "was run on them. Of the first ten one was missed, the first: no compared token read that "
        "row. Of the second ten two were: nobody compared the masks of micro-batches, and the "
        "stage that sees tokens ahead had no block in the small copy. Since then half of the "
        "tokens are the first or last ids of a rank, masks of micro-batches are compared, and "
        "stages are even.",
        "",
        "| mistake | axis | result | what `tdp prove` says |",
        "|---|---|---|---|",
        *(
            f"| {x.what} | {_axes(x)} | {_result(blind.get(x.name))} | {_says(blind.get(x.name))} |"
            for x in BLIND
        ),
    ]
    return "\n".join(lines) + "\n"


def _sweep() -> Iterator[str]:
    """Yield what the search for false alarms has compared, and every alarm."""
    rows = sweep.stored().values()
    compared = [row for row in rows if "layouts" in row]
    alarms_of = {row["name"]: row["found"] for row in compared if row["found"]}
    refused = [row["name"] for row in rows if "why" in row]
    total = len(sweep.CONFIGS) + sweep.NUM_CLASSES
    configs = sum(row["name"].endswith(".yaml") for row in compared)
    resumed = sum(row.get("resumes", False) for row in compared)
    yield (
        f"`scripts/replay --sweep` compares all files of configs/ and all classes of "
        f"[model_classes.md](model_classes.md), small, on two ranks along data, pipe and tensor. "
        f"So far it came to {len(rows)} of {total}: {configs} files and "
        f"{len(compared) - configs} classes were compared ({resumed} with stops and resumes), "
        f"{len(refused)} are refused along every axis. {len(alarms_of)} differ or stop"
        + "".join(f"; {name}: {'; '.join(map(str, x))}" for name, x in sorted(alarms_of.items()))
        + "."
    )


def _line(report: Report, row: Row | None) -> str:
    links = ", ".join(_link(x) for x in report.reports)
    return f"| {links} | {report.what} | {_axes(report)} | {_result(row)} | {_says(row)} |"


def _link(report: str) -> str:
    repository, _, number = report.partition("#")
    return f"[{repository.partition('/')[2]}#{number}](https://github.com/{repository}/issues/{number})"


def _axes(report: Report) -> str:
    return ", ".join(sorted(report.axis))


def _result(row: Row | None) -> str:
    if row is None:
        return "not run"
    missing = {"another module or axis": "is_named", "another kind": "is_told"}
    notes = [text for text, key in missing.items() if row["result"] != "missed" and not row[key]]
    return row["result"] + (f"; {', '.join(notes)}" if notes else "")


def _says(row: Row | None) -> str:
    if row is None:
        return ""
    if row["result"] == "missed":
        return REASONS.get(row["name"], "")
    axes = ", ".join(row["axis"])
    text = " ".join(row["says"].replace("|", "\\|").split())
    return f"{axes}: {text}" if axes else text


REASONS: Mapping[str, str] = {}
"""Why a report is missed."""


def write(results: Mapping[str, Any]) -> None:
    before = PAGE.read_text("utf-8").partition(MARKER)[0]
    PAGE.write_text(before + MARKER + page(results), "utf-8")


def main(arguments: Sequence[str]) -> int:
    from torchdistpackage.testing import RankPool

    if "--page" in arguments:
        write(json.loads(RESULTS.read_text("utf-8")))
        return 0
    names = [x for x in arguments if not x.startswith("-")]
    if "--sweep" in arguments:
        done = () if names else sweep.stored()
        todo = [name for name in names or sweep.cases() if name not in done]
        for row in sweep.sweep(todo, _SWEEP_S, resumes="--resumes" in arguments):
            sys.stdout.write(f"{row}\n")
            sys.stdout.flush()
        write(json.loads(RESULTS.read_text("utf-8")))
        return 0
    chosen = [x for x in (*REPORTS, *BLIND) if not names or x.name in names]
    with RankPool(8, timeout_s=300.0, preload=("torch._dynamo", "tests.replay.plants")) as pool:
        if "--alarms" in arguments:
            results = json.loads(RESULTS.read_text("utf-8"))
            for key, text in alarms(chosen, pool, {} if names else results["alarms"]):
                sys.stdout.write(f"{key}: {text or 'right'}\n")
                sys.stdout.flush()
                results["alarms"][key] = text
                keep(results, [])
            return 0
        outcomes: list[Outcome] = []
        for report in chosen:
            outcome = replay(report, pool)
            outcomes.append(outcome)
            sys.stdout.write(f"{outcome}\n")
            sys.stdout.flush()
            if "--keep" in arguments:
                keep(json.loads(RESULTS.read_text("utf-8")), [outcome])
        found = {} if names else dict(alarms((*REPORTS, *BLIND), pool))
    if names and "--keep" not in arguments:
        return 0
    results = json.loads(RESULTS.read_text("utf-8")) if names else {"alarms": found}
    keep(results, outcomes)
    return 0


def keep(results: dict[str, Any], outcomes: Sequence[Outcome]) -> None:
    """Write the results with these outcomes in the place of earlier ones, and the page."""
    fresh = {outcome.name: outcome.as_row() for outcome in outcomes}
    for part, reports in (("reports", REPORTS), ("blind", BLIND)):
        rows = {row["name"]: row for row in results.get(part, [])} | fresh
        results[part] = [rows[x.name] for x in reports if x.name in rows]
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    write(results)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
