"""Texts in blocks that are tokenized when needed, so that training need not wait for all of them.
No torch.

A block is consecutive pieces of the files, of about 8 MiB, and a cache entry of its own. Its name
is a hash of the files as the file system describes them, so a start reads no text of a block that
is there. A thread makes the blocks that come next; whichever rank is first makes a block, and the
others find it.
"""

from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from weakref import WeakMethod, finalize

from torchdistpackage.data.tokens.documents import Piece, TextSource, files_of, streamed_pieces_of
from torchdistpackage.data.tokens.token_cache import TokenizedText, tokenized_block
from torchdistpackage.errors import DataError

BLOCK_BYTES = 8 << 20
"""Size of a block: two processes tokenize it in about three seconds."""


class TextBlocks:
    """The blocks of a source. cache: folder of their entries.

    Raises:
        DataError: a file is missing or cannot be read.
    """

    def __init__(self, source: TextSource, cache: Path):
        self._source = source
        self._cache = cache
        self._blocks = _blocks(source)
        self._thread: Thread | None = None
        self._tasks: SimpleQueue[int | None] = SimpleQueue()

    def __len__(self) -> int:
        return len(self._blocks)

    def read(self, number: int) -> TokenizedText:
        """Return the ids of a block, made now if they are missing; raises DataError, by line."""
        return tokenized_block(self._source, self._blocks[number], self._cache)

    def make_ahead(self, numbers: Sequence[int]) -> None:
        """Make these blocks in a thread, in this order, after those asked for before."""
        if self._thread is None:
            # a daemon: a run that ends does not wait for a block
            self._thread = Thread(
                target=_make_all, args=(self._tasks, WeakMethod(self.read)), daemon=True
            )
            self._thread.start()
            finalize(self, self._tasks.put, None).atexit = False
        for number in numbers:
            self._tasks.put(number)


def _make_all(tasks: "SimpleQueue[int | None]", weak_read: WeakMethod) -> None:
    while (number := tasks.get()) is not None and (reader := weak_read()) is not None:
        try:
            reader(number)
        except DataError:
            return  # whoever needs the block raises it again
        del reader


def _blocks(source: TextSource) -> list[tuple[Piece, ...]]:
    """Return the pieces of each block; a short rest joins the block before it."""
    blocks: list[tuple[Piece, ...]] = []
    pending: list[Piece] = []
    size = 0
    for path in files_of(source.kind, Path(source.path)):
        for piece in streamed_pieces_of(source.kind, path):
            pending.append(piece)
            size += piece.num_bytes
            if size >= BLOCK_BYTES:
                blocks.append(tuple(pending))
                pending = []
                size = 0
    if pending and blocks and size < BLOCK_BYTES // 2:
        blocks[-1] += tuple(pending)
    elif pending:
        blocks.append(tuple(pending))
    return blocks
