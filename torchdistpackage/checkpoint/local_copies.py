"""Copies of a run's state on its nodes' disks; each node keeps its files and the next node's.

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
from typing import Any, cast

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
from torchdistpackage.checkpoint.manifest import FileFacts, read_manifest
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
from torchdistpackage.comm.primitives import ForEach, Group
from torchdistpackage.comm.tpc import resolve_group
from torchdistpackage.errors import CheckpointError

_NAMED = 8
"""Largest number of unusable copies that a start names."""
KEPT = 2
"""Checkpoints kept on a node. With two, all nodes have the older one if a crash interrupts a commit
after only some nodes have the newer one."""


class LocalCopies:
    """The folders of this run on all nodes, as a `SaveTarget`; all ranks call it together.

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
        own_copies = checkpoints_in(folder, unusable.append)
        versions = [(x.step, x.digest) for x in own_copies]
        # one rank looks for its node: the other ranks there see the same files
        report = (_named(unusable), versions) if self._commits else (_named(()), [])
        summary = primitives.reduce_objects(report, self._summary, self.group)
        notes, sources = cast(tuple[list[str], list[tuple[int, str, int]]], summary)
        self.notes += notes
        for step, digest, source in sources:
            if newest_step is not None and step <= newest_step:
                self.notes.append(
                    f"no local copies are used: the run folder has step {newest_step}"
                )
                return newest
            path = folder / folder_name(step)
            own_copy = next((x for x in own_copies if x.digest == digest), None)
            if (problem := self._drain_found(path, own_copy, source)) is None:
                self.notes.append(
                    f"local copies of step {step} are used, and have been copied into the run "
                    "folder"
                )
                return self._checkpoints / path.name
            if self._rank == self._ranks[0]:
                warn_skipped(path, problem)
        self.notes.append("no local copies are used: none is complete on the nodes of this start")
        return newest

    def _summary(self, reports: list[Any]) -> object:
        """Return notes on what all nodes have, and each version of a checkpoint, newest first.

        A version is its step, its digest and the first rank that has it.

        reports: problems and versions of each rank.
        """
        notes = _unusable([problems for problems, _ in reports])
        sources: dict[tuple[int, str], int] = {}
        nodes_of: dict[int, int] = {}
        for rank, (_, versions) in zip(self._ranks, reports, strict=True):
            for step in {step for step, _ in versions}:
                nodes_of[step] = nodes_of.get(step, 0) + 1
            for version in versions:
                sources.setdefault(version, rank)
        for step in sorted(nodes_of, reverse=True):
            num_nodes = f"{nodes_of[step]} of {self._num_nodes} nodes"
            notes.append(f"local copies of step {step} on {num_nodes}")
        return notes, [(*version, sources[version]) for version in sorted(sources, reverse=True)]

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

    def _drain_found(self, path: Path, own_copy: NodeCheckpoint | None, source: int) -> str | None:
        """Copy a local checkpoint to the run's folder; return what is wrong with it, or None.

        own_copy: what this rank's node has of it. source: a rank whose node has some of it.
        """
        manifest, problem = None, ""
        if own_copy is not None:
            try:
                manifest = read_manifest(path)
            except (OSError, CheckpointError) as error:
                problem = str(error)
        # only nodes that have the list of all files keep it, because it grows with the ranks
        facts = manifest and (manifest.step, manifest.tokens, manifest.degrees, manifest.facts)
        sent = primitives.broadcast_object((facts, problem), self.group, source)
        facts, problem = cast(tuple[Any, str], sent)
        if problem:
            return problem
        at = self._node.index(self._rank)
        share: Sequence[str] = ()
        files: Files = {}
        if own_copy is not None and manifest is not None:
            share, files = own_copy.files[at :: len(self._node)], manifest.files
        problems = {name: _problem(path / name, files[name]) for name in share}
        intact = [name for name, problem in problems.items() if not problem]
        unusable = _named([problem for problem in problems.values() if problem])
        report = unusable, intact, files if self._rank == source else None
        answer = primitives.reduce_objects(report, _divided, self.group)
        notes, lost, own_files = cast(tuple[list[str], str, list[str]], answer)
        self.notes += notes
        if lost:
            return lost

        def copy(temporary: Path, cancelled: Callable[[], bool]) -> Files:
            return {x: _copied(path / x, temporary, files[x], cancelled) for x in own_files}

        saved = SaveFacts(*facts)
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

    def drain(self, pending: PendingSave, target: SharedFolder) -> PendingSave:
        """Start threads that copy the finished local checkpoint `pending` to the run's folder."""
        name = file_name(self._rank)
        # open it now: a later save may remove the file's name before the copy is finished
        path = self.path / folder_name(pending.step) / name
        opened = LocalWork(lambda: path.open("rb"), in_thread=False)

        def copy(temporary: Path, cancelled: Callable[[], bool]) -> Files:
            with opened.result() as file:
                return {name: copy_file(file, temporary / name, pending.files[name], cancelled)}

        def close() -> None:
            if opened.error is None:
                opened.result().close()

        return PendingSave(target, pending.saved, copy, in_thread=True, unused=close)

    def close(self) -> None:
        """Remove the copies on all nodes, after the run has ended with its state in its folder."""
        if self._commits:
            shutil.rmtree(self.path, ignore_errors=True)
        if self._rank == self._ranks[0]:
            (self._checkpoints / ID).unlink(missing_ok=True)
        self._exchange.close()


