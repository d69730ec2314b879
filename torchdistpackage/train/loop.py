"""The run from its first step to its last: train, validate, save, say, draw.

Every rank runs the same loop; rank 0 also speaks and writes. Where the host runs ahead of a device,
whatever is asked of a step, its numbers, its time, its recording, is asked when the next one has
been issued, so that the device always has work.
"""

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from torchdistpackage.errors import NonFiniteError
from torchdistpackage.harness.hang.heartbeat import Heartbeat
from torchdistpackage.harness.stragglers.compare import Comparison
from torchdistpackage.harness.watchdog import HangWatchdog
from torchdistpackage.schedule.trace_costs import BubbleAttribution
from torchdistpackage.train.callbacks import ReplicaCheck
from torchdistpackage.train.corpus import MAX_TABLE_VOCAB, entropies
from torchdistpackage.train.data import TokenDataset
from torchdistpackage.train.log import MetricsLog, ProgressDisplay
from torchdistpackage.train.nonfinite import explain
from torchdistpackage.train.profiler import StepProfiler
from torchdistpackage.train.step import Trainer
from torchdistpackage.train.step_stats import PendingStep, StepResult
from torchdistpackage.train.stop import StopController
from torchdistpackage.train.train_state import TrainState, save_state


class Loop:
    """One call of `run()`. `folder` is the run folder, shared by all ranks.

    call_timeout_s: of a collective or message after the first step, without a watch. unit: what the
    loss is a mean over. flops_per_token: of the model, None where it is unknown. log_every,
    eval_every, save_every, save_every_min, check_every: steps, or minutes, between two; 0 and None
    are off, and a validation comes at the end too. keep_last: checkpoints. skips_nonfinite: leave
    such a step out instead of ending the run. profiler: of a pipeline. compare, check_replicas:
    called after each step, and after every `check_every`th. watch: told of the progress; it ends a
    hang before the limits of single calls do.
    """

    def __init__(
        self,
        trainer: Trainer,
        state: TrainState,
        folder: Path,
        life: StopController | None = None,
        watch: HangWatchdog | None = None,
        *,
        call_timeout_s: float,
        unit: str = "tokens",
        flops_per_token: float | None = None,
        log_every: int = 1,
        eval_every: int = 0,
        save_every: int = 0,
        save_every_min: float | None = None,
        keep_last: int = 1,
        check_every: int = 0,
        skips_nonfinite: bool = False,
        profiler: StepProfiler | None = None,
        compare: Comparison | None = None,
        check_replicas: ReplicaCheck | None = None,
    ):
        self.trainer, self.state, self.folder = trainer, state, folder
        self.unit = unit
        self._flops_per_token = flops_per_token
        self._log_every, self._eval_every, self._check_every = log_every, eval_every, check_every
        self._save_every, self._save_every_min = save_every, save_every_min
        self._keep_last, self._skips_nonfinite = keep_last, skips_nonfinite
        self._profiler, self._compare, self._check_replicas = profiler, compare, check_replicas
        self.marks = watch or Heartbeat()
        self._call_timeout_s = call_timeout_s if watch is None else watch.call_timeout_s
        if watch is not None:
            # in the first step too, of which the watch knows the limit
            trainer.limit(self._call_timeout_s)
        self.stop = life or StopController()
        if trainer.runs_ahead:
            # there the numbers of a step are read when the next one has been issued, and the
            # clock is asked while the one before still runs
            self.stop.ahead = 4
        self.is_main = trainer.rank == 0
        self._saved_at = time.monotonic()
        self._pending: PendingStep | None = None
        self._metrics: MetricsLog | None = None
        self._bar: ProgressDisplay | None = None
        self._asked_to_save = self._asked_to_stop = False
        self._stragglers: list[str] = []
        self._pending_lines: list[str] = []
        self._gaps: dict[int, BubbleAttribution] = {}
        self.artifacts: tuple[str, ...] = ()
        self._entropies: tuple[float, float] | None = None

    def run(self) -> float | None:
        """Train to the last step; the final validation loss, in nats a token.

        None if a rank asked for the end before: the state is saved, and all ranks know.
        """
        try:
            loss = self._run()
        except BaseException:
            self.trainer.close(wait=False)
            raise
        self.trainer.close()
        return loss

    def _run(self) -> float | None:
        total, done = self.trainer.num_steps, self.state.step
        if not self.is_main:
            return self._train()
        with (
            MetricsLog(self.folder, resume_step=done) as self._metrics,
            ProgressDisplay(
                total, every=self._log_every, stream=sys.stdout, done=done, unit=self.unit
            ) as self._bar,
        ):
            if done:
                left = f"{total - done} to go" if done < total else "nothing left to train"
                self._bar.say(f"resumed after step {done} of {total}; {left}")
            loss = self._train()
            self._metrics.sync()
            if self._profiler is not None:
                self.artifacts = self._profiler.write(self.folder)
            return loss

    def _train(self) -> float | None:
        trainer, profiler = self.trainer, self._profiler
        start, total = self.state.step, trainer.num_steps
        final = self._pending_eval() if self.state.owes_validation else None
        began = time.monotonic()
        for step in range(start + 1, total + 1):
            if self._asked_to_stop:
                break
            self.marks.step()
            measure = not trainer.runs_ahead or step % self._log_every == 0
            record = profiler is not None and profiler.is_due(step)
            issued = trainer.train_step(
                step,
                measure=measure,
                record=record,
                save=self._save_is_due(),
                stop=self.stop.should_stop,
            )
            if step == start + 1:
                # without a watch start-up is over now: a silent peer is a hung one
                trainer.limit(self._call_timeout_s)
            if profiler is not None and record:
                profiler.hold(step)
            if self._pending is not None:
                self._pending.period.end_with(issued.period)
                self._log_step(self._read(self._pending))
            self._pending = issued
            if self._compare is not None:
                self._stragglers += self._compare(step)
            check = _every(self._check_every, step)
            if check and self._check_replicas is not None:
                with self.marks.allow_slow():
                    self._check_replicas()
            validate = step == total or _every(self._eval_every, step)
            save = _every(self._save_every, step) or (step == total and self._saves)
            # what follows the step is not of its time
            apart = check or validate or save or self._asked_to_stop or self._asked_to_save
            if apart or not trainer.runs_ahead:
                result = self._read(issued)
                if validate:
                    final = self._validate()
                self._log_step(
                    result, {} if final is None or not validate else self._validated(final)
                )
            if step > start + 1:  # the first one warms up
                self.stop.step_s.append(time.monotonic() - began)
            if save or self._asked_to_save or self._asked_to_stop:
                self._save()
            began = time.monotonic()
        if self._asked_to_stop:
            return None
        with self.marks.allow_slow():
            return trainer.evaluate() if final is None else final

    def _validate(self) -> float | None:
        """The loss; None, and owed to the next start, if a rank asked for the end before."""
        with self.marks.allow_slow():
            loss = None if self._asked_to_stop else self.trainer.evaluate(self.stop.should_stop)
        self._asked_to_stop |= loss is None
        self.state.owes_validation = loss is None
        return loss

    def _pending_eval(self) -> float | None:
        """The validation that an earlier start left out, added to the row of its step."""
        loss = self._validate()
        if self._metrics is not None and loss is not None:
            self._metrics.amend(self.state.step, **self._validated(loss))
        return loss

    def _save(self) -> None:
        began = time.monotonic()
        if self._metrics is not None:
            self._metrics.sync()  # a checkpoint without its rows would leave a gap
        with self.trainer.phases("save"), self.marks.allow_slow():
            save_state(self.trainer, self.state, self.folder, self._keep_last)
        self._saved_at, self._asked_to_save = time.monotonic(), False
        self.stop.save_s.append(self._saved_at - began)

    @property
    def _saves(self) -> bool:
        return bool(self._save_every or self._save_every_min)

    def _save_is_due(self) -> bool:
        """Rank 0's clock decides for all; the step's all-reduce carries its word."""
        minutes = self._save_every_min
        return (
            self.is_main
            and minutes is not None
            and time.monotonic() - self._saved_at >= 60 * minutes
        )

    def _read(self, issued: PendingStep) -> StepResult:
        """Wait for the numbers of a step, and note what all ranks agreed on with them."""
        result = issued.wait()
        self._pending = None
        if self._profiler is not None and (gap := self._profiler.take(result.step)) is not None:
            self._gaps[result.step] = gap
        if result.skipped:
            self._on_nonfinite(issued)
        self._asked_to_save |= result.save
        self._asked_to_stop |= result.stop
        self.state.step = result.step
        self.state.tokens += result.tokens
        return result

    def _on_nonfinite(self, issued: PendingStep) -> None:
        """A number of this step was not finite, on every rank's account: say where, or end."""
        with self.marks.allow_slow():
            text = explain(self.trainer, issued)
        if not self._skips_nonfinite:
            raise NonFiniteError(
                f"{text}. No rank has updated anything since; go on from the last checkpoint with "
                f"other data or a lower optim.lr, or leave such steps out with "
                f"train.on_nonfinite=skip"
            )
        self.state.skipped += 1
        self._pending_lines.append(f"{text}; left out, {self.state.skipped} so far")

    def _log_step(
        self, result: StepResult, more: Mapping[str, float | str] = MappingProxyType({})
    ) -> None:
        """Write and show a step, once."""
        speed = result.tokens_per_s
        if self.state.skipped:
            more = {**more, "skipped": self.state.skipped}
        if self._stragglers and self._bar is not None:
            more = {**more, "stragglers": "; ".join(self._stragglers)}
        if (gap := self._gaps.pop(result.step, None)) is not None:
            more = {**more, "pipeline": str(gap)}
        if self._bar is not None:
            for line in (*self._stragglers, *self._pending_lines):
                self._bar.say(line)
        self._stragglers, self._pending_lines = [], []
        if self._metrics is not None:
            self._metrics.write(
                result.step,
                **result.logged(),
                tokens=self.state.tokens,
                flops_per_s=self._flops_per_token and self._flops_per_token * speed,
                **more,
            )
        if self._bar is not None:
            pipelined = self._profiler is not None
            self._bar.update(
                result.step,
                loss=result.loss,
                tokens_per_s=speed,
                bubble=result.bubble if pipelined else None,
                predicted_bubble=self.trainer.plan.timeline.bubble if pipelined else None,
            )
            if gap is not None:
                self._bar.say(f"  {gap}")

    def _validated(self, loss: float) -> dict[str, float]:
        values = {"val_loss": loss}
        if found := self.table_entropies():
            values |= {"unigram": found[0], "bigram": found[1]}
        return values

    def table_entropies(self) -> tuple[float, float] | None:
        """(unigram, bigram) of the validation split, on the rank that speaks; None without."""
        data = self.trainer.data
        if not self.is_main or not isinstance(data, TokenDataset) or data.vocab > MAX_TABLE_VOCAB:
            return None
        if self._entropies is None:
            self._entropies = entropies(*data.splits, vocab=data.vocab)
        return self._entropies


def _every(interval: int, step: int) -> bool:
    return interval > 0 and step % interval == 0
