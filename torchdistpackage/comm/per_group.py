"""Values kept for a process group while it lives."""

from typing import TypeVar
from weakref import WeakKeyDictionary, ref

import torch.distributed as dist

Group = dist.ProcessGroup
V = TypeVar("V")

_all: "list[ref[PerGroup]]" = []


class PerGroup(WeakKeyDictionary[Group, V]):
    """Group -> value; an entry goes with its group, or by `forget`."""

    def __init__(self) -> None:
        super().__init__()
        _all.append(ref(self, _all.remove))


def forget(group: Group) -> None:
    """Drop every value kept for `group`, as if it had just been made."""
    for kept in [values() for values in _all]:
        if kept is not None:
            kept.pop(group, None)
