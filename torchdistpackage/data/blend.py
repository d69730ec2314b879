"""Several sources as one: sample n of a run is of the source on whose arc point n lies.

The points n x step mod 2**64 fill a circle evenly (Weyl), most evenly with the golden ratio as the
step (Knuth, The Art of Computer Programming 3, 6.4), and each source has an arc as long as its
weight. How many of the first n points lie in an arc is a sum of floors, which takes some 40
divisions (Graham, Knuth, Patashnik, Concrete Mathematics, 3.5). So a sample's source, and its
number among the samples of that source, follow from n alone: nothing is saved, and after any number
of samples the part of each source is right up to a few samples.
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
    """Which source each sample is of. weights: at least one above 0."""

    def __init__(self, weights: Sequence[float], seed: int):
        parts = list(accumulate(Fraction(weight) for weight in weights))
        self._ends = [int(part / parts[-1] * _CIRCLE) for part in parts]
        self._first = seed_from("blend", seed)

    def source(self, number: int) -> int:
        """That of sample `number`."""
        return bisect_right(self._ends, (self._first + number * _STEP) % _CIRCLE)

    def counts(self, number: int) -> list[int]:
        """Of each source, how many of the first `number` samples are of it."""
        below = [self._below(end, number) for end in self._ends]
        return [b - a for a, b in zip([0, *below], below, strict=False)]

    def _below(self, end: int, number: int) -> int:
        """How many of the first points lie before `end`: where floor((x - end) / circle) lies one
        below floor(x / circle)."""
        whole = _sum_of_floors(number, _CIRCLE, _STEP, self._first)
        return whole - _sum_of_floors(number, _CIRCLE, _STEP, self._first - end + _CIRCLE) + number


def _sum_of_floors(number: int, over: int, step: int, first: int) -> int:
    """The sum of (first + i * step) // over for i from 0 to below `number`, as Euclid divides."""
    total = 0
    while number:
        whole, step = divmod(step, over)
        more, first = divmod(first, over)
        total += whole * (number * (number - 1) // 2) + more * number
        # what is left are the lattice points under a line, counted along the other axis
        number, first = divmod(step * number + first, over)
        over, step = step, over
    return total


class BlendPart(NamedTuple):
    """A source of several. num_samples: of one pass over its training data."""

    label: str
    weight: float
    data: SequenceSource
    num_samples: int


class BlendedDataset:
    """Samples of several sources, each as often as its weight says; see `DataSource`.

    A validation has samples of all sources too, by the same weights. global_batch: samples in a
    step, or in a batch of a validation. rows_per_sample: what is asked for are rows, of which a
    sample has so many, one after another.
    """

    def __init__(self, parts: Sequence[BlendPart], global_batch: int, rows_per_sample: int = 1):
        self.parts, self._global_batch, self._rows = parts, global_batch, rows_per_sample
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
        """As those of the sources; see `DataSource.batch`.

        Raises:
            DataError: no such split or data index, or a source cannot be read.
        """
        check_place(split, data_index, num_data)
        # training steps are counted from 1, batches of a validation from 0
        start = 1 if split == "train" else 0
        each = self._rows
        begin = (step - start) * self._global_batch * each + first + data_index * per_rank
        order = self._order(seed if split == "train" else 0)
        sources = [order.source(row // each) for row in range(begin, begin + per_rank)]
        wanted, before = Counter(sources), [each * n for n in order.counts(begin // each)]
        found: list[Tensor] | None = None
        for index, number in wanted.items():
            data, own_seed = self.parts[index].data, seed_from("source", seed, index)
            rows = torch.tensor([row for row, of in enumerate(sources) if of == index])
            some = data.batch(split, own_seed, start, 0, 1, number, first=before[index])
            if found is None:
                found = [x.new_empty(per_rank, *x.shape[1:]) for x in some]
            for whole, part in zip(found, some, strict=True):
                whole[rows] = part
        assert found is not None
        return (found[0], found[1]) if len(found) == 2 else (found[0], found[1], found[2])

    def shares(self, seed: int, step: int) -> dict[str, float]:
        """Of each source, its part of the samples of a training step."""
        order = self._order(seed)
        before, after = (order.counts(x * self._global_batch) for x in (step - 1, step))
        return {
            part.label: (b - a) / self._global_batch
            for part, a, b in zip(self.parts, before, after, strict=True)
        }

    def epochs(self, seed: int, step: int) -> dict[str, float]:
        """Of each source, how often its data have been passed over when a training step is done."""
        counts = self._order(seed).counts(step * self._global_batch)
        return {
            x.label: self._rows * n / x.num_samples for x, n in zip(self.parts, counts, strict=True)
        }

    def _order(self, seed: int) -> BlendOrder:
        if seed not in self._orders:
            self._orders[seed] = BlendOrder([part.weight for part in self.parts], seed)
        return self._orders[seed]
