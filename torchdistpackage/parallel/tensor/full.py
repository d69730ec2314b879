"""Convert layers from the tensors of a one-process module, and back."""

from collections.abc import Mapping
from typing import Self, cast

import torch
from torch import Tensor, nn

from torchdistpackage.comm import primitives
from torchdistpackage.comm.attendance import expect_all
from torchdistpackage.comm.primitives import Group
from torchdistpackage.errors import LayoutError
from torchdistpackage.layout.derive import blocks, local_shape
from torchdistpackage.layout.layout import Layout
from torchdistpackage.layout.mark import collect, mark_of
from torchdistpackage.topology.mesh import Mesh

Full = nn.Module | Mapping[str, Tensor]
"""A one-process module, or its tensors by name."""


class FullTensors:
    """Base class for loading from, and returning, the tensors of a one-process module.

    Their names are those of this module's parameters; a subclass with other names for some
    one-process module translates them in `full_names`.
    """

    def full_names(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return a one-process module's `tensors` under the names of this module's parameters."""
        return tensors

    def from_full(self, full: Full) -> Self:
        """Overwrite every parameter with this rank's slice of it in `full`; return this module.

        full: a one-process module (`nn.Linear`, `nn.Embedding`, a norm, this class in a group of
            one rank) or its tensors by name, equal on all ranks. Nothing is sent.

        Raises:
            LayoutError: names or shapes differ; lists all of them, and nothing is overwritten.
        """
        load_full(cast(nn.Module, self), self.full_names(_tensors_of(full)))
        return self

    def to_full(self) -> dict[str, Tensor]:
        """Return copies of the full parameters by name, on every rank. All ranks of the group call
        this.
        """
        module = cast(nn.Module, self)
        layouts, parameters = collect(module), dict(module.named_parameters())
        groups = (_place(p, layouts[name])[2] for name, p in parameters.items())
        if (group := next((x for x in groups if x is not None), None)) is not None:
            expect_all("to_full()", group)
        return {name: gather_full(p, layouts[name]) for name, p in parameters.items()}


@torch.no_grad()
def load_full(module: nn.Module, full: Mapping[str, Tensor]) -> None:
    """Overwrite the parameters of `module` with their slices of `full`, by name.

    Raises:
        LayoutError: names or shapes differ; lists all.
    """
    layouts, parameters = collect(module), dict(module.named_parameters())
    problems = [f"{name} is missing" for name in parameters if name not in full]
    problems += [f"{name} is not a parameter here" for name in full if name not in parameters]
    problems += [
        f"{name} has shape {tuple(full[name].shape)}, but this was made for {layouts[name].shape}"
        for name in parameters
        if name in full and tuple(full[name].shape) != layouts[name].shape
    ]
    if problems:
        kind = type(module).__name__
        raise LayoutError(
            f"whole tensors for {kind}: {'; '.join(problems)}; give one of the layer's shape for "
            f"each of {', '.join(parameters)}"
        )
    for name, target in parameters.items():
        layout = layouts[name]
        mesh, index, _ = _place(target, layout)
        copy_part(target, full[name], layout, mesh, index)


@torch.no_grad()
def gather_full(parameter: Tensor, layout: Layout) -> Tensor:
    """Return a copy of the full parameter on every rank of the group that splits it; all of them
    call this.
    """
    mesh, _, group = _place(parameter, layout)
    if group is None or group.size() == 1:
        return parameter.detach().clone()
    shapes = [local_shape(layout, mesh, i) for i in range(mesh.size)]
    sizes = [torch.Size(shape).numel() for shape in shapes]
    local_values = parameter.detach().reshape(-1)
    flat = primitives.all_gather(local_values, group, None if len(set(sizes)) == 1 else sizes)
    full = parameter.new_empty(layout.shape)
    for i, part in enumerate(flat.split(sizes)):
        for where, local in blocks(layout, mesh, i):
            full[where] = part.view(shapes[i])[local]
    return full


@torch.no_grad()
def copy_part(target: Tensor, full: Tensor, layout: Layout, mesh: Mesh, rank: int) -> None:
    """Overwrite `target`, the shard of `rank`, with its slice of the full tensor.

    Raises:
        LayoutError: `full` is not of the layout's shape.
    """
    if tuple(full.shape) != layout.shape:
        raise LayoutError(
            f"{layout.name}: the whole tensor has shape {tuple(full.shape)}, "
            f"but the layer was made for {layout.shape}; give one of that shape"
        )
    for region, local in blocks(layout, mesh, rank):
        target[local].copy_(full[region])


def _place(parameter: Tensor, layout: Layout) -> tuple[Mesh, int, Group | None]:
    """Return the mesh of the group that splits a parameter, and this rank's index in it."""
    mark = mark_of(parameter)
    group = None if mark is None else cast(Group | None, mark.group)
    if not layout.split_axes or group is None:
        return Mesh(()), 0, None
    return Mesh(((layout.split_axes[0], group.size()),)), group.rank(), group


def _tensors_of(full: Full) -> Mapping[str, Tensor]:
    return dict(full.named_parameters()) if isinstance(full, nn.Module) else full