def _named(problems: Sequence[str]) -> tuple[list[str], int]:
    """Return the first problems of this host, with its name, and the number of problems."""
    return [f"{socket.gethostname()}: {text}" for text in problems[:_NAMED]], len(problems)


def _unusable(reports: Sequence[tuple[list[str], int]]) -> list[str]:
    """Return the notes on copies that cannot be used. reports: `_named` of each rank."""
    named = [text for texts, _ in reports for text in texts][:_NAMED]
    notes = [f"local copies not usable on {text}" for text in named]
    if num_more := sum(num for _, num in reports) - len(named):
        notes.append(f"local copies not usable: {num_more} more")
    return notes


def _divided(reports: list[Any]) -> ForEach:
    """Return notes, what the checkpoint lacks ("" if nothing), and the files to copy, by rank.

    reports: problems and intact files of each rank, and from one rank the files of the checkpoint.
    """
    notes = _unusable([problems for problems, _, _ in reports])
    files = cast(Files, next(files for _, _, files in reports if files is not None))
    by_rank = [names for _, names, _ in reports]
    lost = sorted(set(files) - {name for names in by_rank for name in names})
    if not lost:
        return ForEach([(notes, "", share) for share in _shared_out(files, by_rank)])
    text = (
        f"{len(lost)} of its {len(files)} files, such as {lost[0]}, are whole on no node of this "
        f"start"
    )
    return ForEach([(notes, text, []) for _ in reports])


def _shared_out(files: Files, intact: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return the files that each rank copies, chosen from the intact ones on its node."""
    holders: dict[str, list[int]] = {}
    for rank, names in enumerate(intact):
        for name in names:
            holders.setdefault(name, []).append(rank)
    shares: list[list[str]] = [[] for _ in intact]
    loads = [0] * len(intact)
    for name in sorted(files):
        rank = min(holders[name], key=lambda i: loads[i])
        shares[rank].append(name)
        loads[rank] += files[name].size_bytes
    return shares


def _copied(
    path: Path, temporary: Path, expected: FileFacts, cancelled: Callable[[], bool]
) -> FileFacts:
    """Copy one file into the temporary folder, checking its checksum."""
    with path.open("rb") as file:
        return copy_file(file, temporary / path.name, expected, cancelled)


def _problem(path: Path, expected: FileFacts) -> str:
    """Return what is wrong with a file; "" if nothing is."""
    try:
        check_file(path, expected, ())
    except (OSError, CheckpointError) as error:
        return f"{path}: {error}"
    return ""
