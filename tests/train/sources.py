"""Data of the tests: every sample is a function of its global number, many targets do not count."""

import torch
from torch import Tensor

from torchdistpackage.comm.random import seed_from


class UnevenTokens:
    """Random ids; each sample ignores another number of targets, some all but one."""

    def __init__(self, seq_len: int, vocab: int):
        self.seq_len, self.vocab = seq_len, vocab

    def batch(self, split, seed, step, data_index, num_data, per_rank, *, first=0):
        samples = range(first + data_index * per_rank, first + (data_index + 1) * per_rank)
        rows = [self._row(split, seed, step, i) for i in samples]
        return torch.stack([x for x, _ in rows]), torch.stack([y for _, y in rows])

    def _row(self, split, seed, step, i) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(seed_from(split, seed, step, i))
        ids = torch.randint(self.vocab, (self.seq_len + 1,), generator=draw)
        targets = ids[1:].clone()
        targets[1 + i % self.seq_len :] = -100
        return ids[:-1], targets
