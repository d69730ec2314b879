"""A run read from its folder: its rows, starts, checkpoints, configuration and state.

Missing, torn or older files are skipped and mentioned in `Run.notes`, so a run is shown as far as
possible.
"""

import contextlib
import os
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import yaml

from torchdistpackage.bounded import read_regular
from torchdistpackage.bounded_yaml import BoundedLoader
from torchdistpackage.errors import ConfigError, DataError, LaunchError
from torchdistpackage.launch.lock import LockHolder, holder_of
from torchdistpackage.launch.run_events import SAVE, SUBMIT, RunEvent, flat, read_events
from torchdistpackage.launch.run_rows import Row, RowReader, mapping, number, numbers
from torchdistpackage.launch.slurm.runs import RunStart, RunState, run_starts, state_of
from torchdistpackage.run_files import METRICS, PICTURE, RESOLVED, RunDir
from torchdistpackage.topology.mesh import Mesh

_STEP = re.compile(r"step_(\d{6,})")
_WARNING = re.compile(r"^(?:warning|note): .*$", re.MULTILINE)
_MOST_TEXT, _MOST_PICTURE = 1 << 24, 1 << 20
_MOST_WARNINGS = 200


@dataclass(frozen=True, slots=True)
class RunSave:
    """A checkpoint: its step, when it was complete, how long it took, and whether it still
    exists.
    """

    step: int
    at_s: float
    took_s: float | None
    kept: bool


