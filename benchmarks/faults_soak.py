"""Faults one after another in one run of four local ranks, by a seed that draws them.

Rule: the run is told nothing. A rank drawn by the seed is killed or stopped from outside at drawn
times, and what counts is how many steps the rows have at the end: the effective training time ratio
is the time that these steps take undisturbed, as its first 20 s or a run beside it have it, of the
time that passed.
Fault number i of a seed is the same in each call, so that a wrong one can be called again.
"""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RANKS, PAUSE_S, TIMEOUT_S, UNDISTURBED_S = 4, 0.25, 5, 20
START_S, LIMIT_S = 180, 120
SIGNALS = (*[signal.SIGKILL] * 4, *[signal.SIGSEGV] * 2, *[signal.SIGABRT] * 2, signal.SIGSTOP)
WORDS = (
    "run.name=soak", "parallel.pipe=1", "pipeline.microbatches=1",
    "model.layers=2", "model.dim=32", "model.heads=2", "data.name=null", "data.seq_len=32",
    "data.global_batch=16", "data.target=tests.train.sources:Paced", "train.steps=100000",
    "train.eval_every=0",
    "train.generate_tokens=0", f"train.step_timeout_s={TIMEOUT_S}", "checkpoint.save_every=0",
    "checkpoint.local_dir=/dev/shm", "checkpoint.local_every=1", "checkpoint.async_mode=disabled",
    "log.plot=false", "launch.requeue.in_job_restarts=1000",
)  # fmt: skip


@dataclass
class Fault:
    """Fault number `index` of `seed`, which alone decide the rank, the signal and the wait before.

    cost_s: seconds to the next new step. right: the run went on within `LIMIT_S` as said, after the
    step it had reached or the one before, with the losses of an undisturbed run.
    """

    seed: int
    index: int
    rank: int
    signal: str
    wait_s: float
    cost_s: float = 0.0
    steps_lost: int = 0
    orphans: int = 0
    right: bool = False
    says: str = ""


def drawn(seed: int, index: int, ranks: int, every_s: float) -> Fault:
    draw = random.Random(f"{seed} {index}")
    rank, signum = draw.randrange(ranks), draw.choice(SIGNALS)
    return Fault(seed, index, rank, signum.name, round(every_s * draw.uniform(0.5, 1.5), 3))


class Run:
    """A run of `ranks` local ranks in a folder of its own."""

    def __init__(self, ranks: int, pause_s: float):
        self._folder = tempfile.TemporaryDirectory(prefix="soak-")
        self.rows = Path(self._folder.name) / "soak" / "metrics.jsonl"
        self._log = (Path(self._folder.name) / "log").open("wb")
        program = [sys.executable, "-m", "torchdistpackage", "train", "configs/gpt_tiny.yaml"]
        data = f"data.args={{seq_len: 32, num_val: 16, pause_s: {pause_s}}}"
        self._process = subprocess.Popen(
            [*program, f"run.dir={self._folder.name}", *WORDS, f"parallel.data={ranks}", data],
            cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=self._log, stderr=self._log,
        )  # fmt: skip
        until_s = time.monotonic() + START_S
        while last_step(self.rows) < 5:
            if self.has_ended or time.monotonic() > until_s:
                raise RuntimeError(f"no run: {self.last_words()}")
            time.sleep(0.1)

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def processes(self) -> list[tuple[int, str]]:
        """Return the ranks of this run with their names."""
        named = [(x, name_of(x)) for x in Path("/proc").iterdir() if x.name.isdigit()]
        return [
            (int(x.name), name) for x, name in named
            if name.startswith("tdp-rank-") and is_of(x, self.rows)
        ]  # fmt: skip

    def strike(self, fault: Fault, ranks: int) -> None:
        """Send the signal to the rank, and note what came of it."""
        starts, at_s = len(self._resumed()), time.monotonic()
        victims: list[int] = []
        while not (victims or self.has_ended or time.monotonic() > at_s + LIMIT_S):
            victims = [pid for pid, name in self.processes() if name == f"tdp-rank-{fault.rank}"]
        for pid in victims:
            os.kill(pid, signal.Signals[fault.signal])

        def wait_for(is_true: Callable[[], bool]) -> None:
            while not (is_true() or self.has_ended or time.monotonic() > at_s + LIMIT_S):
                time.sleep(0.02)

        # the rows of its last moments count: a step may end between the signal and its end
        wait_for(lambda: not any(map(is_alive, victims)))
        before = table(self.rows)
        reached = max(before, default=0)
        wait_for(lambda: len(self._resumed()) > starts and last_step(self.rows) > reached + 1)
        fault.cost_s = round(time.monotonic() - at_s, 2)
        after = table(self.rows)
        fault.orphans = max(len(self.processes()) - ranks, 0)
        went_on = (
            not self.has_ended
            and len(self._resumed()) > starts
            and max(after, default=0) > reached + 1
        )
        fault.steps_lost = max(reached - self._resumed()[-1], 0) if went_on else 0
        same = all(after.get(step) == loss for step, loss in before.items())
        in_order = sorted(after) == list(range(1, len(after) + 1))
        fault.right = went_on and same and in_order and fault.steps_lost <= 1 and not fault.orphans
        if not fault.right:
            fault.says = f"went on {went_on}, same rows {same}, in order {in_order}: " + (
                self.last_words()
            )

    def _resumed(self) -> list[int]:
        """Return the step that each start went on from."""
        found = re.findall(rb"resumed after step (\d+)", Path(self._log.name).read_bytes())
        return [int(step) for step in found]

    def last_words(self) -> str:
        return Path(self._log.name).read_text(errors="replace")[-400:]

    def end(self) -> int:
        """End the run; return how many of its ranks outlive it."""
        self._process.kill()
        self._process.wait()
        until_s = time.monotonic() + 5
        while (left := self.processes()) and time.monotonic() < until_s:
            time.sleep(0.1)
        self._log.close()
        self._folder.cleanup()
        return len(left)


