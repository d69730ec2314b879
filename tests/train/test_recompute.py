"""Recomputed modules: the same numbers on every layout, and less memory kept."""

import itertools
import re

import pytest
import torch
from torch import nn

from tests.ddp.allocated import Meter
from tests.train import parity
from torchdistpackage.errors import ConfigError
from torchdistpackage.plan.memory import memory
from torchdistpackage.plan.run_plan import make_plan
from torchdistpackage.train.recompute import measured, recompute_blocks
from torchdistpackage.train.staged_model import TrainStages

RUN = [
    *("model.layers=4", "model.dim=32", "model.heads=4", "data.seq_len=32", "train.steps=2"),
    *("data.global_batch=8", "pipeline.microbatches=2", "optim.warmup_steps=1"),
    *("precision.dtype=float64", "model.dropout=0.1", "train.eval_batches=1"),
]


def trained(extra: list[str]) -> tuple[list[float], parity.Held, tuple[str, ...]]:
    """(losses of two steps, parameters, names of what is recomputed)."""
    run = parity.trainer([*RUN, *extra])
    losses = [run.train_step(step).wait().loss for step in (1, 2)]
    held = parity.held(run, "data")
    run.close()
    return losses, held, run.recomputed or run.offloaded


LAYOUTS = {
    "data": ["parallel.data=2", "parallel.zero=0"],
    "zero1": ["parallel.data=2", "parallel.zero=1"],
    "zero3": ["parallel.data=2", "parallel.zero=3"],
    "pipe": ["parallel.pipe=2"],
    "pipe-zb": ["parallel.pipe=2", "pipeline.schedule=zb-h1"],
    "tensor": ["parallel.tensor=2", "parallel.sequence_parallel=true"],
}


def limit_gb(extra: list[str], share: float, base: list[str] = RUN) -> float:
    """A limit that leaves `share` of its activations to this rank."""
    run = parity.trainer([*base, *extra])
    total = measured(run)["root"]["fwd_mem"] / 1e3
    run.close()
    state = memory(run.plan.config, run.plan.topology, run.layouts.values(), run.rank)
    return state.state_bytes / 1e9 + share * total


def cases():
    small = {("tensor", "blocks"), ("pipe-zb", "blocks"), ("zero3", "auto"), ("pipe", "auto")}
    small |= {("zero3", "offload")}
    for case in itertools.product(LAYOUTS, ("blocks", "offload", "auto")):
        yield pytest.param(*case, marks=[] if case in small else [pytest.mark.full])


@pytest.mark.few(1)
@pytest.mark.parametrize(("layout", "how"), list(cases()))
def test_numbers_are_bit_for_bit_those_without(ranks, layout, how):
    """With dropout, whose masks are drawn again."""
    extra = LAYOUTS[layout]
    plain = ranks(2).run(trained, extra)
    limit = []
    if how == "auto":
        limit = [f"train.memory_gb={max(ranks(2).run(limit_gb, extra, 0.85))}"]
    again = ranks(2).run(trained, [*extra, f"train.recompute={how}", *limit])
    for (losses, held, _), (want_losses, want, nothing) in zip(again, plain, strict=True):
        assert losses == want_losses and not nothing
        for (name, _, _, x), (same, _, _, y) in zip(held, want, strict=True):
            assert name == same and torch.equal(x, y), name
    assert any(names for _, _, names in again), "something is recomputed or offloaded"
    if layout == "tensor":
        assert again[0][2] == again[1][2], "their messages must match"
    if how != "auto":
        found = sorted({name.split(".", 1)[1] for _, _, names in again for name in names})
        assert found == [f"blocks.{i}" for i in range(4)]


def peaks(extra: list[str]) -> tuple[int, tuple[str, ...]]:
    """(most bytes alive in the second step beyond those before it, names)."""
    run = parity.trainer([*RUN, "model.dropout=0", "pipeline.microbatches=1", *extra])
    run.train_step(1).wait()
    meter = Meter()
    meter.run(run.train_step, 2).wait()
    run.close()
    return meter.peak, run.recomputed


def test_a_limit_leaves_less_alive_and_blocks_least(ranks):
    (limit,) = ranks(1).run(limit_gb, ["pipeline.microbatches=1", "model.dropout=0"], 0.75)
    (plain, _), (auto, some), (blocks, every) = (
        ranks(1).run(peaks, extra)[0]
        for extra in (
            [],
            ["train.recompute=auto", f"train.memory_gb={limit}"],
            ["train.recompute=blocks"],
        )
    )
    assert len(every) == 4 and some and set(some) != set(every)
    # gradients and what is computed at the moment are in the peak too
    assert blocks < 0.65 * plain and auto < 0.85 * plain


def refused(extra: list[str]) -> str:
    try:
        parity.trainer([*RUN, *extra])
    except ConfigError as error:
        return str(error)
    return "not refused"


def test_a_limit_that_nothing_meets_is_refused_on_all_ranks(ranks):
    extra = ["parallel.pipe=2"]
    limit = max(ranks(2).run(limit_gb, extra, 0.05))
    told = ranks(2).run(refused, [*extra, "train.recompute=auto", f"train.memory_gb={limit}"])
    assert told[0] == told[1]
    assert re.search(r"auto: activations of \d of 2 ranks do not fit into what weights", told[0])
    assert "GB if every module that can be is recomputed" in told[0]


def test_a_plan_knows_what_is_left_and_refuses_no_room():
    config = parity.config([*RUN, "train.recompute=auto", "train.memory_gb=0.001"])
    with pytest.raises(ConfigError, match=r"pipe 0 holds 0\.001\d+ GB .* leaves nothing of train"):
        make_plan(config, 1)
    with pytest.raises(ConfigError, match=r"train\.recompute=auto needs train\.memory_gb"):
        parity.config([*RUN, "train.recompute=auto"])
    with pytest.raises(ConfigError, match=r"train\.recompute.*none or blocks or offload or auto"):
        parity.config([*RUN, "train.recompute=all"])
    with pytest.raises(ConfigError, match=r"train\.memory_gb.*above 0"):
        parity.config([*RUN, "train.memory_gb=0"])


def test_blocks_of_a_chain_are_its_children_with_parts():
    block = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    stages = TrainStages({0: nn.Sequential(nn.Linear(2, 2), block), 2: nn.Sequential(nn.ReLU())})
    assert recompute_blocks(stages) == ("0.1",)
    decoder = nn.Module()
    decoder.layers, decoder.norm = nn.ModuleList([nn.Linear(1, 1)]), nn.Sequential(nn.ReLU())
    assert recompute_blocks(TrainStages({1: decoder})) == ("1.layers.0",)
