"""Measure how fast this rank's device multiplies, copies and starts operations, in about 1 s.

These are the numbers of a cluster profile from which `tdp plan --time --profile` predicts a step.
All ranks of a host measure at once, since they share its cores and its memory in a run too. A host
measures tensors that its caches do not hold, as those of a step are when an operation comes to
them, and what a step of it spends time on besides: activation and attention, whose time no
bandwidth gives.
"""

import itertools
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchdistpackage.harness.bench.profile import MeasuredDevice

_SIZES_ON_HOST = (32, 64, 128, 256, 512, 768)
_SIZES_ON_GPU = (256, 512, 1024, 2048, 4096, 8192)
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_BUDGET_S = 0.06
"""Seconds of each measurement, after one uncounted call."""
_CHAIN = 50
"""Number of operations on one element, so that calls outweigh the clock's resolution."""
_COLD_BYTES = 2**26
"""Bytes of the tensors that take turns on a host: more than its caches hold."""
_MAX_TURNS = 64
_ELEMENTS = 2**18
"""Number of elements of a tensor in element-wise work on a host."""
_ATTENTION = (128, 4, 4, 32)
"""Tokens, samples, heads and their width, of a size that a host trains."""


def device_speed(on_cuda: bool, num_ranks: int) -> MeasuredDevice:
    """Measure this rank's device. num_ranks: of this host."""
    device = torch.device("cuda" if on_cuda else "cpu")
    sizes = _SIZES_ON_GPU if on_cuda else _SIZES_ON_HOST
    matmuls = {dtype: _matmuls(sizes, kind, device) for dtype, kind in _DTYPES.items()}
    return MeasuredDevice(
        name=torch.cuda.get_device_name() if on_cuda else "cpu",
        num_ranks=num_ranks,
        matmuls=matmuls,
        bytes_per_s=_bytes_per_s(device),
        call_s=_call_s(device) if on_cuda else _host_call_s(),
        memory_bytes=float(_memory_bytes(on_cuda)),
        activation_s=None if on_cuda else _activation_s(),
        attention_s=None if on_cuda else _attention_s(),
    )


def _matmuls(
    sizes: Sequence[int], dtype: torch.dtype, device: torch.device
) -> tuple[tuple[float, float], ...]:
    times: list[tuple[float, float]] = []
    for size in sizes:
        times.append((2.0 * size**3, _matmul_s(size, dtype, device)))
        if times[-1][1] > _BUDGET_S:  # bfloat16 takes seconds on hosts without it
            break
    return tuple(times)


def _matmul_s(size: int, dtype: torch.dtype, device: torch.device) -> float:
    def operands() -> tuple[Tensor, ...]:
        return tuple(torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))

    turns = _turns(operands, device)
    return _median_s(lambda: torch.mm(*next(turns)), device)


