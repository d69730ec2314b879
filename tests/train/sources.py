"""Data of the tests: every sample is a function of its global number, many targets do not count."""

import ctypes
import os
import random
import signal
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchdistpackage.comm.random import seed_from
from torchdistpackage.data import corpus
from torchdistpackage.data.source import TokenDataset


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


class PackedTokens(UnevenTokens):
    """The same, of three documents a sample, which begin elsewhere in each: positions from 0."""

    def batch(self, split, seed, step, data_index, num_data, per_rank, *, first=0):
        ids, targets = super().batch(split, seed, step, data_index, num_data, per_rank, first=first)
        samples = range(first + data_index * per_rank, first + (data_index + 1) * per_rank)
        rows = [self.lengths(i) for i in samples]
        positions = [torch.cat([torch.arange(n) for n in lengths]) for lengths in rows]
        return ids, targets, torch.stack(positions)

    def lengths(self, sample: int) -> tuple[int, int, int]:
        """Of the documents of a sample."""
        one = 2 + sample % (self.seq_len - 5)
        return one, 3, self.seq_len - 3 - one


class Misbehaving(UnevenTokens):
    """The same, but one rank ends, exits, stops or raises when it is asked for one step."""

    def __init__(self, seq_len: int, vocab: int, how: str, rank: int, step: int, note: str):
        super().__init__(seq_len, vocab)
        self.fault = (how, rank, step, Path(note))

    def batch(self, split, seed, step, data_index, num_data, per_rank, *, first=0):
        how, rank, when, note = self.fault
        if step == when and split == "train" and dist.get_rank() == rank:
            note.write_text(str(time.time()))
            if how == "raise":
                raise ValueError("this rank was told to fail")
            if how == "exit":
                raise SystemExit(7)
            if how == "leave":
                raise SystemExit(0)
            if how == "collective":
                dist.all_reduce(torch.ones(1))  # the others come with a bucket
                return super().batch(split, seed, step, data_index, num_data, per_rank)
            if how == "vanish":
                os._exit(0)
            if how == "vanish in a thread":
                threading.Thread(target=os._exit, args=(0,)).start()
                time.sleep(60)
            os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        return super().batch(split, seed, step, data_index, num_data, per_rank, first=first)


class Hoarding(UnevenTokens):
    """The same, but one rank asks for more and more memory in one step."""

    def __init__(self, seq_len: int, vocab: int, rank: int, step: int):
        super().__init__(seq_len, vocab)
        self.when = (rank, step)

    def batch(self, split, seed, step, data_index, num_data, per_rank, *, first=0):
        held = []
        while (dist.get_rank(), step) == self.when and len(held) < 60:
            held.append(torch.ones(25_000_000))  # 100 MB, touched
            time.sleep(0.05)
        return super().batch(split, seed, step, data_index, num_data, per_rank, first=first)


class Hanging(UnevenTokens):
    """One rank never gets its batch of one step: loading sleeps, holds the interpreter, or is
    stopped (`how`). Validation takes its time."""

    def __init__(
        self, seq_len: int, vocab: int, how: str, rank: int, step: int, note: str, val_s: float
    ):
        super().__init__(seq_len, vocab)
        self.fault, self.val_s = (how, rank, step, Path(note)), val_s

    def batch(self, split, seed, step, data_index, num_data, per_rank, *, first=0):
        how, rank, when, note = self.fault
        if split == "val":
            time.sleep(self.val_s)
        elif step == when and dist.get_rank() == rank:
            note.write_text(str(time.time()))
            if how == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif how == "hold":
                ctypes.PyDLL(None).sleep(300)
            else:
                time.sleep(300)
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


class Classes(Line):
    """The same points, of one of two classes each: targets (n,)."""

    def batch(self, *args, **more):
        x, targets = super().batch(*args, **more)
        return x, (targets.squeeze(1) > 0).long()


def classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()


def summed_squared_error(outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    return (outputs - targets).square().sum(), targets.shape[0]


def token_losses(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """That of a run without `model.loss`, of all logits (B, S, V)."""
    flat = outputs.flatten(0, 1), targets.flatten()
    return nn.functional.cross_entropy(*flat, reduction="sum"), (targets != -100).sum()


class Signalled(UnevenTokens):
    """One rank gets a signal at a moment of step 3: while it waits for data, between two rounds of
    gradients, in a validation after that step, or some time later, wherever it then is."""

    def __init__(self, seq_len: int, vocab: int, signum: int, rank: int, moment: str):
        super().__init__(seq_len, vocab)
        self.signum, self.mine, self.moment = signum, dist.get_rank() == rank, moment
        self._sent = False

    def batch(self, split, seed, step, data_index, num_data, per_rank, *, first=0):
        here = {
            "wait": split == "train" and step == 3 and first == 0,
            "accumulation": split == "train" and step == 3 and first > 0,
            "eval": split == "val" and step == 1 and self._trained == 4,
            "anytime": split == "train" and step == 3,
        }
        if split == "train":
            self._trained = step
        if self.mine and here[self.moment] and not self._sent:
            self._sent = True
            if self.moment == "anytime":
                late_s = random.Random(self.signum).uniform(0, 0.05)
                threading.Timer(late_s, os.kill, (os.getpid(), self.signum)).start()
            else:
                os.kill(os.getpid(), self.signum)
                time.sleep(0.05 if self.moment == "wait" else 0)
        return super().batch(split, seed, step, data_index, num_data, per_rank, first=first)

    _trained = 0


class Paced:
    """What data.name=python_stdlib gives, but each batch of training takes a while to come."""

    def __init__(self, seq_len: int, num_val: int, pause_s: float):
        found = corpus.python_stdlib(0.05)
        self.data = TokenDataset(found.train, found.val, 256, seq_len, num_val=num_val)
        self.pause_s = pause_s

    def batch(self, split, *args, **more):
        time.sleep(self.pause_s if split == "train" else 0)
        return self.data.batch(split, *args, **more)


class ByGlobalRank(UnevenTokens):
    """The same, but other samples on each global rank."""

    def batch(self, split, seed, step, data_index, num_data, per_rank, *, first=0):
        mine = dist.get_rank() * per_rank
        return super().batch(split, seed, step, data_index, num_data, per_rank, first=first + mine)


class Mortal(Paced):
    """The same, and the first time that `rank` is asked for `step` is its end."""

    def __init__(self, seq_len: int, num_val: int, pause_s: float, rank: int, step: int, note: str):
        super().__init__(seq_len, num_val, pause_s)
        self.end, self.note = (rank, step), Path(note)

    def batch(self, split, seed, step, *args, **more):
        if split == "train" and (dist.get_rank(), step) == self.end and not self.note.exists():
            self.note.write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        return super().batch(split, seed, step, *args, **more)
