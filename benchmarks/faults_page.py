"""Write docs/faults.md from the rows of the fault matrix, which it also stores without paths.

python -m benchmarks.faults_page --rows FILE      FILE: what benchmarks.faults_matrix wrote
python -m benchmarks.faults_page                  the page, from the stored rows
"""

import argparse
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.faults_matrix import FAULTS, MOMENTS, PLACES, Row

ROOT = Path(__file__).resolve().parents[1]
STORED = ROOT / "benchmarks" / "results" / "faults_matrix.jsonl"
PAGE = ROOT / "docs" / "faults.md"
RESTARTS = ROOT / "benchmarks" / "results" / "faults_restart.json"
LOSSES = {
    "rank": "a rank is killed",
    "node": "a node loses its power",
    "network": "a node's cable is pulled, as when a switch dies",
}
STAGES = {
    "report": "a rank reports the loss",
    "decision": "the script decides",
    "watcher": "ranks are forked",
    "loaded": "they have joined, built and loaded",
}
MARKER = "<!-- python -m benchmarks.faults_page writes everything below this line -->\n"
_PATH = re.compile(r"/[^\s:,]*/(?=[^\s:,/]+)")
_SAID = 160


def stored() -> list[Row]:
    return [Row(**json.loads(line)) for line in STORED.read_text("utf-8").splitlines()]


def store(path: Path) -> None:
    """Keep the last row of each case, in the order of the table, and what wrong ones said."""
    rows = {row.key: row for row in (Row(**json.loads(x)) for x in path.read_text().splitlines())}
    place = {
        (fault, phase, rank): i
        for i, (fault, phase, rank) in enumerate(
            (f, p, r) for f in FAULTS for p in MOMENTS for r in PLACES.values()
        )
    }
    lines = []
    for key in sorted(rows, key=place.__getitem__):
        row = rows[key]
        said = "" if row.right else _PATH.sub("", row.says)[:_SAID]
        lines.append(json.dumps(vars(row) | {"says": said}))
    STORED.write_text("\n".join(lines) + "\n", "utf-8")


def outcome(row: Row) -> str:
    """Return the column of the confusion matrix."""
    if row.named == row.rank:
        return "the culprit"
    if row.named is not None:
        return "another rank"
    return "nobody"


def page(rows: Sequence[Row]) -> str:
    total = len(FAULTS) * len(MOMENTS) * len(PLACES)
    right = sum(r.right for r in rows)
    in_time = [r for r in rows if r.expected in ("named", "disk")]
    late = [r for r in in_time if r.gone_s is not None and r.gone_s > r.limit_s]
    earlier = sum(r.code != "" for r in rows)
    text = [
        f"{len(rows)} of {total} cases were run. In {right} ({right / len(rows):.1%}) it was as "
        "expected: the culprit was named first with the cause, or, where a fault does no harm, the "
        f"run ended as undisturbed and nobody was blamed. {sum(r.orphans for r in rows)} processes "
        f"were left over; {len(late)} of {len(in_time)} runs took longer than promised to end.",
        "",
    ]
    if earlier:
        text[0] += (
            f" {earlier} of them were run before the last mends of names and were right then; they "
            "were not run again, those that were not right were."
        )
    heads = ("the culprit", "another rank", "nobody")
    text += [
        "| fault | cases | named: the culprit | another rank | nobody | as expected | gone after |",
        "|---|---|---|---|---|---|---|",
    ]
    for fault in FAULTS:
        mine = [row for row in rows if row.fault == fault]
        counts = Counter(map(outcome, mine))
        gone = sorted(row.gone_s for row in mine if row.gone_s is not None)
        times = f"{gone[len(gone) // 2]:.1f} s, at most {gone[-1]:.1f} s" if gone else ""
        cells = [str(counts[head]) for head in heads] if mine else ["", "", ""]
        share = f"{sum(r.right for r in mine)} of {len(mine)}" if mine else "not run"
        text.append(f"| {fault} | {len(mine)} | {' | '.join(cells)} | {share} | {times} |")
    text += ["", "By phase and by rank:", ""]
    text += _by("phase", MOMENTS, rows, lambda row: row.phase)
    text += [""]
    places = {rank: name for name, rank in PLACES.items()}
    text += _by("rank", tuple(PLACES), rows, lambda row: places[row.rank])
    if wrong := [row for row in rows if not row.right]:
        text += ["", "Not as expected:", ""]
        text += [f"- {row.fault}, {row.phase}, rank {row.rank}: {_why(row)}" for row in wrong]
    return "\n".join(text) + "\n"


def restarts() -> str:
    """Return the table of benchmarks.faults_restart: the slowest of each loss, by stage."""
    rows = json.loads(RESTARTS.read_text("utf-8"))
    text = [
        "Seconds from the loss until a new step is finished, in a Slurm job of two nodes and a "
        "spare one with a copy after each step (`python -m benchmarks.faults_restart`), the "
        "slowest time:",
        "",
        f"| loss | times | {' | '.join(STAGES.values())} | a new step | steps done again |",
        "|---|---|" + "---|" * (len(STAGES) + 2),
    ]
    for loss, said in LOSSES.items():
        mine = [row for row in rows if row["loss"] == loss]
        if not mine:
            continue
        stages = [f"{max(row['stages_s'][stage] for row in mine):.1f}" for stage in STAGES]
        back = f"{max(row['back_s'] for row in mine):.1f}"
        lost = max(row["steps_lost"] for row in mine)
        text.append(f"| {said} | {len(mine)} | {' | '.join(stages)} | {back} | {lost} |")
    return "\n".join(text) + "\n"


def _why(row: Row) -> str:
    if row.fault == "slow rank":
        return "the run ended well, and no line named the slow rank"
    return f"ended {row.ended}: {row.says or 'nothing was said'}"


def _by(
    head: str, names: Sequence[str], rows: Sequence[Row], name_of: Callable[[Row], str]
) -> list[str]:
    lines = [f"| {head} | cases | as expected |", "|---|---|---|"]
    for name in names:
        mine = [row for row in rows if name_of(row) == name]
        lines.append(f"| {name} | {len(mine)} | {sum(row.right for row in mine)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=Path)
    options = parser.parse_args()
    if options.rows is not None:
        store(options.rows)
    before = PAGE.read_text("utf-8").partition(MARKER)[0]
    PAGE.write_text(f"{before}{MARKER}\n{restarts()}\n{page(stored())}", "utf-8")


if __name__ == "__main__":
    main()
