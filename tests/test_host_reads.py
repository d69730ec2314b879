"""The counter of host reads counts each kind once, where it was asked for, and nothing else."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.host_reads import HostReads
from torchdistpackage.optim.clip import scale_gradients
from torchdistpackage.optim.scaler import GradScaler

X = torch.arange(6.0).reshape(2, 3)

READS = {
    "item": lambda: X[0, 0].item(),
    "float": lambda: float(X[0, 0]),
    "bool": lambda: bool((X > 0).all()),
    "tolist": lambda: X.tolist(),
    "tolist of one": lambda: X[0, 0].tolist(),
    "numpy": lambda: X.numpy(),
    "cpu": lambda: X.cpu(),
    "to": lambda: X.to("cpu"),
    "nonzero": lambda: X.nonzero(),
    "where": lambda: torch.where(X > 1),
    "equal": lambda: torch.equal(X, X),
    "unique": lambda: X.unique(),
    "masked_select": lambda: X.masked_select(X > 1),
    "mask": lambda: X[X > 1],
    "put by a mask": lambda: X.clone().__setitem__(X > 1, torch.zeros(4)),
    "repeats": lambda: X[0].repeat_interleave(torch.tensor([1, 2, 3])),
    "made from a number": lambda: torch.tensor(3.0, device=torch.device("cpu")),
    "a call in a backward": lambda: in_a_backward(lambda g: g.tolist()[0][0]),
    "in a backward": lambda: in_a_backward(lambda g: float(g[0, 0])),
}

NONE = {
    "arithmetic": lambda: scale_gradients([X], torch.ones(())),
    "filled by a mask": lambda: X.clone().__setitem__(X > 100, 1.0),
    "chosen": lambda: torch.where(X > 1, X, 0),
    "not waited for": lambda: X.to("cpu", non_blocking=True),
    "to a device": lambda: X.to(torch.device("cpu"), torch.float64),
    "on the host": lambda: torch.tensor(3.0),
    "repeats of a known number": lambda: X[0].repeat_interleave(
        torch.tensor([1, 2, 3]), output_size=6
    ),
    "a whole backward": lambda: nn.Linear(3, 3)(X).square().mean().backward(),
    "a gather": lambda: X[:, torch.tensor([0, 2])],
}


class _Reader(torch.autograd.Function):
    """Its backward reads the gradient by `read`."""

    @staticmethod
    def forward(ctx, x, read):
        ctx.read = read
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.read(gradient), None


def in_a_backward(read: Callable[[torch.Tensor], float]) -> None:
    _Reader.apply(X.clone().requires_grad_(), read).sum().backward()


@pytest.mark.parametrize("kind", READS)
def test_a_read_counts_once_by_its_line(kind):
    with HostReads() as reads:
        READS[kind]()
    assert reads.found.total() == 1, reads.found
    (where,) = reads.found
    assert where.startswith(f"{__file__}:")


@pytest.mark.parametrize("kind", NONE)
def test_what_waits_for_nothing_does_not_count(kind):
    with HostReads() as reads:
        NONE[kind]()
    assert not reads.found


def test_a_read_of_the_package_counts_by_its_file(ranks):
    assert ranks(2).run(_scaled)[0] == [True, True]


def _scaled() -> list[bool]:
    from torch.distributed import group

    scaler = GradScaler(group=group.WORLD)
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with HostReads() as reads:
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
    return [bool(reads.found), all(x.startswith("optim/scaler.py:") for x in reads.found)]


def test_files_of_the_host_do_not_count():
    from torchdistpackage.data.source import fingerprint

    with HostReads() as reads:
        fingerprint(X)
    assert not reads.found
    with HostReads(host=()) as reads:
        fingerprint(X)
    assert {x.split(":")[0] for x in reads.found} == {"data/source.py"}
