"""Initial weights that do not depend on the layout.

One rule: a parameter's full tensor is drawn from a generator of its own, seeded by its
global name, and each rank keeps its slices. So one seed gives the same model, bit for bit,
on any number of ranks. Draws are float32 on the CPU whatever the parameter is, so that runs
in another precision or on another device start from the same numbers.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from torchdistpackage.comm.primitives import Group
from torchdistpackage.comm.random import differ, seed_from
from torchdistpackage.errors import LayoutError
from torchdistpackage.layout.derive import holders_along, local_shape, local_slices
from torchdistpackage.layout.layout import Layout
from torchdistpackage.parallel.tensor.full import copy_part
from torchdistpackage.parallel.tensor.marked import Marked
from torchdistpackage.topology.mesh import Mesh, Topology


@dataclass(frozen=True, slots=True)
class Initial:
    """The initial value of a parameter.

    kind: "normal" and "uniform" are centred on 0; "zeros" and "ones" are constant.
    std: standard deviation of the draws; a uniform draw lies within std * sqrt(3).
    zero_row: this row of the whole tensor is zeros, as that of an embedding's padding.
    make: for the kind "made", what draws the whole tensor from the seed of a run.
    """

    kind: Literal["normal", "uniform", "zeros", "ones", "made"] = "normal"
    std: float = 0.02
    zero_row: int | None = None
    make: Callable[[int], Tensor] | None = None

    @property
    def constant(self) -> bool:
        return self.kind in ("zeros", "ones")


NORMAL, ZEROS, ONES = Initial(), Initial("zeros"), Initial("ones")


@torch.no_grad()
def fill(x: Tensor, initial: Initial, generator: torch.Generator | None = None) -> Tensor:
    """Overwrite `x` with the values of `initial` and return it."""
    if initial.constant:
        return x.fill_(1 if initial.kind == "ones" else 0)
    if initial.kind == "normal":
        return x.normal_(0, initial.std, generator=generator)
    bound = initial.std * 3**0.5
    return x.uniform_(-bound, bound, generator=generator)


def _zero_row(x: Tensor, row: int | None) -> None:
    if row is not None and row >= 0:
        x[row] = 0


def parameter(
    layout: Layout,
    initial: Initial,
    group: Group,
    axis: str,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> nn.Parameter:
    """Return this rank's shard of a parameter that `axis`, whose ranks are `group`, may cut.

    It is filled from torch's stream, each rank of a cut parameter with draws of its own; what
    must not depend on the layout is overwritten by `initialize`.

    Raises:
        LayoutError: the ranks cannot share a dim evenly.
    """
    shape = local_shape(layout, Mesh(((axis, group.size()),)), group.rank())
    weight = torch.empty(shape, dtype=dtype, device=device)
    if weight.is_meta:
        return nn.Parameter(weight)
    differs = bool(layout.split_axes) and not initial.constant
    index = holders_along(layout, group.size(), group.rank()).start
    with differ(index, weight.device) if differs else nullcontext():
        fill(weight, initial)
    if initial.zero_row is not None:
        (rows, *_), *_ = local_slices(layout, Mesh(((axis, group.size()),)), group.rank())
        row = initial.zero_row
        _zero_row(weight, row - rows.start if row < rows.stop else None)
    return nn.Parameter(weight)


def make_parameters(
    layer: Marked, dtype: torch.dtype | None, device: torch.device | str | None
) -> None:
    """Register and mark the parameters that a layer with `group` and `axis` declares by
    `initials()`.

    One without a layout, such as an omitted bias, becomes None.
    """
    layouts = layer.layouts()
    for name, initial in layer.initials().items():
        weight = None
        if name in layouts:
            weight = parameter(layouts[name], initial, layer.group, layer.axis, dtype, device)
        layer.register_parameter(name, weight)
    layer.mark()


def collect_initials(module: nn.Module) -> dict[str, Initial]:
    """Return, by parameter name, what submodules of `module` declare with `initials()`; outer ones
    win.
    """
    declared: dict[str, Initial] = {}
    for path, part in module.named_modules():
        if callable(initials := getattr(part, "initials", None)):
            for name, initial in initials().items():
                declared.setdefault(f"{path}.{name}" if path else name, initial)
    return {name: declared[name] for name, _ in module.named_parameters() if name in declared}


@torch.no_grad()
def initialize(
    module: nn.Module,
    layouts: Mapping[str, Layout],
    mesh: Mesh | Topology,
    rank: int,
    seed: int,
    initials: Mapping[str, Initial] | None = None,
) -> None:
    """Set every declared parameter to the initial weights of `seed`, equal under every layout.

    layouts: by parameter name, as `collect` gives them; the seed is mixed with `layout.name`.
    initials: by parameter name; default `collect_initials(module)`. A parameter that is not
        among them stays what its module made it, which is equal on all ranks only if
        the caller seeded them alike before building it.
    mesh: of all layouts, or the topology that has it for the view of each.

    Raises:
        LayoutError: a parameter is not there, has no layout, or has another shape than its layout.
    """
    parameters = dict(module.named_parameters())
    for name, initial in (collect_initials(module) if initials is None else initials).items():
        if name not in parameters or name not in layouts:
            lacks = "layout" if name in parameters else "parameter"
            raise LayoutError(f"initial weights of {name}: the module has no {lacks} of that name")
        target, layout = parameters[name], layouts[name]
        view = mesh.view(layout.view) if isinstance(mesh, Topology) else mesh
        if tuple(target.shape) != (shape := local_shape(layout, view, rank)):
            raise LayoutError(
                f"{name} has shape {tuple(target.shape)} on rank {rank}, but its layout, "
                f"{layout.shape} split {layout.split}, gives it {shape}; build the module "
                f"with the group of the same mesh"
            )
        if initial.constant:
            fill(target, initial)
            continue
        full = _whole(layout, initial, seed)
        copy_part(target, full, layout, view, rank)


def _whole(layout: Layout, initial: Initial, seed: int) -> Tensor:
    """Return the full tensor, as float32 on the CPU."""
    if initial.make is not None:
        return initial.make(seed)
    generator = torch.Generator().manual_seed(seed_from(seed, layout.name))
    full = fill(torch.empty(layout.shape, dtype=torch.float32, device="cpu"), initial, generator)
    _zero_row(full, initial.zero_row)
    return full
