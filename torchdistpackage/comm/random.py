"""Random numbers: the same along an axis, or different, and the same again on recomputation.

There is one stream, torch's default generator. It is seeded alike along the tensor axis, where
activations are replicated, and differently along all others. Where activations are split
(heads, columns, rows) `differ` forks it: the fork's seed is one draw of the shared
stream mixed with the index, so whatever replays the stream, as activation checkpointing
does, replays the fork.
"""

import hashlib
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from torchdistpackage.comm.tpc import tpc
from torchdistpackage.topology.mesh import Mesh

SAME_AXES = ("tensor",)
"""Axes along which replicated activations need equal draws."""


def seed_from(*parts: object) -> int:
    """A 63-bit seed from anything that prints: equal parts, equal seed, on every machine.

    For noise that is equal on all ranks that hold a parameter, draw that of the full parameter from
    `torch.Generator().manual_seed(seed_from(seed, step, layout.name))` and take this rank's part
    with `parallel.tensor.full.copy_part`; docs/random.md has the function.
    """
    digest = hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def seed_rank(seed: int, mesh: Mesh | None = None, rank: int | None = None) -> None:
    """Seed torch's generators, alike on ranks that differ only along the tensor axis.

    mesh, rank: default to those of `tpc`.

    Raises:
        LaunchError: no mesh is given, and `tpc` is not set up.
    """
    mesh = tpc.topology.dense if mesh is None else mesh
    rank = tpc.rank if rank is None else rank
    coord = {a: i for a, i in mesh.coord(rank).items() if a not in SAME_AXES and i}
    torch.manual_seed(seed_from(seed, sorted(coord.items())))


@contextmanager
def differ(index: int, device: torch.device | str = "cpu") -> Iterator[None]:
    """Inside, the default generators are a fork that depends on `index` (along the split axis).

    Everybody who shares the stream must enter, with its own index: the stream moves on by one
    draw. No device synchronisation.
    """
    draw = int(torch.randint(2**62, (), dtype=torch.int64, device="cpu"))
    with seeded(seed_from(draw, index), device):
        yield


def forked_dropout(shape: Sequence[int], like: Tensor, p: float, index: int) -> Tensor:
    """What a dropout inside `differ(index)` multiplies by, for a graph, which cannot enter that:
    zeros, and 1 / (1 - p). The same numbers in the same order.

    The shared stream's draw is an operation of the graph. What follows from it is a function of the
    draw, so it may be computed again, or at another place, and is the same.
    """
    draw = torch.randint(2**62, (), dtype=torch.int64, device="cpu")
    return _dropout_factors(draw, list(shape), p, index, like.dtype, like.device)


@torch.library.custom_op("torchdistpackage::dropout_factors", mutates_args=())
def _dropout_factors(
    draw: Tensor,
    shape: Sequence[int],
    p: float,
    index: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    with seeded(seed_from(int(draw), index), device):
        return F.dropout(torch.ones(shape, dtype=dtype, device=device), p)


@_dropout_factors.register_fake
def _(draw, shape, p, index, dtype, device):
    return torch.empty(shape, dtype=dtype, device=device)


@contextmanager
def seeded(seed: int, device: torch.device | str = "cpu") -> Iterator[None]:
    """Inside, the default generators of the CPU and of `device` begin at `seed`; afterwards they go
    on as if nothing had been drawn. No device synchronisation."""
    on_cuda = torch.device(device).type == "cuda"
    cpu_state = torch.get_rng_state()
    cuda_state = torch.cuda.get_rng_state(device) if on_cuda else None
    torch.default_generator.manual_seed(seed)
    if on_cuda:
        with torch.cuda.device(device):  # which need not be the current one
            torch.cuda.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(cpu_state)
        if cuda_state is not None:
            torch.cuda.set_rng_state(cuda_state, device)


def fix_rand(rank: int = 0) -> None:
    """Seed torch, numpy and random with 2222 + rank, and make cuDNN deterministic.

    Once `tpc` is set, ranks that differ only along the tensor axis count as the first of them, so
    that with its own global rank each draws as after `seed_rank`: replicated activations alike.
    """
    if tpc.is_set and 0 <= rank < tpc.topology.world_size:
        rank = tpc.topology.dense.group(rank, SAME_AXES)[0]
    seed = 2222 + rank
    seed_all(seed)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def seed_all(seed: int) -> None:
    """Seed torch, on the CPU and on CUDA, NumPy, and Python's `random`."""
    import numpy as np  # late: few programs seed it

    random.seed(seed)
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
