"""A save by all ranks: a snapshot, its writing and the commit, while steps wait or beside them.

The rank that owns an element (layout/derive.py) writes it once, with its position in the global
tensor. The committer assembles the manifest from the headers of the files; ranks send it those that
have changed since the last save (piece_table.py). All ranks succeed, or all fail.

Writing and committing use no collectives (`LocalWork`), so they may run in a thread while the steps
use theirs. Ranks meet only between two steps, in `PendingSave.agree`. A `SaveTarget` decides which
folders ranks write to, and which rank commits them.
"""

import errno
import logging
import shutil
import socket
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import nn

from torchdistpackage.checkpoint.commit import commit, folder_name, make_temporary, retain
from torchdistpackage.checkpoint.local_work import LocalWork
from torchdistpackage.checkpoint.manifest import Fact, Manifest, TensorEntry
from torchdistpackage.checkpoint.parts import Params, TopologyRank, params_of
from torchdistpackage.checkpoint.piece_table import Files, PieceTable, WrittenFiles
from torchdistpackage.checkpoint.retention import BEST_STEP, Retention
from torchdistpackage.checkpoint.snapshot import Extras, HostCopies, Snapshot, take_snapshot
from torchdistpackage.checkpoint.writer import CancelledSave, write_snapshot
from torchdistpackage.comm import primitives
from torchdistpackage.comm.attendance import expect_all
from torchdistpackage.comm.creation import PerGroup
from torchdistpackage.comm.flight_recorder import recorder
from torchdistpackage.comm.primitives import ForEach, Group
from torchdistpackage.comm.tpc import resolve_group
from torchdistpackage.ddp.sharded import ShardedOptimizer
from torchdistpackage.disk_room import rooms_of, shortage
from torchdistpackage.errors import CheckpointError
from torchdistpackage.files import appears
from torchdistpackage.topology.mesh import Topology

log = logging.getLogger(__name__)


def save(
    folder: str | Path,
    *,
    step: int,
    tokens: int,
    params: Params | nn.Module,
    topology: Topology,
    rank: int,
    optimizer: torch.optim.Optimizer | None = None,
    extras: Extras | None = None,
    facts: Mapping[str, Fact] | None = None,
    keep_last: int = 2,
    group: Group | None = None,
) -> Path:
    """Write `folder`/step_NNNNNN, all ranks together, and return its path.

    It saves optimizer state with each parameter: `name#exp_avg` with the parameter's layout, and
    scalars as `name#step`. Under ZeRO the ranks that hold the slices write both, and wide copies of
    narrow parameters as `name#master`. Afterwards only the last `keep_last` complete checkpoints
    stay.

    params: parameters with their layouts, or a module whose layers declare them.
    group: all ranks (default).

    Raises:
        CheckpointError: on all ranks, if any could not write; `folder` is then unchanged.
        CommError: other ranks did not call it in time.
    """
    expect_all("save() of a checkpoint", resolve_group(group, "global"))
    return start_save(
        SharedFolder(folder, Retention(keep_last), group),
        step=step,
        tokens=tokens,
        params=params,
        topology=topology,
        rank=rank,
        optimizer=optimizer,
        extras=extras,
        facts=facts,
    ).finish()


Write = Callable[[Path, Callable[[], bool]], Files]
"""A function that writes this rank's files into a temporary folder. Its second argument tells
whether to stop."""


@dataclass(frozen=True, slots=True)
class SaveFacts:
    """The fields of a manifest other than its tensors and files."""

    step: int
    tokens: int
    degrees: tuple[tuple[str, int], ...]
    facts: Mapping[str, Fact]

    def manifest(self, tensors: Mapping[str, TensorEntry], files: Files) -> Manifest:
        """Return the manifest with these tensors and files."""
        return Manifest(self.step, self.tokens, self.degrees, tensors, files, self.facts)


