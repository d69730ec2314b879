"""Processes that tokenize pieces of files side by side; what they make comes in order. No torch.

Processes and not the threads of the tokenizers library, as parsing lines and copying ids hold
Python's lock. They are forks of a server that has neither threads nor a device, so also a rank can
have them made. Held at once are a few pieces a process, whatever the size of the files.
"""

import os
import selectors
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self, cast

from torchdistpackage.data.tokens.documents import Piece, TextSource
from torchdistpackage.data.tokens.token_encoder import DocumentEncoder, EncodedBatch
from torchdistpackage.errors import DataError, LaunchError
from torchdistpackage.launch.fork_server_client import ForkedChild, ForkServer
from torchdistpackage.launch.ipc import Channel

Progress = Callable[[int, int], None]
"""Told (bytes of text read, of all) now and then."""
Encoded = list[EncodedBatch] | None
"""What a piece holds; None: a line of it, or the piece, is wrong."""
_TASKS = 2
"""Of a worker: the one it is at, and the next, so that it need not wait for it."""
_AHEAD = 4
"""Pieces a worker that are under way, or wait for one before them."""
_REAP_S = 5.0


class _TokenProcess:
    """A process, and the numbers of the pieces that it was given, in order."""

    def __init__(self, child: ForkedChild):
        assert child.channel is not None
        self.child, self.channel = child, child.channel
        self.given: deque[int] = deque()


class TokenWorkers:
    """At most `most` processes that tokenize a source. With less than two there are none, and each
    piece comes as None.

    encode: set to False when no more ids are wanted, only whether lines are wrong.
    """

    def __init__(self, source: TextSource, most: int):
        self.encode = True
        self._source, self._most = source, most
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
        """Each piece with what it holds, in order.

        Raises:
            DataError: processes cannot be started, or one ended; names what it was at.
        """
        if self._most < 2:
            for piece in pieces:
                yield piece, None
            return
        coming = enumerate(pieces)
        ahead: dict[int, Piece] = {}
        done: dict[int, Encoded] = {}
        following: tuple[int, Piece] | None = next(coming, None)
        number = 0
        while following is not None or ahead:
            while following is not None and len(ahead) < _AHEAD * self._most:
                if (worker := self._with_room(following[1])) is None:
                    break
                index, piece = following
                ahead[index] = piece
                worker.given.append(index)
                worker.channel.send((piece, self.encode))
                following = next(coming, None)
            if number in done:
                yield ahead.pop(number), done.pop(number)
                number += 1
            else:
                self._collect(ahead, done)

    def _with_room(self, piece: Piece) -> _TokenProcess | None:
        """One that has nothing to do, started now if there may be one more; else one that has not
        yet its next piece; None: all have.
        """
        least = min(self._workers, key=lambda x: len(x.given), default=None)
        if least is not None and (not least.given or len(self._workers) == self._most):
            return least if len(least.given) < _TASKS else None
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}  # one process is one core
        try:
            child = self._server.spawn(
                tokenize_pieces, (self._source,), env=environment, with_channel=True
            )
        except (LaunchError, OSError) as error:
            raise DataError(
                f"{piece.path}: cannot start a process that tokenizes it: {error}"
            ) from error
        if not self._workers:
            self._selector.register(self._server, selectors.EVENT_READ)
        worker = _TokenProcess(child)
        self._workers.append(worker)
        self._selector.register(worker.channel, selectors.EVENT_READ)
        return worker

    def _collect(self, ahead: dict[int, Piece], done: dict[int, Encoded]) -> None:
        """Wait for something that workers send."""
        self._selector.select()
        with suppress(LaunchError):  # gone with all workers, of which the first says so
            self._server.reap()
        for worker in self._workers:
            messages, open_ = worker.channel.recv_ready()
            for message in messages:
                done[worker.given.popleft()] = cast(Encoded, message)
            if not open_:
                first = ahead[worker.given[0]] if worker.given else next(iter(ahead.values()))
                raise DataError(self._end_of(worker, first))

    def _end_of(self, worker: _TokenProcess, piece: Piece) -> str:
        until_s = time.monotonic() + _REAP_S
        try:
            while worker.child.exit is None and time.monotonic() < until_s:
                self._server.reap()
                time.sleep(0.01)
            gone = worker.child.exit
            code = None if gone is None else gone.exit_code
            how = "ended" if code is None else f"ended with exit code {code}"
            if code is not None and code < 0:
                how = f"was ended by {signal.Signals(-code).name}"
            if code == -signal.SIGKILL:
                how += " (if nobody sent that, memory was short)"
        except LaunchError as error:
            how = f"is gone: {error}"
        return f"{_named(self._source.kind, piece)}: the process that tokenized this {how}"


def _named(kind: str, piece: Piece) -> str:
    path = piece.path
    if kind == "text":
        return str(path)
    if kind == "parquet":
        return f"{path}: row groups {piece.first + 1} to {piece.last}"
    first = _lines(path, 0, piece.first) + 1
    return f"{path}: lines {first} to {first + max(_lines(path, piece.first, piece.last), 1) - 1}"


def _lines(path: Path, first: int, last: int) -> int:
    """How many end between these bytes."""
    number = 0
    with path.open("rb") as file:
        file.seek(first)
        while first < last and (block := file.read(min(1 << 20, last - first))):
            number += block.count(b"\n")
            first += len(block)
    return number


def tokenize_pieces(channel: Channel, source: TextSource) -> None:
    """Be a worker: answer each piece with what it holds, until the channel is closed."""
    encoder = DocumentEncoder(source)
    while True:
        try:
            piece, encode = cast(tuple[Piece, bool], channel.recv())
        except EOFError:
            return
        channel.send(_encoded(encoder, piece, encode))


def _encoded(encoder: DocumentEncoder, piece: Piece, encode: bool) -> Encoded:
    found: list[EncodedBatch] = []
    try:
        for batch in encoder.batches(piece, encode=encode):
            if batch.problems:
                return None
            found.append(batch)
    except DataError:
        return None
    return found
