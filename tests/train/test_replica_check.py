"""What ranks hold alike is compared to the bit, and nothing goes without a layout."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from tests.train import parity
from tests.train.test_nonfinite import BASE
from torchdistpackage.ddp.sharded import ShardedOptimizer
from torchdistpackage.errors import CommError, LayoutError
from torchdistpackage.train import own_model as builder
from torchdistpackage.train.build import make_loop
from torchdistpackage.train.replica_check import RANDOM, ReplicaCheck
from torchdistpackage.train.step import Trainer
from torchdistpackage.train.train_state import TrainState


def flipped(extra: list[str], rank: int, name: str) -> str:
    """What the check says on this rank once one bit of one parameter of one rank is another."""
    run = parity.trainer([*BASE, *extra])
    check = ReplicaCheck(run)
    run.train_step(1).wait()
    check()
    run.train_step(2).wait()
    check()
    # of ZeRO's shards of a small tensor one data rank may have all
    if dist.get_rank() in ((rank, rank + 2) if "#" in name and len(extra) > 2 else (rank,)):
        flip(run, name)
    try:
        check()
    except CommError as error:
        return str(error)
    return ""


def flip(run: Trainer, name: str) -> None:
    """Make one bit another: of a parameter, of an optimizer's state, or of the random state."""
    if name == RANDOM:
        torch.rand(1)
        return
    parameter_name, _, key = name.partition("#")
    optimizer = run.optimizer
    for local, parameter in run.stage.named_parameters():
        if run.layouts[local].name != parameter_name:
            continue
        tensor = parameter.data
        if isinstance(optimizer, ShardedOptimizer) and key:
            shards = [x.tensor for x in optimizer.shards if x.parameter is parameter]
            if not shards:
                continue  # it is all of another rank
            tensor = shards[0].data if key == "master" else optimizer.state[shards[0]][key]
        elif key:
            assert optimizer is not None
            tensor = optimizer.state[parameter][key]
        tensor.view(torch.int32).view(-1)[1] ^= 1


MOE = "model.moe={num_experts: 4, top_k: 2, hidden: 8}"


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("size", "extra", "name", "holders"),
    [
        (4, ["data=4", "expert=2", MOE], "blocks.1.mlp.experts.down", {1, 3}),
        (2, ["data=2", "expert=2", MOE], "blocks.1.mlp.router.weight", {0, 1}),
        (2, ["tensor=2", "data=1", MOE], "blocks.1.mlp.router.weight#exp_avg", {0, 1}),
        (2, ["tensor=2", "data=1", "sequence_parallel=true"], "blocks.1.norm2.weight", {0, 1}),
        (4, ["data=2", "tensor=2", "zero=3"], "blocks.0.norm1.weight#master", {0, 1, 2, 3}),
        (4, ["data=2", "tensor=2", "zero=1"], "blocks.0.norm1.weight#exp_avg", {0, 1, 2, 3}),
        (2, ["data=2"], "blocks.0.attention.qkv.weight#exp_avg_sq", {0, 1}),
        (2, ["tensor=2", "data=1"], RANDOM, {0, 1}),
        (2, ["data=2"], "blocks.0.mlp.up.weight", {0, 1}),
        (2, ["data=2"], "blocks.0.attention.qkv.weight", {0, 1}),
        (2, ["data=2", "zero=1"], "blocks.0.attention.qkv.weight", {0, 1}),
        (2, ["pipe=2", "data=1"], "embed.weight", {0, 1}),
        (2, ["context=2", "data=1"], "blocks.0.norm1.weight", {0, 1}),
        (4, ["data=2", "tensor=2"], "blocks.0.attention.qkv.weight", {1, 3}),
        (4, ["data=2", "tensor=2"], "blocks.0.norm1.weight", {0, 1, 2, 3}),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, list) else "",
)
def test_a_flipped_bit_is_seen_by_all_that_hold_a_copy(ranks, size, extra, name, holders):
    words = [x if x.startswith("model.") else f"parallel.{x}" for x in extra]
    told = ranks(size).run(flipped, words, 1, name)
    for rank, text in enumerate(told):
        assert (name in text) == (rank in holders)
    if "#" in name and len(holders) > 2:  # of four ranks two hold the shard
        assert "between ranks (2, 3)" in told[0] or "between ranks (0, 1)" in told[0]
    elif len(holders) > 2:
        assert f"{name} on rank 1" in told[1]


def drifting(folder: str, more: list[str]) -> str:
    """A run in which a bit of rank 1 flips in the third step; how it ended."""
    run = parity.trainer([*BASE, "parallel.data=2", "train.check_replicas_every=2", *more])
    train_step = run.train_step

    def flips(step: int, **options):
        issued = train_step(step, **options)
        if step == 3 and dist.get_rank() == 1:
            flip(run, "blocks.1.norm1.weight")
        return issued

    run.train_step = flips  # type: ignore[method-assign]
    loop = make_loop(run, TrainState(), Path(folder))
    try:
        loop.run()
    except CommError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_run_keeps_the_values_that_differ_and_ends_or_goes_on(ranks, tmp_path, goes_on):
    more = ["train.on_replicas_differ=continue"] if goes_on else []
    told = ranks(2).run(drifting, str(tmp_path), more)
    folder = tmp_path / "replicas" / "step_000004"
    one, other = (load_file(folder / f"rank{rank}.safetensors") for rank in (0, 1))
    assert {*one} == {*other} and "blocks.1.norm1.weight" in one
    assert not torch.equal(one["blocks.1.norm1.weight"], other["blocks.1.norm1.weight"])
    if goes_on:
        rows = [json.loads(x) for x in (tmp_path / "metrics.jsonl").read_text().splitlines()]
        assert told == ["", ""] and len(rows) == 4
    else:
        assert told[0] == told[1] and told[0].startswith("step 4: ")
        assert "blocks.1.norm1.weight between ranks (0, 1)" in told[0] and str(folder) in told[0]


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