class SaveTarget(Protocol):
    """A place that the ranks of `group` write to. A committer creates a folder and commits it.

    path: folder of the finished checkpoints. name: its name in messages, the same on all ranks.
    committer: the global rank that commits the files of this rank.
    """

    path: Path
    name: str

    @property
    def group(self) -> Group: ...

    @property
    def committer(self) -> int: ...

    def make_temporary(self, step: int) -> Path:
        """Create a private folder for a checkpoint of `step`; only committers call it."""
        ...

    def write(self, temporary: Path, snapshot: Snapshot, cancelled: Callable[[], bool]) -> Files:
        """Write this rank's files; those of all ranks together form the checkpoint."""
        ...

    def describe(self, temporary: Path, files: Files) -> WrittenFiles:
        """Return the facts of what this rank has written, for the committer."""
        ...

    def commit(self, temporary: Path, saved: SaveFacts, files: Files) -> None:
        """Make the written files a checkpoint, and remove old ones; only committers call it."""
        ...


class SharedFolder:
    """One folder that all ranks write to and the first rank commits.

    keep: retention rules to apply afterwards; None: keep all. group: all ranks (default).
    """

    def __init__(self, path: str | Path, keep: Retention | None = None, group: Group | None = None):
        self.path, self.name = Path(path), str(path)
        self._keep, self._group = keep, group

    @property
    def group(self) -> Group:
        return resolve_group(self._group, "global")

    @property
    def committer(self) -> int:
        return primitives.ranks_of(self.group)[0]

    def make_temporary(self, step: int) -> Path:
        return make_temporary(self.path, step)

    def write(self, temporary: Path, snapshot: Snapshot, cancelled: Callable[[], bool]) -> Files:
        return {snapshot.file: write_snapshot(temporary, snapshot, cancelled)}

    def describe(self, temporary: Path, files: Files) -> WrittenFiles:
        return _table(self.group).describe(temporary, files)

    def commit(self, temporary: Path, saved: SaveFacts, files: Files) -> None:
        final = commit(temporary, saved.manifest(_table(self.group).tensors(files), files))
        if self._keep is not None:
            retain(self.path, self._keep, final, saved.facts.get(BEST_STEP))
        num_bytes = sum(file.size_bytes for file in files.values())
        if problem := shortage(self.path, num_bytes, len(files) + 1):
            log.warning("the next checkpoint does not fit: %s; make room before it is due", problem)


_tables: PerGroup[PieceTable] = PerGroup()
"""Group -> what the files of its last save hold."""


def _table(group: Group) -> PieceTable:
    return _tables.setdefault(group, PieceTable())


def start_save(
    target: SaveTarget,
    *,
    step: int,
    tokens: int,
    params: Params | nn.Module,
    topology: Topology,
    rank: int,
    optimizer: torch.optim.Optimizer | None = None,
    extras: Extras | None = None,
    facts: Mapping[str, Fact] | None = None,
    copies: HostCopies | None = None,
) -> "PendingSave":
    """Start a save, all ranks of the target together. Other arguments are those of `save`.

    copies: host memory that the state is copied to before this returns; threads then create a
        folder, write and commit. None: `agree` and `finish` do all the work, from the run's own
        memory.
    """
    if isinstance(optimizer, ShardedOptimizer):
        optimizer.arrive()  # wait for a gather in flight, which uses the slices to be written

    def snapshot() -> Snapshot:
        layouts = params_of(params, topology, rank)
        topology_rank = TopologyRank(topology, rank)
        views = take_snapshot(file_name(rank), layouts, topology_rank, optimizer, extras or {})
        return views if copies is None else copies.copy(views)

    snapshot_work = LocalWork(snapshot, in_thread=False)
    return PendingSave(
        target,
        SaveFacts(step, tokens, degrees_of(topology), facts or {}),
        lambda temporary, cancelled: target.write(temporary, snapshot_work.result(), cancelled),
        in_thread=copies is not None,
    )


