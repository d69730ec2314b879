"""Every call of torch.distributed under the late transport, between real peers."""

from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist

from torchdistpackage.errors import ConfigError, RaceError, RankError
from torchdistpackage.testing import RankPool

reduce_scatter_into = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
gather_into = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
TRANSPORTS = ["late", "late:early", "late:3"]


def collectives() -> list[torch.Tensor]:
    """Each collective, asynchronous, and what it must give; all at once in flight."""
    rank, size = dist.get_rank(), dist.get_world_size()
    ones = lambda *shape: torch.ones(*shape, dtype=torch.float64)  # noqa: E731
    works, results = [], []

    def note(work, got, want) -> None:
        works.append(work)
        results.append((got, want))

    x = ones(3) * (rank + 1)
    note(dist.all_reduce(x, async_op=True), x, ones(3) * 10)
    x = ones(3) * (rank + 1)
    note(dist.all_reduce(x, op=dist.ReduceOp.AVG, async_op=True), x, ones(3) * 2.5)
    x = torch.tensor([rank])
    note(dist.all_reduce(x, op=dist.ReduceOp.MAX, async_op=True), x, torch.tensor([3]))
    x = ones(2) * rank
    note(dist.broadcast(x, 2, async_op=True), x, ones(2) * 2)
    x = ones(2) * rank
    note(dist.reduce(x, 1, async_op=True), x, ones(2) * (6 if rank == 1 else rank))
    rooms = [ones(i + 1) for i in range(size)]
    note(
        dist.all_gather(rooms, ones(rank + 1) * rank, async_op=True),
        rooms,
        [ones(i + 1) * i for i in range(size)],
    )
    out = ones(8)
    note(
        gather_into(out, ones(2) * rank, async_op=True),
        out,
        torch.arange(4.0, dtype=torch.float64).repeat_interleave(2),
    )
    out = ones(rank + 1)
    parts = [ones(i + 1) * (rank + i) for i in range(size)]
    want = ones(rank + 1) * (6 + 4 * rank)
    note(dist.reduce_scatter(out, parts, async_op=True), out, want)
    out = ones(1)
    flat = torch.arange(4.0, dtype=torch.float64)
    note(reduce_scatter_into(out, flat, async_op=True), out, ones(1) * 4 * rank)
    sizes = [(rank + i) % 3 for i in range(size)]
    out = ones(sum(sizes), 2)
    note(
        dist.all_to_all_single(out, ones(sum(sizes), 2) * rank, sizes, sizes, async_op=True),
        out,
        torch.cat([ones(n, 2) * i for i, n in enumerate(sizes)]),
    )
    rooms = [ones(2) for _ in range(size)] if rank == 3 else None
    note(
        dist.gather(ones(2) * rank, rooms, 3, async_op=True),
        rooms or [],
        [ones(2) * i for i in range(size)] if rank == 3 else [],
    )
    out = ones(2)
    parts = [ones(2) * i for i in range(size)] if rank == 0 else None
    note(dist.scatter(out, parts, 0, async_op=True), out, ones(2) * rank)
    out, following = ones(4).bfloat16(), (rank + 1) % size
    works += dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, (ones(4) * rank).bfloat16(), following),
            dist.P2POp(dist.irecv, out, (rank - 1) % size),
        ]
    )
    assert len(works) == len(results) + 1  # one work for all of a batch, as on NCCL
    results.append((out, (ones(4) * ((rank - 1) % size)).bfloat16()))
    for work in reversed(works):
        work.wait()
    for i, (got, want) in enumerate(results):
        for one, other in zip(*[x if type(x) is list else [x] for x in (got, want)], strict=True):
            assert torch.equal(one, other), (i, one, other)


@pytest.mark.few(1)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_all_calls_deliver(ranks: RankPool, transport: str):
    ranks(4).run(collectives, transport=transport)


def others() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    values: list = [None] * size
    dist.all_gather_object(values, {"rank": rank})
    assert [value["rank"] for value in values] == list(range(size))
    box = [f"from {rank}"]
    dist.broadcast_object_list(box, 1)
    assert box == ["from 1"]
    dist.barrier()
    half = dist.new_group([rank - rank % 2, rank - rank % 2 + 1], use_local_synchronization=True)
    x = torch.ones(3, dtype=torch.complex64)
    dist.all_reduce(x, group=half)
    assert x.real.tolist() == [2.0] * 3
    if rank % 2:
        dist.recv(x, rank - 1)
        assert x[0] == 7
    else:
        dist.send(torch.full_like(x, 7), rank + 1)


def test_objects_groups_and_blocking_messages(ranks: RankPool):
    ranks(4).run(others, transport="late")


