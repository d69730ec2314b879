"""`torchdistpackage.comm` as users import it: groups by name, overlapping calls, no torch."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from torchdistpackage import comm
from torchdistpackage.comm.tpc import tpc


def groups_by_name() -> None:
    tpc.setup_process_groups([("data", 2), ("tensor", 2)])
    rank = dist.get_rank()
    x = torch.tensor([float(rank)], dtype=torch.float64)
    for mode in ("data", "tensor", "model", "global"):
        members = tpc.get_ranks_in_group(mode)
        assert list(comm.ranks_of(mode)) == members
        assert float(comm.reduce(x, mode)) == sum(members)
        assert comm.gather(x, 0, mode).tolist() == members
        assert comm.gather_objects(rank, mode) == members
        assert comm.broadcast_object(rank, group=mode) == members[0]
        assert float(comm.start_all_reduce(x.clone(), mode, comm.MAX).wait()) == members[-1]
        assert comm.broadcast(x, mode, members[-1]).tolist() == [members[-1]]
        comm.barrier(mode)
    assert comm.gather(x, 0, "pipe") is x, "an axis that is left out has one rank a group"
    assert comm.gather_objects(rank) == [0, 1, 2, 3]
    comm.barrier()


def test_a_group_may_be_the_name_of_an_axis(ranks):
    ranks(4).run(groups_by_name)


def begun_and_awaited_in_any_order() -> None:
    """Three collectives under way at once, each with what its waiting form gives."""
    tpc.setup_process_groups([("data", 2), ("tensor", 2)])
    rank, group = dist.get_rank(), tpc.get_group("tensor")
    rows = torch.arange(6.0).view(2, 3) + 10 * rank
    sizes, mine = (1, 3), torch.full((1 + 2 * group.rank(),), float(rank))
    begun = [
        (comm.start_all_reduce(rows.clone(), "tensor"), comm.reduce(rows, "tensor")),
        (comm.start_all_gather(rows, group="tensor"), comm.gather(rows, 0, group)),
        (comm.start_all_gather(mine, group, sizes), comm.gather(mine, 0, group, sizes)),
        (comm.start_reduce_scatter(rows, "tensor"), comm.reduce_scatter(rows, 0, group)),
        (comm.start_all_to_all(rows, "tensor"), comm.all_to_all(rows, 0, 0, group)),
        (comm.start_broadcast(rows.clone(), "tensor"), comm.broadcast(rows, group)),
    ]
    for pending, expected in reversed(begun):
        assert torch.equal(pending.wait(), expected)
        assert torch.equal(pending.wait(), expected)


def test_started_collectives_give_what_the_waiting_ones_do(ranks):
    ranks(4).run(begun_and_awaited_in_any_order)


def messages_by_name() -> None:
    tpc.setup_process_groups([("pipe", 3)])
    rank = dist.get_rank()
    if rank < 2:
        comm.send(torch.full((2,), float(rank)), "pipe", rank + 1)
    if rank > 0:
        room = comm.start_receive(torch.empty(2), "pipe", source=rank - 1)
        assert room.wait().tolist() == [rank - 1.0] * 2


def test_messages_go_along_an_axis(ranks):
    ranks(3).run(messages_by_name)


def lengths() -> None:
    rank = dist.get_rank()
    for length in range(8):
        sizes = comm.even_sizes(length, 3)
        assert sum(sizes) == length and max(sizes) - min(sizes) <= 1
        assert list(sizes) == sorted(sizes, reverse=True)
        mine = torch.zeros(2, sizes[rank])
        assert comm.exchange_sizes(mine, -1, dist.group.WORLD) == sizes
        assert comm.gather(mine, 1, dist.group.WORLD, sizes).shape == (2, length)


def test_sizes_are_as_even_as_can_be_and_found_out(ranks):
    ranks(3).run(lengths)


@pytest.mark.parametrize("name", comm.__all__)
def test_a_public_name_is_there_and_documented(name):
    thing = getattr(comm, name)
    assert name in dir(comm)
    if callable(thing) and name.islower():
        assert len(thing.__doc__ or "") > 10 and thing.__name__ == name


def test_names_hide_no_file_and_others_are_refused():
    """`import torchdistpackage.comm.tpc` sets an attribute, which a public name would lose to."""
    inside = {path.stem for path in Path(comm.__file__).parent.iterdir()}
    assert inside.isdisjoint(comm.__all__)
    with pytest.raises(AttributeError, match=r"'torchdistpackage\.comm' has no attribute 'gathr'"):
        comm.gathr  # noqa: B018


def test_importing_it_imports_no_torch():
    code = "import sys; from torchdistpackage import comm; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["False"]
