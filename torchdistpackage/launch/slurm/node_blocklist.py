"""Suspect nodes: `suspects.jsonl` next to the runs, with one piece of evidence on each line.

Evidence has a weight and expires. A node is excluded while its valid evidence weighs at least 1 in
total. Errors of the user's own code (an exception, too much memory) are no evidence. A job start
counts once against a node, however often it is reported.
"""

import logging
import re
import signal
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from torchdistpackage.environment.failure import Failure, FailureKind
from torchdistpackage.environment.slurm_env import expand
from torchdistpackage.errors import LaunchError
from torchdistpackage.files import append_json, read_json_lines
from torchdistpackage.launch.slurm.query import Runner, run_command, slurm_time
from torchdistpackage.launch.slurm.requeue import NODE_SILENT
from torchdistpackage.launch.slurm.run_dir import Start, attempt_id, read_starts
from torchdistpackage.launch.slurm.runs import decision
from torchdistpackage.run_files import RunDir

log = logging.getLogger(__name__)

THRESHOLD = 1.0
EXPIRY_S = 24 * 3600.0
NODE_FAIL_EXPIRY_S = 48 * 3600.0
_HALF = 0.5

_HARDWARE = (
    ("uncorrectable memory error of the GPU", r"uncorrectable ecc|double.bit ecc"),
    ("uncorrectable NVLink error", r"uncorrectable nvlink"),
    ("Xid of the GPU driver", r"\bxid\b[ :(]*(pci|[0-9])"),
    ("GPU lost", r"fallen off the bus|gpu is lost"),
    ("GPU unavailable", r"cuda-capable device\(s\) is/are busy or unavailable"),
    ("hardware error of the GPU", r"(cuda|hip) error: [^\n]*hardware"),
    (
        "network error of NCCL",
        r"ncclremoteerror|remote process exited or there was a network error",
    ),
    ("slow or wrong before the first step", r"the node check failed on rank"),
)
"""Hardware faults, and the texts by which CUDA, its driver, NCCL and the node check report them."""

_DOWN = re.compile(r"(down|fail|failing)\*?", re.IGNORECASE)
"""States of a broken node; drained or powered-off nodes are not broken."""
_NOTICED_S = 900.0
"""Seconds until Slurm notices a lost node; a job may end with its connections long before."""
_CLOCKS_DIFFER_S = 60.0


@dataclass(frozen=True, slots=True)
class NodeIncident:
    """A piece of evidence against a node. job: the start (`123.0`) or id of its job."""

    node: str
    reason: str
    weight: float
    time_s: float
    expires_s: float
    job: str

    def __str__(self) -> str:
        when = time.strftime("%d %b %H:%M", time.localtime(self.time_s))
        until = time.strftime("%d %b %H:%M", time.localtime(self.expires_s))
        return f"{self.node}: {self.reason} ({when}, job {self.job}; until {until})"


def incident_of(
    failure: Failure, job: str, now_s: float, others: Sequence[Failure] = ()
) -> NodeIncident | None:
    """Return the evidence against a node in the failure that ended a start, if any.

    others: failures of the same start. A node that reported a rank's end after the alarm of a hang
    is still alive.
    """
    reason, node = _reason(failure), failure.host.partition(".")[0]
    # a watcher ends its rank only after others have failed, whatever the clocks of two hosts say
    later = [
        other
        for other in others
        if other.host == failure.host
        and (other.kind is FailureKind.ENDED or other.time_s > failure.time_s)
    ]
    if not reason or not node or (failure.kind is FailureKind.HUNG and later):
        return None
    text = f"rank {failure.rank}: {reason}"
    return NodeIncident(node, text, _HALF, failure.time_s, now_s + EXPIRY_S, job)


def record(path: Path, evidence: NodeIncident) -> None:
    """Append a piece of evidence.

    If that fails, a warning is logged instead of an error: a job that ends has more important
    things to report.
    """
    try:
        append_json(path, asdict(evidence))
    except OSError as error:
        log.warning("%s is not noted in %s: %s", evidence, path, error.strerror)


def record_bad_node(
    files: RunDir, env: Mapping[str, str], node: str, rank: int, reason: str
) -> None:
    """Record a node that the check before the first step named; one start is enough evidence."""
    now_s = time.time()
    text = f"rank {rank}: {reason}"
    record(
        files.suspects,
        NodeIncident(node, text, THRESHOLD, now_s, now_s + EXPIRY_S, attempt_id(env)),
    )


def named_in(path: Path, start: str) -> tuple[str, ...]:
    """Return the nodes against which starts of one job since its last requeue have evidence.

    start: one of these starts, such as 7.0 or 7.0.1.
    """
    of_job = ".".join(start.split(".")[:2])
    return tuple(
        sorted({x.node for x in read(path) if x.job == of_job or x.job.startswith(f"{of_job}.")})
    )


def read(path: Path) -> list[NodeIncident]:
    """Return all evidence, including expired evidence.

    Invalid lines, and a path that is not a file, are skipped with a warning.
    """
    try:
        evidence, bad = read_json_lines(path, _parse)
    except LaunchError as error:
        log.warning("%s", error)
        return []
    if bad:
        log.warning("%s: not read: line %s", path, ", ".join(map(str, bad)))
    return evidence


