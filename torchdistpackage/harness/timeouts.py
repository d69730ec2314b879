"""A time limit on groups for a while.

One rule: only gloo's groups get one, whose operation then fails and can be told about. NCCL's
watchdog would end the process; there the caller keeps time itself.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from torchdistpackage.comm.flight_recorder import recorder
from torchdistpackage.comm.primitives import Group, set_timeout


@contextmanager
def limited(groups: Iterable[Group], seconds: float) -> Iterator[None]:
    """Operations that begin inside end within `seconds`; afterwards the limits are as before."""
    chosen = {group for group in groups if dist.get_backend(group) == "gloo"}
    before = [(group, _limit_s(group), recorder.line(group).limit) for group in chosen]
    for group in chosen:
        set_timeout(group, seconds)
    try:
        yield
    finally:
        for group, limit_s, recorded in before:
            set_timeout(group, limit_s)
            recorder.line(group).limit = recorded


def _limit_s(group: Group) -> float:
    backend = group._get_backend(torch.device("cpu"))
    return backend.options._timeout.total_seconds()
