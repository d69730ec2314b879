"""A checkpoint of any layout is one of every layout: each rank finds what it holds."""

from typing import Any

import pytest
import torch.distributed as dist

from tests.checkpoint.test_save_load import adamw, build, check_equal, of, step
from torchdistpackage.checkpoint.load import load
from torchdistpackage.checkpoint.save import degrees_of, save

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
