"""Steps of ranks for the linter's tests: right ones, and each wrong in one way."""

import time

import torch
import torch.distributed as dist

from torchdistpackage.comm.flight_recorder import recorder
from torchdistpackage.comm.tpc import tpc


def collectives(rank: int) -> None:
    """Every call of torch.distributed gives what it is defined as."""
    size = dist.get_world_size()
    mine, total = torch.arange(4.0) + rank, torch.arange(4.0) * size + size * (size - 1) / 2

    x = mine.clone()
    dist.all_reduce(x)
    assert torch.equal(x, total)
    for op, expected in (("MAX", mine - rank + size - 1), ("AVG", total / size)):
        dist.all_reduce(x := mine.clone(), getattr(dist.ReduceOp, op))
        assert torch.equal(x, expected)
    work = dist.all_reduce(x := torch.tensor([rank == 0]), dist.ReduceOp.MAX, async_op=True)
    work.wait()
    assert work.is_completed() and x.item()
    dist.broadcast(x := mine.clone(), 1)
    assert torch.equal(x, torch.arange(4.0) + 1)
    dist.reduce(x := mine.clone(), 2)
    assert torch.equal(x, total if rank == 2 else mine)

    parts = [torch.empty(4) for _ in range(size)]
    dist.all_gather(parts, mine)
    whole = torch.empty(size, 4)
    getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(whole, mine)
    assert torch.equal(torch.stack(parts), whole) and torch.equal(whole[rank], mine)
    part = torch.empty(4)
    getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)(part, whole)
    assert torch.equal(part, size * mine)
    dist.reduce_scatter(part, list(whole))
    assert torch.equal(part, size * mine)
    dist.gather(mine, parts if rank == 1 else None, dst=1)
    dist.scatter(part, list(2 * whole) if rank == 1 else None, src=1)
    assert torch.equal(part, 2 * mine)

    out = torch.empty(size)
    dist.all_to_all_single(out, torch.arange(size) + 10.0 * rank)
    assert torch.equal(out, 10.0 * torch.arange(size) + rank)
    received = [torch.empty(rank) for _ in range(size)]
    dist.all_to_all(received, [torch.full((j,), float(rank)) for j in range(size)])
    assert all(torch.equal(x, torch.full((rank,), float(i))) for i, x in enumerate(received))
    dist.barrier()


def messages(rank: int) -> None:
    size = dist.get_world_size()
    left, right = (rank - 1) % size, (rank + 1) % size
    a, b, c = (torch.full((2,), value) for value in (rank + 0.5, 10.0 + rank, 0.0))
    d = torch.zeros(2)
    ops = [dist.P2POp(dist.isend, a, right), dist.P2POp(dist.isend, b, right)]
    ops += [dist.P2POp(dist.irecv, c, left), dist.P2POp(dist.irecv, d, left)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert c[0] == left + 0.5 and d[0] == 10 + left
    if rank == 0:
        sources = {dist.recv(c) for _ in range(size - 1)}
        assert sources == set(range(1, size))
    else:
        dist.send(a, 0)
    got: list = [None] * size
    dist.all_gather_object(got, {"rank": rank})
    box = [rank]
    dist.broadcast_object_list(box, src=1)
    assert got == [{"rank": r} for r in range(size)] and box == [1]
    pair = dist.new_group([0, 1])
    if rank < 2:
        dist.all_reduce(x := torch.ones(1), group=pair)
        assert x.item() == 2


def own_numbers(rank: int) -> tuple[float, ...]:
    """Ranks that seed alike draw alike, however their draws interleave."""
    torch.manual_seed(7)
    recorder.phase = f"of rank {rank}"
    drawn = []
    for _ in range(4):
        drawn.append(torch.rand(()).item())
        dist.barrier()
        assert recorder.phase == f"of rank {rank}"
    return tuple(drawn)


def swapped(rank: int) -> None:
    first, second = (dist.barrier, reduce_three)[:: 1 if rank else -1]
    first()
    second()


def reduce_three() -> None:
    dist.all_reduce(torch.ones(3))


def shapes(rank: int) -> None:
    dist.all_reduce(torch.ones(3 + rank))


def dtypes(rank: int) -> None:
    dist.all_reduce(torch.ones(3, dtype=torch.float64 if rank else torch.float32))


def roots(rank: int) -> None:
    dist.broadcast(torch.ones(3), src=rank)


def sizes(rank: int) -> None:
    """Rank 1 gives rank 0 two rows, which expects one."""
    give = [2, 1] if rank else [1, 1]
    dist.all_to_all_single(torch.empty(2), torch.ones(sum(give)), [1, 1], give)


def lengths(rank: int) -> None:
    if rank == 0:
        dist.send(torch.ones(3), 1)
    else:
        dist.recv(torch.ones(4), 0)


def missing(rank: int) -> None:
    if rank != 1:
        reduce_three()


def not_received(rank: int) -> None:
    if rank == 0:
        dist.isend(torch.ones(3), 1)


def sends_first(rank: int) -> None:
    dist.send(torch.ones(3), 1 - rank)
    dist.recv(torch.ones(3), 1 - rank)


def batch_before_collective(rank: int) -> None:
    """NCCL runs both on one stream: the sum of one rank comes after its batch."""
    x = torch.ones(3)
    if rank == 1:
        batch = dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 0)])
        dist.all_reduce(torch.ones(3), async_op=True).wait()
        batch[0].wait()
    else:
        dist.all_reduce(torch.ones(3))
        dist.recv(x, 1)


