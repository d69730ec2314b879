"""Copies of a run's state on its nodes' own disks: each node keeps its own files and the next
node's.

A local checkpoint is a checkpoint whose files lie on several nodes. Each node has the manifest,
which lists the files of all ranks, and the files of two nodes. So the checkpoint is complete unless
two adjacent nodes are lost. No rank loads from it. If it is newer than the run's own checkpoints,
nodes that have its files first copy them to the run's folder and commit them like any save. A start
with other degrees or on other nodes then loads it like any checkpoint.
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
from torchdistpackage.checkpoint.nodes import place_in_nodes
from torchdistpackage.checkpoint.piece_table import Files, WrittenFiles
from torchdistpackage.checkpoint.save import (
    PendingSave,
    SaveFacts,
    SharedFolder,
    agree_on,
    fail_together,
    file_name,
)
from torchdistpackage.checkpoint.snapshot import Snapshot
from torchdistpackage.checkpoint.writer import copy_file, write_snapshot
from torchdistpackage.comm import primitives
from torchdistpackage.comm.primitives import Group
from torchdistpackage.comm.tpc import resolve_group
from torchdistpackage.errors import CheckpointError

_NAMED = 8
"""Largest number of unusable copies that a start names."""
KEPT = 2
"""Checkpoints kept on a node. With two, all nodes have the older one if a crash interrupts a commit
after only some nodes have the newer one."""


class LocalCopies:
    """The folders of this run on all nodes, as a target of saves. All ranks call it together.

    where: `checkpoint.local_dir`. checkpoints: the run's checkpoint folder. run: its name.
    notes: the findings of `recover`, equal on all ranks: which copies exist, which cannot be used
        and why, and which are used.

    Raises:
        CheckpointError: on all ranks, if a node lacks such a folder or shares it with others.
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
        place = place_in_nodes(root, self.name, self.group)
        self._node, self._num_nodes = place.node, place.num_nodes
        self.committer = self._node[0]
        self.path, self._start = root, ""
        self._exchange = FileExchange(place)

    # -- the beginning of a start ------------------------------------------------------------

    def recover(self, newest: Path | None) -> Path | None:
        """Return the newest complete checkpoint, after copying it to the run's folder if local.

        A local checkpoint is complete if some node of this start has each of its files with the
        right checksum; the others get a warning.

        newest: the newest complete checkpoint in the run's folder.

        Raises:
            CheckpointError: on all ranks, if the run's folder cannot be written.
        """
        start = str(primitives.broadcast_object(current_id(self._checkpoints), self.group))
        if not start:
            if newest is not None:
                self.notes.append(
                    f"no local copies: no {ID} of an earlier start is at {newest.parent}"
                )
            return newest
        folder = folder_of(self._root, self._run, start)
        newest_step = newest and step_of(newest)
        unusable: list[str] = []
        own_copies = checkpoints_in(folder, unusable.append) if self._commits else []
        by_rank = cast(
            list[list[NodeCheckpoint]], primitives.gather_objects(own_copies, self.group)
        )
        self._note_unusable(unusable)
        for step in sorted({x.step for node in by_rank for x in node}, reverse=True):
            num_nodes = sum(any(x.step == step for x in node) for node in by_rank)
            self.notes.append(
                f"local copies of step {step} on {num_nodes} of {self._num_nodes} nodes"
            )
        versions = {(x.step, x.digest) for node in by_rank for x in node}
        for step, digest in sorted(versions, reverse=True):
            if newest_step is not None and step <= newest_step:
                self.notes.append(
                    f"no local copies are used: the run folder has step {newest_step}"
                )
                return newest
            path = folder / folder_name(step)
            matching = [next((x for x in node if x.digest == digest), None) for node in by_rank]
            if (problem := self._drain_found(path, matching)) is None:
                self.notes.append(
                    f"local copies of step {step} are used, and in the run folder now"
                )
                return self._checkpoints / path.name
            if self._rank == self._ranks[0]:
                warn_skipped(path, problem)
        self.notes.append("no local copies are used: none is whole on the nodes of this start")
        return newest

    def _note_unusable(self, problems: Sequence[str]) -> None:
        """Add to `notes` the unusable copies that all ranks report, each with its host."""
        named = [f"{socket.gethostname()}: {text}" for text in problems]
        gathered = cast(list[list[str]], primitives.gather_objects(named, self.group))
        all_problems = [text for texts in gathered for text in texts]
        self.notes += [f"local copies not usable on {text}" for text in all_problems[:_NAMED]]
        if len(all_problems) > _NAMED:
            self.notes.append(f"local copies not usable: {len(all_problems) - _NAMED} more")

    def begin(self) -> None:
        """Create the folders of this start, and remove stale ones, such as those of earlier starts.

        Raises:
            CheckpointError: on all ranks, if a node cannot create its folder.
        """
        is_first = self._rank == self._ranks[0]
        doing = f"making a folder in {self.name}"
        draw: Callable[[], str] = lambda: renew_id(self._checkpoints) if is_first else ""  # noqa: E731
        self._start = str(agree_on(draw, self.group, doing, lambda drawn: drawn[0]))
        self.path = folder_of(self._root, self._run, self._start)
        with fail_together(self.group, doing):
            if self._commits:
                make_folder(self.path, self._checkpoints, self._start)
                remove_stale(self.path, self._checkpoints)

    def _drain_found(self, path: Path, has: Sequence[NodeCheckpoint | None]) -> str | None:
        """Copy a local checkpoint to the run's folder; return what is wrong with it, or None.

        has: what each rank's node has of it; None for ranks that do not commit.
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
        of_committer = has[self._ranks.index(self.committer)]
        share = (
            ()
            if of_committer is None
            else of_committer.files[self._node.index(self._rank) :: len(self._node)]
        )
        problems = {name: _problem(path / name, manifest.files[name]) for name in share}
        intact = [name for name, problem in problems.items() if not problem]
        self._note_unusable([problem for problem in problems.values() if problem])
        by_rank = cast(list[list[str]], primitives.gather_objects(intact, self.group))
        lost = sorted(set(manifest.files) - {name for names in by_rank for name in names})
        if lost:
            return (
                f"{len(lost)} of its {len(manifest.files)} files, such as {lost[0]}, are whole on "
                f"no node of this start"
            )
        own_files = _shared_out(manifest.files, by_rank)[self.group.rank()]

        def copy(temporary: Path, cancelled: Callable[[], bool]) -> Files:
            return {
                x: _copied(path / x, temporary, manifest.files[x], cancelled) for x in own_files
            }

        saved = SaveFacts(manifest.step, manifest.tokens, manifest.degrees, manifest.facts)
        target = SharedFolder(self._checkpoints, None, self.group)
        PendingSave(target, saved, copy, in_thread=False).finish()
        return None

    # -- as the target of a save -------------------------------------------------------------

    @property
    def _commits(self) -> bool:
        return self._rank == self.committer

    def make_temporary(self, step: int) -> Path:
        if not is_own(self.path):  # for example a cleanup job of the node removed it
            make_folder(self.path, self._checkpoints, self._start)
        return make_temporary(self.path, step)

    def write(self, temporary: Path, snapshot: Snapshot, cancelled: Callable[[], bool]) -> Files:
        writing = LocalWork(lambda: write_snapshot(temporary, snapshot, cancelled), in_thread=False)
        # run the exchange even without a file of our own: other ranks wait for our messages
        facts = None if writing.error else writing.result()
        sending = LocalWork(
            lambda: self._exchange.run(temporary / snapshot.file, facts), in_thread=False
        )
        written = {snapshot.file: writing.result()}
        sending.result()
        return written

    def describe(self, temporary: Path, files: Files) -> WrittenFiles:
        return WrittenFiles(files, {}, {})

    def commit(self, temporary: Path, saved: SaveFacts, files: Files) -> None:
        # the manifest lists no tensors: their headers are in files, and this node has only some
        commit(temporary, saved.manifest({}, files))
        for path in candidates(self.path)[KEPT:]:
            remove_checkpoint(path)

    def drain(self, done: PendingSave, target: SharedFolder) -> PendingSave:
        """Start threads that copy the finished local checkpoint `done` to the run's folder."""
        name = file_name(self._rank)
        # open it now: a later save may remove the file's name before the copy is finished
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
        """Remove the copies on all nodes, once the run has ended with its state in its folder."""
        if self._commits:
            shutil.rmtree(self.path, ignore_errors=True)
        if self._rank == self._ranks[0]:
            (self._checkpoints / ID).unlink(missing_ok=True)
        self._exchange.close()


def _shared_out(files: Files, intact: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return the files that each rank copies, chosen from the intact ones on its node."""
    shares: list[list[str]] = [[] for _ in intact]
    loads = [0] * len(intact)
    for name in sorted(files):
        rank = min((i for i, names in enumerate(intact) if name in names), key=lambda i: loads[i])
        shares[rank].append(name)
        loads[rank] += files[name].size_bytes
    return shares


def _copied(
    path: Path, temporary: Path, expected: FileFacts, cancelled: Callable[[], bool]
) -> FileFacts:
    """Copy one file into the temporary folder, checking its checksum."""
    with path.open("rb") as file:
        return copy_file(file, temporary / path.name, expected, cancelled)


def _read(path: Path) -> str:
    """Return the text of a file; "" if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _problem(path: Path, expected: FileFacts) -> str:
    """Return what is wrong with a file; "" if nothing is."""
    try:
        check_file(path, expected, ())
    except (OSError, CheckpointError) as error:
        return f"{path}: {error}"
    return ""
