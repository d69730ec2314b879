"""A save of all ranks: a snapshot, its writing, and the commit, in turn or beside the steps.

Every element of every tensor is written once, by the rank that owns it (layout/derive.py), with its
place in the global tensor. The manifest is put together from the headers of the files, so ranks
exchange nothing but how it went: all succeed, or all fail.

What a rank writes or commits it does without collectives (`LocalWork`), so it may run in a thread
while the steps make theirs. Ranks meet between two steps alone, in `PendingSave.agree`.
"""

import math
import os
import shutil
import socket
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Generic, TypeVar, cast

import torch
from safetensors import safe_open
from torch import nn

from torchdistpackage.checkpoint.commit import commit, folder_name, make_temporary, retain
from torchdistpackage.checkpoint.manifest import Fact, FileFacts, Manifest, TensorEntry
from torchdistpackage.checkpoint.parts import Params, TopologyRank, params_of
from torchdistpackage.checkpoint.retention import Retention
from torchdistpackage.checkpoint.snapshot import Extras, HostCopies, Snapshot, take_snapshot
from torchdistpackage.checkpoint.writer import CancelledSave, write_snapshot
from torchdistpackage.comm import primitives
from torchdistpackage.comm.primitives import Group
from torchdistpackage.comm.tpc import resolve_group
from torchdistpackage.errors import CheckpointError
from torchdistpackage.optim.sharded import ShardedOptimizer
from torchdistpackage.topology.mesh import Topology

_NICENESS = 10
"""Of a thread that writes beside the steps: they come first where cores are short."""


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
    """
    return PendingSave(
        folder,
        step=step,
        tokens=tokens,
        params=params,
        topology=topology,
        rank=rank,
        optimizer=optimizer,
        extras=extras,
        facts=facts,
        keep=Retention(keep_last),
        group=group,
    ).finish()


T = TypeVar("T")


class LocalWork(Generic[T]):
    """What one rank does by itself, now or in a thread, and how it ended."""

    def __init__(self, work: Callable[[], T], *, in_thread: bool):
        self._work = work
        self.error: Exception | None = None
        self._result: T | None = None
        self._thread: threading.Thread | None = None
        if in_thread:
            # a daemon: a rank that ends with an error is not kept by a slow disk
            self._thread = threading.Thread(target=self._run_nice, name="checkpoint", daemon=True)
            self._thread.start()
        else:
            self._run()

    @property
    def is_done(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def result(self) -> T:
        """What the work returned; raises what it raised. Waits for it."""
        if self._thread is not None:
            self._thread.join()
        if self.error is not None:
            raise self.error
        return cast(T, self._result)

    def _run_nice(self) -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        self._run()

    def _run(self) -> None:
        try:
            self._result = self._work()
        except Exception as error:
            self.error = error


class PendingSave:
    """One save under way. Made, asked to `agree`, `finish` and `cancel` on all ranks alike.

    The arguments are those of `save`; keep: what stays afterwards. copies: memory for a copy of the
    state, made before this returns; a thread then writes it and another commits. None: it has been
    written when this returns, from the run's own memory.

    Raises:
        CheckpointError: on all ranks if the folder takes no more.
    """

    def __init__(
        self,
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
        keep: Retention | None = None,
        group: Group | None = None,
        copies: HostCopies | None = None,
    ):
        self.step = step
        self._folder, self._group = Path(folder), resolve_group(group, "global")
        self._ranks = primitives.ranks_of(self._group)
        self._is_first, self._in_thread = rank == self._ranks[0], copies is not None
        self._doing = f"writing the checkpoint of step {step} to {folder}"
        self._cancelled = threading.Event()
        self._is_written = False
        if isinstance(optimizer, ShardedOptimizer):
            optimizer.arrive()  # a gather in flight has the slices that are written
        self._temporary = self._make_temporary()

        def snapshot() -> Snapshot:
            held, place = params_of(params, topology, rank), TopologyRank(topology, rank)
            taken = take_snapshot(file_name(rank), held, place, optimizer, extras or {})
            return taken if copies is None else copies.copy(taken)

        def manifest(files: Mapping[str, FileFacts]) -> Manifest:
            tensors, degrees = collect(self._temporary, files), degrees_of(topology)
            return Manifest(step, tokens, degrees, tensors, files, facts or {})

        def commit_files(files: Mapping[str, FileFacts]) -> None:
            final = commit(self._temporary, manifest(files))
            retain(self._folder, keep or Retention(), final)

        self._commit = commit_files
        taken = LocalWork(snapshot, in_thread=False)
        self._work: LocalWork[FileFacts | None] = LocalWork(
            lambda: write_snapshot(self._temporary, taken.result(), self._cancelled.is_set),
            in_thread=self._in_thread,
        )

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

        Of the two phases the first ends when all have written and the second when the first rank
        has committed. Waits for this rank's work.

        Raises:
            CheckpointError: on all ranks if any failed; then the folder is as before.
        """
        try:
            outcomes = _outcomes_of(self._work.result, self._group, self._doing)
        except CheckpointError:
            if self._is_first:
                shutil.rmtree(self._temporary, ignore_errors=True)
            raise
        if self._is_written:
            return True
        self._is_written = True
        files = dict(zip(map(file_name, self._ranks), cast(list[FileFacts], outcomes), strict=True))
        self._work = LocalWork(
            lambda: self._commit(files) if self._is_first else None,
            in_thread=self._in_thread and self._is_first,
        )
        return False

    def finish(self) -> Path:
        """Wait for all that is left, all ranks together; returns the checkpoint.

        Raises:
            CheckpointError: as `agree`.
        """
        while not self.agree():
            pass
        return self._folder / folder_name(self.step)

    def cancel(self) -> None:
        """Write no more here, as some rank has failed; its error comes from `agree`."""
        self._cancelled.set()

    def _make_temporary(self) -> Path:
        def make() -> str:
            return str(make_temporary(self._folder, self.step) if self._is_first else "")

        return Path(str(_outcomes_of(make, self._group, self._doing)[0]))


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


def _outcomes_of(work: Callable[[], object], group: Group, doing: str) -> list[object]:
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