def _turns(
    make: Callable[[], tuple[Tensor, ...]], device: torch.device
) -> Iterator[tuple[Tensor, ...]]:
    """Yield the same tensors again and again; on a host others in turn, so that they are not
    cached.
    """
    first = make()
    num_bytes = sum(x.numel() * x.element_size() for x in first)
    number = 1 if device.type == "cuda" else min(max(_COLD_BYTES // num_bytes, 1), _MAX_TURNS)
    return itertools.cycle([first, *(make() for _ in range(number - 1))])


def _bytes_per_s(device: torch.device) -> float:
    """Return the bytes per second of an addition, which reads two tensors and writes one."""
    count = 2**26 if device.type == "cuda" else _ELEMENTS

    def tensors() -> tuple[Tensor, ...]:
        return tuple(torch.ones(count, device=device) for _ in range(3))

    turns = _turns(tensors, device)

    def add() -> None:
        a, b, result = next(turns)
        torch.add(a, b, out=result)

    return 3 * 4 * count / _median_s(add, device)


def _activation_s() -> tuple[float, float]:
    """Return the seconds per number of a GELU, forward and backward, including its memory
    traffic.
    """
    host, results = torch.device("cpu"), deque[Tensor](maxlen=_MAX_TURNS)
    turns = _turns(lambda: tuple(torch.randn(_ELEMENTS) for _ in range(2)), host)

    def there() -> None:
        results.append(F.gelu(next(turns)[0]))

    def back() -> None:
        numbers, gradient = next(turns)
        results.append(torch.ops.aten.gelu_backward(gradient, numbers))

    return _median_s(there, host) / _ELEMENTS, _median_s(back, host) / _ELEMENTS


def _attention_s() -> tuple[float, float]:
    """Return the seconds per floating-point operation of causal attention, forward and backward.

    Only scores below the diagonal count, and the backward has two and a half times as many
    operations."""
    host, (tokens, samples, heads, width) = torch.device("cpu"), _ATTENTION
    flops = 2.0 * tokens * tokens * samples * heads * width
    # (S, B, H, D), as a model without transposed copies has them
    q, k, v = (
        torch.randn(tokens, samples, heads, width).permute(1, 2, 0, 3).requires_grad_()
        for _ in range(3)
    )

    def there() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    result = there()
    gradient = torch.ones_like(result)

    def back() -> None:
        torch.autograd.grad(result, (q, k, v), gradient, retain_graph=True)

    return _median_s(there, host) / flops, _median_s(back, host) / (2.5 * flops)


def _call_s(device: torch.device) -> float:
    leaf = torch.ones(1, device=device, requires_grad=True)

    def chain() -> None:
        value = leaf
        for _ in range(_CHAIN):
            value = value * 1.0
        value.sum().backward()

    return _median_s(chain, device) / (3 * _CHAIN)


class _TinyBlock(nn.Module):
    """A block of a transformer as PyTorch runs it, which takes its calls' time where it has few
    numbers. calls: the kernels of its forward and, twice as many, of its backward that
    predict/layer.py counts."""

    calls = 3 * 19

    def __init__(self, heads: int = 2, width: int = 4) -> None:
        super().__init__()
        dim = heads * width
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.inputs, self.output = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.activation, self.down = nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        tokens, samples, dim = x.shape
        joined = self.inputs(self.norms[0](x)).view(tokens, samples, 3, self.heads, -1)
        q, k, v = (each.permute(1, 2, 0, 3) for each in joined.unbind(2))
        seen = F.scaled_dot_product_attention(_turned(q), _turned(k), v, is_causal=True)
        x = x + self.output(seen.permute(2, 0, 1, 3).reshape(tokens, samples, dim))
        return x + self.down(self.activation(self.up(self.norms[1](x))))


def _turned(x: Tensor) -> Tensor:
    """Return rotated halves, as for rotary positions; the angle makes no difference to the time."""
    one, two = x.chunk(2, -1)
    return torch.cat((one * 0.5 - two * 0.5, two * 0.5 + one * 0.5), -1)


def _host_call_s() -> float:
    block, x = _TinyBlock(), torch.randn(4, 1, 8, requires_grad=True)
    return _median_s(lambda: block(x).sum().backward(), torch.device("cpu")) / _TinyBlock.calls


def _median_s(call: Callable[[], object], device: torch.device) -> float:
    return statistics.median(times_s(call, device, _BUDGET_S))


def times_s(call: Callable[[], object], device: torch.device, budget_s: float) -> list[float]:
    """Return the seconds of each call in `budget_s` seconds, after one uncounted call."""
    times: list[float] = []
    call()
    _wait(device)
    end = time.perf_counter() + budget_s
    while time.perf_counter() < end or not times:
        start = time.perf_counter()
        call()
        _wait(device)
        times.append(time.perf_counter() - start)
    return times


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        # the host only queues kernels, and the clock must see their end
        torch.cuda.synchronize()


def _memory_bytes(on_cuda: bool) -> int:
    if on_cuda:
        return torch.cuda.get_device_properties(0).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
