"""From a chain of pieces to the pieces of my stage, by a policy that has a name.

Every rank builds the same chain and decides alike, by default from tpc's pipe group, so nothing is
sent; of measured times, which differ, the medians over ranks decide.
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
"""Pieces of a stage: a Sequential of a Sequential, a ModuleList of a ModuleList, else a list."""
Parts = Chain | list[Chain]
"""My stage; a list of my stages where a placement is given."""


def partition_uniform(
    flat_sequence: Sequence[Piece],
    extra_len: int = 0,
    *,
    embedding: float = 1.0,
    head: float = 1.0,
    placement: Sequence[int] | None = None,
) -> Parts:
    """My stage of pieces whose numbers differ by at most one, the last stages with one more.

    extra_len: pieces that the last stage holds beyond the sequence. embedding, head: how many
    pieces the first and the last one count as. placement: for each stage the pipe index that runs
    it, where an index runs several; then a list of stages is returned, balanced by index first.
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
    """My stage of a cut whose largest number of parameters is as small as can be.

    weights: factors by a piece's class, such as `{nn.Embedding: 0}`; a piece without parameters
    weighs 1. placement: as in `partition_uniform`. Others are accepted for compatibility.
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
    """My stage of a cut whose step is as fast as can be, by measured times.

    model: a chain of pieces (a list, a Sequential), of which a part is returned; or any module that
        torch.fx can trace, of which a module is returned (`fx_split.split_traced`).
    microbatch: the one argument of the model or first piece, or a tuple of several. Each rank runs
        the full model on it a few times, `rounds` and one more, and the medians over ranks decide.
    placement: as in `partition_uniform`; of a module, a list of modules is returned then.
    group: the pipe group, tpc's unless given. bytes_per_s: of its links, which are measured unless
        given; where less goes across a cut may be the better one.
    options: schedule, cap_bytes and live, see `layer_costs.split_measured`; of a module more.
        Without a schedule the busiest rank is made as fast as can be.

    Raises:
        ScheduleError: no cut fits into cap_bytes, or the module cannot be traced or cut.
    """
    group = resolve_group(group, "pipe")
    given = microbatch if isinstance(microbatch, tuple) else (microbatch,)
    stage_ranks = range(group.size()) if placement is None else placement
    if isinstance(model, nn.Module) and not isinstance(model, nn.Sequential | nn.ModuleList):
        options |= {"rounds": rounds, "group": group, "bytes_per_s": bytes_per_s}
        stages = split_traced(model, given, stage_ranks, **options)
        mine = [s for s, rank in zip(stages, stage_ranks, strict=True) if rank == group.rank()]
        return mine[0] if placement is None else mine
    costs = measure(model, *given, rounds=rounds, group=group)
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
    """`flatten_sequence`, then my stage by the named policy, which gets the options."""
    if partition_policy not in PARTITIONS:
        raise ScheduleError(
            f"no partition policy {partition_policy!r}; the names are {', '.join(PARTITIONS)}"
        )
    return PARTITIONS[partition_policy](flatten_sequence(sequence, flat_level), **options)


def _split(costs: Sequence[float], placement: Sequence[int] | None) -> tuple[range, ...]:
    num_stages = tpc.get_pp_size() if placement is None else len(placement)
    return split_by_cost(costs, num_stages, placement=placement)


def _mine(
    pieces: Sequence[Piece],
    ranges: Sequence[range],
    placement: Sequence[int] | None,
    index: int | None = None,
) -> Parts:
    index = tpc.get_pp_rank() if index is None else index
    if placement is None:
        return _part(pieces, ranges[index])
    return [_part(pieces, r) for r, rank in zip(ranges, placement, strict=True) if rank == index]


def _part(pieces: Sequence[Piece], span: range) -> Chain:
    """The pieces of `span`, in the container of the chain, under their names.

    Not by a slice: a subclass would be made anew by its own constructor.
    """
    if isinstance(pieces, nn.Sequential):
        named = list(pieces._modules.items())[span.start : span.stop]
        return nn.Sequential(OrderedDict(named))  # type: ignore[arg-type]
    mine = list(pieces)[span.start : span.stop]
    return nn.ModuleList(mine) if isinstance(pieces, nn.ModuleList) else mine  # type: ignore[arg-type]
