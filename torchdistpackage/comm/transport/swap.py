"""A socket between two ranks of gloo, by which they swap small parts in calls that both wait for.

Of such a swap gloo makes six messages and wakes its reading thread for each; here a rank sends one
and reads one, by itself, which takes a quarter of the time. Both are in one call whenever
something is on its way, so its tag and its length say which it is.

Ranks that know no address of their own, as gloo would choose it, have no such socket.
"""

import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from ctypes import Array, c_char
from datetime import timedelta
from errno import EBADF
from typing import cast
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from torchdistpackage.comm.creation import default_store
from torchdistpackage.comm.flight_recorder import GroupLog
from torchdistpackage.launch.network import GLOO, is_loopback, read_addresses, resolve

_HEADER = struct.Struct("=QQ")
_GREETING_BYTES = 16
_LONGEST_PAUSE_S = 0.05
_LONGEST_S = 2.0**20
"""A longer limit is no number for poll(2)."""


class SwapSocket:
    """This rank's end of the connection with global rank `peer`.

    limit: for what a call waits for, where the group's log has none.
    """

    def __init__(self, connection: socket.socket, peer: int, goes_first: bool, limit: timedelta):
        self._socket, self._goes_first = connection, goes_first
        self._default = self._limit = limit
        self._head = bytearray(_HEADER.size)
        connection.settimeout(_seconds(limit))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        host, port = connection.getpeername()[:2]
        self._peer = f"rank {peer} at [{host}]:{port}"
        _open.add(self)

    def swap(self, tag: int, sent: Tensor, room: Tensor, limit: timedelta | None) -> None:
        """`sent` to the other rank, and what it sends into `room`; both contiguous, in host memory.

        One thread at a time.

        Raises:
            RuntimeError: it has gone, or did not come in time, or is in another call.
        """
        try:
            self._swap(tag, sent, room, limit or self._default)
        except TimeoutError as error:
            self.close()
            raise RuntimeError(f"Timed out waiting {self._limit} for {self._peer}") from error
        except OSError as error:
            self.close()
            if error.errno == EBADF:
                raise RuntimeError(
                    f"the connection was closed on this side, not by {self._peer}: an earlier call "
                    f"failed, the group ended, or this process was forked; make a new group"
                ) from error
            raise RuntimeError(f"Connection closed by peer, {self._peer} ({error})") from error
        except BaseException:
            self.close()  # no later call may take what is still on its way for its own
            raise

    def close(self) -> None:
        self._socket.close()

    def __del__(self) -> None:
        self.close()

    def _swap(self, tag: int, sent: Tensor, room: Tensor, limit: timedelta) -> None:
        if limit is not self._limit:
            self._socket.settimeout(_seconds(limit))
            self._limit = limit
        parts = _HEADER.pack(tag, sent.nbytes), _memory(sent)
        num = self._socket.sendmsg(parts)
        # what the kernel has no room for waits for the other one, which must not wait as well
        rest = b"" if num == _HEADER.size + sent.nbytes else memoryview(b"".join(parts))[num:]
        if rest and self._goes_first:
            self._socket.sendall(rest)
        head, into = memoryview(self._head), memoryview(_memory(room))
        num = self._socket.recvmsg_into((head, into))[0]
        self._read(head[num:], num)
        num = max(num - _HEADER.size, 0)
        if (came := _HEADER.unpack(head)) != (tag, room.nbytes):
            # unread, it would take mine away from the other one
            self._read(memoryview(bytearray(came[1] - num)))
            raise RuntimeError(
                f"the other rank is in another call: {came[1]} bytes came with tag {came[0]}, "
                f"where {room.nbytes} with tag {tag} were expected; let both make the same calls "
                f"in one order, from one thread at a time, on tensors of one shape"
            )
        self._read(into[num:])
        if rest and not self._goes_first:
            self._socket.sendall(rest)

    def _read(self, rest: memoryview, number: int = 1) -> None:
        """`rest` whole; number: of bytes that came before, 0 being the end."""
        while number and len(rest):
            number = self._socket.recv_into(rest)
            rest = rest[number:]
        if not number:
            raise ConnectionError("its end is closed")


_open: WeakSet[SwapSocket] = WeakSet()


