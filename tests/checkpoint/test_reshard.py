"""A checkpoint of any layout is one of every layout: each rank finds what it holds."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.checkpoint.test_save_load import adamw, build, check_equal, cut, of, step
from torchdistpackage.checkpoint.load import load
from torchdistpackage.checkpoint.save import degrees_of, save
from torchdistpackage.layout.layout import Layout

Axes = tuple[tuple[str, int], ...]
ONE: Axes = (("data", 1),)
CHANGES: list[tuple[Axes, Axes]] = [
    ((("tensor", 4),), ONE),
    (ONE, (("data", 2), ("pipe", 2), ("tensor", 1))),
    ((("data", 2), ("pipe", 1), ("tensor", 1)), (("tensor", 4),)),
    ((("pipe", 2), ("data", 1), ("tensor", 2)), (("data", 1), ("tensor", 2))),
]


def write(folder: str, axes: Axes) -> None:
    world, rank = of(axes), dist.get_rank()
    params = build(world, rank)
    optimizer = adamw(params)
    for salt in (1, 2):
        step(params, optimizer, world, rank, salt)
    common: dict[str, Any] = {"topology": world, "rank": rank, "optimizer": optimizer}
    save(folder, step=400, tokens=99, params=params, extras={"mine": rank}, **common)


def read(folder: str, axes: Axes, of_writer: Axes) -> None:
    world, rank = of(axes), dist.get_rank()
    params, other = build(world, rank), build(world, rank, salt=9)
    optimizer, into = adamw(params), adamw(other)
    for salt in (1, 2):
        step(params, optimizer, world, rank, salt)
    step(other, into, world, rank, 7)  # state that must be overwritten
    common: dict[str, Any] = {"topology": world, "rank": rank, "optimizer": into}
    loaded = load(f"{folder}/step_000400", params=other, **common)
    assert loaded.degrees == degrees_of(of(of_writer))
    assert loaded.extras == {}
    check_equal(params, optimizer, other, into)
    for each, its in ((params, optimizer), (other, into)):
        step(each, its, world, rank, 3)
    check_equal(params, optimizer, other, into)


@pytest.mark.parametrize(("before", "after"), CHANGES, ids=str)
def test_parameters_and_moments_come_back_bitwise_on_another_layout(ranks, tmp_path, before, after):
    ranks(of(before).world_size).run(write, str(tmp_path), before)
    ranks(of(after).world_size).run(read, str(tmp_path), after, before)


def chunked_and_even(folder: str) -> None:
    """What torch.chunk's rule cut, as versions before the even rule did, is read by that rule."""
    world, rank = of((("tensor", 4),)), dist.get_rank()
    split = (("tensor",), ())
    chunks = tuple(((start, stop),) for start, stop in ((0, 3), (3, 6), (6, 9), (9, 9)))
    by_chunks = Layout("w", (9, 3), split, ranges=chunks)
    by_even = Layout("w", (9, 3), split, uneven=True)
    before, truth = (cut(layout, world, rank, salt=1) for layout in (by_chunks, by_even))
    assert [len(before), len(truth)] == [[3, 3], [3, 2], [3, 2], [0, 2]][rank]
    common: dict[str, Any] = {"topology": world, "rank": rank}
    save(folder, step=1, tokens=1, params={"w": (nn.Parameter(before), by_chunks)}, **common)
    after = nn.Parameter(torch.zeros_like(truth))
    load(f"{folder}/step_000001", params={"w": (after, by_even)}, **common)
    assert torch.equal(after, truth)


def test_parts_of_another_rule_of_rounding_are_read(ranks, tmp_path):
    ranks(4).run(chunked_and_even, str(tmp_path))
