"""Random numbers that are equal or different along an axis, and reproduced on recomputation.

There is one stream, torch's default generator. Its seed is equal along the tensor axis, where
activations are replicated, and different along all other axes. If activations are split (heads,
columns, rows) `differ` forks the stream. The fork's seed is one draw of the shared stream mixed
with the index. So activation checkpointing, which replays the stream, replays the fork too.
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
    """Return a 63-bit seed from printable values: equal values give equal seeds on every machine.

    For noise that is equal on all ranks that hold a parameter, draw noise for the full parameter
    from `torch.Generator().manual_seed(seed_from(seed, step, layout.name))` and take this rank's
    slice with `parallel.tensor.full.copy_part`; docs/random.md has the function.
    """
    digest = hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def seed_rank(seed: int, mesh: Mesh | None = None, rank: int | None = None) -> None:
    """Seed torch's generators, equally on ranks that differ only along the tensor axis.

    mesh, rank: default: those of `tpc`.

    Raises:
        LaunchError: there is no `mesh`, and `tpc` is not set up.
    """
    mesh = tpc.topology.dense if mesh is None else mesh
    rank = tpc.rank if rank is None else rank
    coord = {a: i for a, i in mesh.coord(rank).items() if a not in SAME_AXES and i}
    torch.manual_seed(seed_from(seed, sorted(coord.items())))


@contextmanager
def differ(index: int, device: torch.device | str = "cpu") -> Iterator[None]:
    """Fork the default generators in the block, by `index` along the split axis.

    Every rank that shares the stream must enter, with its own index, because the stream advances by
    one draw. It does not synchronise with the device.
    """
    draw = int(torch.randint(2**62, (), dtype=torch.int64, device="cpu"))
    with seeded(seed_from(draw, index), device):
        yield


def forked_dropout(shape: Sequence[int], like: Tensor, p: float, index: int) -> Tensor:
    """Return the factors of a dropout inside `differ(index)`, zeros and 1 / (1 - p), for graphs.

    A graph cannot enter `differ`. The numbers are the same, in the same order. The draw of the
    shared stream is an operation of the graph. The factors are a function of that draw, so they are
    equal if they are computed again or elsewhere.
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
    """Compute the dropout factors for a draw, as an operator."""
    with seeded(seed_from(int(draw), index), device):
        return F.dropout(torch.ones(shape, dtype=dtype, device=device), p)


@_dropout_factors.register_fake
def _(draw, shape, p, index, dtype, device):
    return torch.empty(shape, dtype=dtype, device=device)


@contextmanager
def seeded(seed: int, device: torch.device | str = "cpu") -> Iterator[None]:
    """Seed the default generators of the CPU and of `device` in the block, and restore them
    afterwards.

    It does not synchronise with the device.
    """
    on_cuda = torch.device(device).type == "cuda"
    cpu_state = torch.get_rng_state()
    cuda_state = torch.cuda.get_rng_state(device) if on_cuda else None
    torch.default_generator.manual_seed(seed)
    if on_cuda:
        with torch.cuda.device(device):  # manual_seed seeds the current device
            torch.cuda.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(cpu_state)
        if cuda_state is not None:
            torch.cuda.set_rng_state(cuda_state, device)


def fix_rand(rank: int = 0) -> None:
    """Seed torch, numpy and random with 2222 + rank, and make cuDNN deterministic.

    Once `tpc` is set, ranks that differ only along the tensor axis count as the first of them. So
    if each passes its global rank, replicated activations get equal draws, as after `seed_rank`.
    """
    if tpc.is_set and 0 <= rank < tpc.topology.world_size:
        rank = tpc.topology.dense.group(rank, SAME_AXES)[0]
    seed = 2222 + rank
    seed_all(seed)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def seed_all(seed: int) -> None:
    """Seed torch (CPU and CUDA), NumPy and Python's `random`."""
    import numpy as np  # imported late, because few programs seed it

    random.seed(seed)
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
