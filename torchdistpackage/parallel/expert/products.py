"""Matmuls of a rank's rows with the matrices of their experts.

On a device these are torch's grouped matmuls, one for each matrix. On a CPU, where torch's grouped
matmul is a loop too, experts are computed one after another, each with its whole MLP.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchdistpackage.layout.partition import even_sizes
from torchdistpackage.parallel.expert.dispatch import Dispatch

_GROUPED = (torch.float32, torch.bfloat16)
"""Types that torch's grouped matmul supports."""
_ROWS = 2048
"""Largest number of rows computed at once, so that the next operation reads the previous result
from the processor's cache."""

_aten = torch.ops.aten


def gated_mlps(
    rows: Tensor,
    plan: Dispatch,
    gate_up: Tensor,
    down: Tensor,
    activation: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return down (activation(gate x) * (up x)) for each row x of its expert: (n, D) -> (n, D).

    gate_up (E, 2 H, D) and down (E, D, H) of the experts here.
    """
    is_silu = activation is F.silu or type(activation) is nn.SiLU
    if rows.device.type == "cpu" and is_silu and not torch.is_autocast_enabled("cpu"):
        return _SwigluInTurn.apply(rows, gate_up, down, plan.runs)
    rows = plan.by_expert(rows)
    gate, up = grouped_linear(rows, gate_up, plan.counts).chunk(2, -1)
    return plan.by_rank(grouped_linear(activation(gate) * up, down, plan.counts))


class _SwigluInTurn(torch.autograd.Function):
    """A SwiGLU that runs expert by expert, in memory that is reused for the next one.

    The backward keeps rows and the results of the first matmul. Activations are recomputed there,
    which costs less than writing them to memory and reading them back.
    """

    @staticmethod
    def forward(ctx, rows: Tensor, gate_up: Tensor, down: Tensor, runs: Sequence[Sequence[slice]]):
        ctx.runs = runs = [_pieces(spans) for spans in runs]
        width, num = down.shape[2], _longest(runs)
        room, out, inputs = rows.new_empty(num, width), torch.empty_like(rows), []
        for first, second, spans in zip(gate_up, down, runs, strict=True):
            for span in spans:
                both = rows.new_empty(span.stop - span.start, 2 * width)
                hidden = room[: len(both)]
                torch.mm(rows[span], first.t(), out=both)
                _aten.silu.out(both[:, :width], out=hidden).mul_(both[:, width:])
                torch.mm(hidden, second.t(), out=out[span])
                inputs.append(both)
        ctx.save_for_backward(rows, gate_up, down, *inputs)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor):
        rows, gate_up, down, *inputs = ctx.saved_tensors
        width, num = down.shape[2], _longest(ctx.runs)
        rooms = [rows.new_empty(num, n) for n in (width, width, 2 * width)]
        grads = [
            torch.empty_like(x) if needed else None
            for x, needed in zip((rows, gate_up, down), ctx.needs_input_grad, strict=False)
        ]
        into_rows, into_first, into_second = grads
        later = iter(inputs)
        for e, spans in enumerate(ctx.runs):
            for number, span in enumerate(spans):
                both = next(later)
                hidden, by_hidden, by_both = (room[: len(both)] for room in rooms)
                gate, up = both[:, :width], both[:, width:]
                torch.mm(grad[span], down[e], out=by_hidden)
                _aten.silu.out(gate, out=hidden)
                torch.mul(by_hidden, hidden, out=by_both[:, width:])
                by_hidden.mul_(up)
                _aten.silu_backward.grad_input(by_hidden, gate, grad_input=by_both[:, :width])
                hidden.mul_(up)
                if into_second is not None:
                    _add_product(into_second[e], grad[span].t(), hidden, number)
                if into_first is not None:
                    _add_product(into_first[e], by_both.t(), rows[span], number)
                if into_rows is not None:
                    torch.mm(by_both, gate_up[e], out=into_rows[span])
        return *grads, None


def _pieces(spans: Sequence[slice]) -> list[slice]:
    """Return the same rows in slices of at most `_ROWS`, with sizes that differ by at most 1; at
    least one slice.
    """
    pieces: list[slice] = []
    for span in spans:
        if num := span.stop - span.start:
            ends = accumulate(even_sizes(num, -(-num // _ROWS)), initial=span.start)
            pieces += [slice(*bounds) for bounds in pairwise(ends)]
    return pieces or [slice(0, 0)]


def _longest(runs: Sequence[Sequence[slice]]) -> int:
    """Return the length of the longest slice."""
    return max(span.stop - span.start for spans in runs for span in spans)


def _add_product(total: Tensor, first: Tensor, second: Tensor, number: int) -> None:
    """Add first @ second to `total`; matmul number 0 overwrites it."""
    torch.addmm(total, first, second, beta=min(number, 1), out=total)


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Multiply each row of x by its expert's matrix, (n, Din) -> (n, Dout).

    weight (E, Dout, Din). counts: (E,) the number of consecutive rows of each expert.
    """
    if torch.is_autocast_enabled(x.device.type):  # torch's grouped product does not look for it
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)
    if _has_grouped_mm(x, weight):
        # grouped_mm takes offsets of int32 alone
        ends = counts.cumsum(0).to(torch.int32)
        y = F.grouped_mm(x, weight.transpose(-2, -1), offs=ends)
        return _ContiguousGrad.apply(y)
    return _LoopedProduct.apply(x, weight, counts)


def _has_grouped_mm(x: Tensor, weight: Tensor) -> bool:
    """Return True if torch's grouped matmul takes these tensors."""
    if not hasattr(F, "grouped_mm") or x.dtype not in _GROUPED:
        return False
    if x.dtype != weight.dtype or not len(x):
        return False
    # the kernels read 16 bytes at once, so rows must be aligned
    widths = x.shape[-1], weight.shape[-2]
    is_aligned = all(n * x.element_size() % 16 == 0 for n in widths)
    if x.device.type == "cuda":
        is_new = torch.cuda.get_device_capability(x.device) >= (8, 0)
        return is_aligned and is_new and x.dtype is torch.bfloat16
    return is_aligned and all(t.data_ptr() % 16 == 0 for t in (x, weight))


class _ContiguousGrad(torch.autograd.Function):
    """The identity with a contiguous gradient; torch's grouped matmul takes no expanded one."""

    @staticmethod
    def forward(ctx, y: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad.contiguous()


class _LoopedProduct(torch.autograd.Function):
    """The grouped matmul as one matmul per expert, for float64 and for torch without grouped
    matmul.

    The host waits for the counts of a device.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.lengths = counts.tolist()
        y = x.new_empty(x.shape[0], weight.shape[1])
        for e, (rows, out) in enumerate(zip(*_split(ctx.lengths, x, y), strict=True)):
            torch.mm(rows, weight[e].t(), out=out)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor):
        x, weight = ctx.saved_tensors
        grad_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        for e, (rows, out) in enumerate(zip(*_split(ctx.lengths, x, grad), strict=True)):
            if grad_weight is not None:
                torch.mm(out.t(), rows, out=grad_weight[e])
        if grad_x is not None:
            for e, (out, into) in enumerate(zip(*_split(ctx.lengths, grad, grad_x), strict=True)):
                torch.mm(out, weight[e], out=into)
        return grad_x, grad_weight, None


def _split(lengths: list[int], *tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Return each tensor split into these lengths."""
    return [x.split(lengths) for x in tensors]


def bias_rows(bias: Tensor, counts: Tensor, num: int) -> Tensor:
    """Return each of `num` rows' expert's bias; rows are sorted by expert."""
    return torch.repeat_interleave(bias, counts, dim=0, output_size=num)
