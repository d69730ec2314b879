"""Where the place of a rank is kept: in the process, or in one thread that is a rank of its own.

One rule: a thread that is not `isolated` shares the process' place. A new thread has an empty
context, so the process' place cannot live in the context variable: it is what is found where that
is unset.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from torch.distributed.device_mesh import DeviceMesh

from torchdistpackage.comm.groups import Groups
from torchdistpackage.comm.primitives import Group
from torchdistpackage.topology.views import Topology


@dataclass
class RankContext:
    """Who a rank is. groups: None where it only stands in for one. moe: expert groups exist.

    found: groups by mode, once asked for.
    """

    topology: Topology
    rank: int
    groups: Groups | None
    moe: bool = False
    mesh: DeviceMesh | None = None
    found: dict[str, Group] = field(default_factory=dict)


@dataclass
class ContextHolder:
    """What is set up, or None; all who share it see it change."""

    place: RankContext | None = None


_process = ContextHolder()
_isolated: ContextVar[ContextHolder | None] = ContextVar("tpc_apart", default=None)
_override: ContextVar[RankContext | None] = ContextVar("tpc_override", default=None)


def holder() -> ContextHolder:
    """The holder of this thread, which is the process' unless it is apart."""
    return _isolated.get() or _process


def current() -> RankContext | None:
    """Who the caller is now; nobody, once the world has ended in which that was."""
    place = _override.get() or holder().place
    if place is not None and place.groups is not None and not place.groups.are_there:
        return None
    return place


@contextmanager
def isolated() -> Iterator[None]:
    """Inside, and in this thread alone, nothing is set up, and what is set up is seen by nobody
    else."""
    token = _isolated.set(ContextHolder())
    outer = _override.set(None)
    try:
        yield
    finally:
        _override.reset(outer)
        _isolated.reset(token)


@contextmanager
def using(place: RankContext) -> Iterator[None]:
    """Be at `place` inside the block."""
    token = _override.set(place)
    try:
        yield
    finally:
        _override.reset(token)
