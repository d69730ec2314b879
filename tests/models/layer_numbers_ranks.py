"""What each layer of a model really sends, computes and keeps on ranks, beside what is stated."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.train import parity
from torchdistpackage.comm import flight_recorder
from torchdistpackage.comm.flight_recorder import DTYPE, OPERATION, SHAPE, recorder
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.layout.mark import mark_of
from torchdistpackage.lazy import resolve
from torchdistpackage.models.gpt_layout import HALVES
from torchdistpackage.plan.run_plan import Plan, make_plan
from torchdistpackage.plan.traffic import microbatch
from torchdistpackage.tools.recompute import checkpoint_modules
from torchdistpackage.train.build import build_model

Calls = Counter[tuple[str, str, int]]
"""(operation, dtype, elements of one call) -> how many calls."""


@dataclass(frozen=True)
class Record:
    """One layer: recorded and stated. kept: None where it is not stated."""

    layer: str
    calls: tuple[Calls, Calls]
    forward_flops: tuple[float, float]
    backward_flops: float
    kept: tuple[int, int] | None


def records(runs: list[list[str]]) -> list[list[Record]]:
    """For each run, the records of its layers, each run alone, forward and backward."""
    found: list[list[Record]] = []
    for overrides in runs:
        plan = make_plan(parity.config(overrides), dist.get_world_size())
        build_model(plan, dist.get_rank(), torch.device("cpu"))  # sets the groups up
        found.append([_record(plan, held) for held in _groups(plan)])
    return found


def _groups(plan: Plan) -> Iterator[Sequence[int]]:
    """Yield what runs alone: a piece; all of a block where the backward computes it again."""
    pieces = plan.pieces
    if plan.config.train.recompute == "none" or not pieces[1].endswith(HALVES):
        yield from ([index] for index in range(len(pieces)))
        return
    yield [0]
    yield from ([index, index + 1] for index in range(1, len(pieces) - 1, 2))
    yield [len(pieces) - 1]


def _record(plan: Plan, held: Sequence[int]) -> Record:
    assert plan.model is not None
    of = microbatch(plan, dist.get_rank())
    stated = plan.model.layer_numbers(held, of)
    stage = _stage(plan, held)
    calls = Calls()
    for call in (call for layer in stated for call in layer.calls):
        calls[call.operation, call.dtype, int(call.num_elements)] += call.number
    with patch.object(recorder, "_ring", []):
        saved = _run(plan, stage, held)
        recorded = _recorded(recorder._ring)
    with sdpa_kernel(SDPBackend.MATH):  # of whose matmuls the counter knows
        flops = _flops(plan, stage, held)
    is_stated = all(layer.is_exact for layer in stated) and not of.recomputed
    return Record(
        " + ".join(layer.layer for layer in stated),
        (recorded, +calls),
        (flops[0], sum(layer.flops for layer in stated)),
        flops[1],
        (saved, sum(layer.kept_bytes for layer in stated)) if is_stated else None,
    )


def _stage(plan: Plan, held: Sequence[int]) -> nn.Module:
    assert plan.model is not None
    torch.manual_seed(0)
    dtype = getattr(torch, plan.numbers.weights.dtype)
    stage = resolve(plan.model.module)(
        plan.shape,
        pieces=range(held[0], held[-1] + 1),
        group=tpc.get_group("tensor"),
        dtype=dtype,
    )
    for parameter in stage.parameters():
        nn.init.normal_(parameter, 0, 0.02)
        if (mark := mark_of(parameter)) is not None:
            mark.num_reducers = 1  # as in a run, whose reducer sums partial gradients
    if plan.config.train.recompute == "blocks":
        own = getattr(stage, "block_names", None)
        names = own() if own else [f"blocks.{name}" for name in getattr(stage, "blocks", {})]
        checkpoint_modules(stage, names)
    return stage


def _forward(plan: Plan, stage: nn.Module, held: Sequence[int]) -> torch.Tensor:
    of = microbatch(plan, dist.get_rank())
    shape: Any = plan.shape
    dtype, is_gpt = getattr(torch, of.stream), not hasattr(shape, "kind")
    ids = torch.randint(shape.vocab, (of.samples, of.tokens))
    tokens = of.tokens // (of.tensor if shape.sequence_parallel else 1)
    sizes = (tokens, of.samples) if is_gpt else (of.samples, tokens)
    x = ids if held[0] == 0 else torch.randn(*sizes, shape.dim, dtype=dtype, requires_grad=True)
    narrow = of.products != of.stream
    with torch.autocast("cpu", getattr(torch, of.products), enabled=narrow):
        y = stage(x)
        return stage.loss(y, ids)[0] if held[-1] == len(plan.pieces) - 1 else y


def _run(plan: Plan, stage: nn.Module, held: Sequence[int]) -> int:
    """Run forward and backward; return the bytes that autograd kept between them."""
    known = {p.untyped_storage()._cdata for p in (*stage.parameters(), *stage.buffers())}
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in known:
            storages[storage._cdata] = storage
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        y = _forward(plan, stage, held)
    num_bytes = sum(storage.nbytes() for storage in storages.values())
    y.float().sum().backward()
    return num_bytes


def _grouped_flops(
    rows: torch.Size, matrices: torch.Size, *_: object, out_shape: object = None, **__: object
) -> int:
    """Those of `grouped_mm`, in whose groups each row is once; torch 2.13 counts none of them."""
    if len(matrices) == 3:
        return 2 * math.prod(rows) * matrices[-1]
    return 2 * math.prod(rows) * matrices[1]


GROUPED = {torch.ops.aten._grouped_mm: _grouped_flops}


def _flops(plan: Plan, stage: nn.Module, held: Sequence[int]) -> tuple[float, float]:
    with FlopCounterMode(display=False, custom_mapping=GROUPED) as forward:
        y = _forward(plan, stage, held)
    with FlopCounterMode(display=False, custom_mapping=GROUPED) as backward:
        y.float().sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


def _recorded(ring: list[flight_recorder.Call]) -> Calls:
    calls = Calls()
    for call in ring:
        dtype = flight_recorder.dtype_name(call[DTYPE])
        calls[call[OPERATION], dtype, math.prod(call[SHAPE])] += 1
    return calls
