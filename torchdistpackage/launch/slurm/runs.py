"""Read a run folder: submissions, starts, progress, how the run ended, and logs.

Reading works at any moment and from any machine that shares the files: missing or truncated data is
skipped and never an error. A log only grows, and a restart has its own file after the previous one,
so no text is passed on twice.
"""

import codecs
import contextlib
import difflib
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchdistpackage.bounded import check_regular, read_regular
from torchdistpackage.environment.failure import (
    Failure,
    read_failure_reports,
    root_cause,
    summary,
)
from torchdistpackage.errors import ConfigError, LaunchError
from torchdistpackage.launch.lock import holder_of
from torchdistpackage.launch.run_events import END, START, RunEvent, read_events
from torchdistpackage.launch.run_rows import last_rows, mapping, number
from torchdistpackage.launch.slurm.query import (
    GRACE_S,
    JobInfo,
    Outcome,
    Runner,
    array_job_id,
    query_jobs,
    run_command,
)
from torchdistpackage.launch.slurm.requeue import Decision, RequeueDecision
from torchdistpackage.launch.slurm.run_dir import Start, Submission, read_records, read_starts
from torchdistpackage.run_files import RESOLVED, RunDir

_TAIL_BYTES, _MOST_CONFIG = 1 << 16, 1 << 24
_STEPS = re.compile(r"^train:\n(?:[ #].*\n|\n)*? +steps: *(\d+)", re.MULTILINE)
_RECORDS = RunDir(Path()).records.as_posix()
_CLOCKS_DIFFER_S = 5.0
"""Largest assumed difference between the clocks of the machine that submits and the nodes."""
_POLL_S = 0.5
_ASK_S = 5.0
"""Seconds between queries of Slurm, because each one burdens its controller."""
RUNNING, UNKNOWN = "running", "unknown"
_STATES = {"requeue": "requeued", "chain": "chained", "again": "restarted", "stop": "stopped"}
"""State of a run by the decision that ended its last start."""
_OUTCOMES = {
    RUNNING: Outcome.ALIVE,
    "finished": Outcome.SUCCEEDED,
    "stopped": Outcome.FAILED,
    "failed": Outcome.FAILED,
}


@dataclass(frozen=True, slots=True)
class RunProgress:
    """The last step in `metrics.jsonl`, the planned number of steps, and the last training loss."""

    step: int | None = None
    num_steps: int | None = None
    loss: float | None = None


@dataclass(frozen=True, slots=True)
class AttemptResult:
    """The end of one start: the decision of its ranks, and which of them failed."""

    start: Start
    decision: Decision | None
    failures: tuple[Failure, ...]


@dataclass(frozen=True, slots=True)
class SubmittedRun:
    """A run that was submitted at least once."""

    folder: Path
    records: tuple[Submission, ...]

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def latest(self) -> Submission:
        return self.records[-1]

    @property
    def files(self) -> RunDir:
        return RunDir(self.folder)


@dataclass(frozen=True, slots=True)
class Status:
    """The status of a run. word: Slurm's state, or one of ours if Slurm does not know the job (any
    more).
    """

    word: str
    outcome: Outcome
    reason: str = ""

    @property
    def suffix(self) -> str:
        """Return the reason in the form that ends a line."""
        return f": {self.reason}" if self.reason else ""


@dataclass(frozen=True, slots=True)
class RunStart:
    """One start of the run: where it began and, as far as known, how it ended.

    attempt: the job and its number, or "local". end_s: None while it runs, or if its end was not
    recorded. word, cause: of its end. keys: the keys that were set, each with value and place.
    """

    attempt: str
    begin_s: float
    step: int
    end_s: float | None = None
    end_step: int | None = None
    word: str = UNKNOWN
    cause: str = ""
    place: str = ""
    num_ranks: int | None = None
    device: str = ""
    job_end_s: float | None = None
    keys: Mapping[str, Sequence[Any]] = field(default_factory=dict[str, Sequence[Any]])


@dataclass(frozen=True, slots=True)
class RunState:
    """The state of a run according to its folder. reason: why it ended so, or ""."""

    word: str
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.word}: {self.reason}" if self.reason else self.word


