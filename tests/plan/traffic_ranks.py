"""What a rank really gave to its calls in one step, by the flight recorder, beside its plan."""

import math
from collections import Counter
from unittest.mock import patch

import torch
import torch.distributed as dist

from tests.train import parity
from torchdistpackage.comm import flight_recorder
from torchdistpackage.comm.flight_recorder import DTYPE, GROUP, OPERATION, SHAPE, recorder
from torchdistpackage.plan.traffic import traffic

Counts = Counter[tuple[tuple[int, ...], str, str, str]]
"""(ranks of the group, operation, dtype, "calls" or "bytes") -> how many."""


def recorded_and_planned(runs: list[list[str]]) -> list[tuple[Counts, Counts]]:
    """Of each run the second step: in the first nothing has to be gathered yet."""
    found: list[tuple[Counts, Counts]] = []
    for overrides in runs:
        trainer = parity.trainer(overrides)
        trainer.train_step(1).wait()
        with patch.object(recorder, "_ring", []):
            trainer.train_step(2).wait()
            got = recorded(recorder._ring)
        trainer.close()
        planned = Counts()
        for call in traffic(trainer.plan, dist.get_rank()):
            add(planned, call.ranks, call.operation, call.dtype, call.number, call.num_bytes)
        found.append((got, planned))
    return found


def recorded(ring: list[flight_recorder.Call]) -> Counts:
    counts = Counts()
    for call in ring:
        group, operation, shape = call[GROUP], call[OPERATION], call[SHAPE]
        if operation == "receive":
            continue
        num = math.prod(shape)
        if operation == "all_gather" and len(shape) == 1:
            num //= len(group.ranks)  # ZeRO's, noted as the whole bucket that it fills in place
        num_bytes = num * torch.empty(0, dtype=call[DTYPE]).element_size()
        dtype = flight_recorder.dtype_name(call[DTYPE])
        add(counts, group.ranks, operation, dtype, 1, num_bytes)
    return counts


def add(
    counts: Counts, ranks: tuple[int, ...], operation: str, dtype: str, num: int, size: float
) -> None:
    counts[ranks, operation, dtype, "calls"] += num
    counts[ranks, operation, dtype, "bytes"] += int(size)
