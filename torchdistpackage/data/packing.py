"""Documents of a tokenized text, packed into samples of one length.

An epoch is a permutation of all documents, drawn from the seed and the epoch's number; its tokens,
one document after another, are cut into samples. Sample i of step s is number s x global batch + i
of all epochs, so nothing but the step is needed to go on. A target that begins a document does not
count, as what comes before it belongs to another; nor do prompts, nor what is left of the last
sample of an epoch.

Packed whole (see bins.py), the documents of a sample are none that began in another, but for those
that are longer than a sample; samples are then permuted in each epoch.

With document masks each piece of a document in a sample stands alone: positions begin again with
it, which is all that a model needs to know where it begins.
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
    """Documents one after another: which, and where each ends; where samples begin and stop."""

    documents: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    begins: npt.NDArray[np.int64]
    stops: npt.NDArray[np.int64]


class PackedDataset:
    """Samples of `seq_len` tokens from whole documents; see `DataSource`.

    global_batch: samples in a step, or in a batch of a validation. val_fraction: part of the
    documents that only validation sees, see `split_documents`; it begins again after its last
    sample. 1: all, with no training; 0: none.
    packing: wrapped cuts documents where a sample ends; whole does not; auto: whole where prompts
    do not count. document_masks: batches come with position_ids, from 0 in each piece of a
    document, see `DataBatch`.

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
        self.text, self.seq_len, self._global_batch = text, seq_len, global_batch
        self._document_masks = document_masks
        self._whole = packing == "whole" or (packing == "auto" and text.prompts is not None)
        self.split = split_documents(text, val_fraction)
        self._trains = val_fraction < 1
        self._ranges: Sequence[range] = (range(seq_len),)
        self._orders: dict[tuple[str, int, int], DocumentOrder] = {}
        if problems := [*self._problems(vocab), *self._long_prompts()]:
            raise DataError("; ".join(problems))

    def part(self, ranges: Sequence[range]) -> "PackedDataset":
        """See `SequenceSource`."""
        found = copy(self)
        found._ranges = ranges
        return found

    @cached_property
    def num_samples(self) -> dict[str, int]:
        """Samples in an epoch, of each split."""
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
        """(ids, targets) and, with document masks, position_ids: int64 (per_rank, seq_len) each, on
        the CPU; targets of -100 do not count. Of a `part` ids and targets are as long as that.

        Raises:
            DataError: no such split or data index, or a file became shorter.
        """
        check_place(split, data_index, num_data)
        self.text.check()
        # training steps are counted from 1, batches of a validation from 0
        before = (step - 1 if split == "train" else step) * self._global_batch
        number, per_epoch = before + first + data_index * per_rank, self.num_samples[split]
        length = sum(map(len, self._ranges))
        ids = np.zeros((per_rank, length), np.int64)
        targets = np.full((per_rank, length), IGNORE, np.int64)
        positions = np.zeros((per_rank, self.seq_len), np.int64)
        for row in range(per_rank):
            epoch, sample = divmod(number + row, per_epoch)
            order = self._order(split, seed, epoch if split == "train" else 0)
            stop, begin = int(order.stops[sample]), 0
            at = int(order.begins[sample])
            for each in self._ranges:
                here = slice(begin, begin + len(each))
                filled = ids[row, here], targets[row, here]
                self._fill(self.split.parts[split], order, at + each.start, stop, *filled)
                begin = here.stop
            if self._document_masks:
                positions[row] = _positions(order, at, self.seq_len)
        found = torch.from_numpy(ids), torch.from_numpy(targets)
        return (*found, torch.from_numpy(positions)) if self._document_masks else found

    def _fill(
        self,
        part: SplitPart,
        order: DocumentOrder,
        at: int,
        stop: int,
        ids: npt.NDArray,
        targets: npt.NDArray,
    ) -> None:
        """From token `at` of an epoch on, document by document; nothing from `stop` on."""
        text, stop = self.text, min(at + len(ids) + 1, stop)
        if at >= stop:
            return
        tokens = np.empty(stop - at, np.int64)
        counts = np.ones(stop - at, bool)
        i, begin = int(np.searchsorted(order.ends, at, side="right")), at
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
                counts[at - begin] = False  # predicted from another document
            at, i = end, i + 1
        ids[: len(tokens)] = tokens[: len(ids)]
        targets[: len(tokens) - 1] = np.where(counts[1:], tokens[1:], IGNORE)

    def _order(self, split: str, seed: int, epoch: int) -> DocumentOrder:
        key = (split, seed if split == "train" else 0, epoch)
        if key not in self._orders:
            if split == "train":
                # two epochs at most: a step may reach into the next one
                kept = [k for k in self._orders if k[0] == split][-1:]
                self._orders = {k: o for k, o in self._orders.items() if k[0] != split or k in kept}
            self._orders[key] = self._ordered(*key)
        return self._orders[key]

    def _ordered(self, split: str, seed: int, epoch: int) -> DocumentOrder:
        part = self.split.parts[split]
        documents = part.documents
        if split == "train":
            documents = shuffled(documents, seed_from("documents", seed, epoch))
        if not self._whole:
            ends = np.cumsum(part.lengths[documents])
            total = int(ends[-1]) if len(ends) else 0
            begins = np.arange(0, max(total - 1, 0), self.seq_len)
            return DocumentOrder(
                documents, ends, begins, np.minimum(begins + self.seq_len + 1, total)
            )
        documents, begins, stops = pack_whole(documents, part.lengths[documents], self.seq_len)
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
        """Of documents whose prompt alone fills a sample."""
        text, prompts = self.text, self.text.prompts
        if prompts is None or not len(long := np.flatnonzero(prompts >= self.seq_len)):
            return []
        return [
            f"{text.origin(int(long[0]))}: a prompt of {prompts[long[0]]} tokens is as long as a "
            f"sample (data.seq_len={self.seq_len}), as are {len(long)} of {len(prompts)}; raise "
            f"data.seq_len to {int(prompts.max()) + 1} or more, or remove them"
        ]


def shuffled(numbers: npt.NDArray[np.int64], seed: int) -> npt.NDArray[np.int64]:
    """The numbers in the order of a hash of each with the seed."""
    return numbers[np.argsort(hashed(numbers, seed), kind="stable")]


def _positions(order: DocumentOrder, at: int, seq_len: int) -> npt.NDArray[np.int64]:
    """0, 1, ... from each beginning of a document on, in the sample that begins at token `at` of
    an epoch, and of what is filled up with zeros behind the last.
    """
    first = np.zeros(seq_len, np.int64)
    inside = slice(*np.searchsorted(order.ends, (at, at + seq_len - 1), side="right"))
    begins = order.ends[inside] - at
    first[begins] = begins
    return np.arange(seq_len) - np.maximum.accumulate(first)
