"""The ranks of `compare_layouts`: they build the model, take three steps and note them."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torchdistpackage.comm.nested import leaves_of
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.equivalence.record import (
    ParityRecord,
    copies,
    dropout_masks,
    recording,
    told_where,
    without_dropout,
)
from torchdistpackage.errors import ConfigError, RankError
from torchdistpackage.harness.pool import Ranks
from torchdistpackage.launch.entrypoint import EntryPoint

NUM_STEPS = 3
SEED = 0
_DEFAULT = (("data", 1), ("pipe", 1), ("context", 1), ("tensor", 1))


@dataclass(frozen=True, slots=True)
class ParityModel:
    """A model of yours on one rank, as `build` of `compare_layouts` returns it.

    module: whose parameters, buffers and modules are compared, by name. step: called with what
    `batch` gave; takes a whole step, with the forward, the backward, the sum over ranks and the
    update, leaves the gradients of it in `.grad`, and returns the loss, or None on a rank that has
    none. The mean over ranks of what is returned is compared with the loss of one process.
    """

    module: nn.Module
    step: Callable[[Any], Tensor | float | None]


@dataclass(frozen=True, slots=True)
class ProgramFunction:
    """A function of the program that was started, which ranks load from its file."""

    entry: EntryPoint
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def __call__(self, *args: Any) -> Any:
        return self.entry.resolve()(*self.args, *args, **self.kwargs)


def importable(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function in a form that ranks can load, also if its module is `__main__`."""
    inner, args, kwargs = function, (), {}
    if isinstance(function, partial):
        inner, args, kwargs = function.func, function.args, function.keywords
    if getattr(inner, "__module__", "") != "__main__":
        return function
    return ProgramFunction(EntryPoint.of(inner), args, kwargs)


def record_rank(
    build: Callable[[], ParityModel],
    batch: Callable[[int, int, int], Any],
    axes: Mapping[str, int],
) -> ParityRecord:
    """Set up `tpc`, build, take the steps. Runs on every rank of the layout."""
    mesh = [(axis, axes.get(axis, 1)) for axis, _ in _DEFAULT]
    expert = axes.get("expert", 1)
    if expert > 1:
        mesh[0] = ("data", axes.get("data", 1) * expert)
    tpc.setup_process_groups(mesh, expert=expert)
    coord = dict(tpc.topology.dense.coord(tpc.rank))
    record = ParityRecord(coord)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        _take_steps(build, batch, record, coord["data"], dict(mesh)["data"])
    finally:
        torch.set_num_threads(threads)
    return record


def _take_steps(
    build: Callable[[], ParityModel],
    batch: Callable[[int, int, int], Any],
    record: ParityRecord,
    index: int,
    num: int,
) -> None:
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(SEED)
    model = build()
    if not isinstance(model, ParityModel):
        raise ConfigError(f"build returned a {type(model).__name__}; return a ParityModel")
    # in float64 rounding is far below a wrong result
    module = model.module.to(torch.float64)
    parts = {_plain(name): part for name, part in module.named_modules()}
    record.initial = named(module.named_parameters())
    for number in range(NUM_STEPS):
        fed = batch(number, index, num)
        if number == 0:
            record.inputs = [x for x in leaves_of(fed) if isinstance(x, Tensor)]
        with (
            told_where(parts),
            without_dropout(module),
            recording(parts, record, lambda n=number: n == 0),
        ):
            loss = model.step(fed)
        if loss is not None:
            record.losses.append(float(loss.detach() if isinstance(loss, Tensor) else loss))
        if number == 0:
            grads = ((n, p.grad) for n, p in module.named_parameters() if p.grad is not None)
            record.grads = named(grads)
    record.weights, record.buffers = named(module.named_parameters()), named(module.named_buffers())
    # in a step more, which may differ between layouts: dropout draws by samples and parts
    record.masks = dropout_masks(module, lambda: model.step(batch(0, index, num)))


def _plain(name: str) -> str:
    """Return a parameter's name without the prefixes of wrappers (`module`, `_orig_mod`)."""
    return ".".join(x for x in name.split(".") if x not in ("module", "_orig_mod"))


def named(pairs: Any) -> dict[str, Tensor]:
    """Return copies by the names that the unwrapped module has for them."""
    return {_plain(name): x for name, x in copies(pairs).items()}


def run_layouts(
    build: Callable[[], ParityModel],
    batch: Callable[[int, int, int], Any],
    layouts: Sequence[Mapping[str, int]],
    ranks: Callable[[int], Ranks],
) -> list[list[ParityRecord]]:
    """Return the records of one process, and of every layout."""
    records = []
    build, batch = importable(build), importable(batch)
    for axes in ({}, *layouts):
        num = 1
        for size in axes.values():
            num *= size
        records.append(records_of(ranks(num), record_rank, build, batch, dict(axes)))
    return records


def records_of(ranks: Ranks, record: Callable[..., ParityRecord], *args: Any) -> list[ParityRecord]:
    """Return the record of each rank; if the steps fail, one rank's record is the error."""
    try:
        return ranks.run(record, *args)
    except RankError as error:
        rank, line = 0, str(error).partition("\n")[0]
        if error.culprit is not None:
            rank, line = error.culprit.rank, error.culprit.error or line
        records = [ParityRecord({}) for _ in range(ranks.world_size)]
        records[rank].error = line.removeprefix("TorchDistError: ")
        records[rank].error_detail = str(error)
        return records
