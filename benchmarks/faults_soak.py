"""Faults one after another in one run of four local ranks, by a seed that draws them.

Rule: the run is told nothing. A rank drawn by the seed is killed or stopped from outside at drawn
times, and what counts is how many steps the rows have at the end: the effective training time ratio
is the time that these steps take undisturbed, as its first 20 s have it, of the time that passed.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RANKS, PAUSE_S, TIMEOUT_S, UNDISTURBED_S = 4, 0.25, 5, 20
WORDS = (
    "run.name=soak", "parallel.data=4", "parallel.pipe=1", "pipeline.microbatches=1",
    "model.layers=2", "model.dim=32", "model.heads=2", "data.name=null", "data.seq_len=32",
    "data.global_batch=16", "data.target=tests.train.sources:Paced", "train.steps=100000",
    f"data.args={{seq_len: 32, num_val: 16, pause_s: {PAUSE_S}}}", "train.eval_every=0",
    "train.generate_tokens=0", f"train.step_timeout_s={TIMEOUT_S}", "checkpoint.save_every=0",
    "checkpoint.local_dir=/dev/shm", "checkpoint.local_every=1", "checkpoint.async_mode=disabled",
    "log.plot=false", "launch.requeue.in_job_restarts=1000",
)  # fmt: skip


def soak(seed: int, minutes: float, every_s: float) -> dict[str, float]:
    """Return what came out of `minutes` with a fault about every `every_s` seconds."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        rows = Path(folder) / "soak" / "metrics.jsonl"
        log = (Path(folder) / "log").open("wb")
        program = [sys.executable, "-m", "torchdistpackage", "train", "configs/gpt_tiny.yaml"]
        run = subprocess.Popen(
            [*program, f"run.dir={folder}", *WORDS],
            cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=log, stderr=log,
        )  # fmt: skip
        try:
            while last_step(rows) < 5:
                time.sleep(0.1)
            first = last_step(rows)
            time.sleep(UNDISTURBED_S)
            step_s = UNDISTURBED_S / (last_step(rows) - first)
            began_s, first = time.monotonic(), last_step(rows)
            lost_s: list[float] = []
            next_s = began_s + every_s * draw.uniform(0.5, 1.5)
            while (now_s := time.monotonic()) < began_s + 60 * minutes and run.poll() is None:
                if now_s >= next_s:
                    signum = draw.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP))
                    lost_s.append(strike(draw.randrange(RANKS), signum, rows))
                    print(f"{signum.name}: {lost_s[-1]:.1f} s to the next new step", flush=True)
                    next_s = time.monotonic() + every_s * draw.uniform(0.5, 1.5)
                time.sleep(0.05)
            took_s, num = time.monotonic() - began_s, last_step(rows) - first
        finally:
            run.kill()
            run.wait()
    cost_s = sum(lost_s) / max(len(lost_s), 1)
    return {
        "seed": seed, "minutes": round(took_s / 60, 2), "faults": len(lost_s), "steps": num,
        "step_s": round(step_s, 4), "cost_of_fault_s": round(cost_s, 2),
        "ettr": round(num * step_s / took_s, 4),
        "ettr_at_one_in_ten_minutes": round(1 - cost_s / 600, 4),
    }  # fmt: skip


def strike(rank: int, signum: signal.Signals, rows: Path) -> float:
    """Send the signal to a rank; return the seconds until a step is there that was not before."""
    reached, at_s = last_step(rows), time.monotonic()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and name_of(entry) == f"tdp-rank-{rank}" and is_of(entry, rows):
            os.kill(int(entry.name), signum)
    while last_step(rows) <= reached + 1 and time.monotonic() < at_s + 120:
        time.sleep(0.05)
    return time.monotonic() - at_s


def name_of(process: Path) -> str:
    try:
        return (process / "comm").read_text().strip()
    except OSError:
        return ""


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
