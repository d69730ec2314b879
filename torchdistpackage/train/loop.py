"""The run from its first step to its last: train, validate, save, say, draw.

Every rank runs the same loop; rank 0 also speaks and writes. The numbers of a step are read when
the next one has been issued, so that a device is never stopped to ask for them.
"""

import sys
import time
from pathlib import Path

import torch

from torchdistpackage.comm import primitives
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.train.corpus import MAX_TABLE_VOCAB, entropies
from torchdistpackage.train.data import TokenDataset
from torchdistpackage.train.generate import generate
from torchdistpackage.train.log import MetricsLog, Progress, plot_loss, say
from torchdistpackage.train.state import TrainState, save_state
from torchdistpackage.train.step import Issued, StepResult, Trainer

PROMPT = b"import "


class Loop:
    """One call of `run()`. `folder` is the run folder, shared by all ranks."""

    def __init__(self, trainer: Trainer, state: TrainState, folder: Path):
        self.trainer, self.state, self.folder = trainer, state, folder
        self.config = trainer.plan.config
        self.speaks = trainer.rank == 0
        self._saved_at = time.monotonic()
        self._pending: Issued | None = None
        self._asked_to_save = False
        model, shape = trainer.plan.model, trainer.plan.shape
        self._flops_per_token = model and shape and model.flops_per_token(shape)
        self._entropies: tuple[float, float] | None = None

    def run(self) -> float:
        """Train to the last step; the final validation loss, in nats a token."""
        total = self.config.train.steps
        done = self.state.step
        if not self.speaks:
            return self._train(None, None)
        with (
            MetricsLog(self.folder, resume_step=done) as metrics,
            Progress(
                total, every=self.config.log.every, stream=sys.stdout, done=done, unit=self.unit
            ) as bar,
        ):
            if done:
                left = f"{total - done} to go" if done < total else "nothing left to train"
                bar.say(f"resumed after step {done} of {total}; {left}")
            return self._train(metrics, bar)

    def _train(self, metrics: MetricsLog | None, bar: Progress | None) -> float:
        config, trainer = self.config, self.trainer
        start, total = self.state.step, config.train.steps
        final = None
        for step in range(start + 1, total + 1):
            measure = trainer.device.type == "cpu" or step % config.log.every == 0
            issued = trainer.train_step(step, measure=measure, save=self._save_is_due())
            if step == start + 1:
                # start-up is over: from here a silent peer is a hung one
                trainer.limit(config.train.step_timeout_s)
            if self._pending is not None:
                self._report(self._pending, metrics, bar, {})
            self._pending = issued
            validate = config.train.eval_every and step % config.train.eval_every == 0
            save = config.checkpoint.save_every and step % config.checkpoint.save_every == 0
            if validate or step == total:
                final = trainer.evaluate()
                self._report(issued, metrics, bar, self._validated(final))
            elif save or config.checkpoint.save_every_min:
                self._report(issued, metrics, bar, {})
            if save or self._asked_to_save or (step == total and self._saves):
                save_state(trainer, self.state, self.folder)
                self._saved_at, self._asked_to_save = time.monotonic(), False
        return trainer.evaluate() if final is None else final

    @property
    def unit(self) -> str:
        """What the loss is a mean over, as far as anybody can know of a user's own."""
        return "tokens" if self.config.model.loss is None else "samples"

    @property
    def _saves(self) -> bool:
        return bool(self.config.checkpoint.save_every or self.config.checkpoint.save_every_min)

    def _save_is_due(self) -> bool:
        """Rank 0's clock decides for all; the step's all-reduce carries its word."""
        minutes = self.config.checkpoint.save_every_min
        return (
            self.speaks
            and minutes is not None
            and time.monotonic() - self._saved_at >= 60 * minutes
        )

    def _report(
        self,
        issued: Issued,
        metrics: MetricsLog | None,
        bar: Progress | None,
        more: dict[str, float],
    ) -> StepResult:
        result = issued.read()
        self._pending = None
        self._asked_to_save = result.save
        self.state.step = result.step
        self.state.tokens += result.tokens
        speed = result.tokens / result.time_s
        if metrics is not None:
            metrics.write(
                result.step,
                loss=result.loss,
                grad_norm=result.grad_norm,
                lr=result.lr,
                tokens=self.state.tokens,
                time_s=result.time_s,
                tokens_per_s=speed,
                bubble=result.bubble,
                flops_per_s=self._flops_per_token and self._flops_per_token * speed,
                **more,
            )
        if bar is not None:
            pipelined = self.config.parallel.pipe > 1
            bar.update(
                result.step,
                loss=result.loss,
                tokens_per_s=speed,
                bubble=result.bubble if pipelined else None,
                predicted_bubble=self.trainer.plan.timeline.bubble if pipelined else None,
            )
        return result

    def _validated(self, loss: float) -> dict[str, float]:
        values = {"val_loss": loss}
        if found := self.table_entropies():
            values |= {"unigram": found[0], "bigram": found[1]}
        return values

    def table_entropies(self) -> tuple[float, float] | None:
        """(unigram, bigram) of the validation split, on the rank that speaks; None without."""
        data = self.trainer.data
        if not self.speaks or not isinstance(data, TokenDataset) or data.vocab > MAX_TABLE_VOCAB:
            return None
        if self._entropies is None:
            self._entropies = entropies(*data.splits, vocab=data.vocab)
        return self._entropies


def finish(loop: Loop, loss: float) -> None:
    """What a person wants to see at the end: losses side by side, a text, where things are."""
    text = sample_text(loop.trainer)
    if not loop.speaks:
        return
    of_tokens = " nats per token" if loop.unit == "tokens" else ""
    say(f"validation loss {loss:.4f}{of_tokens}")
    if found := loop.table_entropies():
        say(f"  unigram table {found[0]:.4f}, bigram table {found[1]:.4f} on the same split")
    if text is not None:
        say("generated by the parallel model:\n" + "\n".join(f"  | {s}" for s in text.splitlines()))
    picture = plot_loss(loop.folder / "metrics.jsonl") if loop.config.log.plot else None
    kept = "resolved.yaml, metrics.jsonl, checkpoints/, logs/"
    say(f"run folder {loop.folder} ({kept}{', loss.png' if picture else ''})")


def sample_text(trainer: Trainer) -> str | None:
    """A few lines sampled by the first model replica; None where the ids are not bytes."""
    config = trainer.plan.config
    num = config.train.generate_tokens
    if not num or trainer.plan.shape is None or config.data.name not in ("python_stdlib", "text"):
        return None
    text = None
    if tpc.get_dp_rank() == 0:
        prompt = torch.tensor(list(PROMPT), dtype=torch.int64)
        ids = generate(trainer, prompt, num)
        text = bytes(ids.clamp(max=255).to(torch.uint8).tolist()).decode(errors="replace")
    primitives.barrier()
    return text
