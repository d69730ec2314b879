"""The checkpoints of a run: when copies are written, and how a failed save is handled.

A save beside the steps goes through three agreements of all ranks, each between two steps: there is
a folder, all have written, those that commit have done so. Whether a rank is ready for the next one
is a vote in the sum that each step makes anyway (votes.py), so a step waits for no disk, and a
failure is known on all ranks with the numbers of the next step.

With local copies a save goes to the nodes' own disks, and from there to the run folder. The two are
under way apart, as a slow folder must not hold up the next local copy.
"""

import socket
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

from torchdistpackage.checkpoint.local_copies import LocalCopies
from torchdistpackage.checkpoint.retention import Retention
from torchdistpackage.checkpoint.save import PendingSave, SharedFolder
from torchdistpackage.checkpoint.snapshot import HostCopies
from torchdistpackage.comm import primitives
from torchdistpackage.errors import CheckpointError
from torchdistpackage.run_files import CHECKPOINTS
from torchdistpackage.text import size_text
from torchdistpackage.train.host_memory import available_bytes
from torchdistpackage.train.step import Trainer
from torchdistpackage.train.train_state import TrainState, begin_save, saved_bytes
from torchdistpackage.train.votes import Votes

_SHARE = 0.5
"""Fraction of a node's free memory that copies may take, because training has not reached its peak
yet.
"""
_SAID_S = 0.05
"""Shortest wait, in seconds, that is reported."""


class SaveSlot:
    """One save in progress, and what all ranks know about it. All ranks call it alike.

    name: that of its votes. done: called with a save that counts, and the seconds that it took;
    failed: with the error of one that does not, and never will.
    """

    def __init__(
        self,
        name: str,
        done: Callable[[PendingSave, float], None],
        failed: Callable[[CheckpointError], None],
    ):
        self._name, self._done, self._failed = name, done, failed
        self.pending: PendingSave | None = None
        self._began_s = 0.0
        self._issued = self._heard_after = 0

    def register(self, votes: Votes) -> None:
        """Make each step carry whether this rank has finished its part of the save, and whether it
        failed.
        """
        votes.register(f"{self._name}_done", self._is_done)
        votes.register(f"{self._name}_failed", self._has_failed)

    def _is_done(self, step: int) -> bool:
        self._issued = step
        return self.pending is not None and self.pending.is_done

    def _has_failed(self, step: int) -> bool:
        return self.pending is not None and self.pending.has_failed

    def hear(self, step: int, votes: Mapping[str, float]) -> None:
        """Act on the summed votes of `step`: cancel a save that failed on a rank, conclude one that
        all ranks finished. Raises what `failed` raises.
        """
        # the votes of steps that were issued before are of the phase before
        if self.pending is None or step <= self._heard_after:
            return
        failed = votes[f"{self._name}_failed"] > 0
        if failed:
            self.pending.cancel()
        if failed or votes[f"{self._name}_done"] == self.pending.num_ranks:
            self._agree()

    def begin(self, begin: Callable[[], PendingSave], began_s: float | None = None) -> None:
        """Begin a save; the previous one must be over. began_s: when it began, if not now."""
        self._began_s = time.monotonic() if began_s is None else began_s
        self.pending = begin()
        self._heard_after = self._issued

    def flush(self) -> None:
        """Wait until no save is in progress; raises what `failed` raises."""
        while self.pending is not None:
            self._agree()

    def _agree(self) -> None:
        assert self.pending is not None
        pending = self.pending
        try:
            is_over = pending.agree()
        except CheckpointError as error:
            self.pending = None
            self._failed(error)
            return
        self._heard_after = self._issued
        if is_over:
            self.pending = None
            self._done(pending, self._began_s)


