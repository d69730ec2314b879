"""A user's own chain of layers, cut into stages.

Every rank builds the whole chain alike, which fixes names, initial weights and what is tied,
and keeps the pieces of its stage under their own names.
"""

from collections.abc import Sequence

from torch import nn

from torchdistpackage.errors import ScheduleError
from torchdistpackage.layout.layout import Layout
from torchdistpackage.parallel.pipeline.split import split_by_cost
from torchdistpackage.parallel.tensor.collect import collect


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


def cut(model: nn.Module, num_stages: int, index: int) -> tuple[nn.Module, dict[str, Layout]]:
    """(stage `index`, its layouts by local name) of a model cut by number of parameters.

    A parameter that several stages hold keeps one global name and lists all of them as tied.

    Raises:
        ScheduleError: more than one stage is asked of a model that is not a Sequential.
    """
    if num_stages == 1:
        return model, {n: layout.on(0) for n, layout in collect(model).items()}
    if not isinstance(model, nn.Sequential):
        raise ScheduleError(
            f"a {type(model).__name__} cannot be cut into {num_stages} pipeline stages; return a "
            f"torch.nn.Sequential from model.target, or set parallel.pipe to 1"
        )
    pieces = list(model.named_children())
    costs = [sum(p.numel() for p in piece.parameters()) or 1 for _, piece in pieces]
    ranges = split_by_cost(costs, num_stages)
    first_name = {id(p): name for name, p in model.named_parameters()}
    holders: dict[int, set[int]] = {}
    for stage, span in enumerate(ranges):
        for i in span:
            for parameter in pieces[i][1].parameters():
                holders.setdefault(id(parameter), set()).add(stage)
    chain = Chain([pieces[i] for i in ranges[index]])
    named = dict(chain.named_parameters())
    layouts = {
        name: layout.named(first_name[id(named[name])]).on(*holders[id(named[name])])
        for name, layout in collect(chain).items()
    }
    return chain, layouts
