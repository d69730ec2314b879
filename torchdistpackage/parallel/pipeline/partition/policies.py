"""Named policies that choose this rank's stage of a chain of pieces.

Every rank builds the same chain and decides alike, by default from tpc's pipe group, so nothing is
sent. Measured times differ between ranks, so their medians over the ranks decide.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

from torch import nn

from torchdistpackage.comm.primitives import Group
from torchdistpackage.comm.tpc import resolve_group, tpc
from torchdistpackage.errors import ScheduleError
from torchdistpackage.parallel.pipeline.partition.cost_split import split_by_cost, split_evenly
from torchdistpackage.parallel.pipeline.partition.fx_split import split_traced
from torchdistpackage.parallel.pipeline.partition.layer_costs import (
    block_weights,
    measure,
    measure_link,
    split_measured,
)
from torchdistpackage.parallel.pipeline.partition.sequential import (
    Piece,
    flatten_sequence,
    num_parameters,
)

Chain = list[Piece] | nn.Sequential | nn.ModuleList
"""Pieces of a stage, in the type of the chain: a Sequential, a ModuleList, or else a list."""
Parts = Chain | list[Chain]
"""This rank's stage, or with a placement the list of its stages."""


def partition_uniform(
    flat_sequence: Sequence[Piece],
    extra_len: int = 0,
    *,
    embedding: float = 1.0,
    head: float = 1.0,
    placement: Sequence[int] | None = None,
) -> Parts:
    """Return this rank's stage of a cut into equal numbers of pieces; the last stages may have one
    more.

    extra_len: pieces that the last stage holds beyond the sequence.
    embedding, head: numbers of pieces that the first and the last piece count as.
    placement: for each stage the pipe index that runs it, if an index runs several. The result is
        then a list of stages, balanced by index first.
    """
    if embedding == head == 1.0 and placement is None:
        num = len(flat_sequence) + extra_len
        ranges = split_evenly(num, tpc.get_pp_size(), longer_last=True)
    else:
        weights = [*block_weights(len(flat_sequence), embedding, head), *[1.0] * extra_len]
        ranges = _split(weights, placement)
    return _mine(flat_sequence, ranges, placement)


def partition_balanced(
    flat_sequence: Sequence[Piece],
    sequence: object = None,
    *,
    weights: Mapping[type[nn.Module], float] | None = None,
    placement: Sequence[int] | None = None,
    **_: object,
) -> Parts:
    """Return this rank's stage of a cut with the smallest largest number of parameters.

    weights: factors by a piece's class, such as `{nn.Embedding: 0}`; a piece without parameters
        weighs 1.
    placement: as in `partition_uniform`. Other arguments are accepted for compatibility.
    """
    factors = weights or {}
    costs = [num_parameters(piece) * factors.get(type(piece), 1.0) for piece in flat_sequence]
    return _mine(flat_sequence, _split(costs, placement), placement)


def partition_by_time(
    model: nn.Module | Sequence[Piece],
    microbatch: object,
    *,
    placement: Sequence[int] | None = None,
    rounds: int = 3,
    group: Group | None = None,
    bytes_per_s: float | None = None,
    **options: object,
) -> Parts | nn.Module:
    """Return this rank's stage of the cut with the fastest step, by measured times.

    model: a chain of pieces (a list, a Sequential), of which the result is a part; or any module
        that torch.fx can trace, for which the result is a module (`fx_split.split_traced`).
    microbatch: the one argument of the model or first piece, or a tuple of several. Each rank runs
        the full model on it `rounds` + 1 times, and the medians over ranks decide.
    placement: as in `partition_uniform`; for a traced module the result is a list of modules.
    group: the pipe group; default: tpc's.
    bytes_per_s: rate of its links; None: measured. A cut that fewer bytes cross may be the better.
    options: schedule, cap_bytes and live, see `layer_costs.split_measured`, and for a traced module
        those of `split_traced`. Without a schedule the busiest rank's time is minimised.

    Raises:
        ScheduleError: no cut fits into cap_bytes, or the module cannot be traced or cut.
    """
    group = resolve_group(group, "pipe")
    arguments = microbatch if isinstance(microbatch, tuple) else (microbatch,)
    stage_ranks = range(group.size()) if placement is None else placement
    if isinstance(model, nn.Module) and not isinstance(model, nn.Sequential | nn.ModuleList):
        options |= {"rounds": rounds, "group": group, "bytes_per_s": bytes_per_s}
        stages = split_traced(model, arguments, stage_ranks, **options)
        own_stages = [
            s for s, rank in zip(stages, stage_ranks, strict=True) if rank == group.rank()
        ]
        return own_stages[0] if placement is None else own_stages
    costs = measure(model, *arguments, rounds=rounds, group=group)
    if bytes_per_s is None:
        bytes_per_s = measure_link(group)
    ranges = split_measured(costs, stage_ranks, bytes_per_s=bytes_per_s, **options)
    return _mine(model, ranges, placement, group.rank())


PARTITIONS: dict[str, Callable[..., object]] = {
    "uniform": partition_uniform,
    "balanced": partition_balanced,
    "time": partition_by_time,
}


def flat_and_partition(
    sequence: Sequence[Piece], flat_level: int = 1, partition_policy: str = "uniform", **options
) -> object:
    """Flatten a sequence, and return this rank's stage by the named policy, which gets the
    options.
    """
    if partition_policy not in PARTITIONS:
        raise ScheduleError(
            f"no partition policy {partition_policy!r}; use one of {', '.join(PARTITIONS)}"
        )
    return PARTITIONS[partition_policy](flatten_sequence(sequence, flat_level), **options)


def _split(costs: Sequence[float], placement: Sequence[int] | None) -> tuple[range, ...]:
    """Return the cut of smallest largest cost."""
    num_stages = tpc.get_pp_size() if placement is None else len(placement)
    return split_by_cost(costs, num_stages, placement=placement)


def _mine(
    pieces: Sequence[Piece],
    ranges: Sequence[range],
    placement: Sequence[int] | None,
    index: int | None = None,
) -> Parts:
    """Return this rank's pieces: one stage, or with a placement a list of stages."""
    index = tpc.get_pp_rank() if index is None else index
    if placement is None:
        return _part(pieces, ranges[index])
    return [_part(pieces, r) for r, rank in zip(ranges, placement, strict=True) if rank == index]


def _part(pieces: Sequence[Piece], span: range) -> Chain:
    """Return the pieces of `span`, under their names, in a container of the chain's type.

    It does not slice the chain, because a slice of a subclass calls the subclass's constructor.
    """
    if isinstance(pieces, nn.Sequential):
        named = list(pieces._modules.items())[span.start : span.stop]
        return nn.Sequential(OrderedDict(named))  # type: ignore[arg-type]
    selected = list(pieces)[span.start : span.stop]
    return nn.ModuleList(selected) if isinstance(pieces, nn.ModuleList) else selected  # type: ignore[arg-type]
