"""Which samples a rank sees in which step.

Sample i of a step is a function of (seed, step, i) alone, and a rank takes its part of
0, 1, 2, ... by its index along data. So every layout trains on the same samples in the same
order, a resumed run goes on with the ones that were next, with nothing to save but the step, and
what was prepared and never used (batches.py) is lost without a trace.
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
    """What a run trains on. Your own, given by import path, is any object with this method."""

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
        """(inputs, targets) of one rank, dim 0 of both being its `per_rank` samples, on the CPU.

        Samples of several documents may have a third, position_ids, see `DataBatch`.
        They are the samples `first + data_index * per_rank` and up of step `step`. Sample i of a
        step must depend on nothing but (split, seed, step, i): never on `num_data`, the global
        rank, or what was asked before. Accumulation round r has first = r * num_data * per_rank.
        For "val", `step` counts the batches of one validation, from 0, which is the same each time.

        On a device it is called from a thread, a step ahead, for one batch at a time.
        """
        ...


@runtime_checkable
class SequenceSource(DataSource, Protocol):
    """A source that reads parts of its samples, where ranks share a sequence. Of one without
    `part` each rank is given whole samples, and keeps its part.
    """

    seq_len: int

    def part(self, ranges: Sequence[range]) -> "SequenceSource":
        """The same samples, of whose `seq_len` positions inputs and targets are those in `ranges`,
        one after another. position_ids stay whole: by them every rank knows who sees whom.
        """
        ...


class TokenDataset:
    """Windows of `seq_len` tokens and, as targets, the tokens that follow each.

    train, val: 1-D token ids, see `corpus`. Training windows begin anywhere, drawn anew in each
    step; validation has `num_val` windows, evenly spaced, and begins again after these.
    global_batch: samples in a batch of a validation; None: no round is left for another call.

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
        found = copy(self)
        found._ranges = ranges
        return found

    @cached_property
    def table_entropies(self) -> tuple[float, float] | None:
        """(unigram, bigram) of the validation split; None of a vocabulary too large to count."""
        if self.vocab > MAX_TABLE_VOCAB:
            return None
        return entropies(self._ids["train"], self._ids["val"], vocab=self.vocab)

    @property
    def num_samples(self) -> dict[Split, int]:
        """Windows that would hold each token once, the last less than full, of each split."""
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
        """(ids, targets), int64 (per_rank, seq_len) each, on the CPU; see `DataSource.batch`. Of a
        `part` they are as long as that.

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
        found, begin = np.empty((2, per_rank, sum(map(len, self._ranges))), np.int64), 0
        for each in self._ranges:
            window = self._windows(split, starts + each.start, len(each))
            end = begin + len(each)
            found[0, :, begin:end], found[1, :, begin:end] = window[:, :-1], window[:, 1:]
            begin = end
        inputs, targets = torch.from_numpy(found).unbind()
        return inputs, targets

    def _windows(self, split: Split, starts: npt.NDArray[np.int64], length: int) -> npt.NDArray:
        """`length` tokens from each start on, and the one that follows, as their last target."""
        tokens = self._ids[split]
        window = np.empty((len(starts), length + 1), tokens.dtype)
        for row, start in zip(window, starts.tolist(), strict=True):
            row[:] = tokens[start : start + length + 1]
        if self._may_exceed[split]:
            self._check_ids(split, window, starts)
        return window

    def _drawn(self, seed: int, step: int, sample: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Random window starts, each a hash of its own sample index."""
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
    """What a source is asked for.

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
    """A random number for each (SplitMix64)."""
    z = (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z += np.uint64(seed)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def table_entropies(source: DataSource) -> tuple[float, float] | None:
    """What a model is compared with: see `TokenDataset`; None of a source of your own."""
    return source.table_entropies if isinstance(source, TokenDataset) else None


class DataBatch(NamedTuple):
    """On the host. position_ids: int64 like ids, from 0 in each document of a sample; no token sees
    another document. None: a sample is one document.
    """

    inputs: Tensor
    targets: Tensor
    position_ids: Tensor | None = None


def fingerprint(x: Tensor) -> int:
    """63-bit number that differs, but for chance, for other contents, shapes and dtypes."""
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
    """Make sure that all ranks of the group with equal `part` hold the same fingerprint: one small
    all-gather.

    The value that most hold counts as right, of equally many the first rank's.

    Raises:
        DataError: on every rank of the group, with the ranks that differ.
    """
    mine = torch.tensor([[value, part]], dtype=torch.int64, device=device)
    rows, ranks = primitives.all_gather(mine, group).tolist(), primitives.ranks_of(group)
    for number in sorted({held for _, held in rows}):
        values = [(rank, v) for rank, (v, held) in zip(ranks, rows, strict=True) if held == number]
        right, _ = Counter(v for _, v in values).most_common(1)[0]
        if odd := ", ".join(f"rank {r} has {v:016x}" for r, v in values if v != right):
            raise DataError(
                f"{axis_name} group of ranks {', '.join(map(str, ranks))}: the ranks of one model "
                f"must get one batch, but {odd} where the others have {right:016x}; choose samples "
                f"by data_index, never by global rank"
            )
