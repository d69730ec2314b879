"""Seconds from the loss of a rank, a node or a network to the next finished step, on a real Slurm.

Rule: nothing is told of the loss, neither the run nor Slurm; times are read from the files of the
run. The job has two nodes with a rank each and a spare one, and a copy of each step on the nodes.

    python -m benchmarks.faults_restart [--losses rank,node,network] [--times 3] [--json FILE]

Needs root on a Debian with Slurm (scripts/slurm_cluster up --install).
"""

import argparse
import json
import os
import re
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path

from tests.slurm.cluster import CannotRun, Cluster
from tests.slurm.lives import ELASTIC, ending, rows, send, until_step

STEPS, AT_STEP, LIMIT_S = 160, 60, 120.0
VICTIM = "n2"
LOSSES = ("rank", "node", "network")
WORDS = (
    *(word for word in ELASTIC if not word.startswith(("launch.elastic", "launch.requeue"))),
    *(f"train.steps={STEPS}", "launch.slurm.nodes=2", "launch.spares=1"),
    *("checkpoint.local_dir=/dev/shm", "checkpoint.local_every=1"),
    *("checkpoint.async_mode=disabled", "launch.requeue.in_job_restarts=5"),
)


def lose(cluster: Cluster, run: Path, what: str) -> None:
    if what == "rank":
        os.kill(rank_of(run), 9)
    else:
        cluster.node("crash" if what == "node" else "cut", VICTIM)


def rank_of(run: Path) -> int:
    """Return the process of rank 1, which is the fork of its watcher."""
    for entry in Path("/proc").iterdir():
        try:
            name = (entry / "comm").read_text().strip() if entry.name.isdigit() else ""
            links = [str(x.readlink()) for x in (entry / "fd").iterdir()] if name else []
        except OSError:
            continue
        if name == "tdp-rank-1" and any(f"/{VICTIM}" in x or str(run) in x for x in links):
            return int(entry.name)
    raise RuntimeError(f"no rank 1 of {run}")


def one(cluster: Cluster, folder: Path, what: str, words: list[str]) -> dict[str, object]:
    """Return the seconds of each stage, from the loss on."""
    # a node that was cut off may be drained, as its processes could not be ended in time
    cluster.run("scontrol", "update", f"nodename={VICTIM}", "state=resume", check=False)
    cluster.settle()
    name = f"{what}-{len(list(folder.glob(f'{what}-*')))}"
    run, job = send(cluster, folder, name, *WORDS, *words)
    until_step(cluster, run, AT_STEP)
    at_s, reached = time.time(), rows(run)[-1]["step"]
    lose(cluster, run, what)
    struck_s = time.time() - at_s
    seen: dict[str, float] = {}

    def mtime(name: str, path: Path) -> None:
        if name not in seen and path.exists():
            seen[name] = path.stat().st_mtime - at_s

    before = (run / "metrics.jsonl").stat().st_ino
    until_s = time.monotonic() + LIMIT_S
    job_dir = run / "job"
    while "step" not in seen and time.monotonic() < until_s:
        for path in job_dir.glob(f"failures.{job}.0/rank*.json"):
            mtime("report", path)
        mtime("decision", job_dir / f"decision.{job}.0")
        text = (run / "logs" / "main.log").read_text(errors="replace")
        for key, words_ in (("ready", "goes on with"), ("again", "again:")):
            if key not in seen and words_ in text:
                seen[key] = time.time() - at_s
        mtime("watcher", run / "logs" / "rank0.restart1.log")
        if any(start["start"] == f"{job}.0.1" for start in starts(run)) and "noted" not in seen:
            seen["noted"] = time.time() - at_s
        if (run / "metrics.jsonl").stat().st_ino != before and "loaded" not in seen:
            seen["loaded"] = time.time() - at_s
        if "loaded" in seen and rows(run) and rows(run)[-1]["step"] > reached + 1:
            seen["step"] = time.time() - at_s
        time.sleep(0.05)
    lived = ending(cluster, run, job)
    began = {start["start"]: start["step"] for start in lived.starts}
    again = job_dir / f"decision.{job}.0"
    last = re.search(r"after step (\d+):", again.read_text()) if again.exists() else None
    first = began.get(f"{job}.0.1")
    return {
        "loss": what, "back_s": round(seen.get("step", LIMIT_S), 1),
        "steps_lost": None if last is None or first is None else int(last[1]) - first,
        "stages_s": {key: round(at, 1) for key, at in seen.items()},
        "struck_s": round(struck_s, 1), "state": lived.states[-1], "starts": len(lived.starts),
        "load": round(os.getloadavg()[0], 1),
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
    }  # fmt: skip


def starts(run: Path) -> list[dict]:
    try:
        return [json.loads(x) for x in (run / "job" / "starts.jsonl").read_text().splitlines()]
    except ValueError:
        return []


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--losses", default=",".join(LOSSES))
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--words", nargs="*", default=[], help="keys of the run")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="restart-"))
    print(f"runs are in {folder}", flush=True)
    found = []
    try:
        with Cluster(f"restart-{os.getpid()}", nodes=3, accounting=True) as cluster:
            for what in options.losses.split(","):
                for _ in range(options.times):
                    found.append(one(cluster, folder, what, options.words))
                    print(json.dumps(found[-1]), flush=True)
                    if options.json is not None:
                        options.json.write_text(json.dumps(found, indent=2) + "\n")
    except CannotRun as error:
        sys.exit(f"benchmarks.faults_restart: {error}")


if __name__ == "__main__":
    main()
