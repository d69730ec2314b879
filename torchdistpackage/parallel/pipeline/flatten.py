"""From a model to a flat chain of pieces, and from the chain to my stage."""

from collections.abc import Callable, Sequence

from torch import nn

from torchdistpackage.comm.tpc import tpc
from torchdistpackage.errors import ScheduleError
from torchdistpackage.parallel.pipeline.split import split_by_cost, split_evenly

Piece = nn.Module | Callable[..., object]


class CallableModule(nn.Module):
    """A plain function as a module without parameters."""

    def __init__(self, fn: Callable[..., object]):
        super().__init__()
        self.fn = fn

    def forward(self, *args, **kwargs):
        return self.fn(*args, **kwargs)


def flatten_model(
    model: nn.Module, layer_list: Sequence[str | Piece], return_list: bool = False
) -> nn.Sequential | list[nn.Module]:
    """The pieces of `model` that `layer_list` names, in its order, as one chain.

    layer_list: attribute names (dotted ones too), modules or functions. Sequential and ModuleList
    are opened one level.

    Raises:
        ScheduleError: a name is no attribute of the model.
    """
    chain: list[nn.Module] = []
    for item in layer_list:
        piece = _named(model, item) if isinstance(item, str) else item
        if isinstance(piece, nn.Sequential | nn.ModuleList):
            chain += list(piece)
        else:
            chain.append(piece if isinstance(piece, nn.Module) else CallableModule(piece))
    return chain if return_list else nn.Sequential(*chain)


def flatten_sequence(sequence: Sequence[Piece], level: int = 1) -> list[nn.Module]:
    """Open Sequentials and ModuleLists inside `sequence`, `level` deep."""
    chain: list[nn.Module] = []
    for piece in sequence:
        if level > 0 and isinstance(piece, nn.Sequential | nn.ModuleList):
            chain += flatten_sequence(list(piece), level - 1)
        else:
            chain.append(piece if isinstance(piece, nn.Module) else CallableModule(piece))
    return chain


def partition_uniform(flat_sequence: Sequence[Piece], extra_len: int = 0) -> list[Piece]:
    """My stage of pieces whose numbers differ by at most one.

    extra_len: pieces that the last stage holds beyond the sequence, counted as its own.
    """
    size, index = tpc.get_pp_size(), tpc.get_pp_rank()
    ranges = split_evenly(len(flat_sequence) + extra_len, size)
    return [flat_sequence[i] for i in ranges[index] if i < len(flat_sequence)]


def partition_balanced(
    flat_sequence: Sequence[Piece], sequence: object = None, **_: object
) -> list[Piece]:
    """My stage of a cut whose largest number of parameters is as small as can be.

    A piece without parameters weighs 1. `sequence` is accepted for compatibility.
    """
    costs = [_num_parameters(piece) for piece in flat_sequence]
    mine = split_by_cost(costs, tpc.get_pp_size())[tpc.get_pp_rank()]
    return [flat_sequence[i] for i in mine]


PARTITIONS = {"uniform": partition_uniform, "balanced": partition_balanced}


def flat_and_partition(
    sequence: Sequence[Piece], flat_level: int = 1, partition_policy: str = "uniform", **options
) -> list[Piece]:
    """`flatten_sequence`, then my stage by the named policy.

    Raises:
        ScheduleError: no policy by that name.
    """
    if partition_policy not in PARTITIONS:
        raise ScheduleError(
            f"no partition policy {partition_policy!r}; the names are {', '.join(PARTITIONS)}"
        )
    return PARTITIONS[partition_policy](flatten_sequence(sequence, flat_level), **options)


def _num_parameters(piece: Piece) -> int:
    if not isinstance(piece, nn.Module):
        return 1
    return sum(p.numel() for p in piece.parameters()) or 1


def _named(model: nn.Module, name: str) -> Piece:
    piece: object = model
    for part in name.split("."):
        if not hasattr(piece, part):
            raise ScheduleError(
                f"{type(model).__name__} has no {name!r}; its children are "
                f"{', '.join(n for n, _ in model.named_children())}"
            )
        piece = getattr(piece, part)
    return piece  # type: ignore[return-value]
