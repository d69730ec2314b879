"""Samples of the replayed runs: each is a function of its global number."""

import itertools

import torch
from torch import Tensor

from tests.train.sources import UnevenTokens
from torchdistpackage.data.source import DataBatch

Tokens = UnevenTokens


class Packed(UnevenTokens):
    """The same samples, each of which holds three documents of unlike lengths."""

    def batch(self, split, seed, step, data_index, num_data, per_rank, *, first=0):
        inputs, targets = super().batch(
            split, seed, step, data_index, num_data, per_rank, first=first
        )
        return DataBatch(inputs, targets, self._positions(inputs))

    def _positions(self, inputs: Tensor) -> Tensor:
        length = self.seq_len
        bounds = (0, length // 4 + 1, length // 2 + 2, length)
        row = torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(bounds)])
        return row.expand(len(inputs), -1).contiguous()
