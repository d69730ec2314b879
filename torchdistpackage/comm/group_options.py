"""Options of the groups along each axis, for back ends that have options.

On NCCL each group has its own stream. A kernel on a high-priority stream gets the next free
multiprocessors of the device, ahead of the remainder of a matmul that was launched earlier. Without
high priority, an all-reduce that should overlap a matmul starts only when the matmul ends. gloo has
no such options.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType
from typing import Any

import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """Options of a group.

    high_priority: its kernels go before others on the device. max_ctas: largest number of thread
    blocks (CTAs) of one of its kernels, each of which occupies a multiprocessor; None: NCCL's
    choice.
    """

    high_priority: bool = False
    max_ctas: int | None = None


PRIORITY_AXES = ("tensor", "context", "expert")
"""Axes whose calls a layer's next operation waits for."""
AXIS_OPTIONS: Mapping[str, GroupOptions] = MappingProxyType(
    dict.fromkeys(PRIORITY_AXES, GroupOptions(high_priority=True))
)
"""Axis -> default options of the groups along it."""


def merged(options: Iterable[GroupOptions]) -> GroupOptions:
    """Return the options of one group that serves several axes: the union of their needs."""
    each = list(options)
    limits = [x.max_ctas for x in each]
    finite = [x for x in limits if x is not None]
    return GroupOptions(
        any(x.high_priority for x in each), max(finite) if len(finite) == len(limits) > 0 else None
    )


def nccl_options(options: GroupOptions, timeout_s: float) -> Any:
    """Return torch's options object for a group over NCCL; None if its defaults suffice.

    timeout_s: time limit of the group's operations, because torch warns if this object has another
        one.
    """
    if options == GroupOptions():
        return None
    nccl = dist.ProcessGroupNCCL.Options(is_high_priority_stream=options.high_priority)
    nccl._timeout = timedelta(seconds=timeout_s)
    if options.max_ctas is not None:
        nccl.config.max_ctas = options.max_ctas
    return nccl
