"""Slices: what each rank gets is the sum, however the tensor is cut and whatever carries it."""

import gc
import time

import pytest
import torch
import torch.distributed as dist

from torchdistpackage.comm import primitives as p
from torchdistpackage.comm.creation import world
from torchdistpackage.comm.debug_checks import checked_calls
from torchdistpackage.comm.flight_recorder import recorder
from torchdistpackage.comm.groups import Groups
from torchdistpackage.comm.transport.sharded_flat import (
    prepost_all_gather_v,
    prepost_reduce_scatter_v,
    start_all_gather_v,
    start_reduce_scatter_v,
)
from torchdistpackage.errors import CommError
from torchdistpackage.harness.lint.linter import lint

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.complex64]


def cuts(size: int) -> list[list[int]]:
    """Even; uneven, the first with nothing; a part of the tensor; nothing at all; more than one
    piece of a message."""
    return [
        [5 * i for i in range(size + 1)],
        [0, 0, *(3 * i * i for i in range(1, size))],
        [2 + i for i in range(size + 1)],
        [0] * (size + 1),
        [300_000 * i + 1 for i in range(size + 1)],
    ]


def there_and_back(group: dist.ProcessGroup) -> None:
    """Summed, then gathered, whole numbers are the sum on every rank, to the bit."""
    me, size = group.rank(), group.size()
    for bounds in cuts(size):
        num = bounds[-1] + 2
        for dtype in DTYPES if num < 1000 else DTYPES[:1]:
            data = [(torch.arange(num) % 7 + i).to(dtype) for i in range(size)]
            total = sum(data[1:], data[0])
            for wire in (None, torch.bfloat16) if dtype.is_floating_point else (None,):
                x = data[me].clone()
                assert start_reduce_scatter_v(x, bounds, group, wire_dtype=wire).wait() is x
                mine = slice(*bounds[me : me + 2])
                assert torch.equal(x[mine], total[mine]), (bounds, dtype, wire)
                assert torch.equal(x[bounds[-1] :], data[me][bounds[-1] :]), "beyond the bounds"

                x = torch.full_like(total, -1)
                x[mine] = total[mine]
                assert start_all_gather_v(x, bounds, group, wire_dtype=wire).wait() is x
                inside = slice(bounds[0], bounds[-1])
                assert torch.equal(x[inside], total[inside]), (bounds, dtype, wire)
                assert (x[bounds[-1] :] == -1).all(), "beyond the bounds"

                if dtype.is_floating_point:
                    x = torch.full_like(total, -1)
                    own = total[mine].double()
                    prepost_all_gather_v(x, bounds, group, wire_dtype=wire, own_shard=own)().wait()
                    assert torch.equal(x[inside], total[inside]), (bounds, dtype, wire)


def over(ranks: list[int]) -> None:
    if dist.get_rank() in ranks:
        there_and_back(Groups(dist.get_rank()).of(ranks))


@pytest.mark.few(1)
@pytest.mark.parametrize("members", [[1, 3], [0], [0, 1, 2]], ids=str)
def test_a_sum_is_there_and_a_gather_brings_it_back(ranks, members):
    ranks(max(members) + 1).run(over, members)


@pytest.mark.few(1)
@pytest.mark.parametrize("size", [2, 3])
def test_the_same_by_flat_collectives(size):
    """What NCCL is given, here delivered by the linter, which also finds nothing to object to."""
    lint(lambda rank: there_and_back(world()), size).check()


def in_order() -> None:
    """Thirds are not exact in binary, so another order would give other bits."""
    group = world()
    me, size = group.rank(), group.size()
    data = [torch.rand(999, generator=torch.Generator().manual_seed(i)) / 3 for i in range(size)]
    total = data[0].clone()
    for x in data[1:]:
        total += x
    for bounds in ([0] * size + [999], [0, *[999] * size], [0, 100, 120, 700, 999]):
        x = data[me].clone()
        start_reduce_scatter_v(x, bounds, group).wait()
        mine = slice(*bounds[me : me + 2])
        assert torch.equal(x[mine], total[mine]), bounds


def test_the_order_of_a_sum_does_not_depend_on_the_cut(ranks):
    ranks(4).run(in_order)


def rounded(dtype: torch.dtype) -> tuple[float, torch.Tensor]:
    group = world()
    me, bounds = group.rank(), [0, 1, 2, 3, 4]
    x = torch.full((4,), 256.0 if me == 0 else 1.0, dtype=dtype)
    start_reduce_scatter_v(x, bounds, group, wire_dtype=torch.bfloat16).wait()
    y = torch.full((4,), 1 / 3 + me)
    return x[me].item(), start_all_gather_v(y, bounds, group, wire_dtype=torch.bfloat16).wait()


@pytest.mark.own_transport("gloo's messages are added in float32, NCCL adds in the dtype")
def test_only_what_travels_is_rounded(ranks):
    """256 + 1 + 1 + 1 is 256 in steps of bf16; a sum of bf16 is rounded once, to 260."""
    for dtype, expected in ((torch.float32, 259.0), (torch.bfloat16, 260.0)):
        found = ranks(4).run(rounded, dtype)
        assert [total for total, _ in found] == [expected] * 4
        thirds = (torch.arange(4) + 1 / 3).bfloat16().float()
        assert all(torch.equal(gathered, thirds) for _, gathered in found), "mine too"


