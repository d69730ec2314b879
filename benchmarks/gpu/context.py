"""Attention over parts of a sequence by CUDA's kernels: one rank does the work of all in turn.

Every rectangle that the ranks of a ring would compute goes through the same kernels, merges and
backwards, and is compared with `F.scaled_dot_product_attention` of the whole in float64. The same
is timed: of n parts one after another, beside the whole at once.
"""

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.here import Here
from benchmarks.gpu.rows import Found
from torchdistpackage.parallel.context import kernels
from torchdistpackage.parallel.context.merge import Backward, Merged, Scoring
from torchdistpackage.parallel.context.order import Ranges, SequenceOrder
from torchdistpackage.parallel.context.visibility import (
    Documents,
    Visibility,
    needed,
    tasks_of,
    tiled,
)

BAR = 1.05
"""For the work of two ranks, one after the other, beside the whole sequence: each half takes at
most half of it and 5 %."""


def measure(here: Here, found: Found) -> None:
    length = 96 if here.small else 1024
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    masks = ("none", "causal", "window", "documents")
    for dtype, mask, kv_heads in itertools.product(dtypes, masks, (8, 2)):
        name = f"{str(dtype).removeprefix('torch.')}, {mask}, {kv_heads} heads of keys"
        with found.case(name):
            _compare(here, found, name, dtype, mask, kv_heads, length)
    with found.case("dropout"):
        _dropout(here, found)
    for length in (128,) if here.small else (8192, 32768):
        for kv_heads, documents in ((16, 1), (4, 1), (4, 8)):
            with found.case(f"time, S {length}, {kv_heads} heads, {documents} documents"):
                _time(here, found, length, kv_heads, documents)


def visibility_of(mask: str, ids: Tensor) -> Visibility:
    return {
        "none": Visibility(),
        "causal": Visibility(is_causal=True),
        "window": Visibility(is_causal=True, window=ids.shape[1] // 5),
        "documents": Visibility(is_causal=True, documents=Documents(ids)),
    }[mask]


def ring(
    qkv: list[Tensor],
    grad: Tensor,
    size: int,
    visibility: Visibility,
    dropout: float = 0.0,
    tile: int | None = 256,
) -> list[Tensor]:
    """Output and gradients of q, k and v, as `size` ranks would compute them. tile: longest side of
    a masked rectangle; None: as in a run."""
    q, k, v = qkv
    scoring = Scoring(
        kernels.choose(q, v, masked=False, dropout=dropout),
        visibility,
        q.shape[-1] ** -0.5,
        dropout,
        kernels.choose(q, v, masked=visibility.has_masks, dropout=dropout),
    )
    order = SequenceOrder(q.shape[2], size)
    parts = [tiled(ranges, visibility, tile) for ranges in order.parts]
    outs, dqs = torch.empty_like(q), torch.empty_like(q)
    dk, dv = (
        torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) for x in (k, v)
    )
    for mine in range(size):
        held, work = parts[mine], []
        merged = Merged(_cut(q, held), scoring)
        for step in range(size):
            source = parts[(mine - step) % size]
            came = source if step == 0 else needed(held, source, visibility)
            tasks = tasks_of(held, came, visibility)
            if tasks:
                work.append((tasks, came, _cut(k, came), _cut(v, came)))
                merged.add(tasks, *work[-1][2:])
        out, lse = merged.take()
        back = Backward(_cut(grad, held), _cut(q, held), out, lse, scoring, merged.drawn)
        for tasks, came, part_k, part_v in work:
            for total, part in zip((dk, dv), back.part(tasks, part_k, part_v), strict=True):
                _add(total, came, part)
        _put(outs, held, out)
        _put(dqs, held, back.take())
    return [outs, dqs, dk, dv]


def _cut(x: Tensor, ranges: Ranges) -> Tensor:
    return torch.cat([x[:, :, r.start : r.stop] for r in ranges], 2)


def _put(x: Tensor, ranges: Ranges, part: Tensor) -> None:
    for r, piece in zip(ranges, part.split([len(r) for r in ranges], 2), strict=True):
        x[:, :, r.start : r.stop] = piece


def _add(x: Tensor, ranges: Ranges, part: Tensor) -> None:
    for r, piece in zip(ranges, part.split([len(r) for r in ranges], 2), strict=True):
        x[:, :, r.start : r.stop] += piece


def _inputs(here: Here, dtype: torch.dtype, kv_heads: int, length: int) -> list[Tensor]:
    torch.manual_seed(length)
    return [
        torch.randn(2, heads, length, 64, device=here.device, dtype=torch.float64).to(dtype)
        for heads in (8, kv_heads, kv_heads, 8)
    ]


