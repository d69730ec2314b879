"""Messages between a process and its children: framed pickles over a private socket.

A pickle travels only over a socket pair whose two ends this program made, never over a file or an
address that others could write to. Only this file reads pickles, and comm/stored_objects.py, which
checks a code that only ranks of one group can make.
"""

from __future__ import annotations

import io
import pickle
import socket
import struct
from collections.abc import Mapping, Sequence

_LENGTH, _FD = struct.Struct("!Q"), struct.Struct("i")
_MAX_FDS = 4


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, aliases: Mapping[str, str]) -> None:
        super().__init__(io.BytesIO(data))
        self._aliases = aliases

    def find_class(self, module_name: str, global_name: str, /) -> object:
        return super().find_class(self._aliases.get(module_name, module_name), global_name)


def unpack(data: bytes, aliases: Mapping[str, str] | None = None) -> object:
    """Return the object in `data`, with modules looked up under `aliases.get(name, name)`."""
    return _Unpickler(data, aliases or {}).load()


def pack(message: object) -> bytes:
    """Return `message` as bytes. Raises pickle's error for an object that cannot be sent."""
    return pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)


class Channel:
    """One end of a private stream socket that carries objects."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._received = bytearray()
        self._fds: list[int] = []

    @staticmethod
    def pair() -> tuple[Channel, Channel]:
        """Return two connected channels."""
        first, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return Channel(first), Channel(right)

    @staticmethod
    def from_fd(fd: int) -> Channel:
        """Return the end of a channel at descriptor `fd` of this process."""
        return Channel(socket.socket(fileno=fd))

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def send(
        self, message: object, fds: Sequence[int] = (), timeout_s: float | None = None
    ) -> None:
        """Send one object, with descriptors attached.

        Raises:
            OSError: the peer is gone (BrokenPipeError) or did not read within `timeout_s`
                (TimeoutError).
        """
        data = pack(message)
        data = _LENGTH.pack(len(data)) + data
        self._socket.settimeout(timeout_s)
        try:
            sent = socket.send_fds(self._socket, [data], list(fds)) if fds else 0
            self._socket.sendall(data[sent:])
        finally:
            self._socket.settimeout(None)

    def recv(self) -> object:
        """Wait for the next object and return it.

        Raises:
            EOFError: the peer is gone.
        """
        while (data := self._next_frame()) is None:
            if not self._fill(0):
                raise EOFError("the other end of this channel is closed")
        return unpack(data)

    def recv_ready(self) -> tuple[list[object], bool]:
        """Return all objects that have fully arrived, and whether the peer may send more. Never
        waits.

        Reading never blocks on a peer that was stopped in the middle of a message.
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

    def take_fds(self) -> list[int]:
        """Return the descriptors that came with the messages read so far; the caller must close
        them.
        """
        fds, self._fds = self._fds, []
        return fds

    def _fill(self, flags: int) -> bool:
        try:
            # not socket.recv_fds, which ignores its flags
            chunk, ancillary, _, _ = self._socket.recvmsg(
                1 << 20, socket.CMSG_LEN(_MAX_FDS * _FD.size), flags | socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionResetError:
            return False
        self._received += chunk
        for _, _, fds in ancillary:
            self._fds += [fd for (fd,) in _FD.iter_unpack(fds)]
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
