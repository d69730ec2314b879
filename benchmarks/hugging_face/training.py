"""Hugging Face's Trainer and this package's train the same model in turns, on the same ranks.

The Trainer runs its own loop from beginning to end; whenever it has done the steps of a turn, a
callback has the other sides do theirs.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaForCausalLM, TrainerCallback, TrainingArguments
from transformers import Trainer as HuggingFaceTrainer

from benchmarks.hugging_face.bars import COMPUTATION, MESSAGES, OURS, TRAINER
from benchmarks.hugging_face.models import Samples
from benchmarks.turns import Turn
from torchdistpackage.comm.runtime import leave, setup_distributed
from torchdistpackage.config.load import loads
from torchdistpackage.plan.run_plan import make_plan
from torchdistpackage.train.build import build
from torchdistpackage.train.step import Trainer

LEARNING_RATE, DECAY, BETAS, CLIP = 1e-4, 0.1, (0.9, 0.95), 1.0
WARM_UP = 1
"""Rounds that are not counted."""
TOLERANCE = 0.01
"""Of the way that the weights have gone, by the parameter that is furthest off."""


def rank_main(
    folder: str, output: str, rounds: int, steps: int, batch: int, seq_len: int
) -> dict[str, Any]:
    """Of one rank: turns by side and round, and how far both Trainers' weights are apart.

    A turn is `steps` steps of `batch` samples of `seq_len` tokens on each rank.
    """
    setup_distributed()
    world, num_steps = dist.get_world_size(), (WARM_UP + rounds) * steps
    before = LlamaForCausalLM.from_pretrained(folder)
    vocab = before.config.vocab_size
    samples = Samples(num_steps * batch * world, seq_len, vocab)
    run = ours(folder, samples, num_steps, batch, seq_len)
    alone, messages = computation(folder, samples, batch), sums(before)

    def our_turn(number: int) -> None:
        for step in range(number * steps + 1, (number + 1) * steps + 1):
            run.train_step(step).wait()

    def repeated(call: Callable[[], object]) -> Callable[[int], None]:
        return lambda _: [call() for _ in range(steps)] and None

    others = {OURS: our_turn, COMPUTATION: repeated(alone), MESSAGES: repeated(messages)}
    turns = _Turns(steps, others)
    arguments = TrainingArguments(
        output,
        use_cpu=True,
        ddp_backend="gloo",
        ddp_find_unused_parameters=False,  # by default it walks over each graph
        max_steps=num_steps,
        per_device_train_batch_size=batch,
        train_sampling_strategy="sequential",
        optim="adamw_torch_fused",
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        weight_decay=DECAY,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        max_grad_norm=CLIP,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,  # shift_labels would be one
    )
    theirs = HuggingFaceTrainer(
        model=LlamaForCausalLM.from_pretrained(folder),
        args=arguments,
        train_dataset=samples,
        callbacks=[turns],
    )
    theirs.train()
    distance = apart(before, theirs.model, run)
    run.close()
    leave()
    if distance > TOLERANCE:
        raise ValueError(f"the weights of both Trainers are {distance:.2%} of their way apart")
    return {
        "turns": {side: found[WARM_UP:] for side, found in turns.taken.items()},
        "cpu_s": {side: found[WARM_UP:] for side, found in turns.cpu_s.items()},
        "distance": distance,
        "parameters": sum(p.numel() for p in before.parameters()),
    }


class _Turns(TrainerCallback):
    """taken: by side and round one turn, from when this rank began to when it ended. cpu_s: the
    processor's time of each.
    """

    def __init__(self, steps: int, others: dict[str, Callable[[int], None]]):
        self._steps, self._others = steps, others
        self.taken: dict[str, list[list[Turn]]] = {side: [] for side in (TRAINER, *others)}
        self.cpu_s: dict[str, list[float]] = {side: [] for side in self.taken}

    def on_train_begin(self, *_: object, **__: object) -> None:
        self._begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: object) -> None:
        number, rest = divmod(state.global_step, self._steps)
        if rest:
            return
        self._end(TRAINER)
        for side, turn in self._others.items():
            self._begin()
            turn(number - 1)
            self._end(side)
        self._begin()

    def _begin(self) -> None:
        dist.barrier()
        self._began, self._cpu_s = time.monotonic(), time.process_time()

    def _end(self, side: str) -> None:
        self.taken[side].append([(self._began, time.monotonic())])
        self.cpu_s[side].append(time.process_time() - self._cpu_s)


def ours(folder: str, samples: Samples, num_steps: int, batch: int, seq_len: int) -> Trainer:
    world = dist.get_world_size()
    run = loads(
        "{}",
        overrides=[
            *(f"model.hf={folder}", f"parallel.data={world}", "pipeline.microbatches=1"),
            *(f"data.seq_len={seq_len}", f"data.global_batch={batch * world}"),
            *(f"optim.lr={LEARNING_RATE}", "optim.min_lr_ratio=1.0", "optim.warmup_steps=0"),
            *(f"optim.weight_decay={DECAY}", f"optim.betas={[*BETAS]}", f"optim.clip={CLIP}"),
            f"train.steps={num_steps}",
        ],
    )
    return build(make_plan(run, world), dist.get_rank(), torch.device("cpu"), samples)


def computation(folder: str, samples: Samples, batch: int) -> Callable[[], None]:
    """transformers' model and torch's AdamW on one rank's samples, which nobody adds up."""
    model = LlamaForCausalLM.from_pretrained(folder)
    adam = torch.optim.AdamW(model.parameters(), LEARNING_RATE, BETAS, fused=True)

    def step() -> None:
        ids, targets = samples.batch("train", 0, 1, 0, 1, batch)
        targets = targets.contiguous()  # transformers makes a view of it
        model(input_ids=ids, labels=targets, shift_labels=targets).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        adam.step()
        adam.zero_grad()

    return step


def sums(model: nn.Module) -> Callable[[], None]:
    """The gradients' bytes in one sum."""
    flat = torch.zeros(sum(p.numel() for p in model.parameters()))
    return lambda: dist.all_reduce(flat) and None


def apart(before: nn.Module, theirs: nn.Module, run: Trainer) -> float:
    """Largest difference of a parameter over the largest change of it by the Trainer."""
    layouts = run.layouts
    mine = {layouts[name].name: p.detach() for name, p in run.stage.named_parameters()}
    begun = dict(before.named_parameters())
    found = 0.0
    for name, p in theirs.named_parameters():
        way = (p.detach() - begun[name].detach()).abs().max()
        found = max(found, float((p.detach() - mine[name]).abs().max() / way))
    return found
