"""The two sides of the fault benchmark: how a run is submitted, and what its files say of it.

One rule: both get the same model size, data, nodes, checkpoints and time; a side differs from the
other only by what is in this file and in the scripts it names.
"""

import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.slurm.cluster import ROOT, Cluster

NODES, STEPS, SAVE_EVERY, AT_STEP = 4, 220, 50, 130
LAYERS, DIM, HEADS, VOCAB, SEQ_LEN, BATCH = 4, 64, 4, 256, 64, 16
VICTIM = 2
"""The rank that raises or is killed."""
MARK = "FAULTS_OF"
"""Variable that all processes of a run have."""
PEERS = {"torchrun": 0, "torchrun, 3 restarts": 3}
"""Name and --max-restarts."""
OURS = {"ours": 0, "ours, 3 restarts": 3}
"""Name and launch.requeue.in_job_restarts."""


@dataclass(frozen=True)
class Progress:
    """num_starts: how often training began; begin: the step before the last start's first one."""

    num_starts: int = 0
    begin: int = 0
    last: int = 0
    in_this_start: bool = False


@dataclass
class Side:
    """A way to submit: what follows the submission is the same for both."""

    name: str
    submit: Callable[[Cluster, Path, str], str]
    progress: Callable[[Path], Progress]
    logs: Callable[[Path, str], list[Path]]


def submit_ours(cluster: Cluster, run: Path, fault: str, restarts: int) -> str:
    args = f"seq_len: {SEQ_LEN}, vocab: {VOCAB}"
    if fault == "raise":
        args += f", broken: {VICTIM}, broken_step: {AT_STEP}, note: {run.parent / run.name}.note"
    cluster.tdp(
        "submit", ROOT / "configs" / "gpt_tiny.yaml", f"run.dir={run.parent}",
        f"run.name={run.name}", "parallel.data=4", "parallel.pipe=1", "pipeline.microbatches=1",
        f"model.layers={LAYERS}", f"model.dim={DIM}", f"model.heads={HEADS}",
        f"model.vocab={VOCAB}", f"data.seq_len={SEQ_LEN}", f"data.global_batch={BATCH}",
        "data.name=null", "data.target=benchmarks.faults_data:Tokens", f"data.args={{{args}}}",
        f"train.steps={STEPS}", "train.eval_every=0", "train.eval_batches=1",
        "train.generate_tokens=0", f"checkpoint.save_every={SAVE_EVERY}", "log.plot=false",
        f"launch.slurm.nodes={NODES}", "launch.slurm.ntasks-per-node=1",
        f"launch.slurm.partition={partition(fault)}", "launch.slurm.time=60",
        "launch.slurm.files=[benchmarks/*.py]",
        f"launch.slurm.prologue=['export {MARK}={run.name}']",
        f"launch.requeue.in_job_restarts={restarts}",
        limit_s=120,
    )  # fmt: skip
    records = (run / "job" / "submissions.jsonl").read_text().splitlines()
    return json.loads(records[-1])["job"]


def progress_ours(run: Path) -> Progress:
    starts = json_lines(run / "job" / "starts.jsonl")
    metrics = run / "metrics.jsonl"
    steps = json_lines(metrics)
    if not starts or not steps:
        return Progress(len(starts), starts[-1]["step"] if starts else 0)
    # Every start writes the file anew before its first step, so an older file is an older start's.
    begin = starts[-1]["step"]
    written_anew = Path(run / "job" / "starts.jsonl").stat().st_mtime < born_s(metrics)
    last = steps[-1]["step"]
    return Progress(len(starts), begin, last, written_anew and last > begin)


def logs_ours(run: Path, job: str) -> list[Path]:
    return [run / "logs" / "main.log"]


def submit_peer(cluster: Cluster, run: Path, fault: str, max_restarts: int) -> str:
    run.mkdir()
    words = [
        f"--folder={run}", f"--layers={LAYERS}", f"--dim={DIM}", f"--heads={HEADS}",
        f"--vocab={VOCAB}", f"--seq-len={SEQ_LEN}", f"--global-batch={BATCH}",
        f"--steps={STEPS}", f"--save-every={SAVE_EVERY}",
    ]  # fmt: skip
    if fault == "raise":
        words += [f"--broken={VICTIM}", f"--broken-step={AT_STEP}"]
    done = cluster.run(
        cluster.python, ROOT / "benchmarks" / "faults_peer.py", f"--logs={run / 'logs'}",
        f"--partition={partition(fault)}", f"--nodes={NODES}", f"--max-restarts={max_restarts}",
        *words, env={MARK: run.name},
    )  # fmt: skip
    return done.stdout.split()[-1]


def progress_peer(run: Path) -> Progress:
    files = sorted(run.glob("metrics.*.jsonl"))
    steps = json_lines(files[-1]) if files else []
    if not steps:
        return Progress(len(files))
    return Progress(len(files), steps[0]["step"], steps[-1]["step"], len(steps) > 1)


def logs_peer(run: Path, job: str) -> list[Path]:
    """The first two are what submitit's own `job.stderr()` and `job.stdout()` show."""
    names = [f"{job}_{task}_log.{what}" for task in range(NODES) for what in ("err", "out")]
    return [run / "logs" / name for name in names]


def sides_of(fault: str) -> list[Side]:
    """Restarts inside the job come into play only when a rank ends and its node stays."""
    ways = (
        (PEERS, submit_peer, progress_peer, logs_peer),
        (OURS, submit_ours, progress_ours, logs_ours),
    )
    return [
        Side(
            name,
            lambda cluster, run, fault, n=num, submit=submit: submit(cluster, run, fault, n),
            progress,
            logs,
        )
        for names, submit, progress, logs in ways
        for name, num in names.items()
        if num == 0 or fault in ("raise", "kill")
    ]


def partition(fault: str) -> str:
    return "graced" if fault == "preempt" else "main"


def json_lines(path: Path) -> list[dict]:
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except ValueError:  # half written
            continue
    return found


def born_s(path: Path) -> float:
    """When this file, not an older one of its name, was made."""
    done = subprocess.run(
        ["stat", "-c", "%W", str(path)], capture_output=True, text=True, timeout=10, check=True
    )
    return float(done.stdout)
