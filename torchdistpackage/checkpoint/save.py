"""A save of all ranks: a snapshot, its writing, and the commit, in turn or beside the steps.

Every element of every tensor is written once, by the rank that owns it (layout/derive.py), with its
place in the global tensor. The manifest is put together from the headers of the files, so ranks
exchange nothing but how it went: all succeed, or all fail.

What a rank writes or commits it does without collectives (`LocalWork`), so it may run in a thread
while the steps make theirs. Ranks meet between two steps alone, in `PendingSave.agree`. Which
folders are written to, and by whom they are committed, is for a `SaveTarget` to say.
"""

import math
import shutil
import socket
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import torch
from safetensors import safe_open
from torch import nn

from torchdistpackage.checkpoint.commit import commit, folder_name, make_temporary, retain
from torchdistpackage.checkpoint.local_work import LocalWork
from torchdistpackage.checkpoint.manifest import Fact, FileFacts, Manifest, TensorEntry
from torchdistpackage.checkpoint.parts import Params, TopologyRank, params_of
from torchdistpackage.checkpoint.retention import Retention
from torchdistpackage.checkpoint.snapshot import Extras, HostCopies, Snapshot, take_snapshot
from torchdistpackage.checkpoint.writer import CancelledSave, write_snapshot
from torchdistpackage.comm import primitives
from torchdistpackage.comm.attendance import expect_all
from torchdistpackage.comm.primitives import Group
from torchdistpackage.comm.tpc import resolve_group
from torchdistpackage.ddp.sharded import ShardedOptimizer
from torchdistpackage.errors import CheckpointError
from torchdistpackage.topology.mesh import Topology


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

    params: with their layouts, or the module, whose layers say them.

    Optimizer state is saved with each parameter, as `name#exp_avg` with the parameter's layout
    or, for scalars, `name#step`. Under ZeRO both are written by the ranks that hold their slices,
    and wide copies of narrow parameters as `name#master`. Afterwards only the last `keep_last`
    complete checkpoints stay. group: all ranks (default).

    Raises:
        CheckpointError: on all ranks if any could not write; then `folder` is as before.
        CommError: other ranks have not called it in time.
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


Files = Mapping[str, FileFacts]
"""What has been written, by name."""
Write = Callable[[Path, Callable[[], bool]], Files]
"""Writes this rank's files into a temporary folder; the second argument: whether to stop."""


@dataclass(frozen=True, slots=True)
class SaveFacts:
    """What a manifest says besides its tensors and files."""

    step: int
    tokens: int
    degrees: tuple[tuple[str, int], ...]
    facts: Mapping[str, Fact]

    def manifest(self, tensors: Mapping[str, TensorEntry], files: Files) -> Manifest:
        return Manifest(self.step, self.tokens, self.degrees, tensors, files, self.facts)


class SaveTarget(Protocol):
    """Where the ranks of `group` write to. A committer makes a folder, and commits what is in it.

    path: where the checkpoint is in the end. name: of that in messages, alike on all ranks.
    committer: the global rank that commits what this one writes.
    """

    path: Path
    name: str

    @property
    def group(self) -> Group: ...

    @property
    def committer(self) -> int: ...

    def make_temporary(self, step: int) -> Path:
        """A fresh private folder for a checkpoint of `step`; called on committers."""
        ...

    def write(self, temporary: Path, snapshot: Snapshot, cancelled: Callable[[], bool]) -> Files:
        """Write this rank's part; the files of all ranks together are those of the checkpoint."""
        ...

    def commit(self, temporary: Path, saved: SaveFacts, files: Files) -> None:
        """Make what all have written count, and remove what is not kept; called on committers."""
        ...


