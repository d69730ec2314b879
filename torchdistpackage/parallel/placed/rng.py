"""Random numbers of operations: the same wherever an operation runs, and none from the program's.

Only the ranks of its place run an operation. If that drew from the program's stream, the streams of
the ranks would part, and with them the data that each of them draws. So each operation has a stream
of its own, which depends on the program's seed and on the number of the operation alone.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from torchdistpackage.comm.random import seed_from, seeded


@contextmanager
def own_draws(number: int, device: torch.device) -> Iterator[None]:
    """Inside, torch draws from the stream of operation `number`; afterwards as if it had not."""
    with seeded(seed_from(torch.default_generator.initial_seed(), number), device):
        yield


def seed_all(seed: int) -> None:
    """Seed torch, on the CPU and on CUDA, NumPy, and Python's `random`."""
    random.seed(seed)
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
