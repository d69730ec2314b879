"""Predicted beside measured step times of layouts on gloo ranks of this machine.

`tdp comm bench --profile` measures the machine, and `tdp plan --time` predicts from that alone; a
step is the median of a short run. After twenty layouts come those that `tdp plan --search` finds
for the narrow model beside plain ones: is the one that it ranks first near the fastest? Run it
where nothing else runs: a load from outside falls on one of the two alone. Layouts of four ranks
are left out where there are fewer cores, which ranks would share by turns.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from benchmarks.common import write
from torchdistpackage.cli._search import model_error, simpler_first
from torchdistpackage.config.load import load
from torchdistpackage.harness.bench.profile import read
from torchdistpackage.plan.layout_search import LayoutChoice, search
from torchdistpackage.plan.measured import measured_device, measured_fabric
from torchdistpackage.predict.error_table import kendall_tau

CONFIG = "configs/gpt_tiny.yaml"
STEPS, WARM_UP = 20, 6
_RUN = [f"train.steps={STEPS}", "train.eval_every=1000", "checkpoint.save_every=1000"]
_OPERATIONS = "all_reduce,all_gather,reduce_scatter,all_to_all,p2p"
_SIZES = ["--sizes", "4KiB:4MiB:x8", "--operations", _OPERATIONS]
_WIDE = ["model.dim=256", "model.heads=8"]
_NONE = {"data": 1, "pipe": 1}


def _parallel(*more: str, **degrees: int) -> list[str]:
    return [*(f"parallel.{k}={n}" for k, n in (_NONE | degrees).items()), *more]


_DEGREES = {
    "data 2": _parallel(data=2),
    "data 2, ZeRO 1": _parallel(data=2, zero=1),
    "data 2, ZeRO 3": _parallel("pipeline.microbatches=1", data=2, zero=3),
    "data 2, recompute": _parallel("train.recompute=blocks", data=2),
    "pipe 2": _parallel(pipe=2),
    "pipe 2, gpipe": _parallel("pipeline.schedule=gpipe", pipe=2),
    "pipe 2, 16 micro-batches": _parallel("pipeline.microbatches=16", pipe=2),
    "tensor 2": _parallel(tensor=2),
    "tensor 2, sequence": _parallel("parallel.sequence_parallel=true", tensor=2),
    "context 2": _parallel(context=2),
    "data 2 x pipe 2": _parallel(data=2, pipe=2),
    "data 2 x tensor 2": _parallel(data=2, tensor=2),
}
LAYOUTS = {
    f"{name}{width}": [*degrees, *more]
    for width, more in (("", []), (", 256 wide", _WIDE))
    for name, degrees in _DEGREES.items()
}
"""Ten of two ranks and two of four, each at 128 and at 256 columns."""
_SEARCHED = 6
"""Layouts of the search that run, beside the first that it prints."""
_BESIDE = ("data 2", "data 2, ZeRO 3", "pipe 2", "tensor 2", "tensor 2, sequence", "context 2")


def main() -> None:
    """Measure the machine, then each layout, and print both seconds and their ratio."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--only", default="", help="layouts whose name has this word")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        trial = _Trial(Path(name))
        layouts = {name: keys for name, keys in LAYOUTS.items() if given.only in name}
        rows = [
            trial.row(name, keys, 4 if " x " in name else 2)
            for name, keys in layouts.items()
            if " x " not in name or (os.cpu_count() or 1) >= 4
        ]
        chosen = [] if given.only else _searched(trial)
    errors = [abs(x["predicted_s"] / x["measured_s"] - 1) for x in rows]
    # within a model, since no layout makes the wide one as fast as the narrow one
    models = [[x for x in rows if x["layout"].endswith("wide") == is_wide] for is_wide in (0, 1)]
    taus = [kendall_tau([(x["predicted_s"], x["measured_s"]) for x in each]) for each in models]
    sys.stdout.write(
        f"{len(rows)} layouts: mean {statistics.mean(errors):.1%}, worst {max(errors):.1%}; "
        f"Kendall's tau {', '.join(f'{tau:.2f}' for tau in taus)}\n"
    )
    if chosen:
        fastest = min(x["measured_s"] for x in chosen)
        sys.stdout.write(
            f"of {len(chosen)} layouts the one that the search ranks first is "
            f"{chosen[0]['measured_s'] / fastest - 1:.1%} slower than the fastest, the first that "
            f"it prints {chosen[1]['measured_s'] / fastest - 1:.1%}\n"
        )
    write(given.json, {"layouts": rows, "search": chosen, "taus": taus})


