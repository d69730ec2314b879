"""One interleaved run on two ranks: every side's block on the same input, taking turns."""

import os
import time
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common import take_turns
from benchmarks.data_parallel.link import RATES, enter_alone, shape
from benchmarks.tensor_parallel.sides import CASES, SIDES, Block, Case, make_plain
from benchmarks.turns import Turn
from torchdistpackage.comm.runtime import leave, setup_distributed

WARM_UP_CALLS = 3
TOLERANCE = 1e-4
"""Of results and gradients of the input, relative to the largest of one process's."""


def rank_main(
    hosts: Sequence[str], link: str, name: str, sequence: bool, sides: Sequence[str], rounds: int
) -> dict[str, object]:
    """Of one rank: turns by side and round, and how far each side is from one process."""
    enter_alone(hosts, int(os.environ["RANK"]))
    rank = setup_distributed()[0]
    if rank == 0:
        shape(hosts, RATES[link])
    dist.barrier()
    case = CASES[name]
    torch.manual_seed(1)
    x, factor = torch.randn(2, case.seq_len, case.batch, case.dim)
    expected = step(make_plain(case), x, factor)
    mine = slice(None)
    if sequence:
        rows = case.seq_len // dist.get_world_size()
        mine = slice(rank * rows, (rank + 1) * rows)
    running, distance = {}, {}
    for side in sides:
        block = SIDES[side](case, sequence)
        running[side] = partial(step, block, x[mine].clone(), factor[mine])
        for _ in range(WARM_UP_CALLS):
            found = running[side]()
        distance[side] = max(
            float((a - b[mine]).abs().max() / b.abs().max())
            for a, b in zip(found, expected, strict=True)
        )
        if distance[side] > TOLERANCE:
            raise ValueError(f"{side}, {name}: {distance[side]:.0e} from one process")
    turns = take_turns(
        sides, sides if case.calls > 1 else (), rounds, lambda side: _turn(running[side], case)
    )
    leave()
    return {"turns": turns, "distance": distance}


def step(block: Block, x: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """Forward and backward; the result and the gradient of x."""
    x = x.detach().requires_grad_()
    y = block(x)
    y.backward(factor)
    assert x.grad is not None
    return y.detach(), x.grad


def _turn(call, case: Case) -> Turn:
    dist.barrier()
    begin = time.monotonic()
    for _ in range(case.calls):
        call()
    return begin, time.monotonic()