def message_against_collective(rank: int) -> None:
    """On 4 ranks: one side reduces over data, the other waits for a message that comes after."""
    group, ranks = tpc.get_group("data"), tpc.get_ranks_in_group("data")
    if rank == ranks[0]:
        dist.all_reduce(torch.ones(3), group=group)
        dist.send(torch.ones(3), ranks[1])
    else:
        dist.recv(torch.ones(3), ranks[0])
        dist.all_reduce(torch.ones(3), group=group)


def groups_in_a_circle(rank: int) -> None:
    """Three ranks make groups of two, each beginning with another one."""
    tpc.groups.of([rank, (rank + 1) % 3])
    tpc.groups.of([rank, (rank - 1) % 3])


def two_under_way(rank: int) -> None:
    """On 4 ranks of data x tensor: two sums under way, begun in two orders."""
    modes = ("data", "tensor")[:: 1 if rank in (0, 3) else -1]
    works = [dist.all_reduce(torch.ones(2), group=tpc.get_group(m), async_op=True) for m in modes]
    for work in works:
        work.wait()


def one_order(rank: int) -> None:
    works = [
        dist.all_reduce(torch.ones(2), group=tpc.get_group(mode), async_op=True)
        for mode in ("data", "tensor", "data")
    ]
    while not works[0].is_completed():
        pass
    for work in works[:: 1 if rank else -1]:
        work.wait()


def prefetch(rank: int) -> None:
    """A receive on a group of its own before the sum that the sender makes first."""
    own, x = dist.new_group([0, 1]), torch.ones(3)
    if rank == 1:
        early = dist.irecv(x, 0, group=own)
        dist.all_reduce(torch.ones(3))
        early.wait()
    else:
        dist.all_reduce(torch.ones(3))
        dist.send(x, 1, group=own)


def torch_ddp(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(gradients under torch's DDP, of this rank alone), over two steps and buckets."""
    torch.manual_seed(3)
    net = torch.nn.Sequential(*(torch.nn.Linear(16, 16).double() for _ in range(3)))
    x = torch.arange(32.0, dtype=torch.float64).reshape(2, 16) * (rank + 1)
    net(x).square().sum().backward()
    alone = torch.cat([p.grad.flatten() for p in net.parameters()])
    ddp = torch.nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.001)
    for _ in range(2):
        ddp.zero_grad()
        ddp(x).square().sum().backward()
    return torch.cat([p.grad.flatten() for p in net.parameters()]), alone


def futures(rank: int) -> None:
    future = dist.all_reduce(torch.ones(2), async_op=True).get_future()
    doubled = future.then(lambda done: done.value()[0] * 2)
    assert future.done() and doubled.wait()[0] == 2 * dist.get_world_size()


def settings(rank: int) -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(torch.get_num_threads() + 1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_float32_matmul_precision("medium")
    torch.backends.cudnn.benchmark = True
    dist.barrier()


def raising(rank: int) -> None:
    dist.barrier()
    try:
        if rank == 1:
            raise KeyError("the one that failed")
        dist.barrier()
    except KeyError:
        raise
    except Exception as error:  # what a step may do must not hide the end
        raise AssertionError("the others just end") from error


def for_ever(rank: int) -> None:
    while rank == 1:
        time.sleep(0.001)
    dist.barrier()