class PendingSave:
    """One save in progress. All ranks create it and call `agree`, `finish` and `cancel` together.

    Creating it neither communicates nor waits for a disk, which may be slow.

    write: writes this rank's files into the temporary folder.
    in_thread: do all work on the disk in threads, not in `agree`.
    unused: called if `write` will never be called.
    files: the files of all ranks on a committer, once all have written; on other ranks their own.
    """

    def __init__(
        self,
        target: SaveTarget,
        saved: SaveFacts,
        write: Write,
        *,
        in_thread: bool,
        unused: Callable[[], None] = lambda: None,
    ):
        self.saved, self._target, self._group = saved, target, target.group
        ranks = primitives.ranks_of(self._group)
        self._source = ranks.index(target.committer)
        self._commits = self._group.rank() == self._source
        self._doing = f"writing the checkpoint of step {saved.step} to {target.name}"
        self._write, self._unused, self._in_thread = write, unused, in_thread
        # set by the training thread; the writing thread looks at it before every block
        self._cancelled = threading.Event()
        self._temporary: Path | None = None
        self._next: Callable[[object], None] | None = self._begin_files
        self._conclude: Callable[[list[Any]], object] = _folders
        self.files: Files = {}
        temporary = self._on_committer(lambda: str(target.make_temporary(saved.step)))
        self._work, self._told = temporary, lambda: (self._source, temporary.result())

    def _on_committer(self, work: Callable[[], object]) -> LocalWork[object]:
        """Start work on the committer; other ranks do nothing."""
        if not self._commits:
            return LocalWork(lambda: None, in_thread=False)
        return LocalWork(work, in_thread=self._in_thread)

    def _begin_files(self, folder: object) -> None:
        temporary = self._temporary = Path(str(folder))

        def write() -> WrittenFiles:
            appears(temporary)  # wait: another node made it, and this node may not see it yet
            files = self._write(temporary, self._cancelled.is_set)
            return self._target.describe(temporary, files)

        self._next, self._unused = self._begin_commit, lambda: None
        written = LocalWork(write, in_thread=self._in_thread)
        self._work, self._conclude = written, self._take_files
        self._told = lambda: (self._commits, written.result())

    def _take_files(self, reports: list[tuple[bool, WrittenFiles]]) -> object:
        """Gather the facts of all written files on the group's first rank; return them to the other
        committers, which need them too.
        """
        written = [each for _, each in reports]
        _table(self._group).take(written)
        files = {name: facts for each in written for name, facts in each.files.items()}
        if not any(commits for commits, _ in reports[1:]):
            # only this rank needs the list, so it is not sent on
            self.files = files
            return None
        return ForEach([files if commits else None for commits, _ in reports])

    def _begin_commit(self, files: object) -> None:
        _, written = cast(tuple[bool, WrittenFiles], self._told())
        _table(self._group).arrived(written)
        if files is not None:
            self.files = cast(Files, files)
        temporary, all_files = cast(Path, self._temporary), self.files or written.files
        self.files, self._next = all_files, None
        commit = self._on_committer(lambda: self._target.commit(temporary, self.saved, all_files))
        self._work, self._told, self._conclude = commit, commit.result, lambda results: None

    @property
    def step(self) -> int:
        return self.saved.step

    @property
    def num_ranks(self) -> int:
        return self._group.size()

    @property
    def is_done(self) -> bool:
        """True if this rank's work has ended, so that `agree` waits only for other ranks."""
        return self._work.is_done

    @property
    def has_failed(self) -> bool:
        """True if this rank's work has failed."""
        return self._work.is_done and self._work.error is not None

    def agree(self) -> bool:
        """End the current phase, all ranks together; return True once the checkpoint is complete.

        The three phases end when the folder exists, when all ranks have written, and when the
        committers have committed. Each waits for this rank's work.

        Raises:
            CheckpointError: on all ranks, if any failed; the folder is then unchanged.
        """
        try:
            answer = agree_on(self._told, self._group, self._doing, self._conclude)
        except CheckpointError:
            self._unused()
            if self._commits and self._temporary is not None:
                shutil.rmtree(self._temporary, ignore_errors=True)
            raise
        if self._next is None:
            return True
        self._next(answer)
        return False

    def finish(self) -> Path:
        """Run the remaining phases, all ranks together, and return the checkpoint's path.

        Raises:
            CheckpointError: as in `agree`.
        """
        while not self.agree():
            pass
        return self._target.path / folder_name(self.step)

    def cancel(self) -> None:
        """Stop writing, because some rank has failed; `agree` raises that rank's error."""
        self._cancelled.set()
        self._unused()


