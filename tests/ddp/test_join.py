"""Uneven inputs: who has data left trains as if the others sent zeros, and all end alike."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.ddp.against_reference import DIM, near, part, squares
from torchdistpackage.comm import primitives
from torchdistpackage.ddp.join import join
from torchdistpackage.ddp.naive_ddp import NaiveDDP
from torchdistpackage.ddp.sync_batch_norm import SyncBatchNorm
from torchdistpackage.errors import CommError


class Counts(nn.Module):
    """Two layers, and a buffer that counts the forwards of training."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM))
        self.register_buffer("num_forwards", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.num_forwards += self.training
        return self.layers(x)


def parts_of(rank: int, number: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(rank)
    return [torch.randn(5, DIM, generator=draw).double() for _ in range(number)]


def the_truth(net: nn.Module, numbers: list[int], num_acc: int, by_all: bool) -> None:
    """One process that sees the parts of all ranks in turn."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    data = [parts_of(rank, number) for rank, number in enumerate(numbers)]
    for start in range(0, max(numbers), num_acc):
        optimizer.zero_grad()
        for micro in range(start, start + num_acc):
            active = [parts[micro] for parts in data if len(parts) > micro]
            for x in active:
                (squares(net, x) / (len(numbers) if by_all else len(active))).backward()
        optimizer.step()


def uneven(numbers: list[int], num_acc: int, by_all: bool) -> None:
    rank = dist.get_rank()
    torch.manual_seed(0)
    one = Counts().double()
    ddp = NaiveDDP(copy.deepcopy(one), num_grad_acc_iter=num_acc, bucket_cap_mb=0.0001)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.05)
    before = ddp.reducer.on_launch
    with join(ddp, optimizer, divide_by_initial_world_size=by_all):
        for i, x in enumerate(parts_of(rank, numbers[rank])):
            if i % num_acc == 0:
                optimizer.zero_grad()
            squares(ddp, x).backward()
            if i % num_acc == num_acc - 1:
                optimizer.step()
    the_truth(one, numbers, num_acc, by_all)
    for (name, p), q in zip(ddp.module.named_parameters(), one.parameters(), strict=True):
        near(p.detach(), q.detach(), name)
    assert int(ddp.module.num_forwards) == max(numbers)
    moments = [state["exp_avg"] for state in optimizer.state.values()]
    for theirs in primitives.gather_objects(moments):
        assert all(torch.equal(a, b) for a, b in zip(moments, theirs, strict=True))
    assert ddp.reducer.on_launch is before
    ddp.zero_grad()
    squares(ddp, part(0)).backward()  # the wrapper is as it was
    if rank == 0:
        ddp.eval()(part(0))  # and tells nobody


@pytest.mark.few(2)
@pytest.mark.parametrize("by_all", [True, False], ids=["by all", "by those with data"])
@pytest.mark.parametrize("numbers", [[1, 4, 2], [3, 3, 3], [5, 0, 5]], ids=str)
def test_ranks_without_data_count_zero_and_end_like_the_others(ranks, numbers, by_all):
    ranks(3).run(uneven, numbers, 1, by_all)


def test_microbatches_not_yet_reduced_are_sent_with_the_next_reduction(ranks):
    ranks(2).run(uneven, [3, 6], 2, True)


def held_back() -> None:
    """no_sync inside: held forwards neither follow buffers nor reduce."""
    rank, numbers = dist.get_rank(), [2, 4]
    torch.manual_seed(0)
    one = Counts().double()
    ddp = NaiveDDP(copy.deepcopy(one))
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.05)
    with join(ddp, optimizer):
        for i, x in enumerate(parts_of(rank, numbers[rank])):
            if i % 2 == 0:
                optimizer.zero_grad()
                with ddp.no_sync():
                    squares(ddp, x).backward()
            else:
                squares(ddp, x).backward()
                optimizer.step()
    the_truth(one, numbers, 2, True)
    for (name, p), q in zip(ddp.module.named_parameters(), one.parameters(), strict=True):
        near(p.detach(), q.detach(), name)


def test_no_sync_may_be_used_inside(ranks):
    ranks(2).run(held_back)


class WithLoss(nn.Module):
    """Returns the loss and what it was made from, that twice."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> dict[str, object]:
        logits = self.layer(x)
        return {"loss": logits.square().mean(), "logits": logits, "more": [logits]}


def scaled_once() -> None:
    rank, numbers = dist.get_rank(), [3, 1]
    torch.manual_seed(0)
    one = WithLoss().double()
    ddp = NaiveDDP(copy.deepcopy(one))

    def total(net: nn.Module, x: Tensor) -> Tensor:
        out = net(x)
        return out["loss"] + 0.1 * (out["logits"] * out["more"][0]).mean()

    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    with join(ddp, optimizer, divide_by_initial_world_size=False):
        for x in parts_of(rank, numbers[rank]):
            optimizer.zero_grad()
            total(ddp, x).backward()
            optimizer.step()
    reference = torch.optim.SGD(one.parameters(), lr=0.05)
    data = [parts_of(rank, number) for rank, number in enumerate(numbers)]
    for micro in range(max(numbers)):
        active = [parts[micro] for parts in data if len(parts) > micro]
        reference.zero_grad()
        (sum(total(one, x) for x in active) / len(active)).backward()
        reference.step()
    for (name, p), q in zip(ddp.module.named_parameters(), one.parameters(), strict=True):
        near(p.detach(), q.detach(), name)


def test_a_loss_that_is_returned_beside_what_it_was_made_from_is_scaled_once(ranks):
    ranks(2).run(scaled_once)


def thrown() -> None:
    ddp = NaiveDDP(Counts().double())
    done = 0
    with (
        pytest.raises(CommError, match=r"ranks \[1\] of \(0, 1\) have no data left"),
        join(ddp, throw_on_early_termination=True),
    ):
        for x in parts_of(0, 4 if dist.get_rank() == 0 else 2):
            squares(ddp, x).backward()
            done += 1
    assert done == 2
    with join(ddp, enable=False):
        squares(ddp, part(0)).backward()


def test_the_first_rank_without_data_stops_all_on_request(ranks):
    ranks(2).run(thrown)


def out_of_step() -> None:
    ddp = NaiveDDP(Counts().double())
    with pytest.raises(CommError, match="0: BUFFERS, 1: REDUCTION"), join(ddp):
        squares(ddp, part(0)).backward()
        out = squares(ddp, part(0))
        ddp(part(0)) if dist.get_rank() == 0 else out.backward()


def refused() -> None:
    ddp = NaiveDDP(nn.Sequential(SyncBatchNorm(DIM)))
    with pytest.raises(CommError, match="SyncBatchNorm, whose forward needs every rank"), join(ddp):
        pass
    plain = NaiveDDP(Counts())
    sharded = torch.optim.SGD(plain.parameters())
    sharded.shards = []
    with pytest.raises(CommError, match="SGD needs every rank in each step"), join(plain, sharded):
        pass


@pytest.mark.parametrize("what", [out_of_step, refused])
def test_what_cannot_be_shadowed_is_refused_on_all_ranks(ranks, what):
    ranks(2).run(what)