def soak(
    seed: int,
    minutes: float,
    every_s: float,
    faults: Path | None = None,
    ranks: int = RANKS,
    pause_s: float = PAUSE_S,
    *,
    beside: bool = False,
) -> dict[str, float]:
    """Return what came out of `minutes` with a fault about every `every_s` seconds.

    faults: file for a line of each, which the next call with this seed goes on from. beside: let an
    undisturbed run go beside it, whose steps are those that the ratio is of.
    """
    kept = [Fault(**json.loads(x)) for x in lines_of(faults)]
    index = 1 + max((x.index for x in kept if x.seed == seed), default=-1)
    run, orphans, new = Run(ranks, pause_s), 0, list[Fault]()
    twin: Run | None = None
    try:
        twin = Run(ranks, pause_s) if beside else None
        first = last_step(run.rows)
        time.sleep(UNDISTURBED_S)
        step_s = UNDISTURBED_S / max(last_step(run.rows) - first, 1)
        began_s, first, num = time.monotonic(), last_step(run.rows), 0
        twin_first = 0 if twin is None else last_step(twin.rows)
        until_s = began_s + 60 * minutes
        while time.monotonic() < until_s:
            fault = drawn(seed, index, ranks, every_s)
            time.sleep(max(min(fault.wait_s, until_s - time.monotonic()), 0.0))
            if time.monotonic() >= until_s:
                break
            run.strike(fault, ranks)
            new.append(fault)
            index += 1
            if faults is not None:
                with faults.open("a") as file:
                    file.write(json.dumps(asdict(fault)) + "\n")
            print(
                f"{'ok ' if fault.right else 'BAD'} {fault.index} {fault.signal} of rank "
                f"{fault.rank}: {fault.cost_s:.1f} s to the next new step {fault.says}",
                flush=True,
            )
            if run.has_ended or not fault.right:
                num += last_step(run.rows) - first
                orphans += run.end()
                run, first = Run(ranks, pause_s), 0
        took_s, num = time.monotonic() - began_s, num + last_step(run.rows) - first
        if twin is not None:
            step_s = took_s / (last_step(twin.rows) - twin_first)
    finally:
        orphans += run.end()
        if twin is not None:
            twin.end()
    cost_s = sum(fault.cost_s for fault in new) / max(len(new), 1)
    return {
        "seed": seed, "minutes": round(took_s / 60, 2), "faults": len(new), "steps": num,
        "step_s": round(step_s, 4), "cost_of_fault_s": round(cost_s, 2),
        "wrong": sum(not fault.right for fault in new),
        "orphans": orphans + sum(fault.orphans for fault in new),
        "steps_lost_at_most": max((fault.steps_lost for fault in new), default=0),
        "ettr": round(num * step_s / took_s, 4),
        "ettr_at_one_in_ten_minutes": round(1 - cost_s / 600, 4),
    }  # fmt: skip


def lines_of(path: Path | None) -> list[str]:
    return path.read_text().splitlines() if path is not None and path.exists() else []


def table(rows: Path) -> dict[int, float]:
    """Return the losses by step."""
    found: dict[int, float] = {}
    for line in lines_of(rows):
        with contextlib.suppress(ValueError, KeyError):  # the last one may be half written
            row = json.loads(line)
            found[row["step"]] = row["loss"]
    return found


def name_of(process: Path) -> str:
    try:
        return (process / "comm").read_text().strip()
    except OSError:
        return ""


def is_alive(pid: int) -> bool:
    """Return whether the process runs or is stopped; one that nobody has reaped yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def is_of(process: Path, rows: Path) -> bool:
    """Return whether the process has a file of the run open."""
    try:
        links = [str(x.readlink()) for x in (process / "fd").iterdir()]
    except OSError:
        return False
    return any(link.startswith(str(rows.parent)) for link in links)


def last_step(rows: Path) -> int:
    try:
        return json.loads(rows.read_text().splitlines()[-1])["step"]
    except (OSError, ValueError, IndexError):
        return 0
