"""Batches: which samples a rank sees in which step.

One rule: sample i of a step is a function of (seed, step, i) alone, and a rank takes its part of
0, 1, 2, ... by its index along data. So every layout trains on the same samples in the same
order, and a resumed run goes on with the ones that were next, with nothing to save but the step.
"""

import hashlib
from collections import Counter
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torchdistpackage.comm import primitives
from torchdistpackage.comm.primitives import Group
from torchdistpackage.comm.random import seed_from
from torchdistpackage.errors import DataError
from torchdistpackage.train.corpus import Ids

Split = Literal["train", "val"]

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
    ) -> tuple[Tensor, Tensor]:
        """(inputs, targets) of one rank, dim 0 of both being its `per_rank` samples, on the CPU.

        They are the samples `first + data_index * per_rank` and up of step `step`, and what
        sample i of a step is must depend on nothing but (split, seed, step, i): never on
        `num_data`, the global rank, or what was asked before. Accumulation round r of a step
        passes first = r * num_data * per_rank. For "val", `step` counts the batches of
        one validation, which is the same each time.

        On a device it is called from a thread, a step ahead, for one batch at a time.
        """
        ...


class TokenDataset:
    """Windows of `seq_len` tokens and, as targets, the tokens that follow each.

    train, val: 1-D token ids, see `corpus`; they stay as they are (mapped, or shared).
    Training windows begin anywhere, drawn anew in each step. Validation has `num_val` windows,
    evenly spaced from the first token to the last, and begins again after these.

    Raises:
        DataError: training data is shorter than one window, or has ids outside the vocabulary
            (of large data the beginning is checked here and the rest when it is used).
    """

    def __init__(self, train: Ids, val: Ids, vocab: int, seq_len: int, *, num_val: int = 256):
        self.vocab = vocab
        self.seq_len = seq_len
        self.num_val = num_val
        self._ids: dict[str, Ids] = {"train": train, "val": val}
        self._check_length("train")
        for split, ids in self._ids.items():
            if np.iinfo(ids.dtype).max >= vocab:
                self._check_ids(split, ids[:_CHECK_AT_START], np.zeros(1, np.int64))

    @property
    def splits(self) -> tuple[Ids, Ids]:
        """The ids of (train, val)."""
        return self._ids["train"], self._ids["val"]

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
        """(ids, targets), int64 (per_rank, seq_len) each, on the CPU; see `DataSource.batch`.

        Raises:
            DataError: no such split or data index, the split is shorter than one window, or an
                id is outside the vocabulary.
        """
        if split not in self._ids:
            raise DataError(f"there is no split {split!r}; use train or val")
        if not 0 <= data_index < num_data:
            raise DataError(
                f"data index {data_index} of {num_data}; pass the index along data "
                f"(0 to {num_data - 1}), not the global rank"
            )
        sample = first + data_index * per_rank + np.arange(per_rank, dtype=np.int64)
        if split == "train":
            starts = self._drawn(seed, step, sample)
        else:
            starts = self._spaced(step * num_data * per_rank + sample)
        tokens, length = self._ids[split], self.seq_len + 1
        window = np.empty((per_rank, length), tokens.dtype)
        for row, start in zip(window, starts.tolist(), strict=True):
            row[:] = tokens[start : start + length]
        self._check_ids(split, window, starts)
        ids = torch.from_numpy(window.astype(np.int64))
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def _drawn(self, seed: int, step: int, sample: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Random window starts, each a hash of its own sample index (SplitMix64)."""
        num_starts = np.uint64(len(self._ids["train"]) - self.seq_len)
        z = (sample.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z += np.uint64(seed_from("data", seed, step))
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return ((z ^ (z >> np.uint64(31))) % num_starts).astype(np.int64)

    def _spaced(self, sample: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        self._check_length("val")
        last = len(self._ids["val"]) - self.seq_len - 1
        return (sample % self.num_val) * last // max(self.num_val - 1, 1)

    def _check_length(self, split: str) -> None:
        if len(self._ids[split]) < self.seq_len + 1:
            raise DataError(
                f"the {split} split has {len(self._ids[split])} tokens, but one sample takes "
                f"{self.seq_len + 1} (data.seq_len {self.seq_len} and the next token); shorten "
                f"data.seq_len, use more text" + (" or raise data.val_fraction" * (split == "val"))
            )

    def _check_ids(self, split: str, ids: npt.NDArray, starts: npt.NDArray[np.int64]) -> None:
        """Refuse ids outside the vocabulary; row i of `ids` begins at token starts[i]."""
        if np.iinfo(ids.dtype).max < self.vocab or not ids.size or ids.max() < self.vocab:
            return
        row, column = divmod(int(ids.argmax()), ids.shape[-1])
        raise DataError(
            f"the {split} split has token id {ids.max()} at position {starts[row] + column}, "
            f"outside the vocabulary of {self.vocab}; raise model.vocab to {int(ids.max()) + 1} "
            f"or more, or check data.dtype"
        )


def fingerprint(x: Tensor) -> int:
    """63-bit number that differs, but for chance, for any other content, shape or dtype."""
    digest = hashlib.blake2b(f"{x.dtype} {tuple(x.shape)}".encode(), digest_size=8)
    flat = x.detach().cpu().contiguous().reshape(-1)
    digest.update(flat.view(torch.uint8).numpy().data)
    return int.from_bytes(digest.digest(), "big") >> 1


def check_fingerprints(
    value: int, group: Group, axis_name: str, device: torch.device | str = "cpu"
) -> None:
    """Make sure that all ranks of the group hold the same fingerprint: one small all-gather.

    The value that most hold counts as right, of equally many the first rank's.

    Raises:
        DataError: on every rank of the group, with the ranks that differ.
    """
    mine = torch.tensor([value], dtype=torch.int64, device=device)
    values = primitives.all_gather(mine, group).tolist()
    right, _ = Counter(values).most_common(1)[0]
    ranks = primitives.ranks_of(group)
    if odd := [(rank, v) for rank, v in zip(ranks, values, strict=True) if v != right]:
        raise DataError(
            f"{axis_name} group of ranks {', '.join(map(str, ranks))}: the ranks of one model must "
            f"get one batch, but {', '.join(f'rank {r} has {v:016x}' for r, v in odd)} where the "
            f"others have {right:016x}; choose samples by data_index, never by global rank"
        )