def read_run(folder: Path) -> SubmittedRun | None:
    """Return the run of a folder, or None if nothing was submitted there."""
    records = read_records(RunDir(folder).records)
    return SubmittedRun(folder, tuple(records)) if records else None


def find_runs(folder: Path) -> list[SubmittedRun]:
    """Return all submitted runs in `folder` and its subfolders, by time of their last
    submission.
    """
    paths = [p for depth in ("*", "*/*") for p in folder.glob(f"{depth}/{_RECORDS}")]
    runs = [run for path in paths if (run := read_run(path.parents[1]))]
    return sorted(runs, key=lambda run: (run.latest.time_s, run.name))


def find(name: str, folder: Path) -> list[SubmittedRun]:
    """Return the runs that `name` refers to: a run folder, the name of one in `folder`, or a job
    id.

    A folder of runs has several, and so has the id of an array.

    Raises:
        ConfigError: none is meant; the text has the names that are near.
    """
    paths = (Path(name), folder / name)
    for path in paths:
        if run := read_run(path):
            return [run]
    runs = find_runs(folder)
    ids = [{x for r in run.records for x in (r.job, array_job_id(r.job))} for run in runs]
    if matches := [
        run for run, job_ids in zip(runs, ids, strict=True) if name in (run.name, *job_ids)
    ]:
        return matches
    for path in paths:
        if matches := find_runs(path):
            return matches
    name_or_id = [name_or_id for run in runs for name_or_id in (run.name, run.latest.job)]
    near = difflib.get_close_matches(name, name_or_id, n=3) or name_or_id[-4:][::-1]
    hint = f"did you mean {' or '.join(near)}?" if near else "no run there was ever submitted"
    if local := [path for path in paths if (path / RESOLVED).is_file()]:
        hint = f"{local[0]} was not submitted; tdp watch {local[0]} and tdp report show such a run"
    raise ConfigError(f"no run in {folder} has the name or job id {name!r}; {hint}")


def single(runs: Sequence[SubmittedRun]) -> SubmittedRun:
    """Return the only one of `runs`.

    Raises:
        ConfigError: there are more.
    """
    if len(runs) > 1:
        names = ", ".join(str(run.folder) for run in runs)
        raise ConfigError(f"{len(runs)} runs are meant: {names}; name one of them")
    return runs[0]


def progress(files: RunDir) -> RunProgress:
    """Return how far the run has progressed, whatever the state of its job."""
    step = loss = None
    for row in last_rows(files.metrics):
        step = int(row["step"]) if step is None else step
        if isinstance(loss_value := row.get("loss"), float | int) and abs(loss_value) < 1e300:
            loss = float(loss_value)
            break
    for path in (files.resolved, files.config):
        with contextlib.suppress(OSError):
            text = read_regular(path, _MOST_CONFIG).decode(errors="replace")
            if match := _STEPS.search(text):
                return RunProgress(step, int(match[1]), loss)
    return RunProgress(step, None, loss)


def starts(run: SubmittedRun, record: Submission | None = None) -> list[Start]:
    """Return all starts in order, or those of the submission `record`."""
    every = read_starts(run.files.starts)
    if record is None:
        return every
    if record.job == array_job_id(record.job):
        return [s for s in every if s.job == record.job]
    # A task knows itself by an id of its own, not by the array's.
    return [s for s in every if s.time_s >= record.time_s - _CLOCKS_DIFFER_S]


def decision(files: RunDir, start: Start) -> Decision | None:
    """Return the decision of a start's ranks, or None if they left none."""
    try:
        content = read_regular(files.decision(start.start), _TAIL_BYTES)
        return Decision.parse(content.decode(errors="replace"))
    except (OSError, LaunchError):
        return None


def attempt_results(run: SubmittedRun) -> list[AttemptResult]:
    """Return every start of the run, with how it ended as far as known."""
    files = run.files
    return [
        AttemptResult(s, decision(files, s), tuple(read_failure_reports(files.failures(s.start))))
        for s in starts(run)
    ]


def last_decision(run: SubmittedRun) -> Decision | None:
    """Return the decision of the ranks in the last start of the latest submission."""
    latest = starts(run, run.latest)
    return decision(run.files, latest[-1]) if latest else None


