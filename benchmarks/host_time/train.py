"""The part of a step that is `tdp train`'s own: everything that a bare loop of torch does not do.

A real run of a tiny GPT in one process: data, statistics, norm, log, callbacks and watch are as in
any run. `Executor.run` (forward and backward of all microbatches) and the optimizer's own step are
timed from outside. What is left of the thread's time between two steps is the run's own, less what
a bare loop takes to clip and to zero as many gradients, between passes of its own: passes push this
code out of the processor's caches, and warm it would take a tenth of that.
"""

import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from benchmarks.common import local
from torchdistpackage.config.load import load
from torchdistpackage.parallel.pipeline.executor import Executor
from torchdistpackage.train.run_folder import prepare_folder

CONFIG = Path(__file__).parents[2] / "configs" / "gpt_tiny.yaml"
NUM_STEPS, WARM_UP_STEPS = 120, 20


def own_part(folder: str) -> dict[str, list[float]]:
    """us a step: whole, what is left of it, and of that what a bare loop needs."""
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
    found = {"whole": whole, "left": left, "bare": bare_loop_us()}
    return {name: us[WARM_UP_STEPS:] for name, us in found.items()}


def bare_loop_us() -> list[float]:
    """us a step in which a bare loop clips and zeroes, of a model of about as many parameters."""
    layer = nn.TransformerEncoderLayer(16, 4, 64, dropout=0.0)
    model = nn.Sequential(nn.Embedding(256, 16), layer, nn.Linear(16, 256))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids, found = torch.randint(256, (1, 9)), list[float]()
    for _ in range(NUM_STEPS):
        logits = model(ids[:, :-1])
        nn.functional.cross_entropy(logits.flatten(0, 1), ids[0, 1:]).backward()
        begin = time.thread_time()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        clipped = time.thread_time()
        optimizer.step()
        stepped = time.thread_time()
        optimizer.zero_grad()
        found.append((time.thread_time() - stepped + clipped - begin) * 1e6)
    return found


def measured() -> dict[str, float]:
    """Medians, us a step."""
    with tempfile.TemporaryDirectory() as folder:
        found = local(own_part, folder, num_procs=1)[0]
    us = {name: median(values) for name, values in found.items()}
    return {**us, "own": us["left"] - us["bare"]}
