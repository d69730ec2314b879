"""Samples of texts that are tokenized block by block while training runs.

An epoch is a permutation of the blocks of the files (tokens/text_blocks.py), drawn from the seed
and the epoch's number. The documents of a block are permuted and packed as those of a file are
(packing.py), so a sample has tokens of one block. Sample i of step s is number s x global batch + i
of all epochs, so a resumed run needs only the step, and the blocks before it, which are cached.
"""

from collections.abc import Sequence
from copy import copy
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchdistpackage.comm.random import seed_from
from torchdistpackage.data.packing import PackedDataset, shuffled
from torchdistpackage.data.source import Split, check_place
from torchdistpackage.data.tokens.documents import TextSource
from torchdistpackage.data.tokens.text_blocks import TextBlocks
from torchdistpackage.errors import DataError

_KEPT = 2
"""Number of blocks mapped at once; a batch may reach into the next one."""
_AHEAD = 2
"""Number of blocks made before they are needed."""


class PackingOptions(NamedTuple):
    """The options of `PackedDataset`."""

    vocab: int
    seq_len: int
    global_batch: int
    document_masks: bool
    packing: str


class _Position(NamedTuple):
    """A block in the order of a seed's epochs. first: number of its first sample."""

    seed: int
    epoch: int
    index: int
    first: int


class StreamedDataset:
    """Samples of `seq_len` tokens of blocks of texts; see `DataSource`. It has no validation.

    Raises:
        DataError: a file or the tokenizer is missing or wrong.
    """

    num_samples: None = None
    """Unknown until all blocks are tokenized."""

    def __init__(self, source: TextSource, cache: Path, options: PackingOptions):
        self.seq_len = options.seq_len
        self._options = options
        self._blocks = TextBlocks(source, cache)
        self._ranges: Sequence[range] = (range(options.seq_len),)
        self._datasets: dict[int, PackedDataset] = {}
        self._counts: dict[int, int] = {}
        self._orders: dict[tuple[int, int], list[int]] = {}
        self._last: _Position | None = None

    def part(self, ranges: Sequence[range]) -> "StreamedDataset":
        """See `SequenceSource`."""
        dataset = copy(self)
        dataset._ranges = ranges
        dataset._datasets = {}
        return dataset

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
        """Return (ids, targets) and, with document masks, position_ids; see `PackedDataset.batch`.

        Raises:
            DataError: no such split or data index, a file became shorter, or a text of a block is
                wrong, by file and line.
        """
        check_place(split, data_index, num_data)
        if split != "train":
            raise DataError("streamed data have no validation; set data.val_path")
        number = (step - 1) * self._options.global_batch + first + data_index * per_rank
        parts: list[tuple[Tensor, ...]] = []
        end = number + per_rank
        while number < end:
            position = self._position(seed, number)
            block = self._order(seed, position.epoch)[position.index]
            sample = number - position.first
            count = min(end - number, self._count(block) - sample)
            block_seed = seed_from("block", seed, position.epoch, block)
            parts.append(
                self._dataset(block).batch("train", block_seed, 1, 0, 1, count, first=sample)
            )
            number += count
        joined = [torch.cat(tensors) for tensors in zip(*parts, strict=True)]
        return (joined[0], joined[1]) if len(joined) == 2 else (joined[0], joined[1], joined[2])

    def _position(self, seed: int, number: int) -> _Position:
        """Return the block of sample `number` of all epochs."""
        last = self._last
        # samples come in order but for a resume, so go on from the last one
        goes_on = last is not None and last.seed == seed and last.first <= number
        at = last if last is not None and goes_on else _Position(seed, 0, 0, 0)
        while number >= at.first + (count := self._count(self._order(seed, at.epoch)[at.index])):
            is_end = at.index + 1 == len(self._blocks)
            epoch = at.epoch + is_end
            at = _Position(seed, epoch, 0 if is_end else at.index + 1, at.first + count)
        if at != last:
            self._last = at
            following = (
                *islice(self._order(seed, at.epoch), at.index + 1, at.index + 1 + _AHEAD),
                *self._order(seed, at.epoch + 1)[:_AHEAD],
            )
            # with one block to come at the end of an epoch, the next epoch begins
            missing = [block for block in following[:_AHEAD] if block not in self._counts]
            self._blocks.make_ahead(missing)
        return at

    def _order(self, seed: int, epoch: int) -> list[int]:
        """Return the blocks of an epoch in their order."""
        if (seed, epoch) not in self._orders:
            newest = dict(list(self._orders.items())[-_KEPT:])
            numbers = np.arange(len(self._blocks))
            order: list[int] = shuffled(numbers, seed_from("blocks", seed, epoch)).tolist()
            self._orders = {**newest, (seed, epoch): order}
        return self._orders[seed, epoch]

    def _count(self, block: int) -> int:
        """Return the samples of a block, which is tokenized for that."""
        if block not in self._counts:
            self._counts[block] = self._dataset(block).num_samples["train"]
        return self._counts[block]

    def _dataset(self, block: int) -> PackedDataset:
        if block not in self._datasets:
            newest = dict(list(self._datasets.items())[1 - _KEPT :])
            options = self._options
            dataset = PackedDataset(
                self._blocks.read(block),
                vocab=options.vocab,
                seq_len=options.seq_len,
                global_batch=options.global_batch,
                val_fraction=0,
                document_masks=options.document_masks,
                packing=options.packing,
            ).part(self._ranges)
            self._datasets = {**newest, block: dataset}
        return self._datasets[block]