def restarts(run: SubmittedRun, info: JobInfo) -> int:
    """Return how often the latest job was restarted."""
    return max(info.restarts or 0, len(starts(run, run.latest)) - 1, 0)


def status(run: SubmittedRun, info: JobInfo, now_s: float) -> Status:
    """Return the status of a run, from Slurm or, if Slurm has none, from the run's files."""
    if info.state:
        reason = f"by uid {info.by}" if info.by.isdigit() else f"by {info.by}" if info.by else ""
        return Status(info.state, info.outcome, reason or info.reason)
    if now_s - run.latest.time_s < GRACE_S:
        return Status("submitted", Outcome.ALIVE, "Slurm does not show it yet")
    forgotten = f"Slurm knows nothing of job {run.latest.job} any more"
    now = _own_state(run)
    if now.word == UNKNOWN:
        return Status(UNKNOWN, Outcome.UNKNOWN, info.reason or forgotten)
    return Status(now.word, _OUTCOMES.get(now.word, Outcome.UNKNOWN), now.reason)


def _own_state(run: SubmittedRun) -> RunState:
    """Return the status according to the starts of the latest submission."""
    try:
        events = read_events(run.folder)[0]
    except LaunchError:
        events = []
    attempts = {start.start for start in starts(run, run.latest)}
    latest_starts = [start for start in run_starts(run.files, events) if start.attempt in attempts]
    return state_of(latest_starts, has_rows=True)


def rank_logs(run: SubmittedRun, rank: int, restart: int | None = None) -> list[Path]:
    """Return the logs of a rank, the earliest start first.

    Raises:
        ConfigError: there is none; the text says which there are.
    """

    def number(path: Path) -> int:
        text = path.stem.rpartition("restart")[2]
        return int(text) if text.isdigit() else -1

    logs = run.files.logs
    paths = sorted(logs.glob(f"rank{rank}.restart*.log"), key=number)
    paths = [path for path in paths if restart in (None, number(path))]
    if not paths:
        existing = ", ".join(sorted(path.name for path in logs.glob("*.log"))) or "no log at all"
        which = "" if restart is None else f" of restart {restart}"
        raise ConfigError(f"rank {rank} has no log{which} in {logs}; there is {existing}")
    return paths


@dataclass(slots=True)
class LogTail:
    """Reads several growing files as one text, each byte once. read_bytes: where to begin, if not
    at 0.

    An incomplete character is held back until its remaining bytes arrive.
    """

    read_bytes: dict[Path, int] = field(default_factory=dict[Path, int])
    _cut: dict[Path, bytes] = field(default_factory=dict[Path, bytes])

    def read_new(self, paths: Sequence[Path]) -> str:
        """Return what was added to `paths` since the last call, in their order."""
        parts: list[str] = []
        for path in paths:
            at = self.read_bytes.get(path, 0)
            try:
                check_regular(path, follow=True)
                with path.open("rb") as file:
                    if at > file.seek(0, 2):  # a shorter one is a new file
                        at = 0
                        self._cut.pop(path, None)
                    file.seek(at)
                    data = file.read()
            except OSError:
                continue
            self.read_bytes[path] = at + len(data)
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            parts.append(decoder.decode(self._cut.pop(path, b"") + data))
            if incomplete := decoder.getstate()[0]:
                self._cut[path] = incomplete
        return "".join(parts)


def follow(
    run: SubmittedRun,
    paths: Callable[[], Sequence[Path]],
    write: Callable[[str], object],
    *,
    tail: LogTail | None = None,
    runner: Runner = run_command,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], object] = time.sleep,
) -> Status:
    """Write the contents of `paths()` and everything added to them until the run's latest job is
    over.

    A requeue is not an end, and neither is a job that depends on this one. While the controller
    does not answer, reading continues.

    tail: text that it has already read is not written again.
    """
    tail, asked_s, ended = tail or LogTail(), float("-inf"), None
    while ended is None:
        if clock() - asked_s >= _ASK_S:
            asked_s = clock()
            ended = _ended(run.folder, runner, asked_s)
        # read after asking Slurm, so that all output of a job that has ended is there
        if text := tail.read_new(paths()):
            write(text)
        if ended is None:
            sleep(_POLL_S)
    return ended


