"""The samples that a rank sees in each step.

Sample i of a step is a function of (seed, step, i) alone, and a rank takes its slice of
0, 1, 2, ... by its index along data. So every layout trains on the same samples in the same order.
A resumed run goes on with the next samples and needs only the step. Batches that were prepared and
never used (batches.py) change nothing.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from copy import copy
from functools import cached_property
from typing import Literal, NamedTuple, Protocol, get_args, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torchdistpackage.comm import primitives
from torchdistpackage.comm.primitives import Group
from torchdistpackage.comm.random import seed_from
from torchdistpackage.config.data_split import too_few_tokens
from torchdistpackage.data.corpus import MAX_TABLE_VOCAB, Ids, entropies
from torchdistpackage.errors import DataError

IGNORE = -100
"""A target that does not count."""

Split = Literal["train", "val"]
_SPLITS = get_args(Split)

_CHECK_AT_START = 1 << 26


@runtime_checkable
class DataSource(Protocol):
    """The data of a run. A source of your own, named by import path, is any object with `batch`."""

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
        """Return (inputs, targets) of one rank on the CPU; dim 0 of both is its `per_rank` samples.

        Samples of several documents may have a third tensor, position_ids, see `DataBatch`.
        The samples are `first + data_index * per_rank` and up of step `step`. Sample i of a step
        must depend on (split, seed, step, i) alone: never on `num_data`, the global rank or
        earlier calls. Accumulation round r has first = r * num_data * per_rank. For "val", `step`
        counts the batches of one validation, from 0; every validation is the same.

        For a device, a thread calls this a step ahead, for one batch at a time.
        """
        ...


@runtime_checkable
class SequenceSource(DataSource, Protocol):
    """A source that can read a slice of each sample, for ranks that share a sequence.

    From a source without `part` each rank reads full samples and keeps its slice.
    """

    seq_len: int

    def part(self, ranges: Sequence[range]) -> "SequenceSource":
        """Return a source of the same samples that has inputs and targets at `ranges` only.

        ranges: of the `seq_len` positions, concatenated in this order. position_ids keep all
        positions: every rank makes its attention mask from them.
        """
        ...


class TokenDataset:
    """Windows of `seq_len` tokens and, as targets, the tokens that follow each.

    train, val: 1-D token ids, see `corpus`. Training windows begin anywhere, drawn anew in each
    step. Validation has `num_val` windows, evenly spaced, and begins again after these.
    global_batch: samples in a batch of a validation; None: num_data * per_rank of a call.

    Raises:
        DataError: training data is shorter than one window, or has ids outside the vocabulary
            (of large data the beginning is checked here and the rest when it is used).
    """

    def __init__(
        self,
        train: Ids,
        val: Ids,
        vocab: int,
        seq_len: int,
        *,
        num_val: int = 256,
        global_batch: int | None = None,
    ):
        self.vocab = vocab
        self.seq_len = seq_len
        self.num_val = num_val
        self._global_batch = global_batch
        self._ranges: Sequence[range] = (range(seq_len),)
        self._ids: dict[Split, Ids] = {"train": train, "val": val}
        self.check_length("train")
        self._may_exceed = {s: np.iinfo(ids.dtype).max >= vocab for s, ids in self._ids.items()}
        for split, ids in self._ids.items():
            if self._may_exceed[split]:
                self._check_ids(split, ids[:_CHECK_AT_START], np.zeros(1, np.int64))

    def part(self, ranges: Sequence[range]) -> "TokenDataset":
        """See `SequenceSource`."""
        dataset = copy(self)
        dataset._ranges = ranges
        return dataset

    @cached_property
    def table_entropies(self) -> tuple[float, float] | None:
        """(unigram, bigram) entropies of the validation split; None for too large a vocabulary."""
        if self.vocab > MAX_TABLE_VOCAB:
            return None
        return entropies(self._ids["train"], self._ids["val"], vocab=self.vocab)

    @property
    def num_samples(self) -> dict[Split, int]:
        """Windows that hold each token once, by split; the last one may not be full."""
        return {s: -(-(len(ids) - 1) // self.seq_len) for s, ids in self._ids.items()}

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
    ) -> tuple[Tensor, Tensor]:
        """Return (ids, targets), int64 (per_rank, seq_len) each, on the CPU.

        See `DataSource.batch`. A `part` returns tensors of its own length.

        Raises:
            DataError: no such split or data index, the split is shorter than one window, or an
                id is outside the vocabulary.
        """
        check_place(split, data_index, num_data)
        sample = first + data_index * per_rank + np.arange(per_rank, dtype=np.int64)
        if split == "train":
            starts = self._drawn(seed, step, sample)
        else:
            starts = self._spaced(step * (self._global_batch or num_data * per_rank) + sample)
        # int64, as torch's embedding and cross entropy take their indices
        rows = np.empty((2, per_rank, sum(map(len, self._ranges))), np.int64)
        begin = 0
        for span in self._ranges:
            window = self._windows(split, starts + span.start, len(span))
            end = begin + len(span)
            rows[0, :, begin:end] = window[:, :-1]
            rows[1, :, begin:end] = window[:, 1:]
            begin = end
        inputs, targets = torch.from_numpy(rows).unbind()
        return inputs, targets

    def _windows(self, split: Split, starts: npt.NDArray[np.int64], length: int) -> npt.NDArray:
        """Return `length` tokens from each start on, and one more, which is the last target."""
        tokens = self._ids[split]
        window = np.empty((len(starts), length + 1), tokens.dtype)
        for row, start in zip(window, starts.tolist(), strict=True):
            row[:] = tokens[start : start + length + 1]
        if self._may_exceed[split]:
            self._check_ids(split, window, starts)
        return window

    def _drawn(self, seed: int, step: int, sample: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return random window starts, each a hash of its sample index."""
        num_starts = np.uint64(len(self._ids["train"]) - self.seq_len)
        return (hashed(sample, seed_from("data", seed, step)) % num_starts).astype(np.int64)

    def _spaced(self, sample: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        self.check_length("val")
        last = len(self._ids["val"]) - self.seq_len - 1
        return (sample % self.num_val) * last // max(self.num_val - 1, 1)

    def check_length(self, split: Split) -> None:
        """Raises DataError if the split is shorter than one window."""
        if text := too_few_tokens(split, len(self._ids[split]), self.seq_len):
            raise DataError(text)

    def _check_ids(self, split: str, ids: npt.NDArray, starts: npt.NDArray[np.int64]) -> None:
        """Refuse ids outside the vocabulary; row i of `ids` begins at token starts[i]."""
        if not ids.size or ids.max() < self.vocab:
            return
        row, column = divmod(int(ids.argmax()), ids.shape[-1])
        raise DataError(
            f"the {split} split has token id {ids.max()} at position {starts[row] + column}, "
            f"outside the vocabulary of {self.vocab}; raise model.vocab to {int(ids.max()) + 1} "
            f"or more, or check data.dtype"
        )


def check_place(split: str, data_index: int, num_data: int) -> None:
    """Check the split and data index that a source is asked for.

    Raises:
        DataError: no such split or data index.
    """
    if split not in _SPLITS:
        raise DataError(f"there is no split {split!r}; use train or val")
    if not 0 <= data_index < num_data:
        raise DataError(
            f"data index {data_index} of {num_data}; pass the index along data "
            f"(0 to {num_data - 1}), not the global rank"
        )


def hashed(numbers: npt.NDArray[np.int64], seed: int) -> npt.NDArray[np.uint64]:
    """Return a random 64-bit number for each of `numbers` (SplitMix64)."""
    z = (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z += np.uint64(seed)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def table_entropies(source: DataSource) -> tuple[float, float] | None:
    """Return the entropies that a loss is compared with, see `TokenDataset`; None if unknown."""
    return source.table_entropies if isinstance(source, TokenDataset) else None


class DataBatch(NamedTuple):
    """The tensors of a batch, on the host.

    position_ids: int64 like ids, from 0 in each document of a sample; no token attends to another
    document. None: a sample is one document.
    """

    inputs: Tensor
    targets: Tensor
    position_ids: Tensor | None = None


def fingerprint(x: Tensor) -> int:
    """Return a 63-bit hash of contents, shape and dtype."""
    digest = hashlib.blake2b(f"{x.dtype} {tuple(x.shape)}".encode(), digest_size=8)
    flat = x.detach().cpu().contiguous().reshape(-1)
    digest.update(flat.view(torch.uint8).numpy().data)
    return int.from_bytes(digest.digest(), "big") >> 1


def check_fingerprints(
    value: int,
    group: Group,
    axis_name: str,
    device: torch.device | str = "cpu",
    *,
    part: int = 0,
) -> None:
    """Check that all ranks of the group with equal `part` have the same fingerprint.

    It takes one small all-gather. The value that most ranks have counts as right; in a tie, that of
    the first rank.

    Raises:
        DataError: on every rank of the group, with the ranks that differ.
    """
    # int64 holds the 63 bits of a fingerprint exactly
    row = torch.tensor([[value, part]], dtype=torch.int64, device=device)
    rows = primitives.all_gather(row, group).tolist()
    ranks = primitives.ranks_of(group)
    for number in sorted({rank_part for _, rank_part in rows}):
        values = [
            (rank, v)
            for rank, (v, rank_part) in zip(ranks, rows, strict=True)
            if rank_part == number
        ]
        right, _ = Counter(v for _, v in values).most_common(1)[0]
        if odd := ", ".join(f"rank {r} has {v:016x}" for r, v in values if v != right):
            raise DataError(
                f"{axis_name} group of ranks {', '.join(map(str, ranks))}: the ranks of one model "
                f"must get one batch, but {odd} where the others have {right:016x}; choose samples "
                f"by data_index, never by global rank"
            )