class SharedFolder:
    """One folder that all ranks write to, and the first one commits.

    keep: what stays in it afterwards; None: all. group: all ranks (default).
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

    def commit(self, temporary: Path, saved: SaveFacts, files: Files) -> None:
        final = commit(temporary, saved.manifest(collect(temporary, files), files))
        if self._keep is not None:
            retain(self.path, self._keep, final)


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
    """Begin a save, all ranks of the target together. Arguments besides these two are as in `save`.

    copies: memory for a copy of the state, made before this returns; threads then make a folder,
    write and commit. None: all is done in `agree` and `finish`, from the run's own memory.
    """
    if isinstance(optimizer, ShardedOptimizer):
        optimizer.arrive()  # a gather in flight has the slices that are written

    def snapshot() -> Snapshot:
        held, place = params_of(params, topology, rank), TopologyRank(topology, rank)
        taken = take_snapshot(file_name(rank), held, place, optimizer, extras or {})
        return taken if copies is None else copies.copy(taken)

    taken = LocalWork(snapshot, in_thread=False)
    return PendingSave(
        target,
        SaveFacts(step, tokens, degrees_of(topology), facts or {}),
        lambda temporary, cancelled: target.write(temporary, taken.result(), cancelled),
        in_thread=copies is not None,
    )


class PendingSave:
    """One save under way. Made, asked to `agree`, `finish` and `cancel` on all ranks alike.

    It begins without a word between ranks, and without one to a disk, which may be slow.

    write: what this rank adds to the temporary folder. in_thread: it and all that is done to the
    disk run in threads; else in `agree`. unused: called if `write` never will be. files: of all
    ranks, once all have written.
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
        self._cancelled = threading.Event()
        self._temporary: Path | None = None
        self._next: Callable[[list[object]], None] | None = self._begin_files
        self.files: dict[str, FileFacts] = {}
        self._work = self._on_committer(lambda: str(target.make_temporary(saved.step)))

    def _on_committer(self, work: Callable[[], object]) -> LocalWork[object]:
        if not self._commits:
            return LocalWork(lambda: None, in_thread=False)
        return LocalWork(work, in_thread=self._in_thread)

    def _begin_files(self, made: list[object]) -> None:
        temporary = self._temporary = Path(str(made[self._source]))
        self._next, self._unused = self._begin_commit, lambda: None
        self._work = LocalWork(
            lambda: self._write(temporary, self._cancelled.is_set), in_thread=self._in_thread
        )

    def _begin_commit(self, written: list[object]) -> None:
        for files in cast(list[Files], written):
            self.files |= files
        temporary = cast(Path, self._temporary)
        self._next = None
        self._work = self._on_committer(
            lambda: self._target.commit(temporary, self.saved, self.files)
        )

    @property
    def step(self) -> int:
        return self.saved.step

    @property
    def num_ranks(self) -> int:
        return self._group.size()

    @property
    def is_done(self) -> bool:
        """Whether this rank waits for the others, in `agree`."""
        return self._work.is_done

    @property
    def has_failed(self) -> bool:
        """Whether this rank could not do its part."""
        return self._work.is_done and self._work.error is not None

    def agree(self) -> bool:
        """End the phase that is under way, all ranks together; whether the checkpoint counts now.

        Of three phases the first ends when there is a folder, the second when all have written and
        the third when those that commit have done so. Waits for this rank's work.

        Raises:
            CheckpointError: on all ranks if any failed; then the folder is as before.
        """
        try:
            outcomes = outcomes_of(self._work.result, self._group, self._doing)
        except CheckpointError:
            self._unused()
            if self._commits and self._temporary is not None:
                shutil.rmtree(self._temporary, ignore_errors=True)
            raise
        if self._next is None:
            return True
        self._next(outcomes)
        return False

    def finish(self) -> Path:
        """Wait for all that is left, all ranks together; returns the checkpoint.

        Raises:
            CheckpointError: as `agree`.
        """
        while not self.agree():
            pass
        return self._target.path / folder_name(self.step)

    def cancel(self) -> None:
        """Write no more here, as some rank has failed; its error comes from `agree`."""
        self._cancelled.set()
        self._unused()


def collect(temporary: Path, files: Mapping[str, FileFacts]) -> dict[str, TensorEntry]:
    """All tensors of a checkpoint, from the headers of its files.

    Raises:
        CheckpointError: ranks disagree about a tensor, or its pieces do not tile it.
    """
    found: dict[str, TensorEntry] = {}
    for file in files:
        with safe_open(temporary / file, framework="pt") as shard:
            header = Manifest.from_json(shard.metadata()["pieces"])
        for name, entry in header.tensors.items():
            have = found.get(name, TensorEntry(entry.shape, entry.dtype, ()))
            if (have.shape, have.dtype) != (entry.shape, entry.dtype):
                raise CheckpointError(
                    f"{name} is {entry.dtype} of shape {entry.shape} in {file}, but {have.dtype} "
                    f"of shape {have.shape} in {have.pieces[0].file}; give it one layout"
                )
            found[name] = TensorEntry(entry.shape, entry.dtype, have.pieces + entry.pieces)
    for name, entry in found.items():
        covered = sum(math.prod(piece.lengths) for piece in entry.pieces)
        if covered != math.prod(entry.shape):
            raise CheckpointError(
                f"{name}: the ranks own {covered} elements of {math.prod(entry.shape)} "
                f"(shape {entry.shape}); its layouts on the ranks do not belong together"
            )
    return found


def file_name(rank: int) -> str:
    """`rank00003.safetensors`."""
    return f"rank{rank:05d}.safetensors"


def degrees_of(topology: Topology) -> tuple[tuple[str, int], ...]:
    """(axis, size) of every axis longer than 1, outermost first, then of the expert axis."""
    expert = topology.expert.axis_size("expert")
    return tuple((a, n) for a, n in (*topology.dense.axes, ("expert", expert)) if n > 1)


@contextmanager
def fail_together(group: Group, doing: str) -> Generator[None]:
    """Run the block, without collectives, on every rank of the group; doing: what it does.

    Raises:
        CheckpointError: on every rank if the block raised on any; names the first of them.
    """
    mine: Exception | None = None
    try:
        yield
    except Exception as error:
        mine = error
    _outcomes(None, mine, group, doing)


def outcomes_of(work: Callable[[], object], group: Group, doing: str) -> list[object]:
    """What `work`, without collectives, returned on every rank; raises as `fail_together`."""
    result, mine = None, None
    try:
        result = work()
    except Exception as error:
        mine = error
    return _outcomes(result, mine, group, doing)


def _outcomes(result: object, mine: Exception | None, group: Group, doing: str) -> list[object]:
    text = None if mine is None else f"on {socket.gethostname()}: {type(mine).__name__}: {mine}"
    # who was cancelled is no culprit
    is_first_hand = not isinstance(mine, CancelledSave)
    gathered = primitives.gather_objects((text, is_first_hand, result), group)
    outcomes = cast(list[tuple[str | None, bool, object]], gathered)
    ranks = primitives.ranks_of(group)
    failed = [(r, o[0]) for r, o in zip(ranks, outcomes, strict=True) if o[0] and o[1]]
    failed = failed or [(r, o[0]) for r, o in zip(ranks, outcomes, strict=True) if o[0]]
    if failed:
        rank, outcome = failed[0]
        others = f" (and {len(failed) - 1} more failed)" if len(failed) > 1 else ""
        raise CheckpointError(f"{doing} failed on rank {rank} {outcome}{others}") from mine
    return [o[2] for o in outcomes]
