"""Exchange objects between the ranks of a device group, through the store where all ranks met.

A back end on devices does not carry what is in host memory, and a gloo group of all ranks connects
each with each: a descriptor for every rank, and for 4,096 ranks gigabytes of addresses (gloo#419).
Here every rank writes one value, the group's first rank reads them, and all read the one answer
that it writes. So what a rank asks of the store does not grow with the number of ranks, but on the
first one.

A key is removed once nobody will read it: all ranks that send their next value have read every
earlier answer. Objects are pickled, and the store listens to everybody on the network, so each
value carries a code, made with a key that travels over the devices' own connections, and nothing is
unpickled whose code is wrong.
"""

import hmac
import io
import pickle
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast
from weakref import finalize

import torch
import torch.distributed as dist

from torchdistpackage.comm.backends import Transport, device_of, transport_of
from torchdistpackage.comm.creation import (
    Group,
    PerGroup,
    default_store,
    default_timeout_s,
    limit_of,
    ranks_of,
    world,
)
from torchdistpackage.comm.flight_recorder import STATE, WAITING, recorder
from torchdistpackage.comm.group_state import GroupState, keep_state
from torchdistpackage.errors import CommError

_CHUNK_BYTES = 4 << 20
"""Largest value that is stored in one piece: torch's store takes 8 MiB at a time."""
_NAMED = 20
_CODE_BYTES = 32
_PART_S = 10.0
"""Seconds that rank 0 waits at the end, at most, for ranks that are still reading."""
_STORE = Transport("store")


@dataclass(frozen=True, slots=True)
class ForEach:
    """The result of `reduce` if each rank gets its own answer, in group order."""

    answers: Sequence[object]


@dataclass(frozen=True, slots=True)
class _Failed:
    """Sent in place of an answer if the first rank could not make one."""

    why: str


@dataclass(frozen=True, slots=True)
class _Apart:
    """Sent in place of an answer if each rank's answer has its own key."""


class _RankUnpickler(pickle.Unpickler):
    """Unpickler for data from a rank of this group, whose code has been checked."""


