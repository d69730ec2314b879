"""The run from its first step to its last: train, validate, save.

Every rank runs the same loop. It differs from most training loops in three ways, each with a
comment at its place: one all-reduce per step carries everything that ranks tell each other, its
numbers are read one step late, and all ranks stop after the same step.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from torchdistpackage.data.source import table_entropies
from torchdistpackage.harness.stragglers.compare import CALLBACKS
from torchdistpackage.harness.watchdog import HangWatchdog, Heartbeat
from torchdistpackage.plan.logged_values import ASKED
from torchdistpackage.train.log import StepLog, evaluation_lines, perplexity
from torchdistpackage.train.saving import RunSaver
from torchdistpackage.train.step import Trainer
from torchdistpackage.train.step_stats import PendingStep, StepResult
from torchdistpackage.train.stop import StopController
from torchdistpackage.train.train_state import TrainState


class Callback:
    """Base class of callbacks; the loop calls them on all ranks alike. `loop.log` takes their
    output.
    """

    def on_begin(self, loop: "Loop") -> None:
        """Called when the files of the run are open, before the first step is issued."""

    def records(self, step: int) -> bool:
        """Return whether this rank should record `step`, the next one."""
        return False

    def is_due(self, step: int) -> bool:
        """Return whether the numbers of `step` must be read before the next step is issued."""
        return False

    def before_step(self, loop: "Loop", step: int) -> None:
        """Called just before `step` is issued."""

    def on_issued(self, loop: "Loop", step: int) -> None:
        """Called after `step` was issued; a device may still be working on it."""

    def on_step(self, loop: "Loop", result: StepResult, issued: PendingStep) -> None:
        """Called when the numbers of a step have arrived, before any of them is recorded or
        logged.
        """

    def on_validated(self, loop: "Loop", values: Mapping[str, float]) -> None:
        """Called after a validation with its values, equal on all ranks.

        They are `val_loss`, the losses of data.eval by name, and others as in the row of the step.
        """

    def on_save(self, loop: "Loop", step: int, took_s: float) -> None:
        """Called when the checkpoint of `step` is complete, took_s seconds after its save began."""

    def on_end(self, loop: "Loop") -> None:
        """Called when the run is over, or saved and asked to end."""


class Loop:
    """One run of training, by `run()`. `folder` is the run folder, shared by all ranks.

    call_timeout_s: of a collective or message after the first step, without a watch. eval_every,
    save_every, save_every_min, local_every: steps, or minutes, between two; 0 and None are off, and
    a validation comes at the end too. save_last: the last step is saved, whatever they are. saver:
    of this run's checkpoints, for local_every with local copies; default: all in turn. callbacks:
    called in their order, on all ranks. watch: ends a hang before the limits of single calls do.
    """

    def __init__(
        self,
        trainer: Trainer,
        state: TrainState,
        folder: Path,
        log: StepLog,
        stop: StopController | None = None,
        watch: HangWatchdog | None = None,
        *,
        call_timeout_s: float,
        eval_every: int = 0,
        save_every: int = 0,
        save_every_min: float | None = None,
        local_every: int = 0,
        save_last: bool = False,
        saver: RunSaver | None = None,
        callbacks: Sequence[Callback] = (),
    ):
        self.trainer, self.state, self.folder, self.log = trainer, state, folder, log
        self._eval_every = eval_every
        self._save_every, self._save_every_min = save_every, save_every_min
        self._save_last = save_last
        self._local_every = local_every
        self._callbacks = callbacks
        self._records, self._is_due = _own(callbacks, "records"), _own(callbacks, "is_due")
        self._before_step, self._on_issued, self._on_step = (
            _own(callbacks, name) for name in ("before_step", "on_issued", "on_step")
        )
        self.heartbeat = watch or Heartbeat()
        self._call_timeout_s = call_timeout_s if watch is None else watch.call_timeout_s
        if watch is not None:
            # in the first step too, of which the watch knows the limit
            trainer.limit(self._call_timeout_s)
        self.stop = stop or StopController()
        self.saver = RunSaver(trainer, folder) if saver is None else saver
        self.votes = trainer.votes
        self.votes.register("save", lambda step: self._save_is_due())
        self.votes.register("stop", lambda step: self.stop.should_stop())
        self.saver.register(self.votes)
        for name, ask in ASKED.items():
            assert name not in self.votes.names, "two owners ask for one value"
            self.votes.register(name, partial(ask, self))
        self.saver.note = log.note
        self.saver.on_saved = self._on_saved
        if trainer.runs_ahead:
            # there the numbers of a step are read when the next one has been issued, and the
            # clock is asked while the one before still runs
            self.stop.ahead = 4
        self.is_main = trainer.rank == 0
        self.artifacts: tuple[str, ...] = ()
        self._saved_at = time.monotonic()
        self._pending: PendingStep | None = None
        self._start = state.step
        self._asked_to_save = self._asked_to_stop = False
        self.early_end = ""
        """Reason why the run is complete before its last step; empty if it is not."""

    def run(self) -> float | None:
        """Train to the last step and return the final validation loss, in nats per token.

        It returns None if a rank asked to stop first; then the state is saved, and all ranks know.
        """
        try:
            with self.log.opened(self.state.step):
                for callback in self._callbacks:
                    callback.on_begin(self)
                loss = self._train()
                with self.heartbeat.allow_slow():
                    self.saver.close()
                self.log.sync()
                for callback in self._callbacks:
                    callback.on_end(self)
        except BaseException:
            self.saver.abandon()
            self.trainer.close(wait=False)
            raise
        self.trainer.close()
        return loss

    def _train(self) -> float | None:
        trainer = self.trainer
        start, total = self._start, trainer.num_steps
        final = self._pending_eval() if self.state.owes_validation else None
        began = time.monotonic()
        for step in range(start + 1, total + 1):
            # All ranks stop at the same step: the vote to stop came back as one sum, so a signal
            # to a single rank ends all of them here, with one checkpoint of one step.
            if self._asked_to_stop or self.early_end:
                break
            self.heartbeat.step()
            for before_step in self._before_step:
                before_step(self, step)
            # One all-reduce for everything: it sums loss, tokens, the gradient's norm and the
            # votes (votes.py) to save, to stop, and on saves under way. Nothing else is
            # exchanged for the log or for a decision, and no rank decides alone.
            issued = trainer.train_step(
                step,
                measure=not trainer.runs_ahead or step % self.log.every == 0,
                record=any(records(step) for records in self._records),
            )
            if step == start + 1:
                # without a watch start-up is over now: a silent peer is a hung one
                trainer.limit(self._call_timeout_s)
            # Numbers a step late: where a device works while its host goes on, the step before is
            # read only now, when this one has been issued, so the device always has work.
            if self._pending is not None:
                self._pending.period.end_with(issued.period)
                self._log_step(self._read(self._pending))
            self._pending = issued
            for on_issued in self._on_issued:
                on_issued(self, step)
            validate = step == total or is_due(self._eval_every, step)
            save = is_due(self._save_every, step) or (step == total and self.saves)
            copy = is_due(self._local_every, step)
            # what follows the step is not of its time
            apart = validate or save or copy or self._asked_to_stop or self._asked_to_save
            if apart or not trainer.runs_ahead or any(x(step) for x in self._is_due):
                result = self._read(issued)
                if validate:
                    final = self._validate()
                self._log_step(result, final if validate else None)
            if step > start + 1:  # the first one warms up
                self.stop.step_s.append(time.monotonic() - began)
            if save or self._asked_to_save or self._asked_to_stop:
                self._save(last=step == total or self._asked_to_stop or bool(self.early_end))
            elif copy:
                self._save_locally()
            began = time.monotonic()
        if self._asked_to_stop:
            return None
        # a run that was complete before this start has validated nothing yet
        return self._validate() if final is None else final

    def _validate(self) -> float | None:
        """Validate and return the loss. None: a rank asked to stop first, and the next start
        validates.
        """
        with self.heartbeat.allow_slow():
            loss = None if self._asked_to_stop else self.trainer.evaluate(self.stop.should_stop)
            sets = None if loss is None else self.trainer.evaluate_sets(self.stop.should_stop)
        loss = None if sets is None else loss
        self._asked_to_stop |= loss is None
        self.state.owes_validation, self.state.val_loss = loss is None, loss
        self.state.set_losses = sets or {}
        if loss is not None and (task := self.trainer.task) is not None:
            self.log.note(
                f"validated: loss {loss:.4f}  {task.text(self.trainer.val_task)}".rstrip()
            )
        if loss is not None and sets:
            self.log.note(*evaluation_lines(loss, sets, of_tokens=self.log.in_nats))
        if loss is not None:
            row = self._validated(loss)
            values = {n: x for n, x in row.items() if isinstance(x, float)} | (sets or {})
            for callback in self._callbacks:
                callback.on_validated(self, values)
        return loss

    def ask_to_save(self) -> None:
        """Save after this step; all ranks call it in the same step."""
        self._asked_to_save = True

    def end_early(self, reason: str) -> None:
        """Mark the run as complete after this step; it is saved if it saves at all. All ranks call
        it in the same step.
        """
        self.early_end = reason
        self._asked_to_save |= self.saves and self.state.step > self._start
        self.log.note(reason)

    def _pending_eval(self) -> float | None:
        """Run the validation that an earlier start left out, and add it to the row of its step."""
        loss = self._validate()
        if loss is not None:
            self.log.amend(self.state.step, self._validated(loss))
        return loss

    def _save(self, *, last: bool) -> None:
        self.log.sync()  # a checkpoint without its rows would leave a gap
        with self.trainer.phases("save"), self.heartbeat.allow_slow():
            self.saver.save(self.state, last=last)
        self._saved_at, self._asked_to_save = time.monotonic(), False

    def _save_locally(self) -> None:
        self.log.sync()
        with self.trainer.phases("save"), self._save_limit():
            self.saver.save_locally(self.state)

    def _save_limit(self) -> AbstractContextManager[None]:
        """Return the time limit of a local copy, which may come after every step and must not hide
        a stopped rank for minutes; that of a save if one to the run folder is under way.
        """
        if self.saver.is_writing_run_folder:
            return self.heartbeat.allow_slow()
        return self.heartbeat.allow_repeated("local copy")

    def _on_saved(self, step: int, took_s: float) -> None:
        """Record that the checkpoint of `step` is complete, `took_s` seconds after its save
        began.
        """
        self.stop.save_s.append(took_s)
        with self.trainer.phases(CALLBACKS):
            for callback in self._callbacks:
                callback.on_save(self, step, took_s)

    @property
    def saves(self) -> bool:
        """Return whether the run saves its last step."""
        save_interval = self._save_every or self._save_every_min or self._local_every
        return self._save_last or bool(save_interval)

    def _save_is_due(self) -> bool:
        """Return rank 0's vote for a save, by its clock; other ranks vote 0."""
        minutes = self._save_every_min
        by_clock = minutes is not None and time.monotonic() - self._saved_at >= 60 * minutes
        return self.is_main and (by_clock or self.saver.owes)

    def _read(self, issued: PendingStep) -> StepResult:
        """Wait for the numbers of a step, and record the decisions that came with them."""
        # a step late if the trainer runs ahead, so that the device already has the next step
        result = issued.wait()
        self._pending = None
        for on_step in self._on_step:
            on_step(self, result, issued)
        self._asked_to_save |= result.votes["save"] > 0
        self._asked_to_stop |= result.votes["stop"] > 0
        self.state.step = result.step
        self.state.loss, self.state.val_loss = result.loss, None
        self.state.set_losses = {}
        self.state.tokens += result.tokens
        self.log.see(result.tokens)
        if self.saver.is_saving:
            with self._save_limit():
                self.saver.hear(result.step, result.votes)
        return result

    def _log_step(self, result: StepResult, val_loss: float | None = None) -> None:
        """Write and show a step, once."""
        values: dict[str, Any] = {} if val_loss is None else self._validated(val_loss)
        if self.state.skipped:
            values["skipped"] = self.state.skipped
        self.log.write(result, self.state.tokens, values)

    def _validated(self, loss: float) -> dict[str, float | dict[str, float]]:
        values: dict[str, float | dict[str, float]] = {"val_loss": loss}
        values |= {f"eval_{name}": x for name, x in self.trainer.val_task.items()}
        if sets := self.state.set_losses:
            values["eval_loss"] = sets
            if self.log.in_nats:
                every = {"val": loss, **sets}
                values["perplexity"] = {name: perplexity(x) for name, x in every.items()}
        # a table's cross entropy says nothing beside a loss of another kind
        if self.is_main and self.log.in_nats and (tables := table_entropies(self.trainer.data)):
            values |= {"unigram": tables[0], "bigram": tables[1]}
        return values


def _own(callbacks: Sequence[Callback], name: str) -> list[Callable[..., Any]]:
    """Return the callbacks' methods of this name, except those that do nothing."""
    nothing = getattr(Callback, name)
    methods = [getattr(callback, name) for callback in callbacks]
    return [x for x in methods if getattr(x, "__func__", None) is not nothing]


def is_due(interval: int, step: int) -> bool:
    """Return whether something that is due every `interval` steps comes after `step`; 0: never."""
    return interval > 0 and step % interval == 0
