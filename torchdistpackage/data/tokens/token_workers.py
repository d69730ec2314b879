"""Processes that tokenize pieces of files side by side, with results in order. No torch.

The threads of the tokenizers library would not do: parsing lines and copying ids hold Python's
lock. The processes are forks of a server that has neither threads nor a device, so a rank can start
them too. Memory holds a few pieces a process, whatever the size of the files.
"""

import os
import selectors
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from typing import Self, cast

from torchdistpackage.data.tokens.documents import Piece, TextSource, reader_of
from torchdistpackage.data.tokens.token_encoder import DocumentEncoder, EncodedBatch
from torchdistpackage.errors import DataError, LaunchError
from torchdistpackage.launch.fork_server_client import ForkedChild, ForkServer
from torchdistpackage.launch.ipc import Channel
from torchdistpackage.launch.process import name_thread

Progress = Callable[[int, int], None]
"""Called with (bytes of text read, bytes of all texts) now and then."""
Encoded = list[EncodedBatch] | None
"""The batches of a piece; None: a line of it, or the piece, is wrong."""
_TASKS = 2
"""Pieces sent to a worker: the current and the next, so that it need not wait."""
_AHEAD = 4
"""Pieces per worker that are in progress or wait for an earlier one."""
_REAP_S = 5.0
"""Seconds to wait for the exit status of a process that ended."""


class _TokenProcess:
    """A process, and the numbers of the pieces it works on, in order."""

    def __init__(self, child: ForkedChild):
        assert child.channel is not None
        self.child = child
        self.channel = child.channel
        self.assigned: deque[int] = deque()


class TokenWorkers:
    """Up to `most` processes that tokenize a source.

    If `most` is below two there are none, and each piece comes as None. encode: set it to False
    when ids are no longer needed, only whether lines are wrong.
    """

    def __init__(self, source: TextSource, most: int):
        self.encode = True
        self._source = source
        self._most = most
        self._stack = ExitStack()
        self._server = self._stack.enter_context(
            ForkServer(["torchdistpackage.data.tokens.token_workers"])
        )
        self._selector = self._stack.enter_context(selectors.DefaultSelector())
        self._workers: list[_TokenProcess] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for worker in self._workers:
            worker.child.signal(signal.SIGKILL)
            worker.channel.close()
        self._stack.close()

    def results(self, pieces: Iterable[Piece]) -> Iterator[tuple[Piece, Encoded]]:
        """Yield each piece with its batches, in order.

        Raises:
            DataError: a process cannot be started, or ended early; names the piece it was at.
        """
        if self._most < 2:
            for piece in pieces:
                yield piece, None
            return
        coming = enumerate(pieces)
        ahead: dict[int, Piece] = {}
        encoded: dict[int, Encoded] = {}
        following: tuple[int, Piece] | None = next(coming, None)
        number = 0
        while following is not None or ahead:
            while following is not None and len(ahead) < _AHEAD * self._most:
                if (worker := self._with_room(following[1])) is None:
                    break
                index, piece = following
                ahead[index] = piece
                worker.assigned.append(index)
                worker.channel.send((piece, self.encode))
                following = next(coming, None)
            if number in encoded:
                yield ahead.pop(number), encoded.pop(number)
                number += 1
            else:
                self._collect(ahead, encoded)

    def _with_room(self, piece: Piece) -> _TokenProcess | None:
        """Return the worker to send a piece to, or None if all have their next one.

        An idle worker comes first, then a new one if the limit allows, then one without its next
        piece.
        """
        least = min(self._workers, key=lambda x: len(x.assigned), default=None)
        if least is not None and (not least.assigned or len(self._workers) == self._most):
            return least if len(least.assigned) < _TASKS else None
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}  # one process is one core
        try:
            child = self._server.spawn(
                tokenize_pieces, (self._source,), env=environment, with_channel=True
            )
        except (LaunchError, OSError) as error:
            raise DataError(
                f"{piece.path}: cannot start a process that tokenizes it: {error}; see whether "
                "this machine has memory and processes left (ulimit -u)"
            ) from error
        if not self._workers:
            self._selector.register(self._server, selectors.EVENT_READ)
        worker = _TokenProcess(child)
        self._workers.append(worker)
        self._selector.register(worker.channel, selectors.EVENT_READ)
        return worker

    def _collect(self, ahead: dict[int, Piece], encoded: dict[int, Encoded]) -> None:
        """Wait until a worker sends results, and store them in `encoded`."""
        self._selector.select()
        with suppress(LaunchError):  # the server is gone with all workers; the first one reports it
            self._server.reap()
        for worker in self._workers:
            messages, open_ = worker.channel.recv_ready()
            for message in messages:
                encoded[worker.assigned.popleft()] = cast(Encoded, message)
            if not open_:
                first = ahead[worker.assigned[0]] if worker.assigned else next(iter(ahead.values()))
                raise DataError(self._end_of(worker, first))

    def _end_of(self, worker: _TokenProcess, piece: Piece) -> str:
        # the channel closes before the exit status is there, so wait for it
        until_s = time.monotonic() + _REAP_S
        try:
            while worker.child.exit is None and time.monotonic() < until_s:
                self._server.reap()
                # the kernel reports the end of a process a little after its channel is closed
                time.sleep(0.01)
            gone = worker.child.exit
            code = None if gone is None else gone.exit_code
            ending = "ended" if code is None else f"ended with exit code {code}"
            if code is not None and code < 0:
                ending = f"was ended by {signal.Signals(-code).name}"
            if code == -signal.SIGKILL:
                ending += " (if nobody sent that, memory was short)"
        except LaunchError as error:
            ending = f"is gone: {error}"
        return (
            f"{reader_of(self._source.kind).place(piece)}: the process that tokenized this {ending}"
        )


def tokenize_pieces(channel: Channel, source: TextSource) -> None:
    """Answer each piece with its batches, until the channel is closed; the body of a worker."""
    name_thread("tdp-tokens")
    encoder = DocumentEncoder(source)
    while True:
        try:
            piece, encode = cast(tuple[Piece, bool], channel.recv())
        except EOFError:
            return
        channel.send(_encoded(encoder, piece, encode))


def _encoded(encoder: DocumentEncoder, piece: Piece, encode: bool) -> Encoded:
    batches: list[EncodedBatch] = []
    try:
        for batch in encoder.batches(piece, encode=encode):
            if batch.problems:
                return None
            batches.append(batch)
    except DataError:
        return None
    return batches
