"""Activations in host memory beside recomputation and beside neither: time and peak of a step.

Blocks of the width of Llama 8B. All sides begin with the same weights and read the same tokens, so
their first losses have the same bits.
"""

import tempfile
from pathlib import Path

import torch

from benchmarks.gpu.here import Here
from benchmarks.gpu.rows import Found
from benchmarks.gpu.transformers_runs import LLAMA_8B, DecoderRun, compiled, measured
from torchdistpackage.text import size_text

LAYERS, SEQ_LEN = 6, 8192
SIDES = ("none", "blocks", "offload")


def measure(here: Here, found: Found) -> None:
    here.join()
    run = DecoderRun({**LLAMA_8B, "num_hidden_layers": LAYERS}, SEQ_LEN, 1).on(here)
    for mode, changes in (("eager", []), ("compiled", compiled(here))):
        losses: dict[str, float] = {}
        for how in SIDES:
            with found.case(f"{mode}, recompute {how}"):
                losses[how] = _side(here, found, run, mode, how, changes)
        if SIDES[0] in losses:
            off = [how for how, loss in losses.items() if loss != losses[SIDES[0]]]
            text = f"{losses[SIDES[0]]:.9g} without; others: {', '.join(off) or 'none'}"
            found.judge(f"{mode}, the first loss has the same bits", "offload" not in off, text)
    here.leave()


def _side(
    here: Here, found: Found, run: DecoderRun, mode: str, how: str, changes: list[str]
) -> float:
    """The loss of the first step."""
    with tempfile.TemporaryDirectory() as folder:
        train = run.trainer(here, Path(folder), [*changes, f"train.recompute={how}"])
        loss = train.train_step(1, measure=False).wait().loss
        result = measured(here, train)
        train.close()
    del train
    if not here.small:
        torch.cuda.empty_cache()
    found.show(
        f"{mode}, recompute {how}",
        f"{1e3 * result.step_s:.1f} ms a step, {run.tokens / result.step_s:,.0f} tokens/s, peak "
        f"{size_text(result.peak_bytes)}",
        step_s=result.step_s,
        peak_bytes=result.peak_bytes,
    )
    return loss
