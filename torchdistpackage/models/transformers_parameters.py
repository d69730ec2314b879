"""Parameters of a stage that was split on the meta device: compared with the layouts, then made."""

from collections.abc import Container
from typing import Any

import torch
from torch import nn

from torchdistpackage.errors import LayoutError
from torchdistpackage.layout.derive import local_shape
from torchdistpackage.layout.mark import mark_of, mark_parameter
from torchdistpackage.models.transformers_layout import weights
from torchdistpackage.topology.mesh import Mesh

_SHOWN = 6


def check_shapes(made: Any, mesh: Mesh, index: int) -> None:
    """Raises LayoutError where transformers' parameters are not those of the layouts. made: a
    `TransformersStage`."""
    known = weights(made.shape, None, made.axis)
    problems: list[str] = []
    parameters = dict(made.named_parameters())
    for name, key in made.global_names().items():
        if key not in known:
            problems.append(f"{key} is not known")
            continue
        has, wants = tuple(parameters[name].shape), local_shape(known[key].layout, mesh, index)
        if has != wants:
            problems.append(f"{key} has shape {has}, not {wants}")
    if problems:
        more = f" and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise LayoutError(
            f"this release of transformers builds another {made.shape.family} than the one known "
            f"here: {'; '.join(problems[:_SHOWN])}{more}; use model.target for this model"
        )


def materialize(made: nn.Module, device: torch.device, left: Container[nn.Parameter] = ()) -> None:
    """Put parameters, without values, and buffers on `device`; what is shared stays so. left: of
    those that stay on meta."""
    known: dict[int, nn.Parameter] = {}
    for module in made.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.is_meta or parameter in left:
                continue
            if id(parameter) not in known:
                empty = torch.empty_like(parameter, device=device)
                known[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
                if (mark := mark_of(parameter)) is not None:
                    mark_parameter(known[id(parameter)], mark.layout, mark.group, mark.depth)
            module._parameters[name] = known[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
