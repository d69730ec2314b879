"""Many cases in one job of ranks, which saves the start and the end of a job for each."""

import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from torchdistpackage.comm.tpc import tpc


def each(body: Callable[..., Any], cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """`body(*case)` for every case; each begins as a job does, and a failure names its case."""
    found = []
    for case in cases:
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float32)
        try:
            found.append(body(*case))
        except BaseException as error:
            error.add_note(f"in the case {case}")
            raise
        tpc.destroy()
    return found
