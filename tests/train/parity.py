"""Shared by the parity tests: a run's configuration for any layout, and what its ranks hold."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from torchdistpackage.checkpoint.parts import TopologyRank
from torchdistpackage.comm import primitives
from torchdistpackage.config.load import loads
from torchdistpackage.config.schema import RunConfig
from torchdistpackage.ddp.sharded import ShardedOptimizer
from torchdistpackage.plan.run_plan import make_plan
from torchdistpackage.train.build import build
from torchdistpackage.train.step import Trainer

Held = list[tuple[str, tuple[int, ...], tuple[slice, ...], Tensor]]
"""(global name, global shape, where, elements) of what one rank holds."""


def config(overrides: list[str]) -> RunConfig:
    """Defaults with `key=value`s, of which a later one replaces an earlier one."""
    last = {item.partition("=")[0]: item for item in overrides}
    return loads("launch: {local: {procs: null}}", overrides=list(last.values()))


def trainer(overrides: list[str]) -> Trainer:
    """On the device of the default group: that of the tests is the CPU."""
    plan = make_plan(config(overrides), dist.get_world_size())
    return build(plan, dist.get_rank(), primitives.device_of(dist.group.WORLD))


def held(run: Trainer, pick: str) -> Held:
    """Every block of parameters ("data") or gradients ("grad") of this rank, or of its shards."""
    place = TopologyRank(run.plan.topology, run.rank)
    if pick == "data" and isinstance(run.optimizer, ShardedOptimizer):
        run.optimizer.finish()
    named = [(run.layouts[name], p) for name, p in run.stage.named_parameters()]
    mine = [place.whole(layout, x) for layout, p in named if (x := getattr(p, pick)) is not None]
    if pick == "grad" and isinstance(run.optimizer, ShardedOptimizer):
        layouts = {p: layout for layout, p in named}
        shards = run.optimizer.shards
        mine = [place.sliced(layouts[s.parameter], s, s.tensor.grad) for s in shards]
    return [(x.name, x.shape, where, t.to("cpu", copy=True)) for x in mine for where, t in x.parts]


def whole(ranks: Iterable[Held], *, rtol: float = 1e-12, atol: float = 1e-14) -> dict[str, Tensor]:
    """Every tensor by global name, put together; elements that several ranks hold must agree."""
    tensors: dict[str, Tensor] = {}
    for pieces in ranks:
        for name, shape, where, value in pieces:
            full = tensors.setdefault(name, torch.full(shape, float("nan"), dtype=value.dtype))
            known = full[where]
            seen = ~known.isnan()
            torch.testing.assert_close(known[seen], value[seen], rtol=rtol, atol=atol)
            full[where] = value
    for name, full in tensors.items():
        assert not full.isnan().any(), f"{name}: an element is on no rank"
    return tensors


def expect_close(results: Iterable[Held], truth: Iterable[Held], *, least: float = 1e-30) -> None:
    """Put together, every tensor is within 1e-9 of the largest element of the one in `truth`,
    or of `least` where that is larger.
    """
    mine, reference = whole(results), whole(truth)
    assert mine.keys() == reference.keys()
    for name, true in reference.items():
        scale = true.abs().max().clamp(min=least)
        worst = ((mine[name] - true).abs().max() / scale).item()
        assert worst < 1e-9, f"{name}: off by {worst:.2e} of its largest element"
