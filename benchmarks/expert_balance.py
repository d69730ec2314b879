"""400 steps of configs/moe_tiny.yaml with each way to keep experts busy, and of a dense model.

    python -m benchmarks.expert_balance            about 10 minutes; the picture and the table
    python -m benchmarks.expert_balance --steps 40

Numbers do not depend on the layout, so each run is one process, and as many run at once as there
are cores. The dense model has as many parameters as meet a token in the mixture, or a few more.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "pictures" / "experts.svg"
CONFIG = ROOT / "configs" / "moe_tiny.yaml"
ALONE = ("parallel.data=1", "parallel.expert=1", "launch.local.procs=1", "log.every=10")
SIDES: dict[str, tuple[str, ...]] = {
    "aux_loss": (),
    "bias": ("model.moe.balance=bias",),
    "none": ("model.moe.balance=none",),
    "dense": ("model.moe=null", "model.mlp_hidden=343"),
}
COLOURS = {"aux_loss": "#0072b2", "bias": "#009e73", "none": "#d55e00"}
LABELS = {"aux_loss": -6, "bias": 16, "none": 4}
"""How far below the end of its line a name is."""
LAST, EACH = 100, 10
"""Steps at the end over which load and loss are averaged; steps of a point of the picture."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args(argv)
    with (
        tempfile.TemporaryDirectory() as folder,
        ThreadPoolExecutor(os.cpu_count() or 1) as pool,
    ):
        found = dict(
            zip(SIDES, pool.map(lambda x: run(Path(folder), x, options.steps), SIDES), strict=True)
        )
    loads = {name: load(rows) for name, rows in found.items() if name != "dense"}
    print(
        "| | busiest over mean, last 100 steps | loss of training, last 100 | loss of validation |"
    )
    print("|---|---|---|---|")
    for name, rows in found.items():
        busy = f"{statistics.mean(loads[name][-LAST:]):.2f}" if name in loads else ""
        losses = [row["loss"] for row in rows if "loss" in row]
        val = [row["val_loss"] for row in rows if "val_loss" in row]
        last = statistics.mean(losses[-LAST:])
        print(f"| {name} | {busy} | {last:.3f} | {val[-1] if val else float('nan'):.3f} |")
    PICTURE.write_text(picture(loads), "utf-8")
    return 0


def run(folder: Path, side: str, steps: int) -> list[dict]:
    """Rows of metrics.jsonl."""
    command = [sys.executable, "-m", "torchdistpackage.cli.main", "train", str(CONFIG)]
    more = (f"run.dir={folder}", f"run.name={side}", f"train.steps={steps}")
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, *ALONE, *SIDES[side], *more], check=True, env=env, cwd=ROOT)
    text = (folder / side / "metrics.jsonl").read_text("utf-8")
    return [json.loads(line) for line in text.splitlines()]


def load(rows: Sequence[Mapping]) -> list[float]:
    """The busiest expert over the mean, the mean of all layers, of each step."""
    return [statistics.mean(row["experts"].values()) for row in rows if "experts" in row]


def picture(loads: Mapping[str, Sequence[float]]) -> str:
    width, height, left, low = 560, 240, 44, 210
    top = max(max(some) for some in loads.values())
    last = max(len(some) for some in loads.values())
    x = lambda i: left + (width - left - 70) * i * EACH / last  # noqa: E731
    y = lambda value: low - (low - 20) * (value - 1) / (top - 1)  # noqa: E731
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="12" fill="#888">',
        f'<text x="{left}" y="12">busiest expert over the mean, by step</text>',
    ]
    for tick in range(1, int(top) + 1):
        parts.append(
            f'<path d="M{left} {y(tick):.1f}H{width - 70}" stroke="#8884"/>'
            f'<text x="{left - 24}" y="{y(tick) + 4:.1f}">{tick}x</text>'
        )
    for name, every in loads.items():
        some = [statistics.mean(every[i : i + EACH]) for i in range(0, len(every), EACH)]
        points = " ".join(f"{x(i):.1f},{y(v):.1f}" for i, v in enumerate(some))
        colour = COLOURS[name]
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
            f'<text x="{x(len(some)):.1f}" y="{y(some[-1]) + LABELS[name]:.1f}" fill="{colour}">'
            f"{name}</text>"
        )
    parts += [f'<text x="{left}" y="{height - 12}">0</text>']
    parts += [f'<text x="{width - 90}" y="{height - 12}">{last}</text>', "</svg>"]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.exit(main())