def _folders(reports: list[tuple[int, str]]) -> object:
    """Return the folder that each rank's committer made.

    reports: for each rank, the index of its committer in the group, and the folder that the rank
        made itself.
    """
    folders = [reports[source][1] for source, _ in reports]
    return folders[0] if len({*folders}) == 1 else ForEach(folders)


def file_name(rank: int) -> str:
    """Return the name of a rank's file, such as `rank00003.safetensors`."""
    return f"rank{rank:05d}.safetensors"


def degrees_of(topology: Topology) -> tuple[tuple[str, int], ...]:
    """Return (axis, size) of every axis longer than 1, outermost first, then of the expert axis."""
    expert = topology.expert.axis_size("expert")
    return tuple((a, n) for a, n in (*topology.dense.axes, ("expert", expert)) if n > 1)


@contextmanager
def fail_together(group: Group, doing: str) -> Generator[None]:
    """Run the block on every rank of the group, and fail on all ranks if any fails.

    The block must not use collectives. doing: what it does, for the message.

    Raises:
        CheckpointError: on every rank, naming the first rank whose block raised.
    """
    own_error: Exception | None = None
    try:
        yield
    except Exception as error:
        own_error = error
    _agreed(None, own_error, group, doing, lambda results: None)


def agree_on(
    work: Callable[[], object],
    group: Group,
    doing: str,
    conclude: Callable[[list[object]], object] = lambda results: None,
) -> object:
    """Do `work`, without collectives, on every rank; return what `conclude` makes of the results.

    conclude: called on the group's first rank alone, as `make` of `primitives.reduce_objects`.

    Raises:
        CheckpointError: as `fail_together`, or what `conclude` raised, on every rank.
    """
    result, own_error = None, None
    try:
        result = work()
    except Exception as error:
        own_error = error
    return _agreed(result, own_error, group, doing, conclude)


def _agreed(
    result: object,
    own_error: Exception | None,
    group: Group,
    doing: str,
    conclude: Callable[[list[object]], object],
) -> object:
    text = (
        None
        if own_error is None
        else f"on {socket.gethostname()}: {type(own_error).__name__}: {own_error}{_room(own_error)}"
    )
    ranks = primitives.ranks_of(group)

    def make(gathered: list[Any]) -> object:
        outcomes = cast(list[tuple[str | None, bool, object]], gathered)
        if problem := _first_failure(ranks, outcomes):
            return f"{doing} failed on {problem}", None
        try:
            with recorder.apart():  # the first rank alone does it
                answer = conclude([o[2] for o in outcomes])
        except CheckpointError as error:
            return str(error), None
        if isinstance(answer, ForEach):
            return ForEach([("", x) for x in answer.answers])
        return "", answer

    # a rank that was cancelled did not cause the failure
    report = text, not isinstance(own_error, CancelledSave), result
    problem, answer = cast(tuple[str, object], primitives.reduce_objects(report, make, group))
    if problem:
        raise CheckpointError(problem) from own_error
    return answer


def _room(error: Exception) -> str:
    """Return how much room a disk has left, if an error is for lack of room; else ""."""
    if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return ""
    rooms = rooms_of(Path(str(error.filename))) if error.filename else []
    return f" ({'; '.join(map(str, rooms))})" if rooms else ""


def _first_failure(
    ranks: Sequence[int], outcomes: Sequence[tuple[str | None, bool, object]]
) -> str:
    """Return the first rank that failed, its error, and how many more failed; "" if none did."""
    failed = [(r, o[0]) for r, o in zip(ranks, outcomes, strict=True) if o[0] and o[1]]
    failed = failed or [(r, o[0]) for r, o in zip(ranks, outcomes, strict=True) if o[0]]
    if not failed:
        return ""
    rank, outcome = failed[0]
    others = f" (and {len(failed) - 1} more failed)" if len(failed) > 1 else ""
    return f"rank {rank} {outcome}{others}"