class Run:
    """A run and the content of its files at the last `read`.

    rows: of metrics.jsonl, a mapping for each step. ranks: of ranks.jsonl. config: by dotted key.
    places: where keys were set. notes: what is missing or could not be read.

    Raises:
        ConfigError: it is not a run folder: there is no such folder, or nothing of a run in it.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.files = RunDir(self.folder)
        self._readers = RowReader(self.files.metrics), RowReader(self.files.ranks)
        self.read()

    def read(self) -> None:
        """Read the folder again; of the rows, only new ones."""
        _check_run_folder(self.files)
        for name in ("warnings", "picture"):  # read when they are asked for
            self.__dict__.pop(name, None)
        self.notes: list[str] = []
        self.config: dict[str, Any] = {}
        self.places: dict[str, str] = {}
        self.rows: list[Row] = _rows(self, self._readers[0], "it has taken no step yet")
        self.ranks: list[Row] = _rows(
            self, self._readers[1], "no numbers of single ranks: an older version, or no step yet"
        )
        self.events: list[RunEvent] = _events(self)
        _read_config(self)
        self.starts: list[RunStart] = _starts(self)
        for event in self.events:
            if event.kind == SUBMIT:
                self.places |= _places(event.values.get("keys"))
        for start in self.starts:
            keys = _places(start.keys).items()
            self.places |= {key: key_path for key, key_path in keys if not _is_copy(key_path, self)}
        self.saves: list[RunSave] = _saves(self.files, self.events)
        for path in (self.files.checkpoints, self.files.logs):
            if path.is_dir() and not os.access(path, os.R_OK | os.X_OK, effective_ids=True):
                self.notes.append(
                    f"{path.name} may not be read, so nothing of it is shown; ask its owner"
                )

    @property
    def state(self) -> RunState:
        """Return the state of the run, with the reason of its end."""
        return state_of(self.starts, has_rows=bool(self.rows))

    @property
    def holder(self) -> LockHolder | None:
        """Return who trains in the folder now, according to its lock, or None."""
        return holder_of(self.files.run_lock)

    @property
    def step(self) -> int:
        """The last step that was logged; 0 before the first."""
        return int(self.rows[-1]["step"]) if self.rows else 0

    @property
    def slowest_rank(self) -> int | None:
        """The rank that was busy longest compared with its peers, by the last row of
        ranks.jsonl.
        """
        excess = busy_excess(self.ranks[-1], self.mesh) if self.ranks else []
        return max(range(len(excess)), key=excess.__getitem__, default=None)

    @property
    def slowest_text(self) -> str:
        """Return a sentence on the slowest rank, or "" if ranks.jsonl has no such times.

        It gives the rank's busy seconds, the steps, and the excess over its peers.
        """
        if (rank := self.slowest_rank) is None:
            return ""
        row, mesh = self.ranks[-1], self.mesh
        busy, excess = busy_seconds(row), busy_excess(row, mesh)
        if len(busy) == 1:  # it has no peers
            return ""
        stages = _stages(mesh, len(busy))
        peers = "ranks" if len(set(stages)) == 1 else "ranks of the same pipe index"
        last, num_steps = int(row["step"]), int(number(row.get("steps")) or 1)
        steps = f"step {last}" if num_steps == 1 else f"steps {last - num_steps + 1} to {last}"
        return (
            f"{self.rank_text(rank)} was the slowest in {steps}: busy {busy[rank]:.3g} s a step "
            f"without its waits, {excess[rank]:.1f} % longer than the median of the "
            f"{stages.count(stages[rank])} {peers}"
        )

    @cached_property
    def warnings(self) -> list[tuple[str, str]]:
        """Warnings of rows and of rank 0's logs, each with its step or the name of its log."""
        return [*_row_warnings(self.rows), *_log_warnings(self.files)][:_MOST_WARNINGS]

    @cached_property
    def picture(self) -> bytes | None:
        """The pipeline's timeline as SVG, or None if it does not exist or cannot be read."""
        try:
            return read_regular(self.files.picture, _MOST_PICTURE)
        except FileNotFoundError:
            return None
        except OSError as error:
            self.notes.append(f"{PICTURE} {error.strerror or error}, so it is not shown")
            return None

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def num_steps(self) -> int | None:
        """Return the number of steps of the whole run."""
        value = self.config.get("train.steps")
        return value if isinstance(value, int) else None

    @property
    def unit(self) -> str:
        """Return the unit over which the loss is a mean, as recorded in the run's own lines."""
        get = self.config.get
        if get("data.name") == "preference":
            return "pairs"
        if get("data.name") == "unpaired_preference":
            return "samples"
        last = self.rows[-1] if self.rows else {}
        batch = number(get("data.global_batch"))
        tokens = number(last.get("tokens"))
        step = number(last.get("step"))
        brings_own_data = get("model.target") is not None and get("data.target") is not None
        if get("model.loss") is None and not brings_own_data:
            return "tokens"
        if batch is None or tokens is None or step is None:
            return "tokens"
        return "samples" if tokens <= batch * step else "tokens"

    @property
    def mesh(self) -> Mesh:
        """The axes with several ranks, as the ranks recorded them, else none."""
        layout = next((row["layout"] for row in self.ranks if "layout" in row), [])
        try:
            return Mesh(tuple((str(name), size) for name, size in layout if size != 1))
        except (TypeError, ValueError):  # which a TopologyError is
            return Mesh(())

    def coord_text(self, rank: int) -> str:
        """Return a rank's position on the axes with several ranks, e.g. `data 1 context 1`, or
        "".
        """
        mesh = self.mesh
        if rank >= mesh.size:
            return ""
        return " ".join(f"{axis} {index}" for axis, index in mesh.coord(rank).items())

    def rank_text(self, rank: int) -> str:
        """Return a rank with its position, such as `rank 3 (data 1 context 1)`."""
        coord = self.coord_text(rank)
        return f"rank {rank} ({coord})" if coord else f"rank {rank}"


def _check_run_folder(files: RunDir) -> None:
    folder = files.run
    if not folder.is_dir():
        raise ConfigError(f"{folder}: there is no such folder; name a run folder, as runs/my_run")
    files_of_run = (files.metrics, files.resolved, files.ranks, files.job, files.logs, files.events)
    if not any(path.exists() for path in files_of_run):
        inside = sorted(x.parent.name for x in folder.glob(f"*/{RESOLVED}"))[:4]
        hint = f"; did you mean {folder / inside[0]}?" if inside else ""
        raise ConfigError(
            f"{folder} has no {METRICS} or {RESOLVED}, so it is not a run folder{hint}"
        )


def _rows(run: Run, reader: RowReader, absent: str) -> list[Row]:
    try:
        reader.read_new()
    except DataError as error:
        run.notes.append(str(error))
        return []
    name, torn, rows = reader.path.name, reader.num_torn, reader.sorted()
    if torn or reader.is_cut:
        torn += reader.is_cut
        lines = "a line is" if torn == 1 else f"{torn} lines are"
        run.notes.append(f"{name}: {lines} cut off or invalid, and left out")
    if not rows:
        run.notes.append(f"{name} has no rows: {absent}")
    return rows


