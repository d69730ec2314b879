"""Write docs/predicted_steps.md, its picture and a line of README.md from predict/published.py.

scripts/docs             write what follows the marker, with the tables of docs/config.md
scripts/docs --check     exit code 1 if it is out of date
scripts/prediction_table.py --fit h100-sxm    print the constants that its rows ask for
"""

import json
import math
import sys
from pathlib import Path

from torchdistpackage.predict.devices import find_device
from torchdistpackage.predict.error_table import (
    PredictedRow,
    compare,
    readme_sentence,
    table,
)
from torchdistpackage.predict.fitting import fit
from torchdistpackage.report.svg import box, colour_of, document, text

ROOT = Path(__file__).resolve().parents[1]
DOCS, README = ROOT / "docs", ROOT / "README.md"
PAGE = DOCS / "predicted_steps.md"
OWN_RUNS = ROOT / "benchmarks" / "results" / "predicted_steps.json"
PICTURE = DOCS / "pictures" / "predicted_steps.svg"
MARKER = "<!-- scripts/docs writes everything below this line -->\n"
LINE_MARKER = "<!-- scripts/docs writes the next line from predict/error_table.py -->\n"
_WIDTH, _HEIGHT, _LEFT, _TOP = 640, 300, 60, 26
_LEAST, _MOST = 0.5, 1.3
"""Predicted over published, at the bottom and at the top."""


def main() -> int:
    if sys.argv[1:2] == ["--fit"]:
        constants, error = fit(find_device(sys.argv[2]))
        sys.stdout.write(f"{constants}, root of the mean squared error {error**0.5:.1%}\n")
        return 0
    page = PAGE.read_text(encoding="utf-8")
    before, marker, after = README.read_text(encoding="utf-8").partition(LINE_MARKER)
    assert marker, f"{README} has no line {LINE_MARKER}"
    readme = before + marker + readme_sentence() + after.partition("\n")[2]
    fresh = {
        PAGE: f"{page.partition(MARKER)[0]}{MARKER}\n{table()}{_own_runs()}",
        PICTURE: picture(),
        README: readme,
    }
    stale = [x for x, words in fresh.items() if not x.exists() or x.read_text("utf-8") != words]
    for path in stale:
        if "--check" in sys.argv[1:]:
            sys.stderr.write(f"{path} is out of date; run scripts/docs\n")
        else:
            path.write_text(fresh[path], encoding="utf-8")
    return int(bool(stale) and "--check" in sys.argv[1:])


def _own_runs() -> str:
    """Return the section on runs that benchmarks/predicted_steps.py measured; "" before it has."""
    if not OWN_RUNS.exists():
        return ""
    found = json.loads(OWN_RUNS.read_text("utf-8"))
    rows = [*found["layouts"], *found["search"]]
    errors = [abs(x["predicted_s"] / x["measured_s"] - 1) for x in found["layouts"]]
    machine, searched = found["machine"], found["search"]
    mean, worst = sum(errors) / len(errors), max(errors)
    said = (
        f"`python -m benchmarks.predicted_steps` on {found['date'][:10]}, {machine['cores']} "
        f"cores, load {machine['load'][0]:.1f}: the error of {len(errors)} layouts is {mean:.1%} "
        f"in the mean and {worst:.1%} at worst; Kendall's tau of the layouts of each model is "
        f"{' and '.join(f'{tau:.2f}' for tau in found['taus'])}."
    )
    if searched:
        narrow = [x for x in rows if not x["layout"].endswith("wide")]
        fastest = min(x["measured_s"] for x in narrow)
        ranked, printed = (x["measured_s"] / fastest - 1 for x in searched[:2])
        said += (
            f" Of {len(narrow)} layouts of the narrow model, the one that `--search` ranks first "
            f"is {ranked:.1%} slower than the fastest, the first that it prints {printed:.1%}."
        )
    again = " and ".join(f"{tau:.2f}" for tau in found["again"])
    said += f" The odd and the even rounds rank the layouts with a tau of {again} to each other."
    lines = ["", "## Our own runs", "", said]
    lines += ["", "| layout | predicted ms | measured ms | error |", "|---|---|---|---|"]
    for x in rows:
        predicted, measured = x["predicted_s"] * 1e3, x["measured_s"] * 1e3
        error = f"{predicted / measured - 1:+.1%}"
        lines.append(f"| {x['layout']} | {predicted:.1f} | {measured:.1f} | {error} |")
    return "\n".join([*lines, ""])


def picture() -> str:
    """Return the drawing of predicted over published by the seconds of a step, all rows, a colour
    for each device; the band is 10 percent around one, and bars are rows of a fit."""
    rows = compare()
    seconds = [each.row.seconds for each in rows]
    low, high = math.log(min(seconds)) - 0.1, math.log(max(seconds)) + 0.1
    devices = list(dict.fromkeys(each.row.device for each in rows))

    def x_of(each: float) -> float:
        return _LEFT + _WIDTH * (math.log(each) - low) / (high - low)

    def y_of(ratio: float) -> float:
        return _TOP + _HEIGHT * (_MOST - ratio) / (_MOST - _LEAST)

    band = y_of(0.9) - y_of(1.1)
    parts = [
        text(_LEFT, 16, "predicted over published seconds of a step"),
        box(_LEFT, y_of(1.1), (_WIDTH, band), "#e6e6e6", "within 10 percent"),
    ]
    for ratio in (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3):
        parts.append(text(_LEFT - 8, y_of(ratio) + 4, f"{ratio:.1f}", anchor="end"))
    parts.append(box(_LEFT, y_of(1.0), (_WIDTH, 1), "#808080", "as published"))
    for tick in (1, 2, 5, 10, 20, 50):
        parts.append(text(x_of(tick), _TOP + _HEIGHT + 16, f"{tick:g} s", anchor="middle"))
    parts += [_mark(x, x_of(x.row.seconds), y_of(1 + x.error), devices) for x in rows]
    for i, name in enumerate(devices):
        y = _TOP + 12 + 17 * i
        parts.append(box(_LEFT + _WIDTH + 14, y - 8, (9, 9), colour_of(i), name))
        parts.append(text(_LEFT + _WIDTH + 28, y, name))
    return document(_LEFT + _WIDTH + 120, _TOP + _HEIGHT + 28, parts)


def _mark(each: PredictedRow, x: float, y: float, devices: list[str]) -> str:
    row = each.row
    said = f"{row.number}: {row.title}, {row.device}, {each.error:+.1%}"
    size = (4, 11) if row.use == "fit" else (7, 7)
    fill = colour_of(devices.index(row.device))
    return box(x - size[0] / 2, y - size[1] / 2, size, fill, said)


if __name__ == "__main__":
    sys.exit(main())
