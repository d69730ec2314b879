"""Four faults on a real Slurm of five nodes: submitit + torchrun, and this package.

Rule: both sides train the same amount on the same tokens with four ranks on four nodes, save every
50 steps, and get the same fault at the same step, one side after the other. What happens is read
from outside: from the files of a run, from Slurm's accounting and from the list of processes.

    python -m benchmarks.faults [--faults crash,kill] [--sides ours] [--json FILE]
    python -m benchmarks.faults --seed 1 --minutes 10     faults_soak.py, without Slurm

Needs root on a Debian with Slurm (scripts/slurm_cluster up --install).
"""

import argparse
import json
import os
import platform
import re
import sys
import tempfile
import time
from dataclasses import dataclass, field
from datetime import datetime
from importlib.metadata import version
from pathlib import Path

from benchmarks.faults_sides import (
    AT_STEP,
    BATCH,
    DIM,
    HEADS,
    LAYERS,
    NODES,
    SAVE_EVERY,
    SEQ_LEN,
    STEPS,
    VOCAB,
    Progress,
    Side,
    json_lines,
    sides_of,
)
from benchmarks.faults_soak import soak
from benchmarks.faults_strike import LAST_LINES, POLL_S, STRIKE, marked, named
from tests.slurm.cluster import ENDED, ROOT, CannotRun, Cluster

LIMIT_S = 90.0
FAULTS = {
    "preempt": "preempted, 20 s of grace",
    "crash": "a node crashes",
    "raise": "a rank raises",
    "kill": "a rank is killed (SIGKILL)",
}


@dataclass
class Row:
    """What one fault did to one run; None where there is nothing to tell. Times from the fault."""

    fault: str
    side: str
    date: str = field(default_factory=lambda: datetime.now().astimezone().isoformat())
    at_step: int = 0
    steps_lost: int | None = None
    back_s: float | None = None
    ended_s: float | None = None
    gone_s: float | None = None
    starts: int = 0
    state: str = ""
    exit_code: str = ""
    culprit: str = ""
    named: str = ""
    says: str = ""
    step_ms: float = 0.0
    load: float = field(default_factory=lambda: round(os.getloadavg()[0], 1))
    last_lines: list[str] = field(default_factory=list)


def one(cluster: Cluster, folder: Path, fault: str, side: Side) -> Row:
    row = Row(fault, side.name)
    run = folder / f"{fault}-{re.sub('[^a-z0-9]+', '-', side.name)}"
    cluster.settle()
    job = side.submit(cluster, run, fault)
    before = cluster.wait_for(
        lambda: look if (look := side.progress(run)).last >= AT_STEP - 1 else None,
        120, f"step {AT_STEP} of {run}", POLL_S,
    )  # fmt: skip
    began, row.culprit = STRIKE[fault](cluster, run)
    text = follow(cluster, side, run, job, before, began, row)
    row.named, row.says, row.last_lines = named(fault, row.culprit, text)
    finish(cluster, run, job, began, row)
    row.starts = side.progress(run).num_starts
    row.step_ms = round(step_ms(run), 1)
    return row


def follow(
    cluster: Cluster, side: Side, run: Path, job: str, before: Progress, began: float, row: Row
) -> dict[str, list[str]]:
    """Until it trains again, has ended, or time is over; the logs' last lines before that."""
    row.at_step = before.last
    last: dict[str, list[str]] = {}
    asked = 0.0
    while time.time() - began < LIMIT_S:
        now = side.progress(run)
        if now.num_starts == before.num_starts:
            row.at_step = max(row.at_step, now.last)
        elif now.in_this_start and row.back_s is None:
            row.back_s = round(time.time() - began, 1)
            row.steps_lost = row.at_step - now.begin
            if row.fault != "raise":  # what is broken stays broken: see where it ends
                return last
        if row.back_s is None and now.num_starts == before.num_starts:
            last = {path.name: tail(path) for path in side.logs(run, job)}
        if time.time() - asked > 0.5:
            asked = time.time()
            if cluster.job_state(job) in ENDED:
                return {path.name: tail(path) for path in side.logs(run, job)}
        time.sleep(POLL_S)
    return {path.name: tail(path) for path in side.logs(run, job)}


def finish(cluster: Cluster, run: Path, job: str, began: float, row: Row) -> None:
    """Wait for the end, of job and processes; a job that would stay is cancelled, and says so."""
    if row.back_s is not None and row.fault != "raise":
        cluster.wait_end(job, 120)
    elif cluster.job_state(job) in ENDED:
        row.ended_s = round(time.time() - began, 1)
        cluster.wait_for(lambda: not marked(run.name), 30, "end of processes", POLL_S)
        row.gone_s = round(time.time() - began, 1)
    else:
        state, num = cluster.job_state(job), len(marked(run.name))
        row.says += f" [after {LIMIT_S:.0f} s: {state}, {num} processes; cancelled]"
        cluster.cancel(job)
        cluster.wait_end(job, 60)

    def booked() -> str:
        words = ("sacct", "-D", "-X", "-n", "-P", "-j", job, "-o", "state,exitcode")
        lines = cluster.run(*words).stdout.splitlines()
        alive = ("RUNNING", "PENDING", "REQUEUED")
        return lines[-1] if lines and not lines[-1].startswith(alive) else ""

    row.state, _, _ = cluster.wait_for(booked, 30, "accounting").partition("|")
    row.state = row.state.split()[0]
    # Not sacct's, which takes 128 off what is above it.
    row.exit_code = cluster.job(job)["ExitCode"]