def _searched(trial: "_Trial") -> list[dict]:
    """Return rows of the fastest layout by the search, of the first that it prints, of others that
    it found, and of plain ones: twelve in all."""
    path = trial.profile(2)
    run, profile = load(CONFIG, LayoutChoice.overrides()), read(path)
    device = measured_device(profile, run, path, 2, 2)
    fabric = measured_fabric(profile, device, 2)
    result = search(run, 2, device, ranks_per_node=2, fabric=fabric, error=model_error(device))
    found, first = result.found, simpler_first(result, device)[0]
    several = [found[0], first, *(x for x in found[1:] if x is not first)][:_SEARCHED]
    named = {f"search {i}": _overrides(x.choice) for i, x in enumerate(several)}
    named |= {name: LAYOUTS[name] for name in _BESIDE}
    return [trial.row(name, keys, 2) for name, keys in named.items()]


def _overrides(choice: LayoutChoice) -> list[str]:
    return [
        f"{section}.{key}={json.dumps(value)}"
        for section, values in choice.keys(2).items()
        for key, value in values.items()
    ]


class _Trial:
    """Runs in a folder. A machine is measured once for each number of ranks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.number = 0

    def profile(self, num_ranks: int) -> Path:
        path = self.folder / f"{num_ranks}.json"
        if not path.exists():
            _tdp("comm", "bench", "--procs", str(num_ranks), *_SIZES, "--profile", str(path))
        return path

    def row(self, name: str, keys: Iterable[str], num_ranks: int) -> dict:
        """Return the predicted and the measured seconds of a layout, and print them."""
        profile = str(self.profile(num_ranks))
        text = _tdp("plan", CONFIG, *keys, "--time", "--profile", profile)
        terms = dict(map(_seconds, (x for x in text.splitlines() if _is_term(x))))
        measured, least = self._measured(keys)
        predicted = terms.pop("step")
        sys.stdout.write(
            f"{name:36} {predicted * 1e3:8.1f} ms predicted {measured * 1e3:8.1f} ms measured "
            f"(least {least * 1e3:.1f}) {predicted / measured - 1:+7.1%}\n"
        )
        sys.stdout.flush()
        return {
            "layout": name,
            "keys": [*keys],
            "predicted_s": predicted,
            "measured_s": measured,
            "least_s": least,
            "terms": terms,
        }

    def _measured(self, keys: Iterable[str]) -> tuple[float, float]:
        """Return the median and the least of the steps after the first."""
        self.number += 1
        name = f"run{self.number}"
        _tdp(
            "train",
            CONFIG,
            *keys,
            *_RUN,
            "log.every=1",
            f"run.dir={self.folder}",
            f"run.name={name}",
        )
        lines = (self.folder / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        times = [x["time_s"] for x in map(json.loads, lines) if "time_s" in x][WARM_UP:]
        return statistics.median(times), min(times)


_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


def _is_term(line: str) -> bool:
    """Return whether this line of the table has the seconds of a term or of the step."""
    words = line.split()
    return line.startswith("  ") and any(
        unit in _UNITS and number.replace(".", "").isdigit()
        for number, unit in itertools.pairwise(words)
    )


def _seconds(line: str) -> tuple[str, float]:
    words = line.split()
    index = next(i for i, word in enumerate(words) if word in _UNITS)
    return " ".join(words[: index - 1]), float(words[index - 1]) * _UNITS[words[index]]


def _tdp(*words: str) -> str:
    command = [sys.executable, "-P", "-m", "torchdistpackage", *words]
    threads = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=threads, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words[:3])} failed:\n{done.stderr[-2000:]}")
    return done.stdout


if __name__ == "__main__":
    main()
