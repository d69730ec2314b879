"""docs/tutorial_slurm.md on a real cluster: every command, in order; the job is requeued on the way
and comes back."""

import re
import shlex
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path

from tests.docs import tutorials
from tests.slurm.cluster import Cluster

SUBMIT_FIRST = True
LIMIT_S = 600


def submit(cluster: Cluster, folder: Path) -> Future[list[tuple[str, str]]]:
    return cluster.beside(follow, cluster, folder)


def follow(shared: Cluster, folder: Path) -> list[tuple[str, str]]:
    """Type each command in turn on a cluster of its own, where nobody else waits for nodes; return
    them with what they printed."""
    with shared.sibling(nodes=2, accounting=True) as cluster:
        return follow_on(cluster, folder)


def follow_on(cluster: Cluster, folder: Path) -> list[tuple[str, str]]:
    env = cluster.env | {"XDG_STATE_HOME": str(folder), "PYTHONPATH": str(tutorials.ROOT)}
    run, told, job = folder / "runs" / "first", [], ""
    for words in tutorials.commands("tutorial_slurm"):
        text = shlex.join(words)
        if words[:2] == ["scontrol", "requeue"]:
            cluster.wait_for(lambda: lines(run / "metrics.jsonl") > 2, LIMIT_S, "three rows")
            words = [*words[:2], job]
        elif words[:3] == ["tdp", "jobs", "show"]:
            cluster.wait_for(lambda: "resumed after step" in main_log(run), LIMIT_S, "a resume")
        if words[0] == "tdp":
            words = [sys.executable, "-m", "torchdistpackage", *words[1:]]
        done = subprocess.run(
            words, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"
        told.append((text, done.stdout))
        if text.startswith("tdp init"):  # as the page says of nodes without GPUs
            file = folder / "first.yaml"
            file.write_text(re.sub(r"\n *gpus-per-node.*", "", file.read_text()))
        elif text.startswith("tdp submit"):
            job = re.search(r"^job (\d+)", done.stdout, re.M)[1]
    assert cluster.wait_end(job, limit_s=LIMIT_S) == "CANCELLED"
    return told


def lines(path: Path) -> int:
    return path.read_text().count("\n") if path.exists() else 0


def main_log(run: Path) -> str:
    return (run / "logs" / "main.log").read_text()


def test_the_job_of_the_tutorial_comes_back(
    cluster: Cluster, submitted: Future[list[tuple[str, str]]], folder: Path
):
    told = submitted.result(3 * LIMIT_S)
    logs = told[-3][1]
    saved = re.search(r"saved and ended after step (\d+): SIGTERM \[requeue\]", logs)
    assert saved, logs
    assert f"resumed after step {saved[1]} of 3000" in logs
    ls = [text for command, text in told if command == "tdp jobs ls"]
    assert [re.search(r"^first +\d+ +(\w+) +(\d)", text, re.M)[2] for text in ls] == ["0", "1"]
    assert (folder / "runs" / "first" / "report.html").exists()