def reasons(path: Path, now_s: float) -> dict[str, list[NodeIncident]]:
    """Return every node to exclude, ordered by name, with the evidence against it."""
    heaviest: dict[tuple[str, str], NodeIncident] = {}
    for evidence in read(path):
        key = (evidence.node, evidence.job)
        heavier = heaviest.get(key)
        if evidence.expires_s > now_s and (heavier is None or evidence.weight > heavier.weight):
            heaviest[key] = evidence
    by_node: dict[str, list[NodeIncident]] = {}
    for evidence in sorted(heaviest.values(), key=lambda e: (e.node, e.time_s)):
        by_node.setdefault(evidence.node, []).append(evidence)
    return {
        n: entries for n, entries in by_node.items() if sum(e.weight for e in entries) >= THRESHOLD
    }


def excluded(path: Path, now_s: float) -> tuple[str, ...]:
    """Return the names of the nodes to exclude, for `sbatch --exclude`."""
    return tuple(reasons(path, now_s))


def explain(path: Path, now_s: float, of: Collection[str] | None = None) -> str:
    """Return one line for each excluded node with the reason, or "". of: names of nodes to list."""
    evidence_of = {n: e for n, e in reasons(path, now_s).items() if of is None or n in of}
    lines = [f"leaving out {'; '.join(map(str, evidence))}" for evidence in evidence_of.values()]
    return "\n".join([*lines, f"({path} says so; remove a line to forgive)"]) if evidence_of else ""


def record_failed_nodes(
    files: RunDir,
    env: Mapping[str, str],
    runner: Runner = run_command,
    *,
    now_s: float | None = None,
) -> list[NodeIncident]:
    """Record the nodes that broke during the previous start; return the new evidence.

    env: environment of this start, or of a submission outside any job. Slurm is asked which nodes
    of that start are down now, and its accounting, if any, which were down in between. A start
    whose ranks left a decision lost no node; the batch script leaves one if a node is silent.
    """
    now = time.time() if now_s is None else now_s
    earlier = [s for s in read_starts(files.starts) if s.start != attempt_id(env)]
    if not earlier or not earlier[-1].nodes:
        return []
    start = earlier[-1]
    decided = decision(files, start)
    if files.decision(start.start).exists() and not (decided and NODE_SILENT in decided.reason):
        return []
    recorded = {(e.node, e.job) for e in read(files.suspects) if e.weight >= THRESHOLD}
    end_s = now + NODE_FAIL_EXPIRY_S
    new = [
        NodeIncident(node, f"{state} under job {start.job}", THRESHOLD, now, end_s, start.start)
        for node, state in _broken(start, runner, now).items()
        if (node, start.start) not in recorded
    ]
    for evidence in new:
        record(files.suspects, evidence)
    return new


def _broken(start: Start, runner: Runner, now_s: float) -> dict[str, str]:
    """Return the nodes that went down during a start, and the state that Slurm gives for each."""
    try:
        nodes = set(expand(start.nodes))
    except LaunchError as error:
        log.warning("start %s: %s", start.start, error)
        return {}
    outages = (
        _rows(runner, "sinfo", "-N", "-h", "-n", start.nodes, "-o", "%N|%T|%H|%E"),
        _rows(
            runner,
            "sacctmgr",
            "-n",
            "-P",
            "list",
            "event",
            f"nodes={start.nodes}",
            f"start={slurm_time(start.time_s)}",
            "format=NodeName,State,TimeStart,Reason",
        ),
    )
    # the accounting last: it may be slow, and time short
    end_s = _end_s(start, runner)
    until_s = now_s if end_s is None else end_s + _NOTICED_S
    broken: dict[str, str] = {}
    for node, state, since, reason in (row for rows in outages for row in rows if len(row) == 4):
        since_s = float(since) if since.isdigit() else now_s
        under = start.time_s - _CLOCKS_DIFFER_S <= since_s <= until_s
        if node in nodes and under and _DOWN.fullmatch(state):
            state_name = state.rstrip("*").lower()
            broken.setdefault(node, f"{state_name} ({reason})" if reason else state_name)
    return broken


def _end_s(start: Start, runner: Runner) -> float | None:
    """Return when the job ended after this start, according to the accounting, or None."""
    since = slurm_time(start.time_s - _CLOCKS_DIFFER_S)
    command = ("sacct", "-D", "-X", "-n", "-P", "-j", start.job, "-S", since, "-o", "Start,End")
    rows = [row for row in _rows(runner, *command) if len(row) == 2 and all(map(str.isdigit, row))]
    return min((float(end) for _, end in rows if float(end) >= start.time_s), default=None)


def _rows(runner: Runner, *command: str) -> list[list[str]]:
    """Return the rows that a command prints, split into fields; none if the command fails."""
    try:
        ran = runner(command)
    except LaunchError as error:
        log.info("%s", error)
        return []
    lines = ran.out.splitlines() if ran.code == 0 else []
    return [[field.strip() for field in line.split("|", 3)] for line in lines]


def _reason(failure: Failure) -> str:
    if failure.kind is FailureKind.SIGNAL and failure.exit_code == -signal.SIGBUS:
        return "killed by SIGBUS"
    if failure.kind is FailureKind.HUNG:  # the detail is about all ranks
        return "did not answer in a hang" if "does not answer" in failure.error else ""
    text = f"{failure.error}\n{failure.detail}".lower()
    return next((reason for reason, pattern in _HARDWARE if re.search(pattern, text)), "")


def _parse(values: Any) -> NodeIncident:
    kinds: Any = {field.name: field.type for field in fields(NodeIncident)}
    return NodeIncident(**{name: kind(values[name]) for name, kind in kinds.items()})
