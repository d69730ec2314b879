"""The part of a step that is `tdp train`'s own: everything that a bare loop of torch does not do.

A real run of a tiny GPT in one process: data, statistics, norm, log, callbacks and watch are as in
any run. `Executor.run` (forward and backward of all microbatches) and the optimizer's own step are
timed from outside. What is left of the thread's time between two steps is the run's own, less what
a bare loop takes to clip and to zero as many gradients, between passes of its own: passes push this
code out of the processor's caches, and warm it would take a tenth of that.

Means of so many steps that what comes every ten steps or sixteen, as lines and batches, is in them.
Beside it is a bare loop that also reads its batches by torch's DataLoader, has a learning rate for
each step, and writes loss and norm as a row and a line every ten steps.
"""

import json
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mean, median

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer
from torch.utils.data import DataLoader, Dataset, RandomSampler

from benchmarks.common import local
from torchdistpackage.config.load import load
from torchdistpackage.launch.run_folder import prepare_folder
from torchdistpackage.parallel.pipeline.executor import Executor

CONFIG = Path(__file__).parents[2] / "configs" / "gpt_tiny.yaml"
NUM_STEPS, WARM_UP_STEPS, WINDOW = 421, 20, 80


def own_part(folder: str) -> dict[str, list[float]]:
    """us a step: whole, what is left of it, what a bare loop needs of that, and what is left of
    one that reads and logs too."""
    from torchdistpackage.train.worker import worker_main

    begun: list[float] = []
    inside: list[float] = []

    def timed(call):
        def run(*args, **kwargs):
            begin = time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                inside[-1] += time.thread_time() - begin

        return run

    run = timed(Executor.run)

    def first(*args, **kwargs):
        begun.append(time.thread_time())
        inside.append(0.0)
        return run(*args, **kwargs)

    Executor.run = first
    # torch wraps the step in its profiler's mark, which is the optimizer's time too
    plain_step = torch.optim.AdamW.step
    torch.optim.AdamW.step = timed(Optimizer.profile_hook_step(plain_step))
    torch.optim.AdamW.step.hooked = True
    changes = [
        f"run.dir={folder}", "run.name=host_time", "model.dim=16", "model.layers=1",
        "data.seq_len=8", "data.global_batch=1", "parallel.data=1", "parallel.pipe=1",
        "pipeline.microbatches=1", "launch.local.procs=1", f"train.steps={NUM_STEPS}",
        "train.eval_every=0", "train.generate_tokens=0", "checkpoint.save_every=0",
        "log.plot=false",
    ]  # fmt: skip
    config = load(str(CONFIG), changes)
    prepare_folder(config, "never")  # a launcher has done that by now
    worker_main(config, resume="never")
    whole = [(b - a) * 1e6 for a, b in pairwise(begun)]
    left = [all_ - part * 1e6 for all_, part in zip(whole, inside, strict=False)]
    torch.optim.AdamW.step = plain_step
    bare, logged = bare_loop_us(folder)
    found = {"whole": whole, "left": left, "bare": bare, "logged": logged}
    return {name: windows(us[WARM_UP_STEPS:]) for name, us in found.items()}


def windows(us: Sequence[float]) -> list[float]:
    """Means of so many steps each."""
    return [mean(us[i : i + WINDOW]) for i in range(0, len(us) - WINDOW + 1, WINDOW)]


class MemmapWindows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of a file of bytes, as a script of one's own maps them."""

    def __init__(self, path: Path, length: int):
        self._ids, self._length = np.memmap(path, np.uint8, "r"), length

    def __len__(self) -> int:
        return len(self._ids) - self._length

    def __getitem__(self, start: int) -> tuple[Tensor, Tensor]:
        ids = torch.from_numpy(self._ids[start : start + self._length + 1].astype(np.int64))
        return ids[:-1], ids[1:]


def bare_loop_us(folder: str) -> tuple[list[float], list[float]]:
    """us a step in which a bare loop clips and zeroes, of a model of about as many parameters, and
    in all but its passes and the optimizer's step, where it reads and logs too."""
    layer = nn.TransformerEncoderLayer(16, 4, 64, dropout=0.0)
    model = nn.Sequential(nn.Embedding(256, 16), layer, nn.Linear(16, 256))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 20))
    path = Path(folder) / "ids.bin"
    np.random.default_rng(0).integers(0, 256, 1 << 22, dtype=np.uint8).tofile(path)
    data = MemmapWindows(path, 8)
    sampler = RandomSampler(data, replacement=True, num_samples=NUM_STEPS + 1)
    batches = iter(DataLoader(data, batch_size=1, sampler=sampler))
    bare, logged = list[float](), list[float]()
    with (Path(folder) / "bare.jsonl").open("a") as rows:
        inputs, targets = next(batches)
        for step in range(NUM_STEPS):
            began = time.perf_counter()
            logits = model(inputs)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
            loss.backward()
            begin = time.thread_time()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            clipped = time.thread_time()
            optimizer.step()
            stepped = time.thread_time()
            optimizer.zero_grad()
            zeroed = time.thread_time()
            rate.step()
            took_s = time.perf_counter() - began
            row = {"step": step, "loss": loss.item(), "grad_norm": norm.item(), "time_s": took_s}
            row |= {"lr": rate.get_last_lr()[0], "tokens_per_s": targets.numel() / took_s}
            rows.write(json.dumps(row) + "\n")
            rows.flush()
            if step % 10 == 0:
                print(f"step {step}/{NUM_STEPS}  loss {row['loss']:.4f}", flush=True)
            inputs, targets = next(batches)
            ended = time.thread_time()
            bare.append((zeroed - stepped + clipped - begin) * 1e6)
            logged.append((ended - stepped + clipped - begin) * 1e6)
    return bare, logged


def measured() -> dict[str, float]:
    """Medians, us a step."""
    with tempfile.TemporaryDirectory() as folder:
        found = local(own_part, folder, num_procs=1)[0]
    us = {name: median(values) for name, values in found.items()}
    by_hand = us["logged"] - us["bare"]
    return {**us, "own": us["left"] - us["bare"], "by hand": by_hand}
