"""The stages of a user's own model, and the layouts of its parameters."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from torchdistpackage.errors import ConfigError
from torchdistpackage.launch.entrypoint import user_object
from torchdistpackage.layout.layout import Layout
from torchdistpackage.models.tables import table_parameters
from torchdistpackage.parallel.pipeline.partition.sequential import chunks_of


def own_stages(
    target: str,
    args: Mapping[str, Any],
    placement: Sequence[int],
    index: int,
    cut: Callable[[nn.Module], Sequence[range] | None],
) -> tuple[dict[int, nn.Module], dict[str, Layout]]:
    """Make the model of `model.target`; return ({stage: its module} of pipe index `index`, layouts
    by "stage.name").

    placement, cut: see `chunks_of`; the cut of the whole model.

    Raises:
        ConfigError: `model.target` returned no module.
        ScheduleError: it cannot be cut into so many stages.
    """
    model = user_object(target)(**args)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model.target {target} returned a {type(model).__name__}, which is "
            f"no torch.nn.Module; name a function that returns one, or the class of one"
        )
    stages, layouts = chunks_of(model, placement, index, cut=cut(model))
    tables = {id(p) for p in table_parameters(model)}
    for stage, module in stages.items():
        for local, parameter in module.named_parameters():
            if id(parameter) in tables and (name := f"{stage}.{local}") in layouts:
                layouts[name] = replace(layouts[name], is_table=True)
    return stages, layouts
