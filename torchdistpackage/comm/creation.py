"""Makes and ends one process group, by its members alone, within a time limit.

One rule: all members meet under one name in the store, and nobody else takes part. torch would do
otherwise in two places, and both are held here while a group is made: its names count the groups of
a process, which differ between ranks; and while the default group is bound to a device it splits
the communicator of everybody, which is a collective of everybody (pytorch#129965).

And no rank waits for ever: what blocks the host until others come (making a group, connecting it)
has a limit, after which the rank says which members have not come. No back end on devices has such
a limit, and the host cannot be called back from it, so another thread speaks. A process that this
package started is then ended; in a user's own the text is all.
"""

import hashlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TypeVar
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist

from torchdistpackage.comm.backends import device_of, transport_of
from torchdistpackage.comm.flight_recorder import recorder
from torchdistpackage.errors import CommError, LaunchError
from torchdistpackage.launch.failure import Failure, FailureKind, to_json
from torchdistpackage.launch.files import atomic_write

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


# -- the default group, with every rank in it ---------------------------------------------


def is_joined() -> bool:
    """Whether this process is one of the ranks of a default group."""
    return dist.is_available() and dist.is_initialized()


def world(how: str = "setup_distributed()") -> Group:
    """The default group.

    how: what the caller's users call to make one.

    Raises:
        LaunchError: there is none.
    """
    if not is_joined():
        raise LaunchError(f"torch.distributed is not initialised; call {how} first")
    return dist.group.WORLD  # type: ignore[return-value]


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


# -- the time limit ----------------------------------------------------------------------

HasCome = Callable[[dist.Store, int], bool]
"""(store, rank) -> whether the rank has come. Blocks nobody."""

MARGIN_S = 5.0
"""Back ends with a limit of their own (gloo) have the first word."""
_NAMED = 20


@contextmanager
def creation_limit(
    what: str, ranks: Sequence[int], has_come: HasCome, store: dist.Store, limit_s: float
) -> Iterator[None]:
    """Inside, who waits for more than `limit_s` says which of `ranks` have not come.

    what: is being made, for the text.

    Raises:
        CommError: the back end gave up, and some had not come; names them.
    """
    wait = _TimedWait(what, tuple(ranks), has_come, store, limit_s)
    timer = threading.Timer(limit_s + MARGIN_S, wait.is_over)
    timer.daemon = True
    timer.start()
    try:
        yield
    except CommError:  # it says what is wrong
        raise
    except RuntimeError as error:
        if text := wait.absent():
            raise CommError(text) from error
        raise
    finally:
        wait.ended = True
        timer.cancel()


@contextmanager
def joins_within(store: dist.Store, rank: int, world_size: int, limit_s: float) -> Iterator[None]:
    """`creation_limit` of the default group, at the store where its ranks meet."""
    store.set(f"joins/{rank}", "")
    with creation_limit("the default group", range(world_size), _has_joined, store, limit_s):
        yield


def _has_joined(store: dist.Store, rank: int) -> bool:
    return store.check([f"joins/{rank}"])


class _TimedWait:
    """ended: nobody waits any more."""

    def __init__(
        self,
        what: str,
        ranks: tuple[int, ...],
        has_come: HasCome,
        store: dist.Store,
        limit_s: float,
    ):
        self._what, self._ranks, self._has_come = what, ranks, has_come
        self._store, self._limit_s, self.ended = store, limit_s, False
        self._since_s = time.monotonic()

    def absent(self) -> str:
        """Who has not come, as far as the store says; "" where nobody is known to be absent."""
        with suppress(RuntimeError):  # gone with its keeper
            store = self._store.clone()  # the thread that waits may hold the connection
            absent = [rank for rank in self._ranks if not self._has_come(store, rank)]
            if absent:
                return self._told([_with_host(store, rank) for rank in absent])
        return ""

    def is_over(self) -> None:
        """Say so, and end the process if it is ours."""
        text = self.absent() or self._all_came()
        if self.ended:
            return
        rank, host = _rank(), socket.gethostname()
        message = f"rank {rank} on {host} waits in vain: {text}"
        if path := os.environ.get("TDP_FAILURE"):
            failure = Failure(
                rank, host, os.getpid(), time.time(), FailureKind.ERROR, 1, text, message
            )
            with suppress(OSError):
                atomic_write(Path(path), to_json(failure))
        with suppress(OSError, ValueError):
            sys.stderr.flush()
        os.write(2, f"{message}\n".encode())
        if path or _ends:
            os._exit(1)

    def _told(self, absent: Sequence[str]) -> str:
        many = "s" * (len(absent) > 1)
        listed = ", ".join(absent[:_NAMED]) + ", ..." * (len(absent) > _NAMED)
        return (
            f"{self._what}: {len(absent)} of {len(self._ranks)} ranks did not come in "
            f"{time.monotonic() - self._since_s:.1f} s, with a time limit of {self._limit_s:g} s "
            f"(rank{many} {listed}); see what they do instead, and whether all ranks ask for "
            f"their groups in one order"
        )

    def _all_came(self) -> str:
        return (
            f"{self._what}: its {len(self._ranks)} ranks came, but are not connected after the "
            f"time limit of {self._limit_s:g} s; see whether they reach each other "
            f"(NCCL_SOCKET_IFNAME, a firewall; NCCL_DEBUG=INFO tells more)"
        )


def _with_host(store: dist.Store, rank: int) -> str:
    """With the host by which it signed in (comm/rendezvous_store.py), if it did."""
    with suppress(RuntimeError, AttributeError):  # a store within no other one
        while True:
            if store.check([f"here/{rank}"]):
                return f"{rank} on {store.get(f'here/{rank}').decode()}"
            store = store.underlying_store  # type: ignore[attr-defined]
    return f"{rank}"


_ends = False


def end_processes() -> None:
    """This process is ours, whoever started it: a wait in vain ends it."""
    global _ends
    _ends = True


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
