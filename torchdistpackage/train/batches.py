"""The batches of one rank, as its step takes them: checked, in the type and memory they leave from.

One rule: of a data source only one batch is asked for at a time. Where the host runs ahead of a
device, that is done in a thread, a step before it is due: what a batch holds depends on nothing but
its number, so what was prepared and never used is lost without a trace.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from itertools import islice
from queue import SimpleQueue
from threading import Thread

from torch import Tensor

from torchdistpackage.errors import DataError
from torchdistpackage.train.data import DataSource, Split

Batch = tuple[Tensor, Tensor]
"""(inputs, targets), on the host."""
_Number = tuple[Split, int, int]
"""Split, step (of a validation: its batch) and round."""
_Task = tuple[_Number, "Future[Batch]"]


class Batches:
    """The part of a rank, `data_index` of `num_data`, in every batch.

    per_round: its samples in a round, of which a step has `rounds`; num_steps: of the run.
    prepare: called with each batch before it is handed out. ahead: have those of the next step made
    in a thread, which `close` ends.
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
        prepare: Callable[[Tensor, Tensor], Batch],
        ahead: bool = False,
    ):
        self._source, self._seed, self._prepare = source, seed, prepare
        self._data_index, self._num_data, self._per_round = data_index, num_data, per_round
        self._rounds, self._num_steps, self._ahead = rounds, num_steps, ahead
        self._thread: Thread | None = None
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._coming: deque[tuple[_Number, Future[Batch]]] = deque()

    def of_training(self, step: int, index: int) -> Batch:
        """Round `index` of step `step`.

        Raises:
            DataError: the source gave another number of samples. And whatever the source raises.
        """
        number: _Number = ("train", step, index)
        if not self._ahead:
            return self._make(number)
        if self._coming and self._coming[0][0] == number:
            batch = self._coming.popleft()[1]
        else:
            # the first one, or a step that is done again
            batch = self._in_thread(number)
        self._ask_for_next(number)
        return batch.result()

    def of_validation(self, index: int) -> Batch:
        """Batch `index` of a validation; raises as `of_training`."""
        number: _Number = ("val", index, 0)
        return self._in_thread(number).result() if self._ahead else self._make(number)

    def close(self, *, wait: bool = True) -> None:
        """End the thread, after the batch it is at, for which nobody need `wait`."""
        for _, future in self._coming:
            future.cancel()
        self._coming.clear()
        if self._thread is not None:
            self._tasks.put(None)
            if wait:
                self._thread.join()
            self._thread, self._tasks = None, SimpleQueue()

    def _ask_for_next(self, number: _Number) -> None:
        """Have the rounds of one step under way, those that follow `number`."""
        _, step, index = number
        first = (step - 1) * self._rounds + index + 1
        wanted = range(first, min(first + self._rounds, self._num_steps * self._rounds))
        numbers = [("train", 1 + n // self._rounds, n % self._rounds) for n in wanted]
        if [n for n, _ in self._coming] != numbers[: len(self._coming)]:
            return  # a step that is done again; those under way come after it
        for following in islice(numbers, len(self._coming), None):
            self._coming.append((following, self._in_thread(following)))

    def _in_thread(self, number: _Number) -> "Future[Batch]":
        if self._thread is None:
            # a daemon: a source that never answers must not keep a failed rank from ending
            self._thread = Thread(
                target=_serve, args=(self._tasks, self._make), name="data", daemon=True
            )
            self._thread.start()
        future: Future[Batch] = Future()
        self._tasks.put((number, future))
        return future

    def _make(self, number: _Number) -> Batch:
        split, step, index = number
        inputs, targets = self._source.batch(
            split,
            self._seed,
            step,
            self._data_index,
            self._num_data,
            self._per_round,
            first=index * self._num_data * self._per_round,
        )
        if inputs.shape[0] != self._per_round or targets.shape[0] != self._per_round:
            raise DataError(
                f"the data source gave {inputs.shape[0]} inputs and {targets.shape[0]} targets "
                f"where {self._per_round} samples were asked of data index {self._data_index}"
            )
        return self._prepare(inputs, targets)


def _serve(tasks: "SimpleQueue[_Task | None]", make: Callable[[_Number], Batch]) -> None:
    """Make what is asked for, one after another; what is raised goes to whoever takes it."""
    while (task := tasks.get()) is not None:
        number, future = task
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(make(number))
            except BaseException as error:
                future.set_exception(error)
        del task, future  # the last batch is not kept while the next one is waited for
