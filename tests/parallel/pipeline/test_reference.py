"""GPipe in its plainest form, and Pipeline: both leave the gradients of one process."""

import torch
import torch.distributed as dist

from tests.parallel.pipeline.whole_model import DIM, batch, chain, same, same_gradients, squares
from torchdistpackage.parallel.pipeline.pipeline import Pipeline
from torchdistpackage.parallel.pipeline.reference import gpipe_step


def three_ways(num_microbatches: int) -> None:
    rank, num_stages = dist.get_rank(), dist.get_world_size()
    whole, plain, executed = (chain(num_stages) for _ in range(3))
    x, y = batch(2 * num_microbatches)
    truth = squares(whole(x), y)
    truth.backward()
    loss = gpipe_step(
        plain[rank],
        list(zip(x.chunk(num_microbatches), y.chunk(num_microbatches), strict=True)),
        squares,
        torch.empty(2, DIM, dtype=torch.float64),
        dist.group.WORLD,
    )
    if rank == num_stages - 1:
        same(loss, truth.detach())
    else:
        assert loss is None
    same_gradients({rank: plain[rank]}, whole)
    pipe = Pipeline(
        executed[rank],
        loss=squares,
        schedule="gpipe",
        num_microbatches=num_microbatches,
        group=dist.group.WORLD,
    )
    same(pipe.step(x, targets=y), truth.detach())
    same_gradients({rank: executed[rank]}, plain)


def test_gpipe_is_one_process_and_pipeline(ranks):
    for size, num_microbatches in ((1, 2), (2, 1), (3, 4)):
        ranks(size).run(three_ways, num_microbatches)
