"""Runs of tests/slurm: submitted, waited for, and what is left of them.

All train the same thing, data 2 x pipe 2 or pipe 2 with dropout, so that their losses can be
compared.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from tests.slurm.cluster import ROOT, Cluster

CONFIG = ROOT / "configs" / "gpt_tiny.yaml"
STEPS = 120
RUN = [
    "model.dim=32", "data.seq_len=32", "data.global_batch=16", "model.dropout=0.2",
    f"train.steps={STEPS}", "train.eval_every=25", "train.eval_batches=1",
    "train.generate_tokens=0", "checkpoint.save_every=0", "log.plot=false",
    "optim.warmup_steps=5",
]  # fmt: skip
FOUR_NODES = ["launch.slurm.nodes=4", "launch.slurm.ntasks-per-node=1"]
ONE_NODE = ["launch.slurm.nodes=1", "launch.slurm.ntasks-per-node=4"]
TWO_NODES = ["launch.slurm.nodes=2", "launch.slurm.ntasks-per-node=1", "parallel.data=1"]
TWO_RANKS = ["launch.slurm.nodes=1", "launch.slurm.ntasks-per-node=2", "parallel.data=1"]
"""A pipeline of two. Each rank takes five seconds of a core to start, and Slurm knows no layout."""
ELASTIC = [
    *("parallel.data=2", "parallel.pipe=1", "pipeline.microbatches=1", "model.dropout=0"),
    *("train.eval_every=0", "precision.dtype=float64", "launch.elastic.nodes=[1, 2]"),
    *("launch.slurm.ntasks-per-node=1", "launch.requeue.in_job_restarts=1", "data.name=null"),
    "data.target=tests.train.sources:Paced",
    "data.args={seq_len: 32, num_val: 16, pause_s: 0.15}",
]  # fmt: skip
"""A job of one or two nodes that goes on with the one that is left; it wants train.steps."""
KEYS = ("step", "loss", "grad_norm", "lr", "tokens", "val_loss")


@dataclass
class Lived:
    """What is left of a job: `states` as accounting has them, one for each start."""

    run: Path
    job: str
    states: list[str]
    code: str
    suspects: str = ""
    excluded: str = ""
    requeue_s: float = 0.0

    @property
    def log(self) -> str:
        return (self.run / "logs" / "main.log").read_text()

    @property
    def starts(self) -> list[dict]:
        return starts(self.run)

    def decision(self, restart: int) -> str:
        return (self.run / "job" / f"decision.{self.job}.{restart}").read_text()


def starts(run: Path) -> list[dict]:
    lines = (run / "job" / "starts.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def rows(run: Path) -> list[dict]:
    path = run / "metrics.jsonl"
    return [json.loads(x) for x in path.read_text().splitlines()] if path.exists() else []


def told(run: Path) -> list[tuple]:
    return [tuple(row.get(key) for key in KEYS) for row in rows(run)]


def send(
    cluster: Cluster,
    folder: Path,
    name: str,
    *changes: str,
    record: str | None = "",
    env: dict[str, str] | None = None,
) -> tuple[Path, str]:
    """`tdp submit` with changes and options; the run folder and the job's id.

    record: None if it is not one run that is submitted; then there is no id. env: more variables.
    """
    kept = {change.partition("=")[0] for change in changes}
    base = [x for x in RUN if x.partition("=")[0] not in kept]
    words = [str(CONFIG), f"run.dir={folder}", f"run.name={name}", *base, *changes]
    out = cluster.tdp("submit", *words, env=env).stdout
    run = folder / name
    if record is None:
        return run, ""
    records = (run / "job" / "submissions.jsonl").read_text().splitlines()
    job = json.loads(records[-1])["job"]
    assert job in out
    return run, job


def until_step(cluster: Cluster, run: Path, step: int, restart: int = 0) -> None:
    """Wait until that start has trained to `step`."""
    log = run / "logs" / f"rank0.restart{restart}.log"

    def there() -> bool:
        return log.exists() and bool(rows(run)) and rows(run)[-1]["step"] >= step

    cluster.wait_for(there, 240, f"step {step} of {run.name}, restart {restart}")


def on_two_nodes(
    shared: Cluster, folder: Path, name: str, step: int, *words: str
) -> tuple[Cluster, Path, str]:
    """A job of `ELASTIC` that has trained on both nodes of a cluster of its own to `step`."""
    cluster = shared.sibling(nodes=2, accounting=True)
    # or Slurm would give the job the node that is up first
    up = lambda: set(cluster.node_states().values()) == {"idle"}  # noqa: E731
    cluster.wait_for(up, 30, "two idle nodes")
    run, job = send(cluster, folder, name, *words)
    until_step(cluster, run, step)
    return cluster, run, job


def ending(cluster: Cluster, run: Path, job: str) -> Lived:
    cluster.wait_end(job, 400)

    def booked() -> list[str]:
        words = ("sacct", "-D", "-X", "-n", "-P", "-j", job, "-o", "state,exitcode")
        lines = cluster.run(*words).stdout.splitlines()
        alive = ("RUNNING", "PENDING", "REQUEUED")
        done = lines and not lines[-1].startswith(alive)
        return lines if done else []

    lines = cluster.wait_for(booked, 30, f"accounting of job {job}")
    code = lines[-1].partition("|")[2]
    return Lived(run, job, [line.partition("|")[0] for line in lines], code)
