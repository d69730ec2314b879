"""Predicted beside measured step times of layouts on gloo ranks of this machine.

All runs of a model are alive at once and take turns: one trains a few steps while the others are
stopped (SIGSTOP), and between rounds `tdp comm bench --profile` measures the machine, so that a
phase in which the machine is slow falls on all of them alike. `tdp plan --time` predicts from each
profile alone, and the median of these predictions stands beside the median of the turns. Beside ten
layouts of each of two models run those that `tdp plan --search` finds for the narrow one: is the
one that it ranks first near the fastest? Layouts of four ranks are left out where there are fewer
cores, which ranks would share by turns. `--models` measures one of the models, and `--json` keeps
what its file has of the other, so that two short calls make one result.
"""

import argparse
import contextlib
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from benchmarks.common import write
from torchdistpackage.cli._search import model_error, simpler_first
from torchdistpackage.config.load import load
from torchdistpackage.harness.bench.profile import read
from torchdistpackage.plan.layout_search import LayoutChoice, search
from torchdistpackage.plan.measured import measured_device, measured_fabric
from torchdistpackage.plan.run_plan import make_plan
from torchdistpackage.plan.step_time import run_time
from torchdistpackage.predict.error_table import kendall_tau

CONFIG = "configs/gpt_tiny.yaml"
STEPS, WARM_UP = 3, 3
"""Steps of a turn that count, behind one that the pause cut; and steps before the first turn."""
_RUN = [
    "train.steps=1000000",
    "train.step_timeout_s=100000",
    "train.eval_every=0",
    "checkpoint.save_every=0",
    "log.every=1",
]
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


def main() -> None:
    """Measure the machine and the layouts in turns, and print both seconds and their ratio."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--only", default="", help="layouts whose name has this word")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="begin no third round after these"
    )
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between two turns")
    parser.add_argument("--models", choices=("narrow", "wide", "both"), default="both")
    given = parser.parse_args()
    before = _rows_of(given.json)
    rows: list[dict] = []
    taus: list[float] = []
    again: list[float] = []
    for model in ("narrow", "wide"):
        chosen = given.models in (model, "both")
        found = _measured(model, given) if chosen else [x for x in before if x["model"] == model]
        if not found:
            continue
        rows += found
        # within a model, since no layout makes the wide one as fast as the narrow one
        plain = [x for x in found if not x["layout"].startswith("search")]
        taus.append(kendall_tau([(x["predicted_s"], x["measured_s"]) for x in plain]))
        again.append(kendall_tau([tuple(x["halves_s"]) for x in plain]))
    searched = [x for x in rows if x["layout"].startswith("search")]
    layouts = [x for x in rows if x not in searched]
    errors = [abs(x["predicted_s"] / x["measured_s"] - 1) for x in layouts]
    sys.stdout.write(
        f"{len(layouts)} layouts: mean {statistics.mean(errors):.1%}, worst {max(errors):.1%}; "
        f"Kendall's tau {', '.join(f'{tau:.2f}' for tau in taus)}; of odd and even rounds to each "
        f"other {', '.join(f'{tau:.2f}' for tau in again)}\n"
    )
    write(given.json, {"layouts": layouts, "search": searched, "taus": taus, "again": again})


def _rows_of(path: Path | None) -> list[dict]:
    """Return the rows in a file of results that an earlier call wrote."""
    if path is None or not path.exists():
        return []
    results = json.loads(path.read_text("utf-8"))
    return [x for x in (*results["layouts"], *results["search"]) if "model" in x]


def _measured(model: str, given: argparse.Namespace) -> list[dict]:
    """Return the rows of a model's layouts."""
    end = time.monotonic() + given.seconds
    named = {
        name: keys
        for name, keys in LAYOUTS.items()
        if given.only in name
        and name.endswith("wide") == (model == "wide")
        and (" x " not in name or (os.cpu_count() or 1) >= 4)
    }
    with tempfile.TemporaryDirectory() as folder, _Turns(Path(folder)) as turns:
        profiles = [turns.profile(0)]
        if model == "narrow" and not given.only:
            named |= _searched(profiles[0])
        for layout, keys in named.items():
            turns.start(layout, keys)
        for number in range(given.rounds):
            if number > 1 and time.monotonic() > end:
                break
            profiles += [turns.profile(number)] if number else []
            for layout in random.Random(number).sample(sorted(named), len(named)):
                turns.take(layout)
                time.sleep(given.pause)
        measured = [turns.row(layout, keys, profiles) for layout, keys in named.items()]
    return [{"model": model, **row} for row in measured]


def _searched(path: Path) -> dict[str, list[str]]:
    """Return the layout that the search ranks first, the first that it prints, and others."""
    run, profile = load(CONFIG, LayoutChoice.overrides()), read(path)
    device = measured_device(profile, run, path, 2, 2)
    fabric = measured_fabric(profile, device, 2)
    result = search(run, 2, device, ranks_per_node=2, fabric=fabric, error=model_error(device))
    found, first = result.found, simpler_first(result, device)[0]
    several = [found[0], first, *(x for x in found[1:] if x is not first)][:_SEARCHED]
    return {f"search {i}": _overrides(x.choice) for i, x in enumerate(several)}