def tail(path: Path) -> list[str]:
    text = path.read_text(errors="replace") if path.exists() else ""
    # results are kept, and where this checkout lies is nobody's business
    return (
        text.replace(f"{ROOT}/", "").replace(f"{sys.base_prefix}/", "").splitlines()[-LAST_LINES:]
    )


def step_ms(run: Path) -> float:
    """Median of a step, as the run itself measured it."""
    files = sorted(run.glob("metrics*.jsonl"))[:1]
    measured = [row.get("step_s", row.get("time_s")) for f in files for row in json_lines(f)]
    times = sorted(time for time in measured if time)
    return 1e3 * times[len(times) // 2] if times else 0.0


def machine(cluster: Cluster) -> dict[str, object]:
    memory = re.search(r"MemTotal:\s+(\d+)", Path("/proc/meminfo").read_text())
    return {
        "cores": os.cpu_count(),
        "memory_gib": round(int(memory[1]) / 2**20) if memory else None,
        "system": platform.platform(),
        "slurm": cluster.run("sinfo", "-V").stdout.strip(),
        "torch": version("torch"),
        "submitit": version("submitit"),
        "nodes": "5 sets of namespaces on this machine, gloo over bridged Ethernet pairs, no GPU",
    }


def settings() -> dict[str, object]:
    return {
        "ranks": f"data parallel {NODES}, one on each of {NODES} nodes, one node spare",
        "model": f"gpt, {LAYERS} layers, dim {DIM}, {HEADS} heads, vocab {VOCAB}, "
        f"seq_len {SEQ_LEN}, global batch {BATCH}, float32",
        "steps": STEPS,
        "save_every": SAVE_EVERY,
        "fault_at_step": AT_STEP,
        "limit_s": LIMIT_S,
        "slurm": "20 s grace in partition graced, KillWait 5, a requeued job waits 5 s; the "
        "controller is told of the crash at once",
        "peer": "submitit AutoExecutor, defaults but for nodes, partition and 60 minutes; "
        "checkpoint() returns DelayedSubmission(self); torchrun with c10d rendezvous, SIGUSR2 "
        "added to its signals to handle; train.py handles SIGUSR2 and SIGTERM: ranks agree on a "
        "step, rank 0 saves. Beside it, where that can matter, the same with --max-restarts=3 and "
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 (without the variable the attempts of four agents "
        "did not meet: the one such run was stuck at the limit)",
        "ours": "tdp submit, defaults but for the same things; beside it, where that can matter, "
        "the same with launch.requeue.in_job_restarts=3",
    }


def show(rows: list[Row]) -> None:
    head = f"{'fault':28}{'side':22}{'lost':>6}{'back s':>8}{'ended s':>9}{'state':>12}{'code':>8}"
    print(f"\n{head}  named")
    for row in rows:
        times = [row.steps_lost, row.back_s, row.ended_s]
        lost, back, ended = ("-" if value is None else value for value in times)
        print(
            f"{FAULTS[row.fault]:28}{row.side:22}{lost:>6}{back:>8}{ended:>9}{row.state:>12}"
            f"{row.exit_code:>8}  {row.named}: {row.says[:90]}"
        )


def keep(path: Path | None, kind: dict[str, object], rows: list[Row]) -> None:
    """Write the results; of runs that were not repeated now, what the file had."""
    if path is None:
        return
    fresh = {(row.fault, row.side): vars(row) for row in rows}
    old = json.loads(path.read_text())["rows"] if path.exists() else []
    all_rows = {(row["fault"], row["side"]): row for row in old} | fresh
    order = [(fault, side.name) for fault in FAULTS for side in sides_of(fault)]
    found = {
        "date": datetime.now().astimezone().isoformat(),
        "machine": kind,
        "settings": settings(),
        "rows": [all_rows[key] for key in order if key in all_rows],
    }
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(found, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="also keep the results in this file")
    parser.add_argument("--faults", default=",".join(FAULTS), help=", ".join(FAULTS))
    parser.add_argument("--sides", default="", help="parts of names: ours, torchrun, 3 restarts")
    parser.add_argument("--seed", type=int, default=1, help="of --minutes")
    parser.add_argument("--minutes", type=float, help="faults by a seed on local ranks, see soak")
    parser.add_argument("--every", type=float, default=60.0, help="seconds between two of them")
    parser.add_argument("--rows", type=Path, help="a fault a line, added to; goes on at its end")
    parser.add_argument("--ranks", type=int, default=4, help="of the run with --minutes")
    parser.add_argument("--pause", type=float, default=0.25, help="seconds that a batch takes")
    parser.add_argument("--beside", action="store_true", help="compare with a run beside it")
    parser.add_argument("--name", default=f"faults-{os.getpid()}", help="of the cluster")
    options = parser.parse_args()
    if options.minutes is not None:
        found = soak(
            options.seed,
            options.minutes,
            options.every,
            options.rows,
            options.ranks,
            options.pause,
            beside=options.beside,
        )
        print(json.dumps(found, indent=2))
        if options.json is not None:
            options.json.write_text(json.dumps(found, indent=2) + "\n")
        return
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    print(f"runs are in {folder}", flush=True)
    rows: list[Row] = []
    began = time.time()
    try:
        with Cluster(options.name, nodes=5, accounting=True) as cluster:
            for fault in options.faults.split(","):
                for side in sides_of(fault):
                    if any(part in side.name for part in options.sides.split(",")):
                        rows.append(one(cluster, folder, fault, side))
                        show(rows[-1:])
                        keep(options.json, machine(cluster), rows)
    except CannotRun as error:
        sys.exit(f"benchmarks.faults: {error}")
    print(f"\ntook {time.time() - began:.0f} s")
    show(rows)


if __name__ == "__main__":
    main()
