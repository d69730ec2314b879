"""Shared by the parity tests: a run's configuration for any layout, and what its ranks hold."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from torchdistpackage.config.load import loads
from torchdistpackage.config.schema import RunConfig
from torchdistpackage.layout.derive import blocks
from torchdistpackage.train.build import build
from torchdistpackage.train.plan import make_plan
from torchdistpackage.train.step import Trainer

Held = list[tuple[str, tuple[int, ...], tuple[slice, ...], Tensor | None]]
"""(global name, global shape, where, elements) of what one rank holds."""


def config(overrides: list[str]) -> RunConfig:
    """Defaults with `key=value`s, of which a later one replaces an earlier one."""
    last = {item.partition("=")[0]: item for item in overrides}
    return loads("launch: {local: {procs: null}}", overrides=list(last.values()))


def trainer(overrides: list[str]) -> Trainer:
    plan = make_plan(config(overrides), dist.get_world_size())
    return build(plan, dist.get_rank(), torch.device("cpu"))


def held(run: Trainer, pick: str) -> Held:
    """Every block of parameters ("data") or gradients ("grad") of this rank."""
    found: Held = []
    for name, parameter in run.stage.named_parameters():
        layout = run.layouts[name]
        tensor = getattr(parameter, pick)
        for where, local in blocks(layout, run.plan.topology.view(layout.view), run.rank):
            value = None if tensor is None else tensor.detach()[local].clone()
            found.append((layout.name, layout.shape, where, value))
    return found


def whole(ranks: Iterable[Held], *, rtol: float = 1e-12, atol: float = 1e-14) -> dict[str, Tensor]:
    """Every tensor by global name, put together; elements that several ranks hold must agree."""
    tensors: dict[str, Tensor] = {}
    for pieces in ranks:
        for name, shape, where, value in pieces:
            assert value is not None, f"{name} has no gradient"
            full = tensors.setdefault(name, torch.full(shape, float("nan"), dtype=value.dtype))
            known = full[where]
            seen = ~known.isnan()
            torch.testing.assert_close(known[seen], value[seen], rtol=rtol, atol=atol)
            full[where] = value
    for name, full in tensors.items():
        assert not full.isnan().any(), f"{name}: an element is on no rank"
    return tensors
