"""Create and end one process group, by its members alone and within a time limit.

All members meet under one name in the store, and no other rank takes part. torch would do otherwise
in two places, and both are held here while a group is made: its names count the groups of a
process, which differ between ranks; and while the default group is bound to a device it splits that
one's communicator, which is a collective of all ranks (pytorch#129965).

No rank waits for ever: what blocks the host until others come (making a group, connecting it) has a
limit, after which the rank names the members that have not come. No back end on devices has such a
limit, and the host cannot be called back from it, so another thread speaks. A process that this
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
from pathlib import Path
from typing import TypeVar
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist

from torchdistpackage.comm.backends import device_of, transport_of
from torchdistpackage.comm.group_options import GroupOptions, nccl_options
from torchdistpackage.comm.group_state import drop_states, state_of
from torchdistpackage.environment.failure import Failure, FailureKind, to_json
from torchdistpackage.errors import CommError, LaunchError
from torchdistpackage.files import atomic_write

Group = dist.ProcessGroup
V = TypeVar("V")

DEFAULTS = GroupOptions()

_all: "list[ref[PerGroup]]" = []


class PerGroup(WeakKeyDictionary[Group, V]):
    """Group -> value; an entry disappears with its group, or by `forget`."""

    def __init__(self) -> None:
        super().__init__()
        _all.append(ref(self, _all.remove))


def forget(group: Group) -> None:
    """Drop every value stored for `group`, as if it had just been made."""
    for values_of in [values() for values in _all]:
        if values_of is not None:
            values_of.pop(group, None)


_complete: PerGroup[tuple[dist.Store, str]] = PerGroup()
"""Group -> (key that its last member sets once it has the group, store of the key)."""
_LATE_S = 5.0
"""Seconds for which a group waits for such a member before it ends; a failed member never comes."""


def create(
    ranks: Sequence[int],
    use: str = "",
    *,
    limit_s: float | None = None,
    backend: str | None = None,
    name: str | None = None,
    connects: bool = True,
    options: GroupOptions = DEFAULTS,
) -> Group:
    """Create the group of these ascending ranks, which include this one, once all of them have
    come.

    use: part of its name, for several groups of the same ranks. limit_s: time for the others to
    come, and later for each operation; None: torch's own. backend: default: that of the default
    group. name: a description for people. connects: a communicator on a device is connected now
    instead of in its first call. options: of the group, if the back end is NCCL.

    Raises:
        CommError: members did not come in time, or torch calls the group by another name.
    """
    default_group, key = world(), tuple(ranks)
    rank, store = default_group.rank(), default_store()
    members = hashlib.sha1(f"{key}{use}".encode(), usedforsecurity=False).hexdigest()
    times = store.add(f"made/{members}/{rank}", 1)
    called, group_name = f"{members}-{times}", f"the group of ranks {key}"
    transport = transport_of(default_group)
    # only a back end that is asked to connects when it is made
    eager = connects and backend is None and transport.device_type == "cuda"
    longest_s = limit_s or default_timeout_s(backend or transport.name)
    has_options = backend is None and dist.get_backend(default_group) == "nccl"

    def came(store: dist.Store, rank: int) -> bool:
        return store.add(f"made/{members}/{rank}", 0) >= times

    with (
        creation_limit(group_name, key, came, store, longest_s, name=called),
        _named(called),
        _unbound(default_group) as bound,
    ):
        group = dist.new_group(
            list(key),
            use_local_synchronization=True,
            timeout=None if limit_s is None else timedelta(seconds=limit_s),
            backend=backend,
            pg_options=nccl_options(options, longest_s) if has_options else None,
            group_desc=name,
            device_id=(bound or device_of(default_group)) if eager else None,
        )
    assert isinstance(group, Group)
    if group.group_name != called:
        raise CommError(
            f"torch {torch.__version__} calls {group_name} {group.group_name!r}, not {called!r}, "
            f"so its members may not meet; use torch 2.11 to 2.13, or report this"
        )
    mark_made(group, store, called)
    return group


def mark_made(group: Group, store: dist.Store, name: str) -> None:
    """Record in the store that this rank has the group; `end` waits until each member has done
    so.
    """
    complete = f"complete/{name}"
    if store.add(f"has/{name}", 1) == group.size():
        store.set(complete, "")
    _complete[group] = store, complete


def end(group: Group) -> None:
    """End a group once each member has it."""
    await_members(group)
    drop_states(group)
    dist.destroy_process_group(group)


def await_members(group: Group) -> None:
    """Wait briefly for members that are still making the group.

    If a member that needed no message ends the group first, a gloo member that is still returning
    from making it finds it broken ("Connection closed by peer").
    """
    if group not in _complete:  # not made here
        return
    store, complete = _complete.pop(group)
    usual, late = store.timeout, timedelta(seconds=_LATE_S)
    store.set_timeout(late)  # a look into a file that has gone waits for it to come back
    try:
        with suppress(RuntimeError):  # too late, or the store has gone: this is no reason to stay
            if not store.check([complete]):
                store.wait([complete], late)
    finally:
        store.set_timeout(usual)


# -- the default group, with every rank in it ---------------------------------------------


def is_joined() -> bool:
    """Return whether this process is one of the ranks of a default group."""
    return dist.is_available() and dist.is_initialized()


def world(caller: str = "setup_distributed()") -> Group:
    """Return the default group.

    caller: the function that a user calls to make one; the error names it.

    Raises:
        LaunchError: there is none.
    """
    if not is_joined():
        raise LaunchError(f"torch.distributed is not initialised; call {caller} first")
    return dist.group.WORLD  # type: ignore[return-value]


def default_store() -> dist.Store:
    """Return the store at which the ranks of the default group meet."""
    return dist.distributed_c10d._get_default_store()


def is_alive(group: Group | None) -> bool:
    """Return whether torch still knows the group; companions may belong to a world that has
    ended.
    """
    return group in dist.distributed_c10d._world.pg_map


def default_timeout_s(backend: str) -> float:
    """Return torch's default time limit for an operation of a new group.

    Steps need less. Under NCCL, whose watchdog ends the process, it is short enough that a stuck
    job does not hold its nodes for hours.
    """
    return dist.distributed_c10d._get_default_timeout(dist.Backend(backend)).total_seconds()


def ranks_of(group: Group) -> tuple[int, ...]:
    """Return the global ranks of the group, in group order.

    Raises:
        CommError: this is not a group, or one that has ended.
    """
    try:
        return tuple(dist.get_process_group_ranks(group))
    except (KeyError, AttributeError) as error:
        raise CommError(
            f"{group!r} is not a process group of this process, or has ended; pass one such as "
            "tpc.get_group('data')"
        ) from error


# public from torch 2.14 on, which warns of the other
_set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout


def set_timeout(group: Group, seconds: float) -> None:
    """Limit how long a later operation of the group may take before it fails."""
    _limits[group] = limit = timedelta(seconds=seconds)
    _set_timeout(limit, group)
    if state_of(group).direct:  # with a limit, a wait on NCCL would block the host
        state_of(group).limit = limit


_limits: PerGroup[timedelta] = PerGroup()


def limit_of(group: Group) -> timedelta | None:
    """Return the last time limit that `set_timeout` set for this group, or None."""
    return _limits.get(group)


# -- the name ----------------------------------------------------------------------------


_naming = threading.local()
"""Thread-local whose attribute `name` is the next group's name; without it torch chooses."""
_lock = threading.Lock()
"""Lock for the state that threads share. It is never held while a group waits for its members,
which may be threads of this process."""
_num_inside = 0
_torch_naming = getattr(dist.distributed_c10d, "_hash_ranks_to_str", None)