def ahead() -> None:
    """Receives of several calls are posted before the first sends, other calls come between, and
    ranks differ in how soon they are there."""
    group = world()
    me, size, num = group.rank(), group.size(), 400_000
    bounds = [num * i // size for i in range(size + 1)]
    mine = slice(*bounds[me : me + 2])
    sums = [torch.empty(num) for _ in range(3)]
    starts = [prepost_reduce_scatter_v(x, bounds, group) for x in sums]
    gathers = [prepost_all_gather_v(torch.full((num,), 7.0), bounds, group) for _ in sums]
    assert p.all_reduce(torch.ones(3), group).sum() == 3 * size
    time.sleep(0.05 * me)
    under_way = []
    for k, (x, start) in enumerate(zip(sums, starts, strict=True)):
        x.fill_(k + me)
        under_way.append(start())
    assert p.all_gather(torch.ones(2), group).sum() == 2 * size
    done = [pending.wait() for pending in under_way]
    for k, x in enumerate(done):
        assert (x[mine] == k * size + sum(range(size))).all()
    x = torch.full((num,), float(me))
    gathers[1] = gathers[1]()
    assert start_all_gather_v(x, bounds, group).wait().unique().tolist() == list(range(size))
    assert gathers[1].wait()[mine].sum() == 7 * len(x[mine])
    del gathers, starts
    gc.collect()  # what all expected and none began
    start_reduce_scatter_v(x, bounds, group)  # and what nobody waits for
    x = torch.ones(num)
    assert (start_reduce_scatter_v(x, bounds, group).wait()[mine] == size).all()
    p.barrier(group)


@pytest.mark.parametrize("size", [2, 3])
def test_what_is_expected_may_begin_later_or_never(ranks, size):
    ranks(size).run(ahead)


def seen() -> list[str]:
    group, x = world(), torch.ones(4)
    recorder.phase = "backward"
    start_reduce_scatter_v(x, [0, 2, 4], group).wait()
    pending = start_all_gather_v(x, [0, 2, 4], group)
    entries = recorder.snapshot()["calls"][-2:]
    assert recorder.snapshot()["phase"] == "backward" and entries[0]["state"] == "done"
    pending.wait()
    return [entry["operation"] for entry in entries]


@pytest.mark.own_transport("what the record says of gloo's calls")
def test_calls_are_in_the_record(ranks):
    assert ranks(2).run(seen) == [["reduce_scatter", "all_gather"]] * 2


def mixed_up(how: str) -> str:
    """Rank 0 sums what rank 1 gathers, or cuts otherwise, or has not come to."""
    rank = dist.get_rank()
    pair, x = Groups(rank).of([0, 1], use="a pair"), torch.ones(4)
    p.set_timeout(pair, 0.5)
    if rank and how == "absent":
        time.sleep(1)
        return "reduce_scatter over"
    other = rank and "otherwise" not in how
    start = start_all_gather_v if other else start_reduce_scatter_v
    cut = [0, 3, 4] if rank and "otherwise" in how else [0, 2, 4]
    with checked_calls(how.startswith("checked")), pytest.raises(CommError) as caught:
        start(x, cut, pair).wait()
    return str(caught.value)


@pytest.mark.own_transport("a message of gloo has a limit of its own")
@pytest.mark.parametrize("how", ["plain", "absent", "checked", "checked, cut otherwise"])
def test_a_call_that_others_do_not_make_fails_by_name(ranks, how):
    first, second = ranks(2).run(mixed_up, how)
    if how.startswith("checked"):
        assert first == second and "differs: rank 0: reduce_scatter of float32" in first
    else:
        assert first.startswith("reduce_scatter over ranks (0, 1) failed")
        assert second.startswith("all_gather over" if how == "plain" else "reduce_scatter over")


def test_the_linter_names_ranks_that_differ():
    def step(rank: int) -> None:
        start = start_all_gather_v if rank else start_reduce_scatter_v
        start(torch.ones(4), [0, 2, 4], world()).wait()

    with pytest.raises(CommError, match="reduce_scatter"):
        lint(step, 2).check()


def refused() -> list[str]:
    x, group, texts = torch.ones(6), world(), []
    for call in (
        lambda: start_reduce_scatter_v(x, [0, 6], group),
        lambda: start_all_gather_v(x, [0, 4, 2], group),
        lambda: start_reduce_scatter_v(x, [0, 3, 7], group),
        lambda: start_reduce_scatter_v(x.view(2, 3), [0, 1, 2], group),
        lambda: start_all_gather_v(torch.ones(8)[::2], [0, 2, 4], group),
        lambda: start_reduce_scatter_v(x.to(torch.int16), [0, 3, 6], group),
        lambda: start_reduce_scatter_v(x.long(), [0, 3, 6], group, wire_dtype=torch.bfloat16),
        lambda: start_all_gather_v(x, [0, 3, 6], group, wire_dtype=torch.int8),
    ):
        with pytest.raises(CommError) as caught:
            call()
        texts.append(str(caught.value))
    return texts


REFUSED = [
    "bounds [0, 6] must be 3 ascending indices",
    "bounds [0, 4, 2] must be 3 ascending",
    "up to element 7 in place in a tensor of shape (6,)",
    "shape (2, 3)",
    "stride (2,)",
    "dtype int16",
    "int64 cannot be rounded to bfloat16",
    "float32 cannot be rounded to int8",
]


def test_bad_input_is_refused_before_anything_is_sent(ranks):
    for texts in ranks(2).run(refused):
        assert all(part in text for part, text in zip(REFUSED, texts, strict=True)), texts