def _events(run: Run) -> list[RunEvent]:
    try:
        events, torn = read_events(run.folder)
    except LaunchError as error:
        run.notes.append(str(error))
        return []
    if torn:
        run.notes.append(f"events.jsonl: {torn} lines are cut off or invalid, and left out")
    if not events:
        run.notes.append("events.jsonl has no events: an older version, or it has not started yet")
    return events


def _read_config(run: Run) -> None:
    for path in (run.files.resolved, run.files.config):
        try:
            text = read_regular(path, _MOST_TEXT).decode()
            value = yaml.load(text, BoundedLoader)
            run.config = dict(flat(value))
            return
        except FileNotFoundError:
            continue
        except (OSError, ValueError, AttributeError, yaml.YAMLError) as error:
            run.notes.append(f"{path.name} cannot be read ({error}), so no key is shown")
            return
    run.notes.append(f"there is no {RESOLVED}, so no key is shown")


def _places(keys: Any) -> dict[str, str]:
    if not isinstance(keys, dict):
        return {}
    return {str(k): str(v[1]) for k, v in keys.items() if isinstance(v, list) and len(v) == 2}


def _is_copy(path: str, run: Run) -> bool:
    """Return whether a path is the job's own copy of the submitted file."""
    return path.partition(":")[0].endswith("job/config.yaml") and bool(run.places)


def _starts(run: Run) -> list[RunStart]:
    last = last_sign_s(run)
    try:
        return run_starts(run.files, run.events, last)
    except LaunchError as error:
        run.notes.append(str(error))
        return []


def last_sign_s(run: Run) -> float | None:
    """Return when the run last wrote a row, which shows until when a start without an end was
    alive.
    """
    times = [x for row in run.ranks[-1:] if (x := number(row.get("at_s"))) is not None]
    with contextlib.suppress(OSError):
        times.append(run.files.metrics.stat().st_mtime)
    return max(times, default=None)


def _saves(files: RunDir, events: Sequence[RunEvent]) -> list[RunSave]:
    at_step: dict[int, float] = {}
    try:
        for path in files.checkpoints.iterdir():
            if match := _STEP.fullmatch(path.name):
                at_step[int(match[1])] = path.stat().st_mtime
    except OSError:
        pass
    saves = {
        e.step: RunSave(e.step, e.at_s, number(e.values.get("took_s")), e.step in at_step)
        for e in events
        if e.kind == SAVE
    }
    for step, at_s in at_step.items():
        saves.setdefault(step, RunSave(step, at_s, None, True))
    return [saves[step] for step in sorted(saves)]


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


def _log_warnings(files: RunDir) -> Iterator[tuple[str, str]]:
    for path in sorted(files.logs.glob("rank0.restart*.log")):
        try:
            text = read_regular(path, _MOST_TEXT).decode(errors="replace")
        except OSError:
            continue
        for line in dict.fromkeys(_WARNING.findall(text)):
            yield path.name, line


def when(time_s: float) -> str:
    """Return local time as text, to the second; "?" if `at_s` is no time."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_s))
    except (ValueError, OverflowError, OSError):
        return "?"


def busy_seconds(row: Row) -> list[float]:
    """Return for each rank the seconds of a step in which it computed and waited for nobody.

    They are means over the steps of the row.
    """
    phases = [numbers(times) for times in mapping(row, "phases").values()]
    return [sum(x) for x in zip(*phases, strict=False)]


def busy_excess(row: Row, mesh: Mesh) -> list[float]:
    """Return for each rank by how many percent it was busy longer than the median of its peers.

    Peers are the ranks with the same pipe index; without axes all ranks.
    """
    busy = busy_seconds(row)
    stage = _stages(mesh, len(busy))
    middle = {
        s: statistics.median(
            b for b, rank_stage in zip(busy, stage, strict=True) if rank_stage == s
        )
        for s in set(stage)
    }
    return [
        100 * (b / middle[s] - 1) if middle[s] > 0 else 0.0
        for b, s in zip(busy, stage, strict=True)
    ]


@lru_cache
def _stages(mesh: Mesh, num_ranks: int) -> list[int]:
    is_known = mesh.size >= num_ranks
    return [mesh.index(rank, "pipe") if is_known else 0 for rank in range(num_ranks)]
