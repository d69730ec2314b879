"""A run folder as `tdp report` and `tdp watch` see it: rows, starts, configuration, warnings.

Files are read as they are found. What is missing, torn or of an older version is left out, and said
in `RunData.notes`, so that a run is shown as far as it goes.
"""

import contextlib
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from torchdistpackage.bounded import read_regular
from torchdistpackage.bounded_yaml import BoundedLoader
from torchdistpackage.environment.failure import root_cause, summary
from torchdistpackage.errors import ConfigError, DataError, LaunchError
from torchdistpackage.launch.lock import holder_of
from torchdistpackage.launch.run_events import END, SAVE, START, SUBMIT, RunEvent, flat, read_events
from torchdistpackage.launch.run_rows import METRICS, RANKS, Row, RowReader, number
from torchdistpackage.launch.slurm.run_dir import RunDir
from torchdistpackage.launch.slurm.runs import AttemptResult, SubmittedRun, attempt_results
from torchdistpackage.topology.mesh import Mesh

RESOLVED, CHECKPOINTS = "resolved.yaml", "checkpoints"
PICTURE = "pipeline.svg"
_STEP = re.compile(r"step_(\d{6,})")
_WARNING = re.compile(r"^(?:warning|note): .*$", re.MULTILINE)
_MOST_TEXT, _MOST_PICTURE = 1 << 24, 1 << 20
_MOST_WARNINGS = 200
RUNNING, UNKNOWN = "running", "no end noted"


@dataclass(frozen=True, slots=True)
class RunStart:
    """One start of the run: where it began and, as far as that is known, how it ended.

    attempt: the job and its number, or "local". end_s: None while it runs, or where nothing said
    when it ended. word, cause: of its end. keys: what was set, each a value and its place.
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
class RunSave:
    """A checkpoint: its step, when it was complete, how long that took, and whether it is there."""

    step: int
    at_s: float
    took_s: float | None
    kept: bool


@dataclass(slots=True)
class RunData:
    """What a folder says. rows: of metrics.jsonl. ranks: of ranks.jsonl. config: by dotted key.
    notes: what is missing or could not be read."""

    folder: Path
    rows: list[Row] = field(default_factory=list[Row])
    ranks: list[Row] = field(default_factory=list[Row])
    starts: list[RunStart] = field(default_factory=list[RunStart])
    saves: list[RunSave] = field(default_factory=list[RunSave])
    config: dict[str, Any] = field(default_factory=dict[str, Any])
    places: dict[str, str] = field(default_factory=dict[str, str])
    warnings: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    picture: bytes | None = None
    notes: list[str] = field(default_factory=list[str])

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def num_steps(self) -> int | None:
        """Steps of the whole run."""
        value = self.config.get("train.steps")
        return value if isinstance(value, int) else None

    @property
    def unit(self) -> str:
        """What the loss is a mean over, as the run's own lines say it."""
        get = self.config.get
        if get("data.name") == "preference":
            return "pairs"
        if get("model.loss") is not None:
            return "samples"
        last, batch = self.rows[-1] if self.rows else {}, number(get("data.global_batch"))
        tokens, step = number(last.get("tokens")), number(last.get("step"))
        if get("model.target") is None or get("data.target") is None:
            return "tokens"
        if batch is None or tokens is None or step is None:
            return "tokens"
        return "samples" if tokens <= batch * step else "tokens"

    @property
    def mesh(self) -> Mesh:
        """Axes of several ranks, as the ranks wrote them; without axes where they did not."""
        found = next((row["layout"] for row in self.ranks if "layout" in row), [])
        try:
            return Mesh(tuple((str(name), size) for name, size in found if size != 1))
        except (TypeError, ValueError):  # which a TopologyError is
            return Mesh(())

    def coord_text(self, rank: int) -> str:
        """Where a rank is along axes of several ranks, as `data 1 context 1`; "" if unknown."""
        mesh = self.mesh
        if rank >= mesh.size:
            return ""
        return " ".join(f"{axis} {index}" for axis, index in mesh.coord(rank).items())

    def rank_text(self, rank: int) -> str:
        """Such as `rank 3 (data 1 context 1)`."""
        coord = self.coord_text(rank)
        return f"rank {rank} ({coord})" if coord else f"rank {rank}"


