"""What ranks hold alike is compared to the bit, and nothing goes without a layout."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.train import parity
from tests.train.test_nonfinite import BASE
from torchdistpackage.errors import CommError, LayoutError
from torchdistpackage.train import own_model as builder
from torchdistpackage.train.callbacks import ReplicaCheck


def flipped(extra: list[str], rank: int, name: str) -> str:
    """What the check says on this rank once one bit of one parameter of one rank is another."""
    run = parity.trainer([*BASE, *extra])
    check = ReplicaCheck(run)
    run.train_step(1).wait()
    check()
    run.train_step(2).wait()
    check()
    for local, parameter in run.stage.named_parameters():
        if run.layouts[local].name == name and dist.get_rank() == rank:
            parameter.data.view(torch.int32).view(-1)[1] ^= 1
    try:
        check()
    except CommError as error:
        return str(error)
    return ""


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("size", "extra", "name", "holders"),
    [
        (2, ["data=2", "zero=3"], "blocks.0.attention.qkv.weight", {0, 1}),
        (2, ["data=2"], "blocks.0.attention.qkv.weight", {0, 1}),
        (2, ["data=2", "zero=1"], "blocks.0.attention.qkv.weight", {0, 1}),
        (2, ["pipe=2", "data=1"], "embed.weight", {0, 1}),
        (4, ["data=2", "tensor=2"], "blocks.0.attention.qkv.weight", {1, 3}),
        (4, ["data=2", "tensor=2"], "blocks.0.norm1.weight", {0, 1, 2, 3}),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, list) else "",
)
def test_a_flipped_bit_is_seen_by_all_that_hold_a_copy(ranks, size, extra, name, holders):
    told = ranks(size).run(flipped, [f"parallel.{x}" for x in extra], 1, name)
    for rank, text in enumerate(told):
        assert (name in text) == (rank in holders)
    if len(holders) > 2:
        assert f"{name} on rank 1" in told[1]


def undeclared() -> str:
    chunks_of = builder.chunks_of

    def without(module: nn.Module, *args, **kwargs):
        stages, layouts = chunks_of(module, *args, **kwargs)
        del layouts[next(iter(layouts))]
        return stages, layouts

    builder.chunks_of = without
    own = ["model.name=null", "model.target=tests.train.sources:build", "model.args={width: 4}",
           "data.target=tests.train.sources:Line", "data.args={}"]  # fmt: skip
    try:
        with pytest.raises(LayoutError) as error:
            parity.trainer(own)
    finally:
        builder.chunks_of = chunks_of
    return str(error.value)


def test_a_parameter_without_layout_is_named(ranks):
    (text,) = ranks(1).run(undeclared)
    assert text.startswith("1 parameters have no layout: 0.weight; the module that makes them")
