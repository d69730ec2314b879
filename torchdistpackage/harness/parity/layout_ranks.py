"""The ranks of `testing.prove`: they build the model, take steps, stop and resume, and note it."""

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from torchdistpackage.comm import primitives
from torchdistpackage.comm.nested import leaves_of
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.equivalence.narrow import noting_casts
from torchdistpackage.equivalence.placed import STATE, Placed
from torchdistpackage.equivalence.record import (
    ParityRecord,
    copies,
    dropout_masks,
    recording,
    told_where,
    without_dropout,
)
from torchdistpackage.equivalence.stopped import RunMoment, resume_gaps
from torchdistpackage.equivalence.wide import float64_within
from torchdistpackage.errors import ConfigError, RankError
from torchdistpackage.harness.pool import Ranks
from torchdistpackage.launch.entrypoint import EntryPoint

NUM_STEPS = 3
SEED = 0
ONE_PROCESS = "one"
_DEFAULT = (("data", 1), ("pipe", 1), ("context", 1), ("tensor", 1))


@dataclass(frozen=True, slots=True)
class ParityModel:
    """A model of yours on one rank, as `build` of `testing.prove` returns it.

    module: whose parameters, buffers and modules are compared, by name. step: called with what
    `batch` gave; takes a whole step, with the forward, the backward, the sum over ranks and the
    update, leaves the gradients of it in `.grad`, and returns the loss, or None on a rank that has
    none. The mean over ranks of what is returned is compared with the loss of one process.
    optimizer: its states are compared, and the gradients that it is about to take, as those of
    ZeroOptimizer's shards. save, load: called with a folder that all ranks see, to write and read
    everything that a resumed run needs; with both, runs that are stopped twice are compared too.
    reshards: `load` also reads what another layout saved, so the save of one process is tried.
    """

    module: nn.Module
    step: Callable[[Any], Tensor | float | None]
    optimizer: torch.optim.Optimizer | None = None
    save: Callable[[Path], None] | None = None
    load: Callable[[Path], None] | None = None
    reshards: bool = False


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
    saves: str = "",
    name: str = "",
    wide: bool = False,
) -> ParityRecord:
    """Set up `tpc`, build, take the steps. Runs on every rank of the layout.

    saves: folder for saves of all layouts; name: that of this layout in it. wide: what the steps
    compute in float32 is float64 too.
    """
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
        folder = Path(saves) / name
        rank = _OwnRank(build, batch, coord["data"], dict(mesh)["data"], folder, wide)
        model = rank.fresh()
        _compared_steps(rank, model, record)
        if saves and model.save is not None and model.load is not None:
            _stop_and_resume(rank, model, record, Path(saves) / ONE_PROCESS)
    finally:
        torch.set_num_threads(threads)
    return record


@dataclass(frozen=True)
class _OwnRank:
    """A rank with its model and inputs; index, num: its position along data. folder: of its
    saves. wide: what its steps compute in float32 is float64 too.
    """

    build: Callable[[], ParityModel]
    batch: Callable[[int, int, int], Any]
    index: int
    num: int
    folder: Path
    wide: bool

    def fresh(self) -> ParityModel:
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(SEED)
        model = self.build()
        if not isinstance(model, ParityModel):
            raise ConfigError(f"build returned a {type(model).__name__}; return a ParityModel")
        if (model.save is None) != (model.load is None):
            raise ConfigError("build returned save without load, or load without save; pass both")
        # in float64 rounding is far below a wrong result
        floats = (p for p in model.module.parameters() if p.is_floating_point())
        if any(p.dtype != torch.float64 for p in floats):
            model.module.to(torch.float64)
        return replace(model, step=partial(_in_float64, model.step)) if self.wide else model

    def fed(self, number: int) -> Any:
        return self.batch(number, self.index, self.num)


def _in_float64(step: Callable[[Any], Any], fed: Any) -> Any:
    """Take a step in which code that asks for float32 gets float64."""
    with float64_within():
        return step(fed)


def _compared_steps(rank: _OwnRank, model: ParityModel, record: ParityRecord) -> None:
    module = model.module
    parts = {_plain(name): part for name, part in module.named_modules()}
    record.initial = weights_of(model)
    for number in range(NUM_STEPS):
        fed = rank.fed(number)
        if number == 0:
            record.inputs = [x for x in leaves_of(fed) if isinstance(x, Tensor)]
        with (
            told_where(parts),
            without_dropout(module),
            recording(parts, record, lambda n=number: n == 0),
            _noting_gradients(model, record) if number == 0 else nullcontext(),
            noting_casts(parts, record.casts, record.singles) if number == 1 else nullcontext(),
        ):
            loss = model.step(fed)
        if loss is not None:
            record.losses.append(_number(loss))
        if number == 0:
            record.updated = weights_of(model)
    record.weights, record.buffers = weights_of(model), named(module.named_buffers())
    record.states = states_of(model)
    # in a step more, which may differ between layouts: dropout draws by samples and parts
    record.masks = dropout_masks(module, lambda: model.step(rank.fed(0)), record.repeated)


def _number(loss: Tensor | float) -> float:
    return float(loss.detach() if isinstance(loss, Tensor) else loss)