def _name_of(ranks: list[int]) -> str:
    assert _torch_naming is not None
    return getattr(_naming, "name", None) or _torch_naming(ranks)


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Make torch call this thread's next group `name` inside the block.

    Members meet in the store under that name, so all must use the same one. torch's own choice
    depends on how many groups the process has, which differs between ranks in different numbers of
    groups, and repeats after a group was destroyed, whose old addresses are then found again.
    """
    global _num_inside
    if _torch_naming is None:
        raise CommError(
            f"torch {torch.__version__} names groups in a way that is not known here; use torch "
            f"2.11 to 2.13"
        )
    # torch has one naming function for all threads of the process
    with _lock:
        _num_inside += 1
        dist.distributed_c10d._hash_ranks_to_str = _name_of
    _naming.name = name
    try:
        yield
    finally:
        del _naming.name
        with _lock:
            _num_inside -= 1
            if not _num_inside:
                dist.distributed_c10d._hash_ranks_to_str = _torch_naming


# -- the device --------------------------------------------------------------------------

_bound: PerGroup[tuple[int, torch.device]] = PerGroup()
"""Default groups while they are unbound -> (number of threads that unbound it, its device)."""


@contextmanager
def _unbound(default: Group) -> Iterator[torch.device | None]:
    """Unbind the default group from its device inside the block; yield that device."""
    # threads of the process share the default group and its device
    with _lock:
        num, device = _bound.get(default, (0, default.bound_device_id))
        if device is not None:
            _bound[default], default.bound_device_id = (num + 1, device), None
    try:
        yield device
    finally:
        if device is not None:
            with _lock:
                num, _ = _bound.pop(default)
                if num > 1:
                    _bound[default] = num - 1, device
                else:
                    default.bound_device_id = device


# -- the time limit ----------------------------------------------------------------------

HasCome = Callable[[dist.Store, int], bool]
"""(store, rank) -> whether the rank has come. Never blocks."""

MARGIN_S = 5.0
"""Extra seconds of our limit: back ends with their own limit (gloo) report first."""
CONNECT_S = 600.0
"""Seconds in which members that have all arrived may connect: thousands take minutes
(nccl#1156).
"""
WARN_S = 60.0
"""Seconds between warnings that members are still connecting."""
_TELL_WAIT_S = 10.0
"""Time limit in seconds for the rank that finds out who is missing; the others wait as long for its
answer.
"""
_NAMED = 20
_ends = False


def end_processes() -> None:
    """Let a wait that times out end this process, as if our launcher had started it."""
    global _ends
    _ends = True


class _Roll:
    """The members that have come to a group in the making, as far as the store knows.

    what: what is being made, for messages. name: of this attempt; the same on all members.
    """

    def __init__(
        self,
        group_name: str,
        name: str,
        rank: int,
        ranks: Sequence[int],
        has_come: HasCome,
        store: dist.Store,
    ):
        self._what, self._name, self._rank, self._ranks = group_name, name, rank, ranks
        self._has_come, self._store = has_come, store
        self._since_s = time.monotonic()
        self._stays_for = 0
        """Number of members that this rank waits for before it ends, because it looked for them or
        may keep the store."""

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._since_s

    def all_came(self) -> bool:
        """Return whether the store says that all came; False if it does not answer."""

        def look() -> bool:
            store = self._store.clone()  # the thread that waits may hold the connection
            return all(self._has_come(store, rank) for rank in self._ranks)

        return bool(_answer(look))

    def absent(self, limit_s: float) -> str:
        """Return a text about the members that have not come, or "" if all have.

        At the limit one member looks for all: thousands that each ask for each would keep the store
        busy for minutes.
        """
        elapsed_s = self.elapsed_s
        shared = elapsed_s >= limit_s  # else it is only this rank that failed
        text = _answer(lambda: self._shared(limit_s) if shared else self._look(limit_s)[0])
        if text is not None:
            return text
        return (
            f"{self._what}: not there in {elapsed_s:.1f} s, with a time limit of {limit_s:g} s, "
            f"and it is not known which ranks came: the store that knows does not answer; look at "
            f"the log of rank 0, which keeps it"
        )

    def stay(self) -> None:
        """Wait until the others have read the result of `absent`, if they need this rank for it."""

        def wait() -> None:
            store, end = self._store.clone(), time.monotonic() + _TELL_WAIT_S
            # polls, because a store cannot wait for a number
            while store.add(f"read/{self._name}", 0) < self._stays_for and time.monotonic() < end:
                time.sleep(0.05)

        if self._stays_for:
            _answer(wait)

    def _shared(self, limit_s: float) -> str:
        # a connection of its own: the main thread may be blocked in a wait on the shared one
        store, key = self._store.clone(), f"absent/{self._name}"
        looks = store.add(f"looks/{self._name}", 1) == 1
        if looks:
            text, num_came = self._look(limit_s)
            store.set(key, f"{num_came} {text}")
        # one rank looks for all: thousands of looks at once would overload the store
        store.wait([key], timedelta(seconds=_TELL_WAIT_S))
        num_came, _, text = store.get(key).decode().partition(" ")
        store.add(f"read/{self._name}", 1)
        if text and (looks or self._rank == 0):
            self._stays_for = int(num_came)
        return text

    def _look(self, limit_s: float) -> tuple[str, int]:
        """Return a text about the missing members, and the number that has come."""
        store = self._store.clone()
        missing = [rank for rank in self._ranks if not self._has_come(store, rank)]
        num_came = len(self._ranks) - len(missing)
        if not missing:
            return "", num_came
        hosts = [_with_host(store, rank) for rank in missing[:_NAMED]]
        return (
            f"{self._what}: {len(missing)} of {len(self._ranks)} ranks did not come in "
            f"{self.elapsed_s:.1f} s, with a time limit of {limit_s:g} s "
            f"(rank{'s' * (len(missing) > 1)} {', '.join(hosts)}"
            f"{', ...' * (len(missing) > _NAMED)}); see what they do instead, and whether all "
            f"ranks ask for their groups in one order"
        ), num_came


def _answer(ask: Callable[[], V]) -> V | None:
    """Return the store's answer, or None if its host has gone.

    The request runs in a thread, because torch retries a connection to a host that has gone for as
    long as the store's own limit.
    """
    answers: list[V] = []

    def run() -> None:
        with suppress(RuntimeError):
            answers.append(ask())

    thread = threading.Thread(target=run, name="roll", daemon=True)
    thread.start()
    thread.join(2 * _TELL_WAIT_S)
    return answers[0] if answers else None


@contextmanager
def creation_limit(
    group_name: str,
    ranks: Sequence[int],
    has_come: HasCome,
    store: dist.Store,
    limit_s: float,
    *,
    name: str | None = None,
    rank: int | None = None,
) -> Iterator[None]:
    """Limit a wait in the block to `limit_s`, and name those of `ranks` that have not come by then.

    Once all have come, the back end may take `CONNECT_S` in total, because a slow network is not a
    missing rank. The first of them warns every `WARN_S` that it is still connecting.

    group_name: what is being made, for messages. name: key in the store, the same on all members
    and used only this once; None: `group_name`. rank: this rank; None: that of the default group.

    Raises:
        CommError: the back end gave up, and some had not come; names them.
    """
    if rank is None:
        rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
    roll, ended = (
        _Roll(group_name, name or group_name, rank, ranks, has_come, store),
        threading.Event(),
    )

    def slow() -> str:
        return (
            f"{group_name}: its {len(ranks)} ranks came, but are not connected after "
            f"{roll.elapsed_s:.0f} s: a slow start of the network, or they do not reach each other "
            f"(NCCL_SOCKET_IFNAME, a firewall; NCCL_DEBUG=INFO says more)"
        )

    def watch() -> None:
        limit, all_present, warns = limit_s + MARGIN_S, False, rank == ranks[0]
        # wakes at once when the group is made, else to warn or at the limit
        while not ended.wait(max(min(limit - roll.elapsed_s, WARN_S), 0.0)):
            if roll.elapsed_s >= limit and not all_present:
                if text := roll.absent(limit_s):
                    if not ended.is_set():
                        _give_up(rank, text, roll.stay)
                    return
                all_present, limit = True, max(limit, CONNECT_S)
            all_present = all_present or (warns and roll.all_came())
            if all_present:
                limit = max(limit, CONNECT_S)
            if ended.is_set():
                return
            if roll.elapsed_s >= limit:
                _give_up(rank, slow())
                return
            if all_present and warns:
                _say(rank, f"still waits: {slow()}; it gives up after {limit:.0f} s")

    threading.Thread(target=watch, name="creation limit", daemon=True).start()
    try:
        yield
    except CommError:  # it says what is wrong
        raise
    except RuntimeError as error:
        if text := roll.absent(limit_s):
            roll.stay()
            raise CommError(text) from error
        raise
    finally:
        ended.set()


@contextmanager
def joins_within(store: dist.Store, rank: int, world_size: int, limit_s: float) -> Iterator[None]:
    """Apply `creation_limit` to the default group, with the store where its ranks meet.

    All have come when the block is entered, so calls inside need no limit for that.

    Raises:
        CommError: some did not come.
    """
    store.set(f"joins/{rank}", "")

    def joined(store: dist.Store, rank: int) -> bool:
        return store.check([f"joins/{rank}"])

    group_name, ranks = "the default group", range(world_size)
    with creation_limit(group_name, ranks, joined, store, limit_s, rank=rank):
        # after the rank's own key above, so that a counted rank is never named as missing
        if store.add("joined", 1) == world_size:
            store.set("joins/all", "")
        store.wait(["joins/all"], timedelta(seconds=limit_s))
        yield


def _say(rank: int, text: str) -> None:
    """Write a line to stderr at once, because the interpreter may not return from a call into
    NCCL.
    """
    with suppress(OSError, ValueError):
        sys.stderr.flush()
    os.write(2, f"rank {rank} on {socket.gethostname()} {text}\n".encode())


def _give_up(rank: int, text: str, before_end: Callable[[], None] = lambda: None) -> None:
    """Report this, and end the process if it is ours to end."""
    if path := os.environ.get("TDP_FAILURE"):
        host = socket.gethostname()
        message = f"rank {rank} on {host} waits in vain: {text}"
        failure = Failure(rank, host, os.getpid(), time.time(), FailureKind.ERROR, 1, text, message)
        with suppress(OSError):
            atomic_write(Path(path), to_json(failure))
    _say(rank, f"waits in vain: {text}")
    before_end()
    if path or _ends:
        os._exit(1)


def _with_host(store: dist.Store, rank: int) -> str:
    """Return the rank as text, with the host under which it signed in (comm/rendezvous_store.py),
    if it did.
    """
    with suppress(RuntimeError, AttributeError):  # a store within no other one
        while True:
            if store.check([f"here/{rank}"]):
                return f"{rank} on {store.get(f'here/{rank}').decode()}"
            store = store.underlying_store  # type: ignore[attr-defined]
    return f"{rank}"
