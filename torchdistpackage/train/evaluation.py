"""Loss on an entire data set, each token predicted once: consecutive windows, the last one
shorter.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from torchdistpackage.comm import primitives
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.data.corpus import Ids
from torchdistpackage.data.packing import PackedDataset
from torchdistpackage.data.preference_data import PreferenceDataset
from torchdistpackage.data.source import IGNORE, DataBatch
from torchdistpackage.errors import DataError
from torchdistpackage.parallel.pipeline.executor import Executor
from torchdistpackage.parallel.pipeline.losses import totals_on
from torchdistpackage.schedule.generators import evaluation
from torchdistpackage.train.staged_model import StagedModel
from torchdistpackage.train.task import TaskLoss

_AT_ONCE = 1 << 22


class Windows(Protocol):
    """`number` windows of `seq_len` tokens; targets that do not count are -100."""

    number: int
    seq_len: int

    def part(self, ranges: Sequence[range]) -> "Windows":
        """Return the same windows restricted to the positions in `ranges`; see `SequenceSource`."""
        ...

    def read(self, first: int, number: int) -> DataBatch:
        """Return the windows from `first` on, int64 (number, seq_len) each."""
        ...


class TokenWindows:
    """A row of token ids: every one except the first is predicted from those before it in its
    window.

    Raises:
        DataError: there are fewer than two, or one is outside the vocabulary.
    """

    def __init__(self, ids: Ids, vocab: int, seq_len: int):
        self.seq_len, self._ids = seq_len, ids
        self._ranges: Sequence[range] = (range(seq_len),)
        self.number = -(-(len(ids) - 1) // seq_len)
        if len(ids) < 2:
            raise DataError(f"{len(ids)} tokens to evaluate on; use 2 or more")
        # here, where all ranks see the same, and not when one of them comes to it
        for at in range(0, len(ids), _AT_ONCE) if np.iinfo(ids.dtype).max >= vocab else ():
            tokens = ids[at : at + _AT_ONCE]
            if tokens.max() >= vocab:
                raise DataError(
                    f"token id {tokens.max()} at position {at + int(tokens.argmax())}, outside "
                    f"the vocabulary of {vocab}; use the tokenizer of this model, and its "
                    "data.dtype"
                )

    def part(self, ranges: Sequence[range]) -> "TokenWindows":
        windows = copy(self)
        windows._ranges = ranges
        return windows

    def read(self, first: int, number: int) -> DataBatch:
        starts = (first + np.arange(number)) * self.seq_len
        parts = [self._read(starts + each.start, len(each)) for each in self._ranges]
        return DataBatch(
            *(torch.from_numpy(np.concatenate(x, 1)) for x in zip(*parts, strict=True))
        )

    def _read(self, starts: npt.NDArray[np.int64], length: int) -> tuple[npt.NDArray, npt.NDArray]:
        ids = np.zeros((len(starts), length), np.int64)
        targets = np.full((len(starts), length), IGNORE, np.int64)
        for row, at in enumerate(starts.tolist()):
            tokens = self._ids[at : at + length + 1]
            ids[row, : len(tokens)] = tokens[:length]
            targets[row, : max(len(tokens) - 1, 0)] = tokens[1:]
        return ids, targets


class DocumentWindows:
    """The documents, or pairs, of `text` held out for validation, cut as in training."""

    def __init__(self, text: PackedDataset | PreferenceDataset):
        self.number, self.seq_len, self._text = text.num_samples["val"], text.seq_len, text

    def part(self, ranges: Sequence[range]) -> "DocumentWindows":
        windows = copy(self)
        windows._text = self._text.part(ranges)
        return windows

    def read(self, first: int, number: int) -> DataBatch:
        return DataBatch(*self._text.batch("val", 0, 0, 0, 1, number, first=first))


class JoinedWindows:
    """The windows of several data sets, one after another."""

    def __init__(self, parts: Sequence[Windows]):
        self.number, self.seq_len = sum(x.number for x in parts), parts[0].seq_len
        self._parts = parts

    def part(self, ranges: Sequence[range]) -> "JoinedWindows":
        return JoinedWindows([x.part(ranges) for x in self._parts])

    def read(self, first: int, number: int) -> DataBatch:
        batches: list[DataBatch] = []
        for part in self._parts:
            count = min(max(part.number - first, 0), number)
            if count:
                batches.append(part.read(first, count))
            first, number = max(first - part.number, 0), number - count
        return DataBatch(
            *(None if x[0] is None else torch.cat(x) for x in zip(*batches, strict=True))
        )


def batches_of(
    windows: Windows, index: int, num_data: int, per_rank: int
) -> Callable[[int], DataBatch]:
    """Return batch b of the rank at `index` along data; past the last window no target counts."""

    def batch(b: int) -> DataBatch:
        first = (b * num_data + index) * per_rank
        number = min(max(windows.number - first, 0), per_rank)
        # where there are too few, others take their place and do not count
        window = windows.read(first if number else 0, max(number, 1))
        rows = torch.arange(per_rank).clamp(max=len(window.targets) - 1)
        filled = DataBatch(*(None if x is None else x[rows] for x in window))
        filled.targets[number:] = IGNORE
        return filled

    return batch


class Evaluated(NamedTuple):
    """The result of an evaluation.

    total: sum of losses. num_counted: number of counted tokens. weight: divisor of the sum. values:
    of a task.
    """

    total: float
    num_counted: int
    weight: float
    values: Mapping[str, float] = MappingProxyType({})


def evaluate(
    model: StagedModel,
    batch: Callable[[int], DataBatch],
    num_batches: int,
    timeout_s: float | None,
    task: TaskLoss | None = None,
) -> Evaluated:
    """Return the sum of losses over all batches and ranks, the same on all.

    batch: returns batch number b of this rank, with its slice of each sequence. task: computes the
    loss; None: the model's next-token loss. The model is left in evaluation mode.

    Raises:
        DataError: nothing counts.
    """
    plan = model.plan
    schedule = evaluation(plan.schedule, plan.schedule.num_microbatches)
    pipe = tpc.get_group("pipe")
    executor = Executor(schedule, pipe, device=model.device, timeout_s=timeout_s)
    totals = totals_on(model.device)
    model.stage.eval()
    if task is not None:
        task.begin_validation()
    for b in range(num_batches):
        microbatches = model.microbatches(batch(b))
        inputs, targets, positions = microbatches
        loss = task and task.loss_of_batch(model, executor, executor.run, microbatches)
        executor.run(model.forward_and_loss(executor, inputs, targets, totals, positions, loss))
    world, values = tpc.get_group("global"), dict[str, float]()
    if task is not None:
        totals = torch.cat([totals, task.take()])
    total, count, *sums = primitives.all_reduce(totals, world).tolist()
    if not count:
        raise DataError("no token counts in the loss; use data with completions or longer texts")
    if task is None:
        return Evaluated(total, round(count), count)
    values |= task.means(sums, count)
    values |= task.end_validation(world)
    return Evaluated(total, task.num_samples(sums, count), count, values)
