"""Preference pairs as samples of two rows each: the chosen answer, and the rejected one.

An epoch is a permutation of all pairs, drawn from the seed and the epoch's number. Pair i of step s
is number s x global batch + i of all epochs, so a resumed run needs only the step. A row is the
prompt and one answer, cut or padded to one length. The padding follows the answer, so no token of
the answer attends to it. Targets in prompts and padding do not count.
"""

from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torchdistpackage.comm.random import seed_from
from torchdistpackage.data.packing import shuffled
from torchdistpackage.data.source import IGNORE, Split, check_place
from torchdistpackage.data.tokens.pair_rows import pair_problems
from torchdistpackage.data.tokens.split import DocumentSplit, split_pairs
from torchdistpackage.data.tokens.token_cache import TokenizedText
from torchdistpackage.errors import DataError


class PreferenceDataset:
    """Rows of `seq_len` tokens, row 2 i chosen and row 2 i + 1 rejected; see `DataSource`.

    global_batch: pairs in a step, or in a batch of a validation. val_fraction: fraction of the
    pairs that only validation sees. 1: all pairs, without training; 0: none. masks_padding: batches
    have position_ids, from 0 in the text of a row, and 0 at each token of its padding.

    Raises:
        DataError: an id is outside `vocab`, a pair has no two different answers in such rows, or
            one side has no pair; all problems at once.
    """

    def __init__(
        self,
        text: TokenizedText,
        *,
        vocab: int,
        seq_len: int,
        global_batch: int,
        val_fraction: float,
        masks_padding: bool = False,
    ):
        self.text, self._masks_padding = text, masks_padding
        self.rows_per_sample = self._rows_per_sample()
        self.seq_len = seq_len
        self._num_rows = self.rows_per_sample * global_batch
        split = self._split(val_fraction)
        self._pairs = {name: part.documents for name, part in split.parts.items()}
        self._epochs: dict[tuple[int, int], npt.NDArray[np.int64]] = {}
        self._ranges: Sequence[range] = (range(seq_len),)
        problems = [*split.problems(seq_len), *self._problems()]
        if text.vocab > vocab:
            problems.append(
                f"the tokenizer has {text.vocab} ids, but model.vocab is {vocab}; set "
                f"model.vocab to {text.vocab} or more"
            )
        if problems:
            raise DataError("\n".join(problems))

    def part(self, ranges: Sequence[range]) -> Self:
        """See `SequenceSource`."""
        dataset = copy(self)
        dataset._ranges = ranges
        return dataset

    @property
    def num_samples(self) -> dict[str, int]:
        """Rows in an epoch, by split."""
        return {name: self.rows_per_sample * len(pairs) for name, pairs in self._pairs.items()}

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
    ) -> tuple[Tensor, ...]:
        """Return (ids, targets), int64 (per_rank, seq_len) each, or of a part the positions of its
        ranges, on the CPU; with masks_padding also position_ids, of whole rows.

        Targets of -100 do not count. per_rank, first: counted in rows; a pair has two.

        Raises:
            DataError: no such split or data index, or a file became shorter.
        """
        check_place(split, data_index, num_data)
        self.text.check()
        numbers = self._numbers(split, step, data_index, per_rank, first)
        return self._rows(numbers, partial(self._fill_row, split, seed))

    def documents(
        self, split: Split, seed: int, step: int, data_index: int, per_rank: int, *, first: int = 0
    ) -> list[int]:
        """Return the document of each row of `batch` with the same arguments."""
        numbers = self._numbers(split, step, data_index, per_rank, first)
        return [self._document(split, seed, number) for number in numbers]

    def rows(self, documents: Sequence[int]) -> tuple[Tensor, ...]:
        """Return what `batch` does of these documents."""
        self.text.check()
        return self._rows(documents, self._fill)

    def _rows(self, numbers: Sequence[int], fill: Callable[..., int]) -> tuple[Tensor, ...]:
        """Return the rows of these numbers; `fill` writes one and returns its number of tokens."""
        ids = np.zeros((len(numbers), self.seq_len), np.int64)
        targets = np.full((len(numbers), self.seq_len), IGNORE, np.int64)
        positions = np.tile(np.arange(self.seq_len), (len(numbers), 1))
        for row, number in enumerate(numbers):
            num_tokens = fill(number, ids[row], targets[row])
            positions[row, max(num_tokens, 1) :] = 0
        own_positions = np.concatenate([np.arange(x.start, x.stop) for x in self._ranges])
        parts = torch.from_numpy(ids[:, own_positions]), torch.from_numpy(targets[:, own_positions])
        return (*parts, torch.from_numpy(positions)) if self._masks_padding else parts

    def _numbers(
        self, split: Split, step: int, data_index: int, per_rank: int, first: int
    ) -> range:
        """Return the numbers of these rows among those of all epochs."""
        # training steps are counted from 1, batches of a validation from 0
        num_before = (step - 1 if split == "train" else step) * self._num_rows
        begin = num_before + first + data_index * per_rank
        return range(begin, begin + per_rank)

    def _rows_per_sample(self) -> int:
        """Return the number of rows of a sample: its documents, two of a pair."""
        return self.text.documents_per_line

    def _split(self, val_fraction: float) -> DocumentSplit:
        """Return the numbers of the pairs of each side."""
        return split_pairs(self.text, val_fraction)

    def _problems(self) -> list[str]:
        """Return the problems of pairs in rows of this length."""
        return pair_problems(self.text, self.seq_len)

    def _unit(self, split: Split, seed: int, number: int) -> int:
        """Return the pair that is number `number` of all epochs."""
        epoch, sample = divmod(number, len(self._pairs[split]))
        return int(self._epoch(split, seed, epoch)[sample])

    def _document(self, split: Split, seed: int, number: int) -> int:
        """Return the document of row `number` of all epochs."""
        sample, side = divmod(number, self.rows_per_sample)
        return self.rows_per_sample * self._unit(split, seed, sample) + side

    def _fill_row(
        self,
        split: Split,
        seed: int,
        number: int,
        ids: npt.NDArray[np.int64],
        targets: npt.NDArray[np.int64],
    ) -> int:
        """Write the ids and targets of row `number` of all epochs; return its number of tokens."""
        return self._fill(self._document(split, seed, number), ids, targets)

    def _fill(
        self, document: int, ids: npt.NDArray[np.int64], targets: npt.NDArray[np.int64]
    ) -> int:
        text = self.text
        begin = int(text.ends[document - 1]) if document else 0
        where = slice(begin, min(int(text.ends[document]), begin + self.seq_len + 1))
        assert text.counted is not None
        tokens = text.tokens[where].astype(np.int64)
        counts = text.counted[where] != 0
        ids[: len(tokens)] = tokens[: self.seq_len]
        targets[: len(tokens) - 1] = np.where(counts[1:], tokens[1:], IGNORE)
        return min(len(tokens), self.seq_len)

    def _epoch(self, split: Split, seed: int, epoch: int) -> npt.NDArray[np.int64]:
        """Return the pairs of an epoch in their order; a validation always has the same order."""
        if split == "val":
            return self._pairs[split]
        if (seed, epoch) not in self._epochs:
            # keep two epochs at most: a step may reach into the next one
            newest = list(self._epochs.items())[-1:]
            drawn = shuffled(self._pairs[split], seed_from("documents", seed, epoch))
            self._epochs = {**dict(newest), (seed, epoch): drawn}
        return self._epochs[seed, epoch]
