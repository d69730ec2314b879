"""A blend of several sources: sample n of a run comes from the source that owns the arc with point
n.

The points n x step mod 2**64 fill a circle evenly (Weyl), most evenly with the golden ratio as the
step (Knuth, The Art of Computer Programming 3, 6.4), and each source has an arc as long as its
weight. How many of the first n points lie in an arc is a sum of floors, which takes some 40
divisions (Graham, Knuth, Patashnik, Concrete Mathematics, 3.5). So a sample's source, and its
number among the samples of that source, follow from n alone. Nothing is saved, and after any number
of samples the share of each source is right up to a few samples.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from torchdistpackage.comm.random import seed_from
from torchdistpackage.data.source import SequenceSource, Split, check_place

_CIRCLE = 1 << 64
_STEP = 0x9E3779B97F4A7C15
"""2**64 over the golden ratio, made odd so that no point comes twice."""


class BlendOrder:
    """The source of each sample. weights: one per source, at least one above 0."""

    def __init__(self, weights: Sequence[float], seed: int):
        parts = list(accumulate(Fraction(weight) for weight in weights))
        self._ends = [int(part / parts[-1] * _CIRCLE) for part in parts]
        self._first = seed_from("blend", seed)

    def source(self, number: int) -> int:
        """Return the index of the source of sample `number`."""
        return bisect_right(self._ends, (self._first + number * _STEP) % _CIRCLE)

    def counts(self, number: int) -> list[int]:
        """Return how many of the first `number` samples come from each source."""
        below = [self._below(end, number) for end in self._ends]
        return [b - a for a, b in zip([0, *below], below, strict=False)]

    def _below(self, end: int, number: int) -> int:
        """Return how many of the first `number` points lie before `end`.

        A point x lies before it where floor((x - end) / circle) is one below floor(x / circle).
        """
        turns = _sum_of_floors(number, _CIRCLE, _STEP, self._first)
        return turns - _sum_of_floors(number, _CIRCLE, _STEP, self._first - end + _CIRCLE) + number


def _sum_of_floors(number: int, over: int, step: int, first: int) -> int:
    """Return the sum of (first + i * step) // over for i in range(number), as Euclid divides."""
    total = 0
    while number:
        step_floor, step = divmod(step, over)
        first_floor, first = divmod(first, over)
        total += step_floor * (number * (number - 1) // 2) + first_floor * number
        # the rest is the lattice points under a line: count them along the other axis
        number, first = divmod(step * number + first, over)
        over, step = step, over
    return total


class BlendPart(NamedTuple):
    """One source of a blend. num_samples: samples in one pass over its training data; None:
    unknown.
    """

    label: str
    weight: float
    data: SequenceSource
    num_samples: int | None


class BlendedDataset:
    """Samples of several sources, each drawn in proportion to its weight; see `DataSource`.

    A validation has samples of all sources too, by the same weights. global_batch: samples in a
    step, or in a batch of a validation. rows_per_sample: consecutive rows that make up a sample;
    `batch` counts rows.
    """

    def __init__(self, parts: Sequence[BlendPart], global_batch: int, rows_per_sample: int = 1):
        self.parts = parts
        self._global_batch = global_batch
        self._rows = rows_per_sample
        self.seq_len = parts[0].data.seq_len
        self._orders: dict[int, BlendOrder] = {}

    def part(self, ranges: Sequence[range]) -> "BlendedDataset":
        """See `SequenceSource`."""
        parts = [x._replace(data=x.data.part(ranges)) for x in self.parts]
        return BlendedDataset(parts, self._global_batch, self._rows)

    def batch(
        self,
        split: Split,
        seed: int,
        step: int,
        data_index: int,
        num_data: int,
        per_rank: int,
        *,
        first: int = 0,
    ) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
        """Return rows of the sources in the order of the blend; see `DataSource.batch`.

        Raises:
            DataError: no such split or data index, or a source cannot be read.
        """
        check_place(split, data_index, num_data)
        # training steps are counted from 1, batches of a validation from 0
        start = 1 if split == "train" else 0
        rows_per_sample = self._rows
        begin = (
            (step - start) * self._global_batch * rows_per_sample + first + data_index * per_rank
        )
        order = self._order(seed if split == "train" else 0)
        sources = [order.source(row // rows_per_sample) for row in range(begin, begin + per_rank)]
        counts = Counter(sources)
        # rows that each source has given before this batch
        first_rows = [rows_per_sample * n for n in order.counts(begin // rows_per_sample)]
        blended: list[Tensor] | None = None
        for index, number in counts.items():
            data = self.parts[index].data
            source_seed = seed_from("source", seed, index)
            rows = torch.tensor([row for row, of in enumerate(sources) if of == index])
            source_batch = data.batch(
                split, source_seed, start, 0, 1, number, first=first_rows[index]
            )
            if blended is None:
                blended = [x.new_empty(per_rank, *x.shape[1:]) for x in source_batch]
            for target, rows_of_source in zip(blended, source_batch, strict=True):
                target[rows] = rows_of_source
        assert blended is not None
        return (
            (blended[0], blended[1]) if len(blended) == 2 else (blended[0], blended[1], blended[2])
        )

    def sources(self, seed: int, step: int) -> list[str]:
        """Return the label of the source of each sample of a training step."""
        order = self._order(seed)
        last = step * self._global_batch
        numbers = range(last - self._global_batch, last)
        return [self.parts[order.source(number)].label for number in numbers]

    def shares(self, seed: int, step: int) -> dict[str, float]:
        """Return the share of each source in the samples of a training step."""
        order = self._order(seed)
        counts_before, counts_after = (
            order.counts(x * self._global_batch) for x in (step - 1, step)
        )
        return {
            part.label: (b - a) / self._global_batch
            for part, a, b in zip(self.parts, counts_before, counts_after, strict=True)
        }

    def epochs(self, seed: int, step: int) -> dict[str, float]:
        """Return the epochs over each source's data at the end of a training step, if known."""
        counts = self._order(seed).counts(step * self._global_batch)
        return {
            x.label: self._rows * n / x.num_samples
            for x, n in zip(self.parts, counts, strict=True)
            if x.num_samples is not None
        }

    def _order(self, seed: int) -> BlendOrder:
        if seed not in self._orders:
            self._orders[seed] = BlendOrder([part.weight for part in self.parts], seed)
        return self._orders[seed]
