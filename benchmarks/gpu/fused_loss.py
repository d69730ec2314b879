"""Cross entropy of a 128k vocabulary: the peak with the logits, and a few tokens at a time.

Forward and backward of the last matmul and its loss, in bf16, of given hidden values and weight.
`tdp train` runs matmul and loss apart; `linear_cross_entropy` is for loops of your own.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.here import Here
from benchmarks.gpu.rows import Found
from benchmarks.gpu.transformers_runs import peak_bytes
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.parallel.tensor.cross_entropy import (
    linear_cross_entropy,
    vocab_parallel_cross_entropy,
)

SIZES, SMALL_SIZES = (8192, 4096, 131072), (64, 16, 1024)
"""Tokens, width and vocabulary."""
CHUNK, SMALL_CHUNK = 1024, 8
BAR = 0.35
"""Peak of the fused loss over that of torch's with all logits."""
CLOSE = 5e-3
"""Relative, of losses whose logits are rounded to bf16."""
UNFUSED, OURS, FUSED = "matmul, F.cross_entropy", "matmul, ours", "linear_cross_entropy"


def measure(here: Here, found: Found) -> None:
    here.join()
    with found.case("a vocabulary of 128k"):
        _sides(here, found)
    here.leave()


def _sides(here: Here, found: Found) -> None:
    tokens, width, vocab = SMALL_SIZES if here.small else SIZES
    chunk = SMALL_CHUNK if here.small else CHUNK
    torch.manual_seed(0)
    x = torch.randn(tokens, width, device=here.device).bfloat16().requires_grad_()
    weight = (torch.randn(vocab, width, device=here.device) / width**0.5).bfloat16()
    weight.requires_grad_()
    target = torch.randint(vocab, (tokens,), device=here.device)
    group = tpc.get_group("data")
    losses: dict[str, Callable[[], Tensor]] = {
        UNFUSED: lambda: F.cross_entropy((x @ weight.t()).float(), target),
        OURS: lambda: vocab_parallel_cross_entropy(
            x @ weight.t(), target, group, vocab=vocab, reduction="mean"
        ),
        FUSED: lambda: linear_cross_entropy(
            x, weight, target, group, vocab=vocab, reduction="mean", chunk_tokens=chunk
        ),
    }
    peaks: dict[str, int] = {}
    values: dict[str, float] = {}
    for name, loss in losses.items():

        def step(loss: Callable[[], Tensor] = loss) -> Tensor:
            x.grad = weight.grad = None
            value = loss()
            value.backward()
            return value.detach()

        took_s = here.median_s(step)
        values[name] = float(step())
        x.grad = weight.grad = None
        before = 0 if here.small else torch.cuda.memory_allocated()
        peaks[name] = peak_bytes(here, step) - before
        ratio = peaks[name] / peaks[UNFUSED]
        found.show(
            name,
            f"{1e3 * took_s:.2f} ms, {peaks[name] / 2**20:,.1f} MiB above what was there "
            f"({ratio:.2f})",
            step_s=took_s,
            peak_bytes=peaks[name],
            ratio=ratio,
        )
    off = max(abs(value / values[UNFUSED] - 1) for value in values.values())
    found.judge("losses agree", off <= CLOSE, f"{off:.1e} apart", off=off)
    ratio = peaks[FUSED] / peaks[UNFUSED]
    found.judge_time("peak, fused", ratio <= BAR, f"{ratio:.2f}; bar {BAR}", ratio=ratio)
