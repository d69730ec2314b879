"""A rank's batches in order; for a device, a thread makes them one step ahead.

Small batches of our own sources are made several at once. Between the passes of two steps all that
a batch needs leaves the processor's caches; made in a loop, a batch takes a fifth of the time.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from itertools import islice
from queue import SimpleQueue
from threading import Thread
from weakref import WeakMethod, finalize

from torch import Tensor

from torchdistpackage.data.source import DataBatch, DataSource, Split
from torchdistpackage.errors import DataError
from torchdistpackage.launch.process import name_thread

_Number = tuple[Split, int, int]
"""Split, step (of a validation: its batch) and round."""
_AT_ONCE = 16
"""Largest number of batches made at once."""
_BYTES = 1 << 16
"""Largest size of the batches made at once, together."""
_Task = tuple[_Number, "Future[DataBatch]"]


class Batches:
    """Makes the batches of the rank at `data_index` of `num_data`, one per call.

    per_round: samples of the rank in a round; a step has `rounds` of them. num_steps: steps of the
    run. prepare: called with the tensors of each batch before it is handed out. ahead: a thread
    makes the batches of the next step; `close` ends it. several: make small batches ahead too, in
    whatever thread asks, so the source is asked before a batch is due.
    """

    def __init__(
        self,
        source: DataSource,
        seed: int,
        *,
        data_index: int,
        num_data: int,
        per_round: int,
        rounds: int,
        num_steps: int,
        prepare: Callable[..., DataBatch],
        ahead: bool = False,
        several: bool = False,
    ):
        self._source = source
        self._seed = seed
        self._prepare = prepare
        self._data_index = data_index
        self._num_data = num_data
        self._per_round = per_round
        self._rounds = rounds
        self._num_steps = num_steps
        self._ahead = ahead
        self._several = several
        self._made: dict[_Number, DataBatch] = {}
        self._thread: Thread | None = None
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._coming: deque[tuple[_Number, Future[DataBatch]]] = deque()

    def of_training(self, step: int, index: int) -> DataBatch:
        """Return the batch of round `index` of step `step`.

        Raises:
            DataError: the source gave another number of samples. Errors of the source pass through.
        """
        number: _Number = ("train", step, index)
        if not self._ahead:
            return self._take(number)
        if self._coming and self._coming[0][0] == number:
            batch = self._coming.popleft()[1]
        else:
            # the first batch, or a step that is done again
            batch = self._in_thread(number)
        self._ask_for_next(number)
        return batch.result()

    def of_validation(self, batch: int, index: int) -> DataBatch:
        """Return round `index` of batch `batch` of a validation; raises as `of_training`."""
        number: _Number = ("val", batch, index)
        return self._in_thread(number).result() if self._ahead else self._make(number)

    def close(self, *, wait: bool = True) -> None:
        """End the thread after the batch it is making. wait: do not return before it has ended."""
        for _, future in self._coming:
            future.cancel()
        self._coming.clear()
        if self._thread is not None:
            self._tasks.put(None)
            if wait:
                # the source may be closed next, and the thread must not read from it then
                self._thread.join()
            self._thread = None
            self._tasks = SimpleQueue()

    def _ask_for_next(self, number: _Number) -> None:
        """Request from the thread the rounds after `number`, one step's worth."""
        numbers = self._following(number, self._rounds)
        if [n for n, _ in self._coming] != numbers[: len(self._coming)]:
            return  # a step is done again; the batches under way come after it
        for following in islice(numbers, len(self._coming), None):
            self._coming.append((following, self._in_thread(following)))

    def _following(self, number: _Number, many: int) -> list[_Number]:
        """Return the numbers of the `many` training batches after `number`, up to the run's end."""
        _, step, index = number
        first = (step - 1) * self._rounds + index + 1
        numbers = range(first, min(first + many, self._num_steps * self._rounds))
        return [("train", 1 + n // self._rounds, n % self._rounds) for n in numbers]

    def _in_thread(self, number: _Number) -> "Future[DataBatch]":
        if self._thread is None:
            # a daemon: a source that never answers must not keep a failed rank from ending
            self._thread = Thread(
                target=_serve, args=(self._tasks, WeakMethod(self._take)), name="data", daemon=True
            )
            self._thread.start()
            # nobody closed this object: its thread must end when the last reference to it goes
            finalize(self, self._tasks.put, None).atexit = False
        future: Future[DataBatch] = Future()
        self._tasks.put((number, future))
        return future

    def _take(self, number: _Number) -> DataBatch:
        """Return batch `number`; if batches are small, make the following ones with it."""
        if number in self._made:
            return self._made.pop(number)
        batch = self._make(number)
        if self._several and number[0] == "train":
            self._made.clear()  # a step is done again
            room = _BYTES // max(sum(x.nbytes for x in batch if x is not None), 1)
            for following in self._following(number, min(_AT_ONCE, room) - 1):
                try:
                    self._made[following] = self._make(following)
                except Exception:
                    break  # making the batch when it is due raises this again
        return batch

    def _make(self, number: _Number) -> DataBatch:
        split, step, index = number
        batch = self._source.batch(
            split,
            self._seed,
            step,
            self._data_index,
            self._num_data,
            self._per_round,
            first=index * self._num_data * self._per_round,
        )
        if not 2 <= len(batch) <= 3 or any(not isinstance(x, Tensor | None) for x in batch):
            raise DataError(
                f"the data source gave ({', '.join(type(x).__name__ for x in batch)}); a batch is "
                f"(inputs, targets), two tensors, and position_ids if there are any"
            )
        fields = zip(batch, DataBatch._fields, strict=False)  # two of them, or all
        names = [(len(x), name) for x, name in fields if x is not None]
        if any(n != self._per_round for n, _ in names):
            raise DataError(
                f"the data source gave {' and '.join(f'{n} {name}' for n, name in names)} "
                f"where {self._per_round} samples were asked of data index {self._data_index}"
            )
        return self._prepare(*batch)


def _serve(
    tasks: "SimpleQueue[_Task | None]", weak_make: "WeakMethod[Callable[[_Number], DataBatch]]"
) -> None:
    """Make the requested batches in order; an error goes to whoever takes the batch."""
    name_thread("tdp-data")
    while (task := tasks.get()) is not None and (make := weak_make()) is not None:
        number, future = task
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(make(number))
            except BaseException as error:
                future.set_exception(error)
        del make, task, future  # or this frame keeps the last batch while it waits for a task
