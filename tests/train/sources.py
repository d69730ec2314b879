"""Data of the tests: every sample is a function of its global number, many targets do not count."""

import os
import signal
import time
from pathlib import Path

import torch
from torch import Tensor, nn

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


class Misbehaving(UnevenTokens):
    """The same, but one rank ends, stops or raises when it is asked for one step."""

    def __init__(self, seq_len: int, vocab: int, how: str, rank: int, step: int, note: str):
        super().__init__(seq_len, vocab)
        self.fault = (how, rank, step, Path(note))

    def batch(self, split, seed, step, data_index, num_data, per_rank, *, first=0):
        how, rank, when, note = self.fault
        if step == when and split == "train" and os.environ["RANK"] == str(rank):
            note.write_text(str(time.time()))
            if how == "raise":
                raise ValueError("this rank was told to fail")
            os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        return super().batch(split, seed, step, data_index, num_data, per_rank, first=first)


class Line:
    """Points on a line: inputs (n, 4) and targets (n, 1)."""

    def batch(self, split, seed, step, data_index, num_data, per_rank, *, first=0):
        samples = range(first + data_index * per_rank, first + (data_index + 1) * per_rank)
        draws = [torch.Generator().manual_seed(seed_from(split, seed, step, i)) for i in samples]
        x = torch.stack([torch.randn(4, generator=draw) for draw in draws])
        return x, x.sum(1, keepdim=True)


def build(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Linear(width, 1)
    )


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()
