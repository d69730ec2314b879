"""What ours sends in a piece of work, and a side that sends the same and computes nothing."""

from collections.abc import Callable
from math import prod

import torch
import torch.distributed as dist

from torchdistpackage.comm import primitives
from torchdistpackage.comm.flight_recorder import OPERATION, SHAPE, recorder

Sent = list[tuple[str, tuple[int, ...]]]
"""Operation and shape of each call, in their order."""


def sent_by(work: Callable[[], object]) -> Sent:
    """What this rank sends in `work`."""
    recorder.ended = []
    try:
        work()
        return [(call[OPERATION], tuple(call[SHAPE] or ())) for call, _, _ in recorder.ended]
    finally:
        recorder.ended = None


def alone(sent: Sent) -> Callable[[], None]:
    """The same sums and gathers by torch's own calls, of tensors that are there already."""
    calls: list[Callable[[], object]] = []
    for operation, shape in sent:
        x = torch.zeros(prod(shape))
        if operation == "all_reduce":
            calls.append(lambda x=x: dist.all_reduce(x))
        elif operation == "all_gather":
            joined = x.new_empty(x.numel() * dist.get_world_size())
            calls.append(lambda x=x, out=joined: primitives.gather_into(out, x))

    def run() -> None:
        for call in calls:
            call()

    return run


def counted(sent: Sent) -> dict[str, dict[str, int]]:
    """Calls and bytes of float32, by operation, of the part of a rank."""
    found: dict[str, dict[str, int]] = {}
    for operation, shape in sent:
        each = found.setdefault(operation, {"calls": 0, "bytes": 0})
        each["calls"] += 1
        each["bytes"] += 4 * prod(shape)
    return found
