"""A user's own chain of layers, cut into stages.

Every rank builds the whole chain alike, which fixes names, initial weights and what is tied,
and keeps the pieces of its stage under their own names.
"""

from collections.abc import Sequence

from torch import nn

from torchdistpackage.errors import ScheduleError
from torchdistpackage.layout.collect import collect
from torchdistpackage.layout.layout import Layout
from torchdistpackage.parallel.pipeline.partition.cost_split import split_by_cost


class Chain(nn.Module):
    """Consecutive children of a Sequential, under the names they had in it; none is identity."""

    def __init__(self, pieces: Sequence[tuple[str, nn.Module]]):
        super().__init__()
        for name, piece in pieces:
            self.add_module(name, piece)

    def forward(self, x):
        for piece in self.children():
            x = piece(x)
        return x


def chunks_of(
    model: nn.Module,
    placement: Sequence[int],
    index: int,
    *,
    cut: Sequence[range] | None = None,
) -> tuple[dict[int, nn.Module], dict[str, Layout]]:
    """({stage: its module} of pipe index `index`, layouts by "stage.name") of a model's stages.

    placement: for each stage the pipe index that runs it. cut: for each stage its children; None:
    such that ranks hold as evenly many parameters as can be. In a layout a stage is a pipe index;
    a parameter that several of them hold keeps one global name and lists all of them as tied. In
    two chunks of one index it is one Parameter, listed under its first name.

    Raises:
        ScheduleError: more than one stage is asked of a model that is not a Sequential, it has
            fewer children than stages, or the cut is not of all of them.
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
            f"stages; give it {len(placement)} children or more, or take fewer stages"
        )
    if cut is None:
        costs = [sum(p.numel() for p in piece.parameters()) or 1 for _, piece in pieces]
        cut = split_by_cost(costs, len(placement), placement=placement)
    if [i for span in cut for i in span] != [*range(len(pieces))] or len(cut) != len(placement):
        raise ScheduleError(
            f"the cut {[*cut]} is not one of {len(pieces)} children into {len(placement)} stages"
        )
    first_name = {id(p): name for name, p in model.named_parameters()}
    holders: dict[int, set[int]] = {}
    for place, span in zip(placement, cut, strict=True):
        for i in span:
            for parameter in pieces[i][1].parameters():
                holders.setdefault(id(parameter), set()).add(place)
    mine = [stage for stage, place in enumerate(placement) if place == index]
    chunks = {stage: Chain([pieces[i] for i in cut[stage]]) for stage in mine}
    layouts: dict[str, Layout] = {}
    seen: set[int] = set()
    for stage, chunk in chunks.items():
        named = dict(chunk.named_parameters())
        for name, layout in collect(chunk).items():
            key = id(named[name])
            if key not in seen:
                layouts[f"{stage}.{name}"] = layout.named(first_name[key]).on(*holders[key])
                seen.add(key)
    return dict(chunks), layouts
