"""Four faults on a real Slurm of five nodes: submitit + torchrun, and this package.

Rule: both sides train the same amount on the same tokens with four ranks on four nodes, save every
50 steps, and get the same fault at the same step, one side after the other. What happens is read
from outside: from the files of a run, from Slurm's accounting and from the list of processes.

    python -m benchmarks.faults [--faults crash,kill] [--sides ours] [--json FILE]

Needs root on a Debian (scripts/slurm_cluster).
"""

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from importlib.metadata import version
from pathlib import Path

from benchmarks.faults_data import BROKEN
from tests.slurm.cluster import ENDED, ROOT, CannotRun, Cluster

NODES, STEPS, SAVE_EVERY, AT_STEP = 4, 220, 50, 130
LAYERS, DIM, HEADS, VOCAB, SEQ_LEN, BATCH = 4, 64, 4, 256, 64, 16
VICTIM = 2
"""The rank that raises or is killed."""
CRASHED = "n2"
LIMIT_S = 90.0
POLL_S = 0.1
LAST_LINES = 40
MARK = "FAULTS_OF"

FAULTS = {
    "preempt": "preempted, 20 s of grace",
    "crash": "a node crashes",
    "raise": "a rank raises",
    "kill": "a rank is killed (SIGKILL)",
}
PEERS = {"torchrun": 0, "torchrun, 3 restarts": 3}
"""Name and --max-restarts."""


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


# The two sides


def submit_ours(cluster: Cluster, run: Path, fault: str) -> str:
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
    """Restarts of torchrun itself come into play only when a rank ends and its node stays."""
    sides = [
        Side(
            name,
            lambda cluster, run, fault, n=num: submit_peer(cluster, run, fault, n),
            progress_peer,
            logs_peer,
        )
        for name, num in PEERS.items()
        if num == 0 or fault in ("raise", "kill")
    ]
    return [*sides, Side("ours", submit_ours, progress_ours, logs_ours)]


def partition(fault: str) -> str:
    return "graced" if fault == "preempt" else "main"


# The faults: each returns the moment, and what should be named


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


# One run


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


# Small readers


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


def tail(path: Path) -> list[str]:
    text = path.read_text(errors="replace") if path.exists() else ""
    return text.splitlines()[-LAST_LINES:]


def step_ms(run: Path) -> float:
    """Median of a step, as the run itself measured it."""
    files = sorted(run.glob("metrics*.jsonl"))[:1]
    measured = [row.get("step_s", row.get("time_s")) for f in files for row in json_lines(f)]
    times = sorted(time for time in measured if time)
    return 1e3 * times[len(times) // 2] if times else 0.0


# Report


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
        "step, rank 0 saves. Beside it the same with --max-restarts=3 where that can matter",
        "ours": "tdp submit, defaults but for the same things",
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
    parser.add_argument("--name", default=f"faults-{os.getpid()}", help="of the cluster")
    options = parser.parse_args()
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