def poisoned() -> None:
    x = torch.ones(4)
    seen = x.numpy()  # by no operation of torch
    work = dist.all_reduce(x, async_op=True)
    assert np.isnan(seen).all() and not work.is_completed()
    work.wait()
    assert work.is_completed() and x.tolist() == [2.0] * 4
    x = torch.ones(4, dtype=torch.int64)
    work = dist.all_reduce(x, async_op=True)
    dist.barrier()  # of the same group: comes after, so the first is there
    assert x.tolist() == [2] * 4
    work.wait()


def test_nothing_is_there_before_the_wait(ranks: RankPool):
    ranks(2).run(poisoned, transport="late")


def read() -> None:
    x = torch.ones(4)
    work = dist.all_reduce(x, async_op=True)
    x[2:].sum()
    work.wait()


def written() -> None:
    x = torch.ones(4)
    work = dist.all_reduce(x, async_op=True)
    x *= 1.0  # a NaN stays one
    work.wait()


def written_unseen() -> None:
    x = torch.ones(4)
    seen = x.numpy()
    work = dist.all_reduce(x, async_op=True)
    seen[1] = 1.0
    work.wait()


def input_changed_unseen() -> None:
    x, out = torch.ones(4), torch.empty(8)
    seen = x.numpy()
    work = gather_into(out, x, async_op=True)
    seen[0] = 2
    work.wait()


def written_in_part() -> None:
    flat = torch.zeros(8)
    work = dist.all_reduce(flat[:4], async_op=True)
    flat[4:] = 1.0  # is not in flight
    flat[3:4] *= 1.0
    work.wait()


def input_changed() -> None:
    x, out = torch.ones(4), torch.empty(8)
    work = gather_into(out, x, async_op=True)
    x += 1
    work.wait()


def given_back() -> None:
    x = torch.ones(4)
    work = dist.all_reduce(x, async_op=True)
    x.untyped_storage().resize_(0)
    work.wait()


def lost() -> torch.Tensor:
    x = torch.ones(4)
    dist.all_reduce(x, async_op=True)
    return x


def taken_by_another_group() -> None:
    half = dist.new_group([0, 1])
    x = torch.ones(4)
    work = dist.all_reduce(x, async_op=True)
    dist.all_reduce(x, group=half)
    work.wait()


def waited_with_limit() -> None:
    dist.all_reduce(torch.ones(4), async_op=True).wait(timedelta(seconds=9))


def told_apart_by_tags() -> None:
    x, y = torch.ones(2), torch.ones(2)
    if dist.get_rank() == 0:
        works = [dist.isend(x, 1, tag=1), dist.isend(y, 1, tag=2)]
    else:
        works = [dist.irecv(y, 0, tag=2), dist.irecv(x, 0, tag=1)]
    for work in works:
        work.wait()


FINDINGS = {
    read: ["all_reduce (number", "ranks (0, 1)", "shape (4,)", "read before wait()", "aten.sum"],
    written_unseen: ["all_reduce", "shape (4,)", "written to while in flight"],
    input_changed_unseen: ["all_gather", "shape (4,)", "input was changed"],
    written: ["all_reduce (number", "ranks (0, 1)", "shape (4,)", "written to while in flight"],
    written_in_part: ["all_reduce", "shape (4,)", "written to while in flight"],
    input_changed: ["all_gather", "shape (4,)", "input was changed"],
    given_back: ["all_reduce", "memory was given back"],
    lost: ["all_reduce", "no call waited", "test_group.py"],
    taken_by_another_group: ["all_reduce", "in flight"],
    waited_with_limit: ["all_reduce", "blocks the host"],
    told_apart_by_tags: ["NCCL ignores tags"],
}


@pytest.mark.few(5)
@pytest.mark.parametrize("step", FINDINGS, ids=lambda step: step.__name__)
def test_misuse_is_named(ranks: RankPool, step):
    with pytest.raises(RankError) as caught:
        ranks(2).run(step, transport="late")
    assert RaceError.__name__ in str(caught.value)
    assert all(text in str(caught.value) for text in FINDINGS[step]), str(caught.value)
    assert "transport: late" in str(caught.value)


def backend() -> str:
    return dist.get_backend()


def test_worlds_of_both_kinds_take_turns(ranks: RankPool):
    pool = ranks(2)
    assert pool.run(backend) == ["gloo"] * 2
    assert pool.run(backend, transport="late:5") == ["late"] * 2
    assert pool.run(backend) == ["gloo"] * 2


@pytest.mark.parametrize("name", ["nccl", "later", "late:", "late:-1", "late:x"])
def test_unknown_transports_are_refused(ranks: RankPool, name: str):
    with pytest.raises(ConfigError, match="use gloo, late"):
        ranks(2).run(backend, transport=name)
