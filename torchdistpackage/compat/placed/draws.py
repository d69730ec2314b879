"""Random numbers of operations that only the ranks of a place run."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from torchdistpackage.comm.random import seed_from, seeded


@contextmanager
def own_draws(number: int, device: torch.device) -> Iterator[None]:
    """Inside, torch draws from the stream of operation `number` of a placed program; afterwards as
    if it had not.

    Only the ranks of its place run an operation. If that drew from the program's stream, the
    streams of the ranks would part. So each operation has one of its own, which depends on the
    program's seed and on the number of the operation alone.
    """
    with seeded(seed_from(torch.default_generator.initial_seed(), number), device):
        yield