def read_run_data(folder: Path, *, readers: Sequence[RowReader] = ()) -> RunData:
    """All that is there.

    readers: of metrics.jsonl and ranks.jsonl, for who looks again and again: of these files only
    what is new is read, and neither logs nor pictures are.

    Raises:
        ConfigError: it is no run folder: there is no such folder, or nothing of a run in it.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder}: there is no such folder; name a run folder, as runs/my_run")
    known = (METRICS, RESOLVED, RANKS, "job", "logs", "events.jsonl")
    if not any((folder / name).exists() for name in known):
        inside = sorted(x.parent.name for x in folder.glob(f"*/{RESOLVED}"))[:4]
        hint = f"; did you mean {folder / inside[0]}?" if inside else ""
        raise ConfigError(f"{folder} has no {METRICS} or {RESOLVED}, so it is no run folder{hint}")
    data = RunData(folder)
    own = readers or (RowReader(folder / METRICS), RowReader(folder / RANKS))
    data.rows = _rows(data, own[0], "it has taken no step yet")
    data.ranks = _rows(data, own[1], "no numbers of single ranks: an older version, or no step yet")
    events = _events(data)
    _read_config(data)
    data.starts = list(_starts(data, events))
    for event in events:
        if event.kind == SUBMIT:
            data.places |= _places(event.values.get("keys"))
    for start in data.starts:
        data.places |= {k: p for k, p in _places(start.keys).items() if not _is_copy(p, data)}
    data.saves = _saves(folder, events)
    for name in (CHECKPOINTS, "logs"):
        if (folder / name).is_dir() and not os.access(
            folder / name, os.R_OK | os.X_OK, effective_ids=True
        ):
            data.notes.append(f"{name} may not be read, so nothing of it is shown; ask its owner")
    if readers:
        return data
    data.warnings = [*_row_warnings(data.rows), *_log_warnings(folder)][:_MOST_WARNINGS]
    try:
        data.picture = read_regular(folder / PICTURE, _MOST_PICTURE)
    except FileNotFoundError:
        pass
    except OSError as error:
        data.notes.append(f"{PICTURE} {error.strerror or error}, so it is not shown")
    return data


def _rows(data: RunData, reader: RowReader, absent: str) -> list[Row]:
    try:
        reader.read_new()
    except DataError as error:
        data.notes.append(str(error))
        return []
    name, torn, rows = reader.path.name, reader.num_torn, reader.sorted()
    if torn or reader.is_cut:
        torn += reader.is_cut
        lines = "a line is" if torn == 1 else f"{torn} lines are"
        data.notes.append(f"{name}: {lines} torn or no row, and left out")
    if not rows:
        data.notes.append(f"{name} has no rows: {absent}")
    return rows


def _events(data: RunData) -> list[RunEvent]:
    try:
        events, torn = read_events(data.folder)
    except LaunchError as error:
        data.notes.append(str(error))
        return []
    if torn:
        data.notes.append(f"events.jsonl: {torn} lines are torn or no event, and left out")
    if not events:
        data.notes.append("events.jsonl has no events: an older version, or it has not started yet")
    return events


def _read_config(data: RunData) -> None:
    for path in (data.folder / RESOLVED, RunDir(data.folder).config):
        try:
            text = read_regular(path, _MOST_TEXT).decode()
            value = yaml.load(text, BoundedLoader)
            data.config = dict(flat(value))
            return
        except FileNotFoundError:
            continue
        except (OSError, ValueError, AttributeError, yaml.YAMLError) as error:
            data.notes.append(f"{path.name} cannot be read ({error}), so no key is shown")
            return
    data.notes.append(f"there is no {RESOLVED}, so no key is shown")


def _places(keys: Any) -> dict[str, str]:
    if not isinstance(keys, dict):
        return {}
    return {str(k): str(v[1]) for k, v in keys.items() if isinstance(v, list) and len(v) == 2}


def _is_copy(place: str, data: RunData) -> bool:
    """Whether a place is the job's own copy of what was submitted, which has its place."""
    return place.partition(":")[0].endswith("job/config.yaml") and bool(data.places)


