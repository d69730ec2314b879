"""The checkpoints of a run: when copies are written, and what becomes of a save that fails.

A save beside the steps goes through three agreements of all ranks, each between two steps: the copy
has been made, all have written, the first rank has committed. Whether a rank is ready for the next
one is a word in the sum that each step makes anyway (`StepStats.save_done`), so a step waits for no
disk, and a failure is known on all ranks with the numbers of the next step.
"""

import socket
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import cast

from torchdistpackage.checkpoint.retention import Retention
from torchdistpackage.checkpoint.save import PendingSave
from torchdistpackage.checkpoint.snapshot import HostCopies
from torchdistpackage.comm import primitives
from torchdistpackage.errors import CheckpointError
from torchdistpackage.train.host_memory import available_bytes
from torchdistpackage.train.step import Trainer
from torchdistpackage.train.step_stats import StepResult
from torchdistpackage.train.train_state import TrainState, begin_save, saved_bytes

_SHARE = 0.5
"""Of the memory that a node has left, what copies may take: training is not at its peak yet."""


class RunSaver:
    """Saves the state of a run, one checkpoint at a time; all ranks call it alike.

    mode: disabled, async, or auto: async where every node has room for the copies. goes_on: a save
    that fails is said, and training goes on; else it raises. note: takes a line for the log;
    on_saved: a step that was saved, and the seconds from the beginning of the save to its commit.
    """

    def __init__(
        self,
        trainer: Trainer,
        folder: Path,
        *,
        keep: Retention | None = None,
        mode: str = "disabled",
        goes_on: bool = False,
    ):
        self._trainer, self._folder, self._keep = trainer, folder, keep or Retention(1)
        self._mode, self._goes_on = mode, goes_on
        self.note: Callable[[str], None] = lambda line: None
        self.on_saved: Callable[[int, float], None] = lambda step, took_s: None
        self._copies = HostCopies() if mode == "async" else None
        self._pending: PendingSave | None = None
        self._began_s = 0.0
        self._issued = self._heard_after = 0

    def words(self, step: int) -> dict[str, bool]:
        """What this rank says of its save in the sum of `step`, which is issued now."""
        self._issued, pending = step, self._pending
        if pending is None:
            return {}
        return {"save_done": pending.is_done, "save_failed": pending.has_failed}

    def hear(self, result: StepResult) -> None:
        """What all ranks said in the sum of a step.

        Raises:
            CheckpointError: on all ranks if a save failed on one, unless it is to go on.
        """
        # the words of steps that were issued before are of the phase before
        if self._pending is None or result.step <= self._heard_after:
            return
        if result.save_failed:
            self._pending.cancel()
        if result.save_failed or result.save_done == self._trainer.plan.world_size:
            self._agree()

    def save(self, state: TrainState) -> None:
        """Save `state`, or begin to; waits for the save before, if it is still under way.

        Raises:
            CheckpointError: as `hear`.
        """
        self._wait_for_earlier(state.step)
        self._began_s = time.monotonic()
        if self._mode == "auto":
            self._choose_mode()
        try:
            self._pending = begin_save(self._trainer, state, self._folder, self._keep, self._copies)
        except CheckpointError as error:
            self._failed(error)
            return
        self._heard_after = self._issued
        if self._copies is None:
            self.flush()

    def flush(self) -> None:
        """Wait until nothing is under way.

        Raises:
            CheckpointError: as `hear`.
        """
        while self._pending is not None:
            self._agree()

    def abandon(self) -> None:
        """The run fails: what is under way will not count."""
        if self._pending is not None:
            self._pending.cancel()

    def _wait_for_earlier(self, step: int) -> None:
        if self._pending is None:
            return
        earlier, began = self._pending.step, time.monotonic()
        self.flush()
        self.note(
            f"save of step {step} waited {time.monotonic() - began:.1f} s for that of step "
            f"{earlier} to be written"
        )

    def _agree(self) -> None:
        assert self._pending is not None
        try:
            is_over = self._pending.agree()
        except CheckpointError as error:
            self._failed(error)
            return
        self._heard_after = self._issued
        if is_over:
            step, self._pending = self._pending.step, None
            self.on_saved(step, time.monotonic() - self._began_s)

    def _failed(self, error: CheckpointError) -> None:
        self._pending = None
        if not self._goes_on:
            raise error
        self.note(f"no checkpoint: {error}; training goes on (checkpoint.on_error: continue)")

    def _choose_mode(self) -> None:
        """Once, at the first save, when the state of the optimizer is there."""
        mine = socket.gethostname(), saved_bytes(self._trainer), available_bytes()
        found = cast(list[tuple[str, int, int]], primitives.gather_objects(mine))
        needed: dict[str, int] = defaultdict(int)
        for host, num_bytes, _ in found:
            needed[host] += num_bytes
        short = next((x for x in found if needed[x[0]] > _SHARE * x[2]), None)
        self._mode = "async" if short is None else "disabled"
        if short is None:
            self._copies = HostCopies()
            return
        host, _, left = short
        self.note("checkpoints are written between steps (checkpoint.async_mode: auto):")
        sizes_gb = needed[host] / 1e9, left / 1e9
        self.note(f"  copies take {sizes_gb[0]:.1f} GB of the {sizes_gb[1]:.1f} GB left on {host}")