@contextmanager
def _noting_gradients(model: ParityModel, record: ParityRecord) -> Iterator[None]:
    """Record the gradients that the optimizer is about to take, or those that the step leaves."""
    optimizer = model.optimizer
    if optimizer is None:
        yield
        pairs = ((n, p.grad) for n, p in model.module.named_parameters() if p.grad is not None)
        record.grads = named(pairs)
        return
    grads: dict[Tensor, Tensor] = {}
    step = optimizer.step

    def noting(*args: Any, **kwargs: Any) -> Any:
        if not grads:
            if _partitions(optimizer):
                cast(Any, optimizer).reducer.finish()  # else sums may still be under way
            tensors = (p for group in optimizer.param_groups for p in group["params"])
            grads.update({p: p.grad.detach().clone() for p in tensors if p.grad is not None})
        return step(*args, **kwargs)

    cast(Any, optimizer).step = noting
    try:
        yield
    finally:
        del cast(Any, optimizer).step
    record.grads = _full(model, grads.get)


def _partitions(optimizer: torch.optim.Optimizer | None) -> list[Any]:
    """Return a sharding optimizer's description of each parameter; nothing for another
    optimizer.
    """
    groups: Sequence[Sequence[Any]] = getattr(optimizer, "partitions", ())
    return [member for members in groups for member in members if any(member.bounds)]


def _full(model: ParityModel, tensor_of: Callable[[Any], Tensor | None]) -> dict[str, Tensor]:
    """Return this rank's tensors of `tensor_of` by name; all ranks call it together.

    Those of ZeRO's shards are gathered from the ranks that share a parameter.
    """
    sharded = {partition.spec.parameter: partition for partition in _partitions(model.optimizer)}
    tensors: dict[str, Tensor] = {}
    for name, p in model.module.named_parameters():
        if p not in sharded:
            x = tensor_of(p)
        else:
            part = sharded[p]
            shard = None if part.own_tensor is None else tensor_of(part.own_tensor)
            if shard is not None:
                shard = part.flat(shard) if part.whole else shard
            shards = primitives.gather_objects(shard, part.group)
            own_shards = [each for each in shards if isinstance(each, Tensor)]
            x = (
                part.shaped(torch.cat(own_shards))
                if sum(map(len, own_shards)) == p.numel()
                else None
            )
        if x is not None:
            tensors[_plain(name)] = x.detach().clone()
    return tensors


def weights_of(model: ParityModel) -> dict[str, Tensor]:
    """Return copies of the weights by name, of ZeRO's shards too; all ranks call it together."""
    if _partitions(model.optimizer):
        cast(Any, model.optimizer).finish()
    return _full(model, lambda p: p)


def states_of(model: ParityModel) -> dict[str, Tensor]:
    """Return the optimizer's states, `NAME#KEY`; all ranks call it together."""
    if model.optimizer is None:
        return {}
    state = model.optimizer.state
    keys = {key for values in state.values() for key in values}
    keys = sorted(set().union(*primitives.gather_objects(sorted(keys))))
    tensors: dict[str, Tensor] = {}
    for key in keys:

        def value_of(p: nn.Parameter, key: str = key) -> Tensor | None:
            value = state.get(p, {}).get(key)
            # what exists once, as a count of steps, each shard has for itself
            return value if isinstance(value, Tensor) and value.shape == p.shape else None

        tensors |= {f"{n}{STATE}{key}": x for n, x in _full(model, value_of).items()}
    return tensors


class _OwnRun:
    """Your own model with the folder of its saves, as a `StoppableRun`."""

    def __init__(self, rank: _OwnRank, model: ParityModel):
        self._rank, self._model = rank, model

    def moment(self) -> RunMoment:
        tensors = weights_of(self._model) | states_of(self._model)
        tensors |= named(self._model.module.named_buffers())
        placed: Placed = {name: [((), x)] for name, x in tensors.items()}
        return RunMoment(placed, {"cpu": torch.get_rng_state()})

    def take_step(self, step: int) -> RunMoment:
        loss = self._model.step(self._rank.fed(step - 1))
        moment = self.moment()
        moment.loss = None if loss is None else _number(loss)
        return moment

    def save(self, step: int) -> None:
        assert self._model.save is not None
        self._rank.folder.mkdir(parents=True, exist_ok=True)
        # one rank may make the folder late
        primitives.barrier()
        self._model.save(self._rank.folder)
        # the load that follows reads what all ranks have saved
        primitives.barrier()

    def load(self) -> None:
        assert self._model.load is not None
        self._model.load(self._rank.folder)

    def close(self) -> None:
        pass


def _stop_and_resume(rank: _OwnRank, model: ParityModel, record: ParityRecord, one: Path) -> None:
    run = _OwnRun(rank, model)
    run.save(NUM_STEPS)
    stopped = run.moment()
    straight = [run.take_step(NUM_STEPS + 1), run.take_step(NUM_STEPS + 2)]
    first = NUM_STEPS
    record.resume_gaps = resume_gaps(lambda: _OwnRun(rank, rank.fresh()), first, stopped, straight)
    if model.reshards:
        other = rank.fresh()
        assert other.load is not None
        other.load(one)
        record.loaded = weights_of(other) | states_of(other)


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
    saves: str = "",
) -> Iterator[list[ParityRecord]]:
    """Yield the records of one process, and of every layout."""
    build, batch = importable(build), importable(batch)
    one = (ranks(1), record_rank, build, batch, {}, saves, ONE_PROCESS)
    records, wide = records_of(*one), False
    if records[0].singles:
        again = records_of(*one, True)
        wide = not again[0].error
        records = again if wide else records_of(*one)  # its saves are what layouts load
    yield records
    for number, axes in enumerate(layouts, 1):
        world = ranks(math.prod(axes.values()))
        name = f"layout{number}"
        yield records_of(world, record_rank, build, batch, dict(axes), saves, name, wide)


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