def _starts(data: RunData, events: Sequence[RunEvent]) -> Iterator[RunStart]:
    """Starts by time; an event and a line of job/starts.jsonl of one start are joined."""
    try:
        attempts = {x.start.start: x for x in attempt_results(SubmittedRun(data.folder, ()))}
    except LaunchError as error:
        data.notes.append(str(error))
        attempts = {}
    begun = [event for event in events if event.kind == START]
    ends = [event for event in events if event.kind == END]
    known = {str(event.values.get("attempt")) for event in begun}
    older = [
        RunEvent(START, x.start.step, x.start.time_s, {"attempt": name, "host": x.start.host})
        for name, x in attempts.items()
        if name not in known
    ]
    begun = sorted([*begun, *older], key=lambda event: event.at_s)
    last = last_sign_s(data)
    for place, event in enumerate(begun):
        until_s = begun[place + 1].at_s if place + 1 < len(begun) else None
        own = [e for e in ends if e.at_s >= event.at_s and (until_s is None or e.at_s < until_s)]
        attempt = str(event.values.get("attempt", ""))
        end = own[-1] if own else None
        yield _start(data.folder, event, end, attempts.get(attempt), until_s, last)


def _start(
    folder: Path,
    event: RunEvent,
    end: RunEvent | None,
    attempt: AttemptResult | None,
    until_s: float | None,
    last_s: float | None,
) -> RunStart:
    values = event.values
    word, cause, end_s, end_step = UNKNOWN, "", None, None
    if end is not None:
        word, cause = str(end.values.get("word", "")), str(end.values.get("reason", ""))
        end_s, end_step = end.at_s, end.step
    elif attempt is not None and attempt.decision is not None:
        word, cause = attempt.decision.word.value, attempt.decision.reason
    if attempt is not None and attempt.failures:
        first = root_cause(attempt.failures)
        word, cause = "failed", f"rank {first.rank} on {first.host}: {summary(first)}"
        end_s = first.time_s
    if word == UNKNOWN and until_s is None and holder_of(RunDir(folder).run_lock):
        word = RUNNING
    if end_s is None and word != RUNNING:
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
        word=word,
        cause=cause,
        place=nodes or str(values.get("host", "")),
        num_ranks=num_ranks if type(num_ranks) is int and number(num_ranks) else None,
        device=str(values.get("device", "")),
        job_end_s=number(values.get("job_end_s")),
        keys=values.get("keys") if isinstance(values.get("keys"), dict) else {},
    )


def last_sign_s(data: RunData) -> float | None:
    """When the run last wrote a row: the latest sign of life of a start without an end."""
    times = [x for row in data.ranks[-1:] if (x := number(row.get("at_s"))) is not None]
    with contextlib.suppress(OSError):
        times.append((data.folder / METRICS).stat().st_mtime)
    return max(times, default=None)


def _saves(folder: Path, events: Sequence[RunEvent]) -> list[RunSave]:
    there: dict[int, float] = {}
    try:
        for path in (folder / CHECKPOINTS).iterdir():
            if match := _STEP.fullmatch(path.name):
                there[int(match[1])] = path.stat().st_mtime
    except OSError:
        pass
    found = {
        e.step: RunSave(e.step, e.at_s, number(e.values.get("took_s")), e.step in there)
        for e in events
        if e.kind == SAVE
    }
    for step, at_s in there.items():
        found.setdefault(step, RunSave(step, at_s, None, True))
    return [found[step] for step in sorted(found)]


def _row_warnings(rows: Sequence[Row]) -> Iterator[tuple[str, str]]:
    skipped = 0
    for row in rows:
        if isinstance(text := row.get("stragglers"), str):
            yield f"step {row['step']}", text
        if isinstance(now := row.get("skipped"), int) and now > skipped:
            skipped = now
            yield (
                f"step {row['step']}",
                f"left out because of a NaN or infinite value, {now} so far",
            )
        if row.get("loss") is None and "loss" in row:
            yield f"step {row['step']}", "the loss was NaN or infinite"


def _log_warnings(folder: Path) -> Iterator[tuple[str, str]]:
    for path in sorted((folder / "logs").glob("rank0.restart*.log")):
        try:
            text = read_regular(path, _MOST_TEXT).decode(errors="replace")
        except OSError:
            continue
        for line in dict.fromkeys(_WARNING.findall(text)):
            yield path.name, line


def when(time_s: float) -> str:
    """Local time as text, to the second; "?" for what is no time."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_s))
    except (ValueError, OverflowError, OSError):
        return "?"
