"""Makes and ends one process group, by its members alone. What is torch's own stands here.

The rule: all members meet under one name in the store, and nobody else takes part. torch would do
otherwise in two places, and both are held here while a group is made: its names count the groups of
a process, which differ between ranks; and while the default group is bound to a device it splits
the communicator of everybody, which is a collective of everybody (pytorch#129965).
"""

import hashlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from torchdistpackage.comm.backends import device_of, transport_of
from torchdistpackage.comm.creation_limit import creation_limit
from torchdistpackage.comm.flight_recorder import recorder
from torchdistpackage.comm.per_group import PerGroup
from torchdistpackage.comm.world import world
from torchdistpackage.errors import CommError

Group = dist.ProcessGroup

_complete: PerGroup[tuple[dist.Store, str]] = PerGroup()
"""Group -> the key that its last member sets once it has the group, too, and in which store."""
_LATE_S = 2.0
"""How long a group waits for such a member before it ends; one that failed never comes."""


def create(
    ranks: Sequence[int],
    use: str = "",
    *,
    limit_s: float | None = None,
    backend: str | None = None,
    name: str | None = None,
    connects: bool = True,
) -> Group:
    """The group of these ranks, ascending, among them mine, when all of them have come.

    use: part of its name, for several groups of the same ranks. limit_s: for the others to come,
    and later for each operation; None: torch's own. backend: that of the default group unless one
    is named. name: a description for people. connects: a communicator on a device is connected now,
    and not in its first call.

    Raises:
        CommError: members did not come in time, or torch calls the group by another name.
    """
    whole, key = world(), tuple(ranks)
    rank, store = whole.rank(), default_store()
    members = hashlib.sha1(f"{key}{use}".encode(), usedforsecurity=False).hexdigest()
    times = store.add(f"made/{members}/{rank}", 1)
    called = f"{members}-{times}"
    transport = transport_of(whole)
    # only a back end that is asked to connects when it is made
    eager = connects and backend is None and transport.device_type == "cuda"
    came, what = partial(_came, members, times), f"the group of ranks {key}"
    longest_s = limit_s or default_timeout_s(backend or transport.name)
    with (
        creation_limit(what, key, came, store, longest_s),
        _named(called),
        _unbound(whole) as bound,
    ):
        group = dist.new_group(
            list(key),
            use_local_synchronization=True,
            timeout=None if limit_s is None else timedelta(seconds=limit_s),
            backend=backend,
            group_desc=name,
            device_id=(bound or device_of(whole)) if eager else None,
        )
    assert isinstance(group, Group)
    if group.group_name != called:
        raise CommError(
            f"torch {torch.__version__} calls {what} {group.group_name!r}, not {called!r}, so its "
            f"members may not meet; use torch 2.11 to 2.13, or report this"
        )
    complete = f"complete/{called}"
    if store.add(f"has/{called}", 1) == len(key):
        store.set(complete, "")
    _complete[group] = store, complete
    return group


def end(group: Group) -> None:
    """End a group, but not while a member is still making it.

    A gloo member that is about to return from making the group finds it broken ("Connection closed
    by peer") where another one, which needed no message, has already ended it.
    """
    store, complete = _complete.pop(group)
    with suppress(RuntimeError):  # too late, or the store has gone: this is no reason to stay
        if not store.check([complete]):
            store.wait([complete], timedelta(seconds=_LATE_S))
    recorder.forget(group)
    dist.destroy_process_group(group)


def default_store() -> dist.Store:
    """Where the ranks of the default group meet."""
    return dist.distributed_c10d._get_default_store()


def is_alive(group: Group | None) -> bool:
    """Whether torch still knows the group: companions may be of a world that ended."""
    return group in dist.distributed_c10d._world.pg_map


def default_timeout_s(backend: str) -> float:
    """The limit that torch gives an operation of a new group: longer than steps need, but for
    NCCL, whose watchdog ends the process, not so long that a stuck job holds its nodes for hours.
    """
    return dist.distributed_c10d._get_default_timeout(dist.Backend(backend)).total_seconds()


def _came(members: str, times: int, store: dist.Store, rank: int) -> bool:
    return store.add(f"made/{members}/{rank}", 0) >= times


# -- the name ----------------------------------------------------------------------------


class _Naming(threading.local):
    """How this thread's next group is called; None: as torch likes."""

    name: str | None = None


_naming = _Naming()
_lock = threading.Lock()
"""Never held while a group waits for its members: these may be threads of this process."""
_num_inside = 0
_torch_naming = getattr(dist.distributed_c10d, "_hash_ranks_to_str", None)


def _name_of(ranks: list[int]) -> str:
    assert _torch_naming is not None
    return _torch_naming(ranks) if _naming.name is None else _naming.name


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Inside, torch calls a new group of this thread `name`.

    That is where members meet in the store, so all must arrive at the same one. torch's own choice
    mixes in how many groups the process has, which differs between ranks that are in different
    numbers of them, and repeats once a group was destroyed, whose addresses then are found again.
    """
    global _num_inside
    if _torch_naming is None:
        raise CommError(
            f"torch {torch.__version__} names groups in a way that is not known here; use torch "
            f"2.11 to 2.13"
        )
    with _lock:
        _num_inside += 1
        dist.distributed_c10d._hash_ranks_to_str = _name_of
    before, _naming.name = _naming.name, name
    try:
        yield
    finally:
        _naming.name = before
        with _lock:
            _num_inside -= 1
            if not _num_inside:
                dist.distributed_c10d._hash_ranks_to_str = _torch_naming


# -- the device --------------------------------------------------------------------------

_bound: PerGroup[tuple[int, torch.device]] = PerGroup()
"""Default groups while they are unbound -> in how many threads, and from which device."""


@contextmanager
def _unbound(whole: Group) -> Iterator[torch.device | None]:
    """Inside, the default group is bound to no device; gives the one that it is bound to."""
    with _lock:
        num, device = _bound.get(whole, (0, whole.bound_device_id))
        if device is not None:
            _bound[whole], whole.bound_device_id = (num + 1, device), None
    try:
        yield device
    finally:
        if device is not None:
            with _lock:
                num, _ = _bound.pop(whole)
                if num > 1:
                    _bound[whole] = num - 1, device
                else:
                    whole.bound_device_id = device
