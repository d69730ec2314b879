"""Flat chains of a model's pieces, and the stages of a Sequential.

A piece takes the output of the piece before it, so a chain may be cut anywhere. Every rank builds
the same chain, which fixes names, initial weights and tied parameters, and keeps the pieces of its
stages under their own names.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from torch import nn

from torchdistpackage.errors import ScheduleError
from torchdistpackage.layout.layout import Layout
from torchdistpackage.layout.mark import collect
from torchdistpackage.parallel.pipeline.partition.cost_split import split_by_cost

Piece = nn.Module | Callable[..., object]

OPENED = (nn.Sequential, nn.ModuleList, list, tuple)
"""Containers that are replaced by the pieces in them."""


class CallableModule(nn.Module):
    """A plain function as a module without parameters."""

    def __init__(self, fn: Callable[..., object]):
        super().__init__()
        self.fn = fn

    def forward(self, *args, **kwargs):
        return self.fn(*args, **kwargs)


class Residual(nn.Module):
    """A residual branch, x + last(... first(x)), such as half of a pre-norm transformer block.

    branch: modules by the names that they keep, such as those in the block.
    """

    def __init__(self, **branch: nn.Module):
        super().__init__()
        for name, module in branch.items():
            self.add_module(name, module)

    def forward(self, x):
        y = x
        for module in self.children():
            y = module(y)
        return x + y


def halves(block: nn.Module, *branches: Sequence[str]) -> list[Residual]:
    """Return one piece for each residual branch of a block, so that it can be cut between them.

    A pipeline may then be cut between attention and MLP.

    branches: for each branch the names of its modules, such as ("norm1", "attention", "drop"),
        which the pieces share with the block.

    Raises:
        ScheduleError: the block has no module of a name.
    """
    children = dict(block.named_children())
    for name in (name for names in branches for name in names):
        if name not in children:
            raise _no_such(block, name)
    return [Residual(**{name: children[name] for name in names}) for names in branches]


def flatten_model(
    model: nn.Module, layer_list: Sequence[str | Piece], return_list: bool = False
) -> nn.Sequential | list[nn.Module]:
    """Return the pieces of `model` that `layer_list` names, in its order, as one chain.

    layer_list: attribute names (dotted ones too), modules or functions. Sequential and ModuleList
        are opened one level.

    Raises:
        ScheduleError: a name is unknown, or a piece cannot be called.
    """
    if isinstance(layer_list, str):
        raise ScheduleError(f"layer_list is {layer_list!r}; give a list of names: [{layer_list!r}]")
    pieces = [_named(model, item) if isinstance(item, str) else item for item in layer_list]
    # entry by entry, because errors count the pieces within an entry
    chain = [piece for item in pieces for piece in flatten_sequence([item])]
    return chain if return_list else nn.Sequential(*chain)


def flatten_sequence(sequence: Iterable[Piece], level: int = 1) -> list[nn.Module]:
    """Open Sequentials, ModuleLists and lists inside `sequence`, `level` deep.

    Raises:
        ScheduleError: a piece cannot be called.
    """
    chain: list[nn.Module] = []
    for piece in sequence:
        if level > 0 and isinstance(piece, OPENED):
            chain += flatten_sequence(piece, level - 1)
        elif isinstance(piece, nn.Module):
            chain.append(piece)
        elif callable(piece):
            chain.append(CallableModule(piece))
        else:
            raise ScheduleError(
                f"piece {len(chain)} of the chain is a {type(piece).__name__}, which cannot be "
                f"called; give names, modules or functions, or open lists in it with a level above "
                f"{level}"
            )
    return chain


def chunks_of(
    model: nn.Module,
    placement: Sequence[int],
    index: int,
    *,
    cut: Sequence[range] | None = None,
) -> tuple[dict[int, nn.Module], dict[str, Layout]]:
    """Return ({stage: its module} of pipe index `index`, layouts by "stage.name").

    In a layout a stage is a pipe index. A parameter that several of them hold keeps one global name
    and lists all of them as tied. In two chunks of one index it is one Parameter, listed under its
    first name.

    placement: for each stage the pipe index that runs it.
    cut: for each stage its children; None: balance the ranks' parameters.

    Raises:
        ScheduleError: the model is not a Sequential and has more than one stage, it has fewer
            children than stages, or the cut does not contain each child once.
    """
    if len(placement) == 1:
        layouts = collect(model)
        return {0: model}, {f"0.{name}": layout.on(0) for name, layout in layouts.items()}
    if not isinstance(model, nn.Sequential):
        raise ScheduleError(
            f"a {type(model).__name__} cannot be cut into {len(placement)} pipeline stages; return "
            f"a torch.nn.Sequential from model.target, or set parallel.pipe to 1"
        )
    pieces = list(model.named_children())
    if len(pieces) < len(placement):
        raise ScheduleError(
            f"a Sequential of {len(pieces)} children cannot be cut into {len(placement)} pipeline "
            f"stages; give it at least {len(placement)} children, or use fewer stages"
        )
    if cut is None:
        costs = [num_parameters(piece) for _, piece in pieces]
        cut = split_by_cost(costs, len(placement), placement=placement)
    if [i for span in cut for i in span] != [*range(len(pieces))] or len(cut) != len(placement):
        raise ScheduleError(
            f"the cut {[*cut]} is not one of {len(pieces)} children into {len(placement)} stages"
        )
    first_name = {id(p): name for name, p in model.named_parameters()}
    holders: dict[int, set[int]] = {}
    for rank, span in zip(placement, cut, strict=True):
        for parameter in (p for i in span for p in pieces[i][1].parameters()):
            holders.setdefault(id(parameter), set()).add(rank)
    own_stages = [stage for stage, rank in enumerate(placement) if rank == index]
    chunks = {
        stage: nn.Sequential(OrderedDict(pieces[i] for i in cut[stage])) for stage in own_stages
    }
    placed_layouts: dict[int, tuple[str, Layout]] = {}
    for stage, chunk in chunks.items():
        named = dict(chunk.named_parameters())
        for name, layout in collect(chunk).items():
            key = id(named[name])
            placed = layout.named(first_name[key]).on(*holders[key])
            placed_layouts.setdefault(key, (f"{stage}.{name}", placed))
    return dict(chunks), dict(placed_layouts.values())


def num_parameters(piece: Piece) -> int:
    """Return the number of a piece's parameters, at least 1."""
    return sum(p.numel() for p in piece.parameters()) or 1 if isinstance(piece, nn.Module) else 1


def _named(model: nn.Module, name: str) -> Piece:
    """Return the module or function at a dotted name of the model."""
    piece: object = model
    for part in name.split("."):
        if not hasattr(piece, part):
            raise _no_such(model, name)
        piece = getattr(piece, part)
    return piece  # type: ignore[return-value]


def _no_such(model: nn.Module, name: str) -> ScheduleError:
    """Return the error for a name that a model does not have."""
    return ScheduleError(
        f"{type(model).__name__} has no {name!r}; its children are "
        f"{', '.join(n for n, _ in model.named_children())}"
    )
