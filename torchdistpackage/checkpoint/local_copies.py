"""A run's state on its nodes' own disks: each node has that of its ranks, and of the next node's.

A local checkpoint is a checkpoint whose files lie on several nodes: on each the manifest, which
lists the files of all ranks, and the files of two nodes. So it is complete as long as no two
neighbours are lost. Nothing is loaded from there. What is newer than the run's own checkpoints is
first copied to them, each file by a node that has it, and the manifest put together as for any
save; so other degrees and other nodes load it as they load every checkpoint.
"""

import os
import shutil
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

from torchdistpackage.checkpoint.commit import (
    candidates,
    check_file,
    commit,
    folder_name,
    make_temporary,
    remove_checkpoint,
    step_of,
    warn_skipped,
)
from torchdistpackage.checkpoint.file_exchange import FileExchange
from torchdistpackage.checkpoint.local_work import LocalWork
from torchdistpackage.checkpoint.manifest import NAME, FileFacts, Manifest, check_manifest
from torchdistpackage.checkpoint.node_folder import (
    ID,
    NodeCheckpoint,
    checkpoints_in,
    current_id,
    expanded,
    folder_of,
    is_own,
    make_folder,
    remove_stale,
    renew_id,
)
from torchdistpackage.checkpoint.nodes import neighbours, nodes_of
from torchdistpackage.checkpoint.save import (
    Files,
    PendingSave,
    SaveFacts,
    SharedFolder,
    fail_together,
    file_name,
    outcomes_of,
)
from torchdistpackage.checkpoint.snapshot import Snapshot
from torchdistpackage.checkpoint.writer import copy_file, write_snapshot
from torchdistpackage.comm import primitives
from torchdistpackage.comm.primitives import Group
from torchdistpackage.comm.tpc import resolve_group
from torchdistpackage.errors import CheckpointError

_NAMED = 8
"""Faults of copies that a start names."""
KEPT = 2
"""Checkpoints on a node: if a crash interrupts a commit, some nodes have the new one and all the
one before."""


