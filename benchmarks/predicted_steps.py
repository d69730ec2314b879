"""Predicted beside measured step times of layouts on gloo ranks of this machine.

`tdp comm bench --profile` measures the machine, and `tdp plan --time` predicts from that
alone; a step is the median of a short run. Run it where nothing else runs: a load
from outside falls on one of the two alone.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.common import arguments, write

CONFIG = "configs/gpt_tiny.yaml"
_STEPS = ["train.steps=12", "train.eval_every=1000", "checkpoint.save_every=1000", "log.every=1"]
_SIZES = ["--sizes", "4KiB:4MiB:x8", "--operations", "all_reduce,all_gather,all_to_all,p2p"]
_WIDE = ["model.dim=256", "model.heads=8"]
_DEGREES = {
    "data 2": ["parallel.data=2", "parallel.pipe=1"],
    "data 2, ZeRO 1": ["parallel.data=2", "parallel.pipe=1", "parallel.zero=1"],
    "data 2, ZeRO 3": ["parallel.data=2", "parallel.pipe=1", "parallel.zero=3"],
    "pipe 2": ["parallel.data=1", "parallel.pipe=2"],
    "pipe 2, gpipe": ["parallel.data=1", "parallel.pipe=2", "pipeline.schedule=gpipe"],
    "tensor 2": ["parallel.data=1", "parallel.pipe=1", "parallel.tensor=2"],
    "tensor 2, sequence": [
        "parallel.data=1",
        "parallel.pipe=1",
        "parallel.tensor=2",
        "parallel.sequence_parallel=true",
    ],
    "recompute": ["parallel.data=2", "parallel.pipe=1", "train.recompute=blocks"],
    "data 2 x pipe 2": ["parallel.data=2", "parallel.pipe=2"],
    "data 2 x tensor 2": ["parallel.data=2", "parallel.pipe=1", "parallel.tensor=2"],
}
LAYOUTS = {
    f"{name}{width}": [*degrees, *more]
    for name, degrees in _DEGREES.items()
    for width, more in (("", []), (", 256 wide", _WIDE))
}
"""Twenty: ten degrees of two to four ranks, at 128 and at 256 columns."""


def main() -> None:
    """Measure the machine, then each layout, and print both seconds and their ratio."""
    given = arguments(__doc__)
    rows: list[dict[str, float | str]] = []
    with tempfile.TemporaryDirectory() as folder:
        profiles = {n: _profile(Path(folder) / f"{n}.json", n) for n in (2, 4)}
        for name, overrides in LAYOUTS.items():
            num_ranks = 4 if " x " in name else 2
            predicted = _predicted(profiles[num_ranks], overrides)
            measured = _measured(Path(folder), len(rows), overrides)
            rows.append({"layout": name, "predicted_s": predicted, "measured_s": measured})
            sys.stdout.write(
                f"{name:30} {predicted * 1e3:8.1f} ms predicted {measured * 1e3:8.1f} ms measured "
                f"{predicted / measured - 1:+7.1%}\n"
            )
            sys.stdout.flush()
    errors = [abs(float(x["predicted_s"]) / float(x["measured_s"]) - 1) for x in rows]
    sys.stdout.write(f"mean {statistics.mean(errors):.1%}, worst {max(errors):.1%}\n")
    write(given.json, {"layouts": rows})


def _profile(path: Path, num_ranks: int) -> Path:
    _tdp("comm", "bench", "--procs", str(num_ranks), *_SIZES, "--profile", str(path))
    return path


def _predicted(profile: Path, overrides: list[str]) -> float:
    """Return the seconds of the line `step` of the table."""
    text = _tdp("plan", CONFIG, *overrides, "--time", "--profile", str(profile))
    line = next(x for x in text.splitlines() if x.startswith("  step  "))
    _, number, unit = line.split()[:3]
    return float(number) * {"s": 1.0, "ms": 1e-3}[unit]


def _measured(folder: Path, number: int, overrides: list[str]) -> float:
    """Return the median of the steps after the first four."""
    name = [f"run.dir={folder}", f"run.name=run{number}"]
    _tdp("train", CONFIG, *overrides, *_STEPS, *name)
    lines = (folder / f"run{number}" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    times = [x["time_s"] for x in map(json.loads, lines) if "time_s" in x]
    return statistics.median(times[4:])


def _tdp(*words: str) -> str:
    command = [sys.executable, "-P", "-m", "torchdistpackage", *words]
    threads = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=threads, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words[:3])} failed:\n{done.stderr[-2000:]}")
    return done.stdout


if __name__ == "__main__":
    main()