class RunSaver:
    """Saves the state of a run, one checkpoint at a time; all ranks call it alike.

    mode: disabled, async, or auto: async if every node has room for the copies. goes_on: a failed
    save is reported, and training continues; otherwise it raises. local: copies on the nodes' own
    disks through which saves go. note: takes a line for the log; on_saved: takes a saved step, and
    the seconds from the beginning of the save to its commit.
    """

    def __init__(
        self,
        trainer: Trainer,
        folder: Path,
        *,
        keep: Retention | None = None,
        mode: str = "disabled",
        goes_on: bool = False,
        local: LocalCopies | None = None,
    ):
        self._trainer, self._goes_on, self._mode = trainer, goes_on, mode
        self._folder, self._keep = folder / CHECKPOINTS, keep or Retention(1)
        self.local = local
        self.note: Callable[[str], None] = lambda line: None
        self.on_saved: Callable[[int, float], None] = lambda step, took_s: None
        self._copies = self._host_copies() if mode == "async" else None
        self._shared = SaveSlot("save", self._saved, self._failed)
        self._local = SaveSlot("local", self._copied, self._local_failed)
        self._drains = False
        self._reads_copies = False
        """True if the save to the run folder that is under way reads `_copies`."""
        self.owes = False
        """True if the run folder needs a checkpoint after the next step, because the local copy
        that should have become one failed."""

    def register(self, votes: Votes) -> None:
        """Make each step carry the progress of this rank's saves."""
        self._shared.register(votes)
        self._local.register(votes)

    @property
    def is_saving(self) -> bool:
        """Return whether a save is under way; the answer is the same on all ranks."""
        return self._shared.pending is not None or self._local.pending is not None

    @property
    def is_writing_run_folder(self) -> bool:
        """Return whether a save to the run folder is under way, or a local copy that becomes
        one.
        """
        is_draining = self._local.pending is not None and self._drains
        return self._shared.pending is not None or is_draining

    def hear(self, step: int, votes: Mapping[str, float]) -> None:
        """Continue the saves in progress according to the summed votes of `step`.

        Raises:
            CheckpointError: on all ranks if a save failed on one, unless it is to go on.
        """
        self._shared.hear(step, votes)
        self._local.hear(step, votes)

    def save(self, state: TrainState, *, last: bool = False) -> None:
        """Save `state`, or begin to; waits for a previous save that is still in progress.

        last: no save follows, so it does not go through a local copy.

        Raises:
            CheckpointError: as `hear`.
        """
        if self.local is not None and not last and not self.owes:
            self.save_locally(state, drains=True)
            return
        self.owes = False
        self._wait_for_earlier(self._local, state.step)
        self._wait_for_earlier(self._shared, state.step)
        self._begin(self._shared, state, self._target)
        self._reads_copies = self._copies is not None

    def save_locally(self, state: TrainState, *, drains: bool = False) -> None:
        """Copy `state` to the nodes' own disks, or begin to. drains: then also to the run folder.

        Raises:
            CheckpointError: as `hear`.
        """
        assert self.local is not None
        if self._reads_copies:  # else this copy would overwrite what that save still writes
            self._wait_for_earlier(self._shared, state.step)
            self._reads_copies = False
        self._wait_for_earlier(self._local, state.step)
        self._drains = drains
        self._begin(self._local, state, self.local)

    def flush(self) -> None:
        """Wait until nothing is under way.

        Raises:
            CheckpointError: as `hear`.
        """
        self._local.flush()
        self._shared.flush()

    def close(self) -> None:
        """Finish the saves in progress, and remove local copies, at the end of a run.

        Raises:
            CheckpointError: as `hear`.
        """
        self.flush()
        if self.local is not None:
            self.local.close()

    def abandon(self) -> None:
        """Abandon the saves in progress of a failing run; they will not count."""
        for slot in (self._local, self._shared):
            if slot.pending is not None:
                slot.pending.cancel()

    @property
    def _target(self) -> SharedFolder:
        return SharedFolder(self._folder, self._keep)

    def _begin(self, slot: SaveSlot, state: TrainState, target: SharedFolder | LocalCopies) -> None:
        if self._mode == "auto":
            self._choose_mode()
        slot.begin(lambda: begin_save(self._trainer, state, target, self._copies))
        if self._copies is None:
            slot.flush()

    def _wait_for_earlier(self, slot: SaveSlot, step: int) -> None:
        if slot.pending is None:
            return
        earlier, began = slot.pending.step, time.monotonic()
        slot.flush()
        if (waited_s := time.monotonic() - began) >= _SAID_S:
            self.note(
                f"save of step {step} waited {waited_s:.1f} s for that of step {earlier} to be "
                f"written"
            )

    def _saved(self, save: PendingSave, began_s: float) -> None:
        self.on_saved(save.step, time.monotonic() - began_s)

    def _copied(self, save: PendingSave, began_s: float) -> None:
        if not self._drains:
            return
        self._wait_for_earlier(self._shared, save.step)
        local = self.local
        assert local is not None
        self._shared.begin(lambda: local.drain(save, self._target), began_s)
        self._reads_copies = False  # it reads the local copy

    def _failed(self, error: CheckpointError) -> None:
        if not self._goes_on:
            raise error
        self.note(f"no checkpoint: {error}; training goes on (checkpoint.on_error: continue)")

    def _local_failed(self, error: CheckpointError) -> None:
        if not self._goes_on:
            raise error
        self.owes |= self._drains
        self.note(f"no local copy: {error}; training goes on (checkpoint.on_error: continue)")

    def _host_copies(self) -> HostCopies:
        """Return copies for which the next update waits, but no forward or backward before it."""
        copies = HostCopies(deferred=True)
        self._trainer.update.before_step = copies.before_update
        return copies

    def _choose_mode(self) -> None:
        """Choose how copies are made, once, at the first save, when the optimizer's state
        exists.
        """
        local = socket.gethostname(), saved_bytes(self._trainer), available_bytes()
        short = cast(tuple[str, int, int] | None, primitives.reduce_objects(local, _short_host))
        self._mode = "async" if short is None else "disabled"
        if short is None:
            self._copies = self._host_copies()
            return
        host, taken_bytes, available = short
        self.note("checkpoints are written between steps (checkpoint.async_mode: auto):")
        size = size_text(taken_bytes)
        self.note(f"  copies take {size} of the {size_text(available)} left on {host}")


def _short_host(ranks: list[tuple[str, int, int]]) -> tuple[str, int, int] | None:
    """Return the first host with too little memory for its copies: its name, their bytes, the
    memory left.
    """
    needed: dict[str, int] = defaultdict(int)
    for host, num_bytes, _ in ranks:
        needed[host] += num_bytes
    return next(((h, needed[h], free) for h, _, free in ranks if needed[h] > _SHARE * free), None)
