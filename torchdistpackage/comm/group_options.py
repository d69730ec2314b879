"""Options of the groups along each axis, for back ends that have such.

On NCCL a group has a stream of its own. A kernel on a stream of high priority gets the next free
multiprocessors of the device, before the rest of a matmul that was launched earlier; without it, a
sum that is to be hidden behind a matmul begins when that matmul ends. gloo has no such options.
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

    high_priority: its kernels go before others on the device. max_ctas: most thread blocks (CTAs)
    of one of its kernels, each of which takes a multiprocessor; None: as many as NCCL likes.
    """

    high_priority: bool = False
    max_ctas: int | None = None


PRIORITY_AXES = ("tensor", "context", "expert")
"""Axes whose calls the next operation of a layer waits for."""
AXIS_OPTIONS: Mapping[str, GroupOptions] = MappingProxyType(
    dict.fromkeys(PRIORITY_AXES, GroupOptions(high_priority=True))
)
"""Axis -> options of the groups along it, unless others are given."""


def merged(options: Iterable[GroupOptions]) -> GroupOptions:
    """Return the options of one group that serves several axes: all that one of them needs."""
    each = list(options)
    limits = [x.max_ctas for x in each]
    finite = [x for x in limits if x is not None]
    return GroupOptions(
        any(x.high_priority for x in each), max(finite) if len(finite) == len(limits) > 0 else None
    )


def nccl_options(options: GroupOptions, timeout_s: float) -> Any:
    """Return torch's object for a group over NCCL; None where its defaults do.

    timeout_s: of the group's operations. torch warns of another one in this object.
    """
    if options == GroupOptions():
        return None
    nccl = dist.ProcessGroupNCCL.Options(is_high_priority_stream=options.high_priority)
    nccl._timeout = timedelta(seconds=timeout_s)
    if options.max_ctas is not None:
        nccl.config.max_ctas = options.max_ctas
    return nccl
