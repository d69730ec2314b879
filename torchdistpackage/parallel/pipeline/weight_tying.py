"""Weights that several pipe ranks hold, such as an embedding that is also the head's weight.

Such a weight has one layout that lists all its holders, and everything that uses layouts does the
rest. NaiveDDP and ZeroOptimizer give the copies equal values and sum their gradients when the
step's messages have been sent, `clip_grad_norm_` counts the weight once, and checkpoints store it
once.
"""

from typing import Any

from torch import nn

from torchdistpackage.comm import primitives
from torchdistpackage.comm.groups import on_cpu
from torchdistpackage.comm.primitives import Group
from torchdistpackage.comm.tpc import resolve_group
from torchdistpackage.errors import ScheduleError
from torchdistpackage.layout.layout import Layout
from torchdistpackage.layout.mark import collect
from torchdistpackage.parallel.pipeline.agreement import by_rank


def tie(stage: nn.Module, *, group: Group | None = None, **weights: str) -> dict[str, Layout]:
    """Return the layouts of `stage`'s parameters, with tied weights; all pipe ranks call it
    together.

    stage: this rank's stage, or a ModuleList of its stages, in which ties are one Parameter.
    weights: a name of your choice = the parameter's name in `stage`, on each rank that holds it:
        `tie(stage, words="embedding.weight")` on the first, `tie(stage, words="head.weight")` on
        the last, `tie(stage)` between.
    group: pipe ranks; default: tpc's.

    Raises:
        ScheduleError: on every rank: a parameter does not exist, only one rank holds it, or shapes
            differ.
    """
    group = resolve_group(group, "pipe")
    layouts = collect(stage)
    shapes_here = {w: layouts[name].shape for w, name in weights.items() if name in layouts}
    unknown = [name for name in weights.values() if name not in layouts]
    problem = f"{type(stage).__name__} has no parameter {', '.join(unknown)}" if unknown else ""
    rows: list[Any] = primitives.gather_objects((shapes_here, problem), on_cpu(group))
    if problems := by_rank([text for _, text in rows]):
        raise ScheduleError(problems)
    for weight in sorted({w for shapes, _ in rows for w in shapes}):
        shape_on = {i: shapes[weight] for i, (shapes, _) in enumerate(rows) if weight in shapes}
        if len(shape_on) == 1 or len(set(shape_on.values())) > 1:
            raise ScheduleError(
                f"tied weight {weight}: its shapes by pipe rank are {shape_on}; name it on two "
                f"ranks or more, with one shape"
            )
        if weight in weights:
            name = weights[weight]
            layouts[name] = layouts[name].named(weight).on(*shape_on)
    return {
        name: layout if layout.stages else layout.named(f"{group.rank()}.{name}").on(group.rank())
        for name, layout in layouts.items()
    }
