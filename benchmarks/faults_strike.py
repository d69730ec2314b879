"""The faults, and what a log must say of each. Runs on the login host, outside the jobs.

One rule: who is at fault is known from the fault itself, never from the log that is judged.
"""

import json
import os
import re
import signal
import time
from pathlib import Path

from benchmarks.faults_data import BROKEN
from benchmarks.faults_sides import MARK, VICTIM
from tests.slurm.cluster import Cluster

CRASHED = "n2"
POLL_S = 0.1
LAST_LINES = 40


def preempt(cluster: Cluster, run: Path) -> tuple[float, str]:
    began = time.time()
    cluster.sbatch("-p", "high", "-N5", "--exclusive", "-o", "/dev/null", script="sleep 1")
    return began, "preemption or its signal"


def crash(cluster: Cluster, run: Path) -> tuple[float, str]:
    began = time.time()
    cluster.power_off(CRASHED)
    return began, f"node {CRASHED}"


def broken(cluster: Cluster, run: Path) -> tuple[float, str]:
    notes = [run / "note", run.parent / f"{run.name}.note"]
    cluster.wait_for(lambda: any(note.exists() for note in notes), 60, "the exception", POLL_S)
    said = json.loads(next(note for note in notes if note.exists()).read_text())
    return said["time_s"], f"rank {said['rank']} on {said['host']}: ValueError: {BROKEN}"


def kill(cluster: Cluster, run: Path) -> tuple[float, str]:
    """The process that trains, not the one that watches over it."""
    found = {pid: env for pid, env in marked(run.name).items() if trains(pid, env)}
    # A rank of ours is the fork of its watcher, with the same words and variables.
    children = [pid for pid in found if parent(pid) in found]
    (pid,) = children or found
    env = found[pid]
    began = time.time()
    os.kill(pid, signal.SIGKILL)
    return began, f"rank {VICTIM} on {env['SLURMD_NODENAME']}: killed by signal 9"


STRIKE = {"preempt": preempt, "crash": crash, "raise": broken, "kill": kill}


def trains(pid: int, env: dict[str, str]) -> bool:
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    if any(word.endswith("faults_train.py") for word in words) and "-u" in words:
        return env.get("RANK") == str(VICTIM)
    return "torchdistpackage" in words and env.get("SLURM_PROCID") == str(VICTIM)


def marked(name: str) -> dict[int, dict[str, str]]:
    """Processes of a run, wherever they live, with their variables."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            if f"{MARK}={name}" in words:
                found[int(entry.name)] = dict(w.split("=", 1) for w in words if "=" in w)
    return found


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def named(fault: str, culprit: str, logs: dict[str, list[str]]) -> tuple[str, str, list[str]]:
    """Who is blamed in the last lines of the log that one opens first, and the words that say it.

    The logs are in the order in which one opens them; the first two count as the first log, and
    where nothing is said in them the others are looked at too.
    """
    names = list(logs)
    first = [line for name in names[:2] for line in logs[name]]
    rest = [line for name in names[2:] for line in logs[name]]
    if fault in ("preempt", "crash"):
        pattern = r"preempt|SIGUSR[12]|SIGTERM" if fault == "preempt" else (
            rf"\b{CRASHED}\b.*fail|fail.*\b{CRASHED}\b"
        )  # fmt: skip
        says = [line for line in first if re.search(pattern, line, re.IGNORECASE)]
        says.sort(key=lambda line: "preempted" not in line)
        return ("yes" if says else "nobody"), (says or [""])[0].strip(), first[-LAST_LINES:]
    rank, host = re.match(r"rank (\d+) on (\w+)", culprit).groups()
    blamed = blame(first)
    elsewhere = blame(rest)
    if (rank, host) in blamed and len(set(blamed)) == 1:
        answer = "yes"
    elif (rank, host) in blamed:
        answer = f"yes, among {len(set(blamed))}"
    elif blamed:
        answer = f"no: {', '.join(f'rank {r} on {h}' for r, h in dict.fromkeys(blamed))}"
    else:
        answer = "nobody"
    if answer[:3] != "yes" and (rank, host) in elsewhere:
        answer += f"; right in 1 of {len(set(elsewhere))} other logs"
    cause = BROKEN if fault == "raise" else r"signal 9|SIGKILL|exitcode\s*:\s*-9"
    says = [line for line in first if re.search(cause, line)]
    return answer, (says or ["the cause is not in this log"])[-1].strip(), first[-LAST_LINES:]


def blame(lines: list[str]) -> list[tuple[str, str]]:
    """(rank, host) that a log declares to be the cause: our last block, torchrun's root cause."""
    found = []
    text = "\n".join(lines)
    found += re.findall(r"^--- rank (\d+) on host (\w+)", text, re.MULTILINE)
    for block in text.split("Root Cause")[1:]:
        host = re.search(r"host\s*:\s*(\w+)", block)
        rank = re.search(r"rank\s*:\s*(\d+)", block)
        if host and rank:
            found.append((rank[1], host[1]))
    return found
