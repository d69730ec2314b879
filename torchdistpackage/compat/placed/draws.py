"""Random streams of operations that only the ranks of a place run."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from torchdistpackage.comm.random import seed_from, seeded


@contextmanager
def own_draws(number: int, device: torch.device) -> Iterator[None]:
    """Let torch draw from the stream of operation `number`, then restore its own stream.

    Only the ranks of its place run an operation. If it drew from the program's stream, the streams
    of the ranks would diverge. So each operation has a stream that depends on the program's seed
    and the operation's number alone.
    """
    with seeded(seed_from(torch.default_generator.initial_seed(), number), device):
        yield