def _whole(qkv: list[Tensor], grad: Tensor, mask: Tensor) -> list[Tensor]:
    inputs = [x.detach().requires_grad_() for x in qkv]
    out = F.scaled_dot_product_attention(*inputs, attn_mask=mask, enable_gqa=True)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def _compare(
    here: Here, found: Found, name: str, dtype: torch.dtype, mask: str, kv_heads: int, length: int
) -> None:
    *qkv, grad = _inputs(here, dtype, kv_heads, length)
    place = torch.arange(length, device=here.device)
    ids = torch.stack([(place > length // 3).long(), (place > length // 7).long()])
    visibility = visibility_of(mask, ids)
    distance = place[:, None] - place
    seen = torch.ones_like(distance, dtype=torch.bool)
    if visibility.is_causal:
        seen &= distance >= 0
    if visibility.window:
        seen &= distance < visibility.window
    seen = seen[None, None]
    if visibility.documents:
        seen = seen & (ids[:, None, :, None] == ids[:, None, None, :])
    exact = _whole([x.double() for x in qkv], grad.double(), seen)
    worst = lambda some: max(  # noqa: E731
        float((a.double() - b).abs().max()) for a, b in zip(some, exact, strict=True)
    )
    masks = visibility.has_masks
    off = worst(ring(qkv, grad, 4, visibility))
    alone = worst(_whole(qkv, grad, seen)) if dtype is not torch.float64 else 0.0
    limit = 1e-11 if dtype is torch.float64 else max(2.5 * alone, 1e-5)
    some = (kernels.choose(qkv[0], qkv[2], masked=x, dropout=0.0).name for x in {False, masks})
    text = f"{', '.join(dict.fromkeys(some))}: {off:.2g} from float64, one process {alone:.2g}"
    found.judge(name, off <= limit, text, off=off, alone=alone)


def _dropout(here: Here, found: Found) -> None:
    """Of values that are ones an output is the weights kept; backwards drop the same ones."""
    for dtype in (torch.float32, torch.bfloat16):
        q, k, _, _ = _inputs(here, dtype, 8, 96 if here.small else 512)
        ones = torch.ones_like(q)
        out, _, _, dv = ring([q, k, ones], ones, 2, Visibility(is_causal=True), 0.25)
        gap = abs(float(out.double().sum() - dv.double().sum())) / float(out.double().sum())
        mean = float(out.double().mean())
        holds = gap < 2e-3 and abs(mean - 1) < 0.05
        found.judge(f"dropout, {dtype}", holds, f"mean {mean:.3f}, sums {gap:.1e} apart")


def _time(here: Here, found: Found, length: int, kv_heads: int, documents: int = 1) -> None:
    """Time `size` ranks' work, one after another, beside the sequence in one call.

    documents: so many of one length. Torch then attends in each of them alone, as samples.
    """
    torch.manual_seed(0)
    width, dtype = (16, torch.float32) if here.small else (128, torch.bfloat16)
    q, k, v, grad = (
        torch.randn(1, heads, length, width, device=here.device, dtype=dtype)
        for heads in (16, kv_heads, kv_heads, 16)
    )
    each = length // documents

    def cut(x: Tensor) -> Tensor:
        return x.view(x.shape[1], documents, each, width).transpose(0, 1)

    def alone() -> None:
        inputs = [cut(x).detach().requires_grad_() for x in (q, k, v)]
        grouped = {"is_causal": True, "enable_gqa": kv_heads != 16}
        out = F.scaled_dot_product_attention(*inputs, **grouped)
        torch.autograd.grad(out, inputs, cut(grad))

    ids = (torch.arange(length, device=here.device) // each)[None]
    visibility = Visibility(True, documents=Documents(ids) if documents > 1 else None)
    whole_s = here.median_s(alone)
    masks = f", {documents} documents" * (documents > 1)
    name = f"S {length}, {kv_heads} heads of keys{masks}"
    for size in (2, 4, 8):
        taken_s = here.median_s(lambda n=size: ring([q, k, v], grad, n, visibility, tile=None))
        ratio = taken_s / whole_s
        text = f"{size} ranks' work {taken_s * 1e3:.2f} ms, whole {whole_s * 1e3:.2f} ms"
        text += f" ({ratio:.2f}), so each {ratio / size:.2f} of it"
        if size == 2 and documents == 1:
            found.judge_time(f"{name}, halves", ratio <= BAR, f"{text}; bar {BAR}", ratio=ratio)
        else:
            found.show(f"{name}, {size} ranks", text, ratio=ratio)