def _overrides(choice: LayoutChoice) -> list[str]:
    return [
        f"{section}.{key}={json.dumps(value)}"
        for section, values in choice.keys(2).items()
        for key, value in values.items()
    ]


class _Turns:
    """Runs in a folder, of which one goes on at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs: dict[str, subprocess.Popen[bytes]] = {}
        self.steps: dict[str, list[list[int]]] = {}

    def __enter__(self) -> "_Turns":
        return self

    def __exit__(self, *_: object) -> None:
        for run in self.runs.values():
            _signal(run.pid, signal.SIGKILL)
            run.wait()

    def profile(self, number: int) -> Path:
        path = self.folder / f"profile{number}.json"
        _tdp("comm", "bench", "--procs", "2", *_SIZES, "--profile", str(path))
        return path

    def start(self, layout: str, keys: Iterable[str]) -> None:
        """Start a run and stop it after its first steps."""
        name = f"run{len(self.runs)}"
        words = ["train", CONFIG, *keys, *_RUN, f"run.dir={self.folder}", f"run.name={name}"]
        with (self.folder / f"{name}.txt").open("wb") as out:
            self.runs[layout] = subprocess.Popen(
                [*_COMMAND, *words], env=_ONE_THREAD, stdout=out, stderr=subprocess.STDOUT
            )
        self.steps[layout] = []
        self._wait(layout, WARM_UP)
        _signal(self.runs[layout].pid, signal.SIGSTOP)

    def take(self, layout: str) -> None:
        """Let a run train a few steps, and note their numbers."""
        run, done = self.runs[layout], len(self._rows(layout))
        _signal(run.pid, signal.SIGCONT)
        # a pause cuts a step, and the first of a turn warms the caches
        self._wait(layout, done + 2)
        self._wait(layout, done + 2 + STEPS)
        _signal(run.pid, signal.SIGSTOP)
        self.steps[layout].append([*range(done + 2, done + 2 + STEPS)])

    def _wait(self, layout: str, number: int) -> None:
        while len(self._rows(layout)) < number:
            if self.runs[layout].poll() is not None:
                name = f"run{[*self.runs].index(layout)}"
                raise SystemExit((self.folder / f"{name}.txt").read_text("utf-8")[-2000:])
            time.sleep(0.02)

    def _rows(self, layout: str, name: str = "metrics") -> list[bytes]:
        path = self.folder / f"run{[*self.runs].index(layout)}" / f"{name}.jsonl"
        return path.read_bytes().splitlines() if path.exists() else []

    def row(self, layout: str, keys: list[str], profiles: list[Path]) -> dict:
        """Return the predicted and the measured seconds of a layout, and print them."""
        times = [json.loads(x).get("time_s", 0.0) for x in self._rows(layout)]
        rounds = [statistics.median(times[i] for i in x) for x in self.steps[layout]]
        predicted = [_predicted(keys, path) for path in profiles]
        terms = {k: statistics.median(x[k] for x in predicted) for k in predicted[0]}
        step = terms.pop("step")
        measured = statistics.median(rounds)
        sys.stdout.write(
            f"{layout:36} {step * 1e3:8.1f} ms predicted {measured * 1e3:8.1f} ms measured "
            f"(least {min(rounds) * 1e3:.1f}) {step / measured - 1:+7.1%}\n"
        )
        sys.stdout.flush()
        return {
            "layout": layout,
            "keys": keys,
            "predicted_s": step,
            "measured_s": measured,
            "halves_s": [statistics.median(rounds[i::2]) for i in range(2)],
            "rounds_s": rounds,
            "terms": terms,
            "phases": self._phases(layout),
        }

    def _phases(self, layout: str) -> dict[str, float]:
        """Return the median seconds of what the ranks did, of the rank that took longest."""
        counted = {i for turn in self.steps[layout] for i in turn}
        rows = [json.loads(x) for i, x in enumerate(self._rows(layout, "ranks")) if i in counted]
        names = {(kind, name) for row in rows for kind in ("phases", "waits") for name in row[kind]}
        return {
            f"{kind} {name}": statistics.median(max(row[kind].get(name, [0.0])) for row in rows)
            for kind, name in sorted(names)
        }


def _predicted(keys: list[str], path: Path) -> dict[str, float]:
    """Return the seconds of each term and of the step."""
    plan, profile = make_plan(load(CONFIG, keys), 2), read(path)
    device = measured_device(profile, plan.config, path, 2)
    step = run_time(plan, device, None, measured_fabric(profile, device, None)).step
    return {**step.terms, "step": step.total}


def _family(pid: int) -> list[int]:
    """Return a process and all that it has started, its oldest first."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found = [pid]
    for each in found:
        found += sorted(children.get(each, []))
    return found


def _signal(pid: int, number: signal.Signals) -> None:
    for each in _family(pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, number)


_COMMAND = [sys.executable, "-P", "-m", "torchdistpackage"]
_ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}


def _tdp(*words: str) -> None:
    done = subprocess.run(
        [*_COMMAND, *words], env=_ONE_THREAD, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(words[:3])} failed:\n{done.stderr[-2000:]}")


if __name__ == "__main__":
    main()
