"""Wrong groups, dims and sizes: refused on every rank before anything is sent, never a hang."""

import pytest
import torch
import torch.distributed as dist

from tests.comm.collective_cases import OPERATIONS, cases
from tests.tells import facts_pattern
from torchdistpackage import comm
from torchdistpackage.comm import collectives as c
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.errors import CommError, LayoutError
from torchdistpackage.topology.mesh import topology

X = torch.zeros(3, 4)
SHAPE = r"dim {} of a tensor of shape \(3, 4\) has {} elements"

REFUSALS = {
    "scatter that does not divide": (
        lambda g: c.scatter(X, 0, g),
        SHAPE.format(0, 3) + ".* 2 ranks cannot share evenly; .*multiple of 2.*sizes=",
    ),
    "reduce_scatter that does not divide": (lambda g: c.reduce_scatter(X, -2, g), "sizes="),
    "all_to_all that does not divide": (lambda g: c.all_to_all(X, 0, 1, g), "split_sizes="),
    "parts that do not add up": (
        lambda g: c.scatter(X, 1, g, sizes=(1, 2)),
        SHAPE.format(1, 4) + r".*sizes=\(1, 2\) add up to 3",
    ),
    "sums that do not add up": (lambda g: c.reduce_scatter(X, 1, g, (5, 0)), "add up to 5"),
    "parts to split that do not add up": (
        lambda g: c.all_to_all(X, 0, 1, g, split_sizes=(1, 1)),
        r"split_sizes=\(1, 1\) add up to 2",
    ),
    "lengths that are not mine": (
        lambda g: c.gather(X, 0, g, sizes=(2, 2)),
        SHAPE.format(0, 3) + r".*sizes=\(2, 2\) give 2 to this rank, number \d of its group",
    ),
    "others that are not mine": (lambda g: c.all_gather(X, 1, g, [3, 3]), "exchange_sizes"),
    "lengths to join that are not mine": (
        lambda g: c.all_to_all(X, 1, 0, g, join_sizes=(2, 2)),
        r"join_sizes=\(2, 2\) give 2",
    ),
    "one of two sizes along one dim": (
        lambda g: c.all_to_all(X, 1, 1, g, split_sizes=(2, 2)),
        r"split_sizes=\(2, 2\) and join_sizes=None .* both",
    ),
    "the other of two": (lambda g: c.all_to_all(X, 1, 1, g, join_sizes=(2, 2)), "both"),
    "what stays differs": (
        lambda g: c.all_to_all(X, 1, 1, g, split_sizes=(2, 2), join_sizes=(1, 3)),
        r"keep 2 .*expect [13] from it",
    ),
    "too few sizes": (lambda g: c.gather(X, 0, g, sizes=(3,)), r"\(3,\) for a group of 2 ranks"),
    "negative sizes": (lambda g: c.scatter(X, 0, g, sizes=(4, -1)), r"\(4, -1\) for a group"),
    "sizes that are not whole": (lambda g: c.scatter(X, 0, g, (1.5, 1.5)), "one whole number"),
    "one size for all": (lambda g: c.scatter(X, 0, g, 3), "sizes=3: pass one whole number"),
    "a dim that is not there": (
        lambda g: c.all_gather(X, 2, g),
        r"no dim 2 in a tensor of shape \(3, 4\), which has 2 dims; use -2 to 1",
    ),
    "a dim before the first": (lambda g: c.gather(X, -3, g), "no dim -3"),
    "a dim that is no number": (lambda g: c.gather(X, "data", g), "no dim 'data'"),
    "a single number": (
        lambda g: c.scatter(torch.tensor(1.0), 0, g),
        r"shape \(\), which has 0 dims; unsqueeze it first",
    ),
    "the length of a dim that is not there": (lambda g: comm.exchange_sizes(X, 2, g), "no dim 2"),
    "even sizes of nothing": (lambda g: comm.even_sizes(3, 0), "3 cannot be cut into 0 parts"),
    "even sizes of less": (lambda g: comm.even_sizes(-1, 2), "-1 cannot be cut into 2 parts"),
}


def layouts_are_refused() -> None:
    group = dist.group.WORLD
    for name, (call, text) in REFUSALS.items():
        try:
            with pytest.raises(LayoutError, match=text):
                call(group)
        except BaseException as error:
            error.add_note(name)
            raise
    # nothing was sent, so the next call meets its like
    assert float(c.reduce(torch.ones(()), group)) == 2


def test_dims_and_sizes_that_do_not_fit(ranks):
    ranks(2).run(layouts_are_refused)


def ranks_that_differ() -> None:
    group, rank = dist.group.WORLD, dist.get_rank()
    with comm.checked_calls():
        for call in (c.gather, c.all_gather):
            with pytest.raises(CommError, match=r"rank 0: .*\[2, 3\].*rank 1: .*\[3, 3\]"):
                call(torch.zeros(2 + rank, 3), 0, group)
        sizes = ((0, 3), (0, 2)) if rank == 0 else ((2, 1), (2, 1))
        with pytest.raises(
            CommError, match=facts_pattern("rank 0", "3 rows", "rank 1", "expects 2")
        ):
            c.all_to_all(torch.zeros(3), 0, 0, group, *sizes)
        assert float(c.reduce(torch.ones(()), group)) == 2


def test_in_debug_mode_ranks_that_differ_are_all_told(ranks):
    ranks(2).run(ranks_that_differ)


def every_operation_refuses(group: object, text: str) -> None:
    for name in OPERATIONS:
        case = cases(name, 1)[0]
        sizes = {"source": 0} if name == "broadcast" else {}
        with pytest.raises(CommError, match=text):
            getattr(c, name)(case.draw(0), *case.dims, group=group, **sizes)
    for name in ("start_all_reduce", "start_all_gather", "start_reduce_scatter"):
        with pytest.raises(CommError, match=text):
            getattr(comm, name)(torch.ones(2), group)
    with pytest.raises(CommError, match=text):
        comm.exchange_sizes(torch.ones(2), 0, group)


def groups_are_refused() -> None:
    rank = dist.get_rank()
    pair = dist.new_group([1, 2])
    if rank == 0:
        every_operation_refuses(pair, "this rank is not a member of the group")
        with pytest.raises(CommError, match="this rank is not a member of the group"):
            comm.barrier(pair)
    else:
        assert float(c.reduce(torch.ones(()), pair)) == 2
        with pytest.raises(CommError, match=r"rank 0, .*not in the group of ranks \(1, 2\)"):
            c.broadcast(torch.ones(()), pair, source=0)
    every_operation_refuses(None, "a group was expected, not None")
    every_operation_refuses([0, 1], r"a group was expected, not \[0, 1\]")
    every_operation_refuses("data", "no group 'data': tpc is not set up")
    tpc.setup_process_groups([("data", 3)])
    every_operation_refuses("dta", "no group 'dta' in data=3; .*data, model")
    every_operation_refuses("moe_ep", r"build_moe_groups")
    with tpc.using(topology([("data", 8)], 8), rank=5):
        every_operation_refuses("data", "it has no groups")
    with pytest.raises(CommError, match=r"rank 7, .*not in the group of ranks \(\d,\)"):
        c.broadcast(torch.ones(()), "tensor", source=7)
    assert float(c.reduce(torch.ones(()), "data")) == 3


def test_what_is_no_group_of_this_rank(ranks):
    ranks(3).run(groups_are_refused)