def _ended(folder: Path, runner: Runner, now_s: float) -> Status | None:
    """Return how the latest job ended, or None while it may continue."""
    run = read_run(folder)
    if run is None:
        return None
    job = run.latest.job
    try:
        info = query_jobs([job], runner, since_s=run.latest.time_s).jobs[job]
    except LaunchError:
        return None
    now = status(run, info, now_s)
    chained = read_run(folder) != run  # just before it ended
    return None if chained or now.outcome is Outcome.ALIVE else now


def run_starts(
    files: RunDir, events: Sequence[RunEvent], last_sign_s: float | None = None
) -> list[RunStart]:
    """Return the starts by time, joining an event and a line of job/starts.jsonl for the same
    start.

    events: of the run. last_sign_s: when it last wrote a row, which is the end of a start that
    recorded none.

    Raises:
        LaunchError: job/starts.jsonl is not a file that can be read.
    """
    attempts = {x.start.start: x for x in attempt_results(SubmittedRun(files.run, ()))}
    begun = [event for event in events if event.kind == START]
    ends = [event for event in events if event.kind == END]
    begun_attempts = {str(event.values.get("attempt")) for event in begun}
    older = [
        RunEvent(START, x.start.step, x.start.time_s, {"attempt": name, "host": x.start.host})
        for name, x in attempts.items()
        if name not in begun_attempts
    ]
    begun = sorted([*begun, *older], key=lambda event: event.at_s)
    result: list[RunStart] = []
    for index, event in enumerate(begun):
        until_s = begun[index + 1].at_s if index + 1 < len(begun) else None
        own_ends = [
            e for e in ends if e.at_s >= event.at_s and (until_s is None or e.at_s < until_s)
        ]
        attempt = attempts.get(str(event.values.get("attempt", "")))
        end = own_ends[-1] if own_ends else None
        result.append(_start(files, event, end, attempt, until_s, last_sign_s))
    return result


def _start(
    files: RunDir,
    event: RunEvent,
    end: RunEvent | None,
    attempt: AttemptResult | None,
    until_s: float | None,
    last_s: float | None,
) -> RunStart:
    values = event.values
    outcome, cause, end_s, end_step = UNKNOWN, "", None, None
    if end is not None:
        outcome, cause = str(end.values.get("word", "")), str(end.values.get("reason", ""))
        end_s, end_step = end.at_s, end.step
    elif attempt is not None and attempt.decision is not None:
        outcome, cause = attempt.decision.word.value, attempt.decision.reason
    # what the ranks agreed on at the end of a start outlives a rank that fails on its way out
    agreed = outcome in (RequeueDecision.FINISHED, RequeueDecision.STOP)
    if attempt is not None and attempt.failures and not agreed:
        first = root_cause(attempt.failures)
        outcome, cause = "failed", f"rank {first.rank} on {first.host}: {summary(first)}"
        end_s = first.time_s
    if outcome == UNKNOWN and until_s is None and holder_of(files.run_lock):
        outcome = RUNNING
    if end_s is None and outcome != RUNNING:
        signs = [x for x in (last_s, until_s) if x is not None and x >= event.at_s]
        end_s = min(signs, default=None)
    nodes = attempt.start.nodes if attempt is not None else ""
    num_ranks = values.get("num_ranks")
    return RunStart(
        attempt=str(values.get("attempt", "")) or "?",
        begin_s=event.at_s,
        step=event.step,
        end_s=end_s,
        end_step=end_step,
        word=outcome,
        cause=cause,
        place=nodes or str(values.get("host", "")),
        num_ranks=num_ranks if type(num_ranks) is int and number(num_ranks) else None,
        device=str(values.get("device", "")),
        job_end_s=number(values.get("job_end_s")),
        keys=mapping({**values}, "keys"),
    )


def state_of(starts: Sequence[RunStart], *, has_rows: bool) -> RunState:
    """Return the state of a run with these starts; every command that prints a state uses this."""
    if not starts:
        return RunState(UNKNOWN if has_rows else "no start noted")
    last = starts[-1]
    reason = "no end noted" if last.word == UNKNOWN else last.cause
    return RunState(_STATES.get(last.word, last.word), reason)