class StoredObjects:
    """The objects of one group; all of its ranks create and use it in one order.

    limit: how long a rank waits for the others in one call.
    """

    def __init__(self, group: Group):
        self.limit = timedelta(seconds=0)
        self._ranks, self._index = ranks_of(group), group.rank()
        self._store = dist.PrefixStore(f"objects/{group.group_name}", _own_connection())
        self._secret = _shared_secret(group)
        self._num_calls = 0
        self._written: list[str] = []
        state = GroupState(self._ranks, self._index, _STORE)
        finalize(self, keep_state(self, state))

    def reduce(self, value: object, make: Callable[[list[object]], object]) -> object:
        """Return the result of `make`, which runs on the first rank with the values of all, in
        group order.

        Raises:
            CommError: `make` raised, or ranks did not come within the limit; names them.
        """
        call, others = self._next_call(), range(1, len(self._ranks))
        earlier, self._written = self._written, []
        if self._index:
            self._write(f"{call}/{self._index}", value)
            answer = self._read(f"{call}/answer", self._ranks[0])
            if isinstance(answer, _Apart):
                answer = self._read(f"{call}/answer/{self._index}", self._ranks[0])
            # the answer says that the first rank has read it
            self._remove([*earlier, *self._written])
            self._written = []
            if isinstance(answer, _Failed):
                raise CommError(answer.why)
            return answer
        values = self._read_all([f"{call}/{index}" for index in others])
        self._remove(earlier)
        try:
            answer = make([value, *values])
        except Exception as error:
            self._write(f"{call}/answer", _Failed(f"rank {self._ranks[0]}: {error}"))
            raise
        if not isinstance(answer, ForEach):
            self._write(f"{call}/answer", answer)
            return answer
        for index in others:
            self._write(f"{call}/answer/{index}", answer.answers[index])
        self._write(f"{call}/answer", _Apart())
        return answer.answers[0]

    def broadcast(self, value: object, source: int) -> object:
        """Return the value of global rank `source` of the group.

        Raises:
            CommError: it did not come within the limit.
        """
        key = f"{self._next_call()}/value"
        if self._ranks[self._index] != source:
            return self._read(key, source)
        self._write(key, value)
        return value

    def _next_call(self) -> int:
        self._num_calls += 1
        return self._num_calls

    # -- keys ----------------------------------------------------------------------------

    def _write(self, key: str, value: object) -> None:
        data = pickle.dumps(value)
        data = self._code(key, data) + data
        chunks = [data[at : at + _CHUNK_BYTES] for at in range(0, len(data), _CHUNK_BYTES)]
        for number, chunk in enumerate(chunks[1:], 1):
            self._set(f"{key}+{number}", chunk)
        self._set(key, len(chunks).to_bytes(4, "big") + chunks[0])  # the last: it is waited for

    def _set(self, key: str, data: bytes) -> None:
        self._written.append(key)
        try:
            self._store.set(key, cast(Any, data))  # torch's stub knows text alone
        except RuntimeError as error:
            raise CommError(
                f"the store of the ranks does not answer: {error}; look at the log of rank 0, "
                "which keeps it"
            ) from error

    def _read(self, key: str, source: int) -> object:
        try:
            # a get without a wait would use the time limit of the store, not that of the group
            self._store.wait([key], self.limit)
            return self._value(key, self._store.get(key))
        except CommError:
            raise
        except RuntimeError as error:
            raise CommError(
                f"no object came from rank {source} within {self.limit.total_seconds():g} s: "
                f"{error}; look at the log of this rank, and raise the time limit if it was only "
                "slow"
            ) from error

    def _read_all(self, keys: list[str]) -> list[object]:
        try:
            # one wait for all keys: the values then come in one answer
            self._store.wait(keys, self.limit)
            values = self._store.multi_get(keys)
            return [self._value(key, data) for key, data in zip(keys, values, strict=True)]
        except CommError:
            raise
        except RuntimeError as error:
            raise CommError(f"{self._absent(keys)}: {error}") from error

    def _absent(self, keys: list[str]) -> str:
        limit_s = self.limit.total_seconds()
        with suppress(RuntimeError):  # the store has gone
            is_present = [self._store.check([key]) for key in keys]
            ranks = [
                r for r, is_here in zip(self._ranks[1:], is_present, strict=True) if not is_here
            ]
            shown = ", ".join(map(str, ranks[:_NAMED])) + ", ..." * (len(ranks) > _NAMED)
            return f"no object came within {limit_s:g} s from {len(ranks)} ranks ({shown})"
        return f"no objects came within {limit_s:g} s, and the store does not answer"

    def _value(self, key: str, data: bytes) -> object:
        chunk_numbers = range(1, int.from_bytes(data[:4], "big"))
        data = b"".join([data[4:], *(self._store.get(f"{key}+{i}") for i in chunk_numbers)])
        code, data = data[:_CODE_BYTES], data[_CODE_BYTES:]
        if not hmac.compare_digest(code, self._code(key, data)):
            raise CommError(
                f"what is in the store under {key} comes from no rank of this group; see who else "
                f"can reach the port of rank 0"
            )
        return _RankUnpickler(io.BytesIO(data)).load()

    def _code(self, key: str, data: bytes) -> bytes:
        return hmac.digest(self._secret, key.encode() + b"\0" + data, "sha256")

    def _remove(self, keys: Sequence[str]) -> None:
        with suppress(RuntimeError):  # what stays is only memory
            for key in keys:
                self._store.delete_key(key)


_connections: PerGroup[dist.Store] = PerGroup()
"""Default group -> its own connection, so a wait on it blocks no other thread."""
_objects: PerGroup[StoredObjects] = PerGroup()


def _own_connection() -> dist.Store:
    if world() not in _connections:
        _connections[world()] = default_store().clone()
    return _connections[world()]


def _shared_secret(group: Group) -> bytes:
    """Draw a key on the first rank and send it to all through the devices, once per group."""
    drawn = torch.tensor([*secrets.token_bytes(_CODE_BYTES)], dtype=torch.uint8)
    on_device = drawn.to(device_of(group))
    dist.broadcast(on_device, src=ranks_of(group)[0], group=group)
    return bytes(on_device.tolist())


def stored_objects(group: Group) -> StoredObjects | None:
    """Return the carrier of `group`'s objects through the store; None if its back end has none."""
    if not transport_of(group).by_store:
        return None
    if group not in _objects:
        _objects[group] = StoredObjects(group)
    objects = _objects[group]
    objects.limit = limit_of(group) or timedelta(seconds=default_timeout_s("gloo"))
    return objects


def part() -> None:
    """Hold rank 0 until all ranks have left the world, because it runs the store that the others
    use.
    """
    if world() not in _objects:
        return
    store = _own_connection()
    with suppress(RuntimeError):  # it has gone, or others have ended in an error
        if store.add("objects/left", 1) == world().size():
            store.set("objects/all left", "")
        if world().rank() == 0:
            # rank 0 keeps the store: if it left first, the others would lose their connection
            store.wait(["objects/all left"], timedelta(seconds=_PART_S))


def run_stored(operation: str, objects: StoredObjects, act: Callable[[], object]) -> object:
    """Return the result of `act`, which is recorded as a call; the counterpart of `run_sync` in
    comm/work.py.
    """
    call = recorder.begin(operation, cast(Any, objects), None)
    call[STATE], since_s = WAITING, recorder.clock_s()
    result = act()
    recorder.end(call, since_s)
    return result
