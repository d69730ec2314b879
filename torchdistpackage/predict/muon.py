"""The predicted seconds of Muon's Newton-Schulz iterations in a step. No torch.

The ranks of a tensor group divide the matrices of a block as the optimizer does, and ranks of ZeRO
own whole parameters; what replicas update twice each of them computes.
"""

from collections.abc import Iterator

from torchdistpackage.predict.collectives import Fabric
from torchdistpackage.predict.devices import Accelerator
from torchdistpackage.predict.kernels import Matmul, matmul_seconds
from torchdistpackage.predict.newton_schulz import (
    NUM_ITERATIONS,
    Parameter,
    SplitMatrix,
    iterated_together,
)
from torchdistpackage.predict.workload import StepLayout, TransformerSizes

_ITEM_BYTES = 2
_DTYPE = "bfloat16"


def block_matrices(sizes: TransformerSizes, layout: StepLayout) -> Iterator[tuple[Parameter, bool]]:
    """Yield the matrices of the parameters of a block, and whether tensor ranks split them."""
    z, queries, keys = sizes, sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    yield (SplitMatrix(1, queries, z.dim), *(SplitMatrix(1, keys, z.dim),) * 2), True
    yield (SplitMatrix(1, queries, z.dim),), True
    experts = max(z.num_experts // layout.expert, 1)
    yield (SplitMatrix(experts, z.hidden, z.dim),) * (2 if z.gated else 1), True
    yield (SplitMatrix(experts, z.hidden, z.dim),), True
    if z.num_experts:
        yield (SplitMatrix(1, z.num_experts, z.dim),), False


def iteration_seconds(
    sizes: TransformerSizes, layout: StepLayout, device: Accelerator, fabric: Fabric
) -> float:
    """Return the seconds in which a rank makes its matrices orthogonal, messages included."""
    x = layout
    blocks = max(round(sizes.layers / x.pipe), 1)
    parameters = tuple(block_matrices(sizes, x)) * blocks
    sharers = x.sharers if x.zero else 1
    seconds_of_whole = [
        sum(_whole_seconds(device, m) for m in matrices) for matrices, _ in parameters
    ]
    if x.tensor == 1:
        # an owner has whole parameters: no rank less than the largest one
        return max(sum(seconds_of_whole) / sharers, max(seconds_of_whole))
    split = [i for i, (_, is_split) in enumerate(parameters) if is_split]
    works = tuple(parameters[i] for i in split[: max(len(split) // sharers, 1)])
    chosen = iterated_together(works, x.tensor, _ITEM_BYTES, x.muon_exchange)
    copied = (
        sum(seconds_of_whole[i] for i, (_, is_split) in enumerate(parameters) if not is_split)
        / sharers
    )
    owned = [sum(_whole_seconds(device, m) for m in w[0]) for w in works]
    alone = [owned[i] for i in range(len(works)) if i not in chosen]
    moved = sum(m.elements for i, w in enumerate(works) if i not in chosen for m in w[0])
    seconds = max(sum(alone) / x.tensor, max(alone, default=0.0)) + copied
    stride = x.stride("tensor")
    seconds += 2 * fabric.exchange_seconds(_ITEM_BYTES * moved / x.tensor, x.tensor, stride)
    summed = sum(m.summed for i in chosen for m in works[i][0])
    seconds += NUM_ITERATIONS * fabric.sum_seconds(_ITEM_BYTES * summed, x.tensor, stride)
    parts = (m for i in chosen for m in works[i][0])
    return seconds + sum(m.number * _seconds(device, m.across, m.along / x.tensor) for m in parts)


def _whole_seconds(device: Accelerator, matrix: SplitMatrix) -> float:
    return matrix.number * _seconds(device, *sorted((matrix.across, matrix.along)))


def _seconds(device: Accelerator, square: float, length: float) -> float:
    products = Matmul(square, square, length), Matmul(square, square, square)
    last = Matmul(square, length, square)
    return NUM_ITERATIONS * sum(matmul_seconds(device, x, _DTYPE) for x in (*products, last))