class LocalCopies:
    """The folders of this run on all nodes, as the target of a save. All ranks call it alike.

    where: `checkpoint.local_dir`. checkpoints: those of the run. run: its name.

    notes: what `recover` has found, alike on all ranks: which copies, what is not to be used and
    why, and which are used.

    Raises:
        CheckpointError: on all ranks, if a node has no such folder, or shares it with others.
    """

    def __init__(self, where: str, checkpoints: Path, run: str, group: Group | None = None):
        self.group = resolve_group(group, "global")
        with fail_together(self.group, "reading checkpoint.local_dir"):
            root = expanded(where, os.environ)
        self._root, self._checkpoints, self._run = root, checkpoints, run
        self.notes: list[str] = []
        self.name = f"checkpoint.local_dir={where}"
        self._ranks = primitives.ranks_of(self.group)
        self._rank = self._ranks[self.group.rank()]
        self._nodes = nodes_of(root, self.name, self.group)
        at = next(i for i, node in enumerate(self._nodes) if self._rank in node)
        self._node = self._nodes[at]
        self.committer = self._node[0]
        self.path, self._start = root, ""
        self._exchange = FileExchange(self.group, *neighbours(self._nodes, self._rank))

    # -- the beginning of a start ------------------------------------------------------------

    def recover(self, newest: Path | None) -> Path | None:
        """The newest complete checkpoint, local or not, which is then among those of the run.

        newest: the newest complete one of the run. A local one is complete if each of its files,
        with its checksum, is on a node of this start; others are named in a warning.

        Raises:
            CheckpointError: on all ranks, if the run's folder takes no more.
        """
        start = str(primitives.broadcast_object(current_id(self._checkpoints), self.group))
        if not start:
            if newest is not None:
                self.notes.append(
                    f"no local copies: no {ID} of an earlier start is at {newest.parent}"
                )
            return newest
        folder, than = folder_of(self._root, self._run, start), newest and step_of(newest)
        unusable: list[str] = []
        mine = checkpoints_in(folder, unusable.append) if self._commits else []
        held = cast(list[list[NodeCheckpoint]], primitives.gather_objects(mine, self.group))
        self._note_unusable(unusable)
        for step in sorted({x.step for node in held for x in node}, reverse=True):
            num = sum(any(x.step == step for x in node) for node in held)
            self.notes.append(f"local copies of step {step} on {num} of {len(self._nodes)} nodes")
        known = {(x.step, x.digest) for node in held for x in node}
        for step, digest in sorted(known, reverse=True):
            if than is not None and step <= than:
                self.notes.append(f"no local copies are used: the run folder has step {than}")
                return newest
            path = folder / folder_name(step)
            has = [next((x for x in node if x.digest == digest), None) for node in held]
            if (problem := self._drain_found(path, has)) is None:
                self.notes.append(
                    f"local copies of step {step} are used, and in the run folder now"
                )
                return self._checkpoints / path.name
            if self._rank == self._ranks[0]:
                warn_skipped(path, problem)
        self.notes.append("no local copies are used: none is whole on the nodes of this start")
        return newest

    def _note_unusable(self, mine: Sequence[str]) -> None:
        """Note what the ranks name, each with its host."""
        told = [f"{socket.gethostname()}: {text}" for text in mine]
        gathered = cast(list[list[str]], primitives.gather_objects(told, self.group))
        every = [text for texts in gathered for text in texts]
        self.notes += [f"local copies not usable on {text}" for text in every[:_NAMED]]
        if len(every) > _NAMED:
            self.notes.append(f"local copies not usable: {len(every) - _NAMED} more")

    def begin(self) -> None:
        """Make the folders of this start; those of earlier starts, and other stale ones, go.

        Raises:
            CheckpointError: on all ranks, if one cannot be made.
        """
        is_first = self._rank == self._ranks[0]
        doing = f"making a folder in {self.name}"
        draw: Callable[[], str] = lambda: renew_id(self._checkpoints) if is_first else ""  # noqa: E731
        self._start = str(outcomes_of(draw, self.group, doing)[0])
        self.path = folder_of(self._root, self._run, self._start)
        with fail_together(self.group, doing):
            if self._commits:
                make_folder(self.path, self._checkpoints, self._start)
                remove_stale(self.path, self._checkpoints)

    def _drain_found(self, path: Path, has: Sequence[NodeCheckpoint | None]) -> str | None:
        """Copy a local checkpoint to those of the run; what is wrong with it, or None.

        has: what the node of each rank that commits has of it.
        """
        first = next(i for i, node in enumerate(has) if node is not None)
        is_source = self._rank == self._ranks[first]
        text = primitives.broadcast_object(
            _read(path / NAME) if is_source else "", self.group, self._ranks[first]
        )
        try:
            manifest = Manifest.from_json(str(text))
            check_manifest(manifest, path)
        except CheckpointError as error:
            return str(error)
        here = has[self._ranks.index(self.committer)]
        share = () if here is None else here.files[self._node.index(self._rank) :: len(self._node)]
        problems = {name: _problem(path / name, manifest.files[name]) for name in share}
        sound = [name for name, problem in problems.items() if not problem]
        self._note_unusable([problem for problem in problems.values() if problem])
        found = cast(list[list[str]], primitives.gather_objects(sound, self.group))
        lost = sorted(set(manifest.files) - {name for names in found for name in names})
        if lost:
            return (
                f"{len(lost)} of its {len(manifest.files)} files, such as {lost[0]}, are whole on "
                f"no node of this start"
            )
        mine = _shared_out(manifest.files, found)[self.group.rank()]

        def copy(temporary: Path, cancelled: Callable[[], bool]) -> Files:
            return {x: _copied(path / x, temporary, manifest.files[x], cancelled) for x in mine}

        saved = SaveFacts(manifest.step, manifest.tokens, manifest.degrees, manifest.facts)
        target = SharedFolder(self._checkpoints, None, self.group)
        PendingSave(target, saved, copy, in_thread=False).finish()
        return None

    # -- as the target of a save -------------------------------------------------------------

    @property
    def _commits(self) -> bool:
        return self._rank == self.committer

    def make_temporary(self, step: int) -> Path:
        if not is_own(self.path):  # somebody has tidied up
            make_folder(self.path, self._checkpoints, self._start)
        return make_temporary(self.path, step)

    def write(self, temporary: Path, snapshot: Snapshot, cancelled: Callable[[], bool]) -> Files:
        own = LocalWork(lambda: write_snapshot(temporary, snapshot, cancelled), in_thread=False)
        # also without a file of its own: the others wait for what they are sent
        facts = None if own.error else own.result()
        sent = LocalWork(
            lambda: self._exchange.run(temporary / snapshot.file, facts), in_thread=False
        )
        written = {snapshot.file: own.result()}
        sent.result()
        return written

    def commit(self, temporary: Path, saved: SaveFacts, files: Files) -> None:
        # without tensors: they are put together from all files, of which this node has a part
        commit(temporary, saved.manifest({}, files))
        for path in candidates(self.path)[KEPT:]:
            remove_checkpoint(path)

    def drain(self, done: PendingSave, target: SharedFolder) -> PendingSave:
        """Begin to copy the local checkpoint that is `done` to the run's own; by threads."""
        name = file_name(self._rank)
        # opened now: the copy may take longer than the file has its name
        path = self.path / folder_name(done.step) / name
        opened = LocalWork(lambda: path.open("rb"), in_thread=False)

        def copy(temporary: Path, cancelled: Callable[[], bool]) -> Files:
            with opened.result() as file:
                return {name: copy_file(file, temporary / name, done.files[name], cancelled)}

        def close() -> None:
            if opened.error is None:
                opened.result().close()

        return PendingSave(target, done.saved, copy, in_thread=True, unused=close)

    def close(self) -> None:
        """The run has ended and its state is in its folder: remove the copies on all nodes."""
        if self._commits:
            shutil.rmtree(self.path, ignore_errors=True)
        if self._rank == self._ranks[0]:
            (self._checkpoints / ID).unlink(missing_ok=True)
        self._exchange.close()


def _shared_out(files: Files, found: Sequence[Sequence[str]]) -> list[list[str]]:
    """For each rank the files that it copies, of those that are sound where it is."""
    mine: list[list[str]] = [[] for _ in found]
    loads = [0] * len(found)
    for name in sorted(files):
        at = min((i for i, names in enumerate(found) if name in names), key=lambda i: loads[i])
        mine[at].append(name)
        loads[at] += files[name].size_bytes
    return mine


def _copied(
    path: Path, temporary: Path, expected: FileFacts, cancelled: Callable[[], bool]
) -> FileFacts:
    with path.open("rb") as file:
        return copy_file(file, temporary / path.name, expected, cancelled)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _problem(path: Path, expected: FileFacts) -> str:
    """What is wrong with a file; "" if nothing."""
    try:
        check_file(path, expected, ())
    except (OSError, CheckpointError) as error:
        return f"{path}: {error}"
    return ""
