"""Documents of a tokenized text, packed into samples of one length.

An epoch is a permutation of all documents, drawn from the seed and the epoch's number. Its tokens,
one document after another, are cut into samples. Sample i of step s is number s x global batch + i
of all epochs, so a resumed run needs only the step. Some targets do not count: the first
token of a document, as another document precedes it; prompts; padding of the last sample.

With packing `whole` (see bins.py) no document is cut, except one that is longer than a sample.
Every epoch then permutes the samples.

With document masks each piece of a document in a sample stands alone. Its positions begin at 0,
which tells a model where the piece begins.
"""

from collections.abc import Sequence
from copy import copy
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torchdistpackage.comm.random import seed_from
from torchdistpackage.data.bins import pack_whole
from torchdistpackage.data.source import IGNORE, Split, check_place, hashed
from torchdistpackage.data.tokens.split import SplitPart, split_documents
from torchdistpackage.data.tokens.token_cache import TokenizedText
from torchdistpackage.errors import DataError


class DocumentOrder(NamedTuple):
    """An order of documents: their numbers and token ends, and where samples begin and stop."""

    documents: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    begins: npt.NDArray[np.int64]
    stops: npt.NDArray[np.int64]


class PackedDataset:
    """Samples of `seq_len` tokens, packed from documents; see `DataSource`.

    global_batch: samples in a step, or in a batch of a validation. val_fraction: fraction of the
    documents that only validation sees, see `split_documents`; validation begins again after its
    last sample. 1: all documents, without training; 0: none.
    packing: `wrapped` cuts documents where a sample ends, `whole` does not, `none` also puts no two
    into one sample, and `auto` is `whole` if prompts do not count. document_masks: batches have
    position_ids, from 0 in each piece of a document, see `DataBatch`.

    Raises:
        DataError: an id is outside `vocab`, a prompt leaves no room for its completion, or one side
            has too few tokens; all at once.
    """

    def __init__(
        self,
        text: TokenizedText,
        *,
        vocab: int,
        seq_len: int,
        global_batch: int,
        val_fraction: float,
        document_masks: bool = False,
        packing: str = "wrapped",
    ):
        self.text = text
        self.seq_len = seq_len
        self._global_batch = global_batch
        self._document_masks = document_masks
        is_whole = packing in ("whole", "none")
        self._packs_whole = is_whole or (packing == "auto" and text.prompts is not None)
        self._is_alone = packing == "none"
        self.split = split_documents(text, val_fraction)
        self._trains = val_fraction < 1
        self._ranges: Sequence[range] = (range(seq_len),)
        self._orders: dict[tuple[str, int, int], DocumentOrder] = {}
        if problems := [*self._problems(vocab), *self._long_prompts()]:
            raise DataError("; ".join(problems))

    def part(self, ranges: Sequence[range]) -> "PackedDataset":
        """See `SequenceSource`."""
        dataset = copy(self)
        dataset._ranges = ranges
        return dataset

    @cached_property
    def num_samples(self) -> dict[str, int]:
        """Samples in an epoch, by split."""
        return {s: len(self._ordered(s, 0, 0).begins) for s in self.split.parts}

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
        """Return (ids, targets) and, with document masks, position_ids, on the CPU.

        Each is int64 (per_rank, seq_len); targets of -100 do not count. A `part` returns ids and
        targets of its own length.

        Raises:
            DataError: no such split or data index, or a file became shorter.
        """
        check_place(split, data_index, num_data)
        self.text.check()
        # training steps are counted from 1, batches of a validation from 0
        num_before = (step - 1 if split == "train" else step) * self._global_batch
        number = num_before + first + data_index * per_rank
        per_epoch = self.num_samples[split]
        length = sum(map(len, self._ranges))
        ids = np.zeros((per_rank, length), np.int64)
        targets = np.full((per_rank, length), IGNORE, np.int64)
        positions = np.zeros((per_rank, self.seq_len), np.int64)
        for row in range(per_rank):
            epoch, sample = divmod(number + row, per_epoch)
            order = self._order(split, seed, epoch if split == "train" else 0)
            at = int(order.begins[sample])
            stop = int(order.stops[sample])
            begin = 0
            for span in self._ranges:
                columns = slice(begin, begin + len(span))
                self._fill(
                    self.split.parts[split],
                    order,
                    at + span.start,
                    stop,
                    ids[row, columns],
                    targets[row, columns],
                )
                begin = columns.stop
            if self._document_masks:
                positions[row] = _positions(order, at, self.seq_len)
        ids_and_targets = torch.from_numpy(ids), torch.from_numpy(targets)
        return (
            (*ids_and_targets, torch.from_numpy(positions))
            if self._document_masks
            else ids_and_targets
        )

    def _fill(
        self,
        part: SplitPart,
        order: DocumentOrder,
        at: int,
        stop: int,
        ids: npt.NDArray,
        targets: npt.NDArray,
    ) -> None:
        """Fill `ids` and `targets` with the tokens of an epoch from `at` on, up to `stop`."""
        text = self.text
        stop = min(at + len(ids) + 1, stop)
        if at >= stop:
            return
        tokens = np.empty(stop - at, np.int64)
        counts = np.ones(stop - at, bool)
        i = int(np.searchsorted(order.ends, at, side="right"))
        begin = at
        while at < stop:
            document = int(order.documents[i])
            end = min(int(order.ends[i]), stop)
            offset = int(part.lengths[document]) - (int(order.ends[i]) - at)
            first = int(part.starts[document]) + offset
            source = slice(first, first + end - at)
            where = slice(at - begin, end - begin)
            tokens[where] = text.tokens[source]
            if text.counted is not None:
                counts[where] = text.counted[source] != 0
            if offset == 0:
                counts[at - begin] = False  # another document precedes the first token
            at, i = end, i + 1
        ids[: len(tokens)] = tokens[: len(ids)]
        targets[: len(tokens) - 1] = np.where(counts[1:], tokens[1:], IGNORE)

    def _order(self, split: str, seed: int, epoch: int) -> DocumentOrder:
        key = (split, seed if split == "train" else 0, epoch)
        if key not in self._orders:
            if split == "train":
                # keep two epochs at most: a step may reach into the next one
                newest = [k for k in self._orders if k[0] == split][-1:]
                self._orders = {
                    k: o for k, o in self._orders.items() if k[0] != split or k in newest
                }
            self._orders[key] = self._ordered(*key)
        return self._orders[key]

    def _ordered(self, split: str, seed: int, epoch: int) -> DocumentOrder:
        part = self.split.parts[split]
        documents = part.documents
        if split == "train":
            documents = shuffled(documents, seed_from("documents", seed, epoch))
        if not self._packs_whole:
            ends = np.cumsum(part.lengths[documents])
            total = int(ends[-1]) if len(ends) else 0
            begins = np.arange(0, max(total - 1, 0), self.seq_len)
            return DocumentOrder(
                documents, ends, begins, np.minimum(begins + self.seq_len + 1, total)
            )
        documents, begins, stops = pack_whole(
            documents, part.lengths[documents], self.seq_len, alone=self._is_alone
        )
        if split == "train":
            order = shuffled(np.arange(len(begins)), seed_from("samples", seed, epoch))
            begins, stops = begins[order], stops[order]
        return DocumentOrder(documents, np.cumsum(part.lengths[documents]), begins, stops)

    def _problems(self, vocab: int) -> list[str]:
        problems: list[str] = []
        if self.text.vocab > vocab:
            problems.append(
                f"the tokenizer has {self.text.vocab} ids, but model.vocab is {vocab}; set "
                f"model.vocab to {self.text.vocab} or more"
            )
        return [*problems, *(self.split.problems(self.seq_len) if self._trains else ())]

    def _long_prompts(self) -> list[str]:
        """Return the problem of documents whose prompt alone fills a sample."""
        text = self.text
        prompts = self.text.prompts
        if prompts is None or not len(long := np.flatnonzero(prompts >= self.seq_len)):
            return []
        return [
            f"{text.origin(int(long[0]))}: a prompt of {prompts[long[0]]} tokens is as long as a "
            f"sample (data.seq_len={self.seq_len}), as are {len(long)} of {len(prompts)}; raise "
            f"data.seq_len to {int(prompts.max()) + 1} or more, or remove them"
        ]


def shuffled(numbers: npt.NDArray[np.int64], seed: int) -> npt.NDArray[np.int64]:
    """Return the numbers, ordered by a hash of each with the seed."""
    return numbers[np.argsort(hashed(numbers, seed), kind="stable")]


def _positions(order: DocumentOrder, at: int, seq_len: int) -> npt.NDArray[np.int64]:
    """Return the position ids of the sample that begins at token `at` of an epoch.

    They count from 0 in each document, and anew in the padding behind the last one.
    """
    first = np.zeros(seq_len, np.int64)
    inside = slice(*np.searchsorted(order.ends, (at, at + seq_len - 1), side="right"))
    begins = order.ends[inside] - at
    first[begins] = begins
    return np.arange(seq_len) - np.maximum.accumulate(first)
