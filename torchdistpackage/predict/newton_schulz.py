"""The work of Muon's Newton-Schulz iterations on split matrices, and who does it. No torch.

Ranks that share a matrix either bring it to an owner, who iterates on all of it, or each iterate on
their part: the products of the unsplit side with itself are sums over ranks, and the rest is local.
The owner multiplies least and sends each element twice; iterating together sends only squares of
the unsplit side, and no rank waits for the owner of a large matrix. Every rank, and the plan, finds
the same choice, since it rests on sizes alone.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Literal, NamedTuple

from torchdistpackage.layout.layout import Layout
from torchdistpackage.layout.partition import greedy_partition

Exchange = Literal["auto", "gather", "together"]
"""gather: each split matrix has an owner. together: all ranks iterate on their parts. auto: for
each parameter what takes less time."""
NUM_ITERATIONS = 5

_FLOPS_PER_S = 400e12
_BYTES_PER_S = 300e9
_CALL_S = 20e-6
"""What an H100 reaches in bfloat16, its links in a node, and the latency of a collective among
eight: the choice rests on their proportions, which differ little between generations."""


class SplitMatrix(NamedTuple):
    """Equal matrices, each with one side that ranks split; fused parts count by themselves."""

    number: int
    along: int
    """Length of the side that is split."""
    across: int

    @property
    def elements(self) -> int:
        return self.number * self.along * self.across

    @property
    def flops(self) -> float:
        """Operations of iterations on whole matrices, whose squares are of the shorter side."""
        short, long = sorted((self.along, self.across))
        return self.number * newton_schulz_flops(short, long)

    def flops_together(self, num_ranks: int) -> float:
        """Operations of one of the ranks that iterate on their parts."""
        return self.number * newton_schulz_flops(self.across, self.along / num_ranks)

    @property
    def summed(self) -> int:
        """Elements that an iteration of all ranks sums over them."""
        return self.number * self.across**2


Parameter = tuple[SplitMatrix, ...]


def newton_schulz_flops(square: float, length: float) -> float:
    """Return the operations of all iterations on a matrix whose products are squares of one side:
    the product of the matrix with itself, its square, and its product with the matrix.
    """
    return NUM_ITERATIONS * (4.0 * square**2 * length + 2.0 * square**3)


@lru_cache(maxsize=4096)
def of_matrix(layout: Layout) -> Layout:
    """Return the layout of a matrix of a stack."""
    last = {name: getattr(layout, name)[-2:] for name in ("shape", "split", "parts")}
    return replace(layout, **last)


def fused_dim(layout: Layout) -> tuple[int, tuple[int, ...]]:
    """Return (the dim from the end that is made of fused parts, their lengths), or (-1, ())."""
    for dim in (-2, -1):
        if layout.parts[dim]:
            return dim, layout.parts[dim]
    return -1, ()


def split_dim(layout: Layout) -> int | None:
    """Return the one dim from the end that ranks split so that no two have the same elements; None:
    no such dim, and a matrix must be brought together.
    """
    dims = [dim for dim in (-2, -1) if layout.split[dim]]
    if len(dims) != 1 or layout.is_shared or layout.ranges:
        return None
    return dims[0]


@lru_cache(maxsize=4096)
def matrices_of(layout: Layout, count: int) -> Parameter:
    """Return the matrices of a parameter. layout: of one of `count` stacked ones."""
    dim, (rows, columns), (fused, lengths) = split_dim(layout), layout.shape[-2:], fused_dim(layout)
    matrices: list[SplitMatrix] = []
    for length in lengths or (layout.shape[fused],):
        sides = (length, columns) if fused == -2 else (rows, length)
        along, across = sides if dim == -2 else sides[::-1]
        matrices.append(SplitMatrix(count, along, across))
    return tuple(matrices)


@lru_cache(maxsize=256)
def iterated_together(
    parameters: tuple[tuple[Parameter, bool], ...],
    num_ranks: int,
    item_bytes: int,
    exchange: Exchange = "auto",
) -> frozenset[int]:
    """Return the indices of the parameters that all ranks iterate on.

    parameters: the matrices of each, and whether ranks can iterate on them together. item_bytes: of
    an element of the products.
    """
    able = [i for i, (_, is_able) in enumerate(parameters) if is_able]
    if exchange != "auto" or num_ranks == 1:
        return frozenset(able if exchange == "together" and num_ranks > 1 else ())
    works = [matrices for matrices, _ in parameters]
    costs = [int(sum(x.flops for x in work)) for work in works]
    together = [_seconds_together(work, num_ranks, item_bytes) for work in works]
    alone = [
        cost / num_ranks / _FLOPS_PER_S + _seconds_moved(work, num_ranks, item_bytes)
        for cost, work in zip(costs, works, strict=True)
    ]
    # what is faster by itself, and the largest ones, for whose owner the others would wait
    faster = {i for i in able if together[i] < alone[i]}
    largest = sorted(able, key=lambda i: (-costs[i], works[i], i))[:num_ranks]
    candidates = [frozenset(faster.union(largest[:n])) for n in range(len(largest) + 1)]

    def seconds(some: frozenset[int]) -> float:
        rest = [i for i in range(len(works)) if i not in some]
        shares = greedy_partition([costs[i] for i in rest], num_ranks)
        load = max(sum(costs[rest[i]] for i in share) for share in shares)
        total = load / _FLOPS_PER_S + sum(together[i] for i in some)
        total += sum(_seconds_moved(works[i], num_ranks, item_bytes) for i in rest)
        return total + _CALL_S * (2 * bool(rest) + (NUM_ITERATIONS + 1) * bool(some))

    return min((frozenset(), *candidates), key=lambda some: (seconds(some), len(some)))


def _seconds_together(work: Sequence[SplitMatrix], num_ranks: int, item_bytes: int) -> float:
    share = 2 * (num_ranks - 1) / num_ranks
    sent = NUM_ITERATIONS * sum(x.summed for x in work) * item_bytes * share
    return sum(x.flops_together(num_ranks) for x in work) / _FLOPS_PER_S + sent / _BYTES_PER_S


def _seconds_moved(work: Sequence[SplitMatrix], num_ranks: int, item_bytes: int) -> float:
    share = 2 * (num_ranks - 1) / num_ranks
    return sum(x.elements for x in work) / num_ranks * item_bytes * share / _BYTES_PER_S