def _leave_to_parent() -> None:
    """The other rank must hear when the parent goes, whatever its children do."""
    for end in list(_open):
        end.close()


os.register_at_fork(after_in_child=_leave_to_parent)


# -- connecting --------------------------------------------------------------------------


def connect(group: dist.ProcessGroup, line: GroupLog) -> SwapSocket | None:
    """The socket of a group of two ranks, which both ask for at once; None: they have none.

    Raises:
        RuntimeError: the other rank did not come in time, or cannot be reached.
    """
    store, key = default_store(), f"swap/{group.group_name}"
    limit: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    first, peer = line.index == 0, line.ranks[1 - line.index]
    try:
        connection = (_offer if first else _answer)(store, key, _seconds(limit))
    except (TimeoutError, RuntimeError) as error:  # of the store, too
        raise RuntimeError(
            f"Timed out waiting {limit} for rank {peer} to come to its first call on the group: "
            f"{error}"
        ) from error
    except OSError as error:
        raise RuntimeError(f"could not connect with rank {peer}: {error}") from error
    return connection and SwapSocket(connection, peer, first, limit)


def _offer(store: dist.Store, key: str, limit_s: float) -> socket.socket | None:
    """Of the group's first rank: say where it listens, and wait."""
    address, greeting = _address(), secrets.token_bytes(_GREETING_BYTES)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        if not address:
            raise OSError
        server = socket.create_server((address, 0), family=family)
    except OSError:
        store.set(key, "")
        return None
    with server:
        store.set(key, f"{address} {server.getsockname()[1]} {greeting.hex()}")
        try:
            return _accept(server, greeting, limit_s)
        except TimeoutError:
            with suppress(RuntimeError):
                store.delete_key(key)
            raise


def _answer(store: dist.Store, key: str, limit_s: float) -> socket.socket | None:
    """Of the other one: come to where that is."""
    until_s, pause_s = time.monotonic() + limit_s, 0.001
    while not store.check([key]):  # a wait would keep other threads from the store
        if time.monotonic() > until_s:
            raise TimeoutError("it did not say where it listens")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    found = store.get(key).decode().split()
    store.delete_key(key)
    if not found:
        return None
    address, port, greeting = found
    connection = socket.create_connection((address, int(port)), limit_s)
    connection.sendall(bytes.fromhex(greeting))
    return connection


def _accept(server: socket.socket, greeting: bytes, limit_s: float) -> socket.socket:
    """The connection of the one who knows the greeting; strangers delay no rank.

    Raises:
        TimeoutError: it did not come.
    """
    until_s, come = time.monotonic() + limit_s, list[socket.socket]()
    server.setblocking(False)
    try:
        while (left_s := until_s - time.monotonic()) > 0:
            for one in _readable([server, *come], left_s):
                with suppress(OSError):  # gone again
                    if one is server:
                        come.append(server.accept()[0])
                        continue
                    come.remove(one)
                    with ExitStack() as turned_away:
                        turned_away.enter_context(one)
                        # so few bytes come in one piece
                        if secrets.compare_digest(one.recv(_GREETING_BYTES), greeting):
                            turned_away.pop_all()
                            return one
        raise TimeoutError("it did not connect")
    finally:
        for one in come:
            one.close()


def _readable(sockets: Sequence[socket.socket], limit_s: float) -> list[socket.socket]:
    with selectors.DefaultSelector() as selector:
        for one in sockets:
            selector.register(one, selectors.EVENT_READ)
        return [cast(socket.socket, key.fileobj) for key, _ in selector.select(limit_s)]


def _address() -> str:
    """The address of this rank that gloo uses; "" where it is not known."""
    addresses = [a for a in read_addresses() if not a.ip.is_link_local]
    if name := os.environ.get(GLOO, "").partition(",")[0]:
        return next((str(a.ip.ip) for a in addresses if a.interface == name), "")
    own = {str(a.ip.ip) for a in addresses}
    return next((x for x in resolve(socket.gethostname()) if x in own or is_loopback(x)), "")


def _seconds(limit: timedelta) -> float:
    return min(max(limit.total_seconds(), 1e-3), _LONGEST_S)


def _memory(x: Tensor) -> "Array[c_char]":
    return (c_char * x.nbytes).from_address(x.data_ptr())
