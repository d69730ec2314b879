"""Messages between a process and the children it started: framed pickles over a private socket.

One rule: a pickle travels only over a socket pair whose both ends this program made itself, never
over a file or an address that somebody else could write to. This file is the one place that reads
pickles, and `ForkRequest` and its answers are all that a fork server understands.
"""

from __future__ import annotations

import io
import pickle
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchdistpackage.launch.entrypoint import EntryPoint

_LENGTH = struct.Struct("!Q")
_MAX_FDS = 4


@dataclass(frozen=True, slots=True)
class ForkRequest:
    """Client to server: fork, become this, call the target; with stdout, stderr[, channel]."""

    target: EntryPoint
    args: bytes  # a pickled tuple, which only the child opens
    env: dict[str, str]
    cwd: str
    sys_path: tuple[str, ...]
    argv: tuple[str, ...]
    umask: int


@dataclass(frozen=True, slots=True)
class SignalRequest:
    """Client to server: signal a child, if it is still there (SIGKILL reaches its whole group)."""

    pid: int
    signum: int


@dataclass(frozen=True, slots=True)
class Forked:
    """Server to client: the child of the last request."""

    pid: int


@dataclass(frozen=True, slots=True)
class ForkRefused:
    """Server to client: no child was made, and why."""

    reason: str


@dataclass(frozen=True, slots=True)
class Exited:
    """Server to client: a child is gone. `exit_code` is minus the signal when one killed it."""

    pid: int
    exit_code: int
    time_s: float  # time.time() when the server saw it


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, aliases: Mapping[str, str]) -> None:
        super().__init__(io.BytesIO(data))
        self._aliases = aliases

    def find_class(self, module_name: str, global_name: str, /) -> object:
        return super().find_class(self._aliases.get(module_name, module_name), global_name)


def unpack(data: bytes, aliases: Mapping[str, str] | None = None) -> object:
    """The object in `data`, with modules looked up under `aliases.get(name, name)`."""
    return _Unpickler(data, aliases or {}).load()


def pack(message: object) -> bytes:
    """`message` as bytes. Raises what pickle raises for an object that cannot travel."""
    return pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)


class Channel:
    """One end of a private stream socket that carries whole objects."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._received = bytearray()

    @staticmethod
    def pair() -> tuple[Channel, Channel]:
        """Two connected ends."""
        left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return Channel(left), Channel(right)

    @staticmethod
    def from_fd(fd: int) -> Channel:
        """The end that sits at descriptor `fd` of this process."""
        return Channel(socket.socket(fileno=fd))

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def send(
        self, message: object, fds: Sequence[int] = (), timeout_s: float | None = None
    ) -> None:
        """Send one object, and descriptors with it.

        Raises:
            OSError: the peer is gone (BrokenPipeError) or did not read within `timeout_s`
                (TimeoutError).
        """
        data = pack(message)
        head = _LENGTH.pack(len(data))
        self._socket.settimeout(timeout_s)
        try:
            if fds:  # they arrive with the first byte, so the head alone carries them
                socket.send_fds(self._socket, [head], list(fds))
                self._socket.sendall(data)
            else:
                self._socket.sendall(head + data)
        finally:
            self._socket.settimeout(None)

    def recv(self) -> object:
        """The next object, waiting for it.

        Raises:
            EOFError: the peer is gone.
        """
        while (data := self._next_frame()) is None:
            if not self._fill(0):
                raise EOFError("the other end of this channel is closed")
        return unpack(data)

    def recv_with_fds(self) -> tuple[object, list[int]]:
        """The next object and the descriptors sent with it; not to be mixed with the others.

        Raises:
            EOFError: the peer is gone.
        """
        head, fds, _, _ = socket.recv_fds(
            self._socket, _LENGTH.size, _MAX_FDS, socket.MSG_CMSG_CLOEXEC
        )
        head += self._exactly(_LENGTH.size - len(head))
        (length,) = _LENGTH.unpack(head)
        return unpack(self._exactly(length)), fds

    def recv_ready(self) -> tuple[list[object], bool]:
        """All objects that have wholly arrived, and whether the peer may send more. Never waits.

        A peer that was stopped in the middle of a message must not stop its reader too.
        """
        open_ = True
        try:
            while open_:
                open_ = self._fill(socket.MSG_DONTWAIT)
        except BlockingIOError:
            pass
        messages: list[object] = []
        while (data := self._next_frame()) is not None:
            messages.append(unpack(data))
        return messages, open_

    def _fill(self, flags: int) -> bool:
        try:
            chunk = self._socket.recv(1 << 20, flags)
        except ConnectionResetError:
            return False
        self._received += chunk
        return bool(chunk)

    def _next_frame(self) -> bytes | None:
        if len(self._received) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._received)
        end = _LENGTH.size + length
        if len(self._received) < end:
            return None
        data = bytes(self._received[_LENGTH.size : end])
        del self._received[:end]
        return data

    def _exactly(self, num_bytes: int) -> bytes:
        data = bytearray()
        while len(data) < num_bytes:
            chunk = self._socket.recv(num_bytes - len(data))
            if not chunk:
                raise EOFError("the other end of this channel is closed")
            data += chunk
        return bytes(data)
