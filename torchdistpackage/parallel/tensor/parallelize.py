"""Replace layers of a model that knows nothing of tensor parallelism by layers of this package.

`parallelize` follows a table (layout/table.py). Column layers that read one input, as q, k and v
do, share its *entrance*: a hook of the module around them brings the input together and, backward,
sums its gradient, once for all of them. A column layer that reads its input alone does both itself.
Row layers leave the split by a sum.

Where the table is for sequence parallelism an entrance gathers the sequence and a row layer
scatters it, so that an attention sees all positions; what stands between, norms and the residual
stream, has this rank's part of the sequence, (B, S/n, D).
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchdistpackage.comm import collectives
from torchdistpackage.comm.primitives import Group
from torchdistpackage.layout.derive import local_shape
from torchdistpackage.layout.layout import Layout
from torchdistpackage.layout.mark import Layouts, mark_parameter
from torchdistpackage.layout.table import AttentionCut, LayerCut, SplitTable
from torchdistpackage.parallel.tensor.full import copy_part
from torchdistpackage.parallel.tensor.linear import ColumnLinear, RowLinear
from torchdistpackage.parallel.tensor.lookup import split_lookup
from torchdistpackage.parallel.tensor.stacked import split_stacked
from torchdistpackage.topology.mesh import Mesh

_ADAPTED = ".base_layer"
"""Name of the layer that a peft layer adapts."""
_ADAPTER_NAME = ".default"
"""Component of a parameter's name between an adapter's factor and its weight."""


def parallelize(
    module: nn.Module,
    table: SplitTable,
    group: Group,
    *,
    axis: str = "tensor",
    tp_comm_overlap: bool = False,
) -> None:
    """Split the layers of `module` that `table` names over the ranks of `group`, in place.

    Layers of the table that are not in `module`, as those of another stage, are left out. Weights
    are cut where there are some; on the meta device shards are made there. Parameters keep their
    names and ties; a layer that peft adapts is split with its adapters.
    tp_comm_overlap: as of `ColumnLinear`.

    Gradients that the table calls partial are summed by a reducer (NaiveDDP, ZeroOptimizer), which
    knows them by the marks of the parameters.
    """
    if group.size() == 1:
        return
    split = _LayerSwap(module, table, group, axis, tp_comm_overlap)
    split.replace_layers()
    for path, layouts in table.experts.items():
        if (experts := split.modules.get(path)) is not None:
            split_stacked(experts, layouts, group, split.shard)
    for path, cut in table.attention.items():
        if (attention := split.modules.get(path)) is not None:
            _count_heads(attention, cut, group)
    names = dict(module.named_parameters())
    for name, layout in table.partial.items():
        if (parameter := names.get(name)) is not None:
            mark_parameter(parameter, layout, group, name.count("."))


class _LayerSwap:
    """A module whose layers are being replaced."""

    def __init__(
        self, module: nn.Module, table: SplitTable, group: Group, axis: str, overlap: bool
    ):
        names = module.named_modules(remove_duplicate=False)
        self.modules = {name.replace(_ADAPTER_NAME, ""): part for name, part in names}
        self._module = module
        self.table, self.group, self.axis, self.overlap = table, group, axis, overlap
        self.mesh = Mesh(((axis, group.size()),))
        # by the parameter that each is a shard of, so that what is tied stays so
        self._shards: dict[nn.Parameter, nn.Parameter] = {}

    def replace_layers(self) -> None:
        present = {
            path: cut for path, cut in self.table.layers.items() if self._layer(path) is not None
        }
        adapted = {path for path in present if self._is_adapted(path)}
        entrances = self.table.shared_inputs(present, adapted)
        replaced: dict[nn.Module, nn.Module] = {}
        for path, cut in present.items():
            layer: Any = self._layer(path)
            parameters = dict(layer._parameters)
            replacement, layouts = self._made(path, cut, layer, is_local=cut.entrance in entrances)
            for name, layout in layouts.items():
                replacement.register_parameter(name, self.shard(parameters[name], layout))
            replaced[layer] = replacement
        for parent in list(self._module.modules()):
            for name, child in parent._modules.items():
                if child in replaced:
                    parent._modules[name] = replaced[child]
        for path, cut in present.items():
            if cut.kind == "joined":
                self._join(path, cut, replaced[self._layer(path)])
        for path, is_sequence in entrances.items():
            entrance = _Entrance(self.group, is_sequence)
            self.modules[path].register_forward_pre_hook(entrance, with_kwargs=True)

    def _layer(self, path: str) -> nn.Module | None:
        """Return the layer at `path`, inside its adapter if it has one; None if it is not in this
        module.
        """
        layer = self.modules.get(path + _ADAPTED) or self.modules.get(path)
        return None if layer is None or layer._parameters.get("weight") is None else layer

    def _is_adapted(self, path: str) -> bool:
        return path + _ADAPTED in self.modules

    def _made(
        self, path: str, cut: LayerCut, layer: Any, is_local: bool
    ) -> tuple[nn.Module, Layouts]:
        """Return the replacement of `layer`, with layouts of its parameters."""
        weight = {"weight": cut.weight}
        if cut.kind in ("vocab", "feature"):
            by_rows = cut.kind == "vocab"
            size = cut.weight.shape[0 if by_rows else 1]
            return split_lookup(layer, by_rows, size, self.group), weight
        if cut.kind == "adapter" and len(cut.weight.shape) == 1:
            return layer, weight  # the magnitudes of DoRA, whose module asks for no sizes
        if cut.kind == "adapter":
            outputs, inputs = local_shape(cut.weight, self.mesh, self.group.rank())
            return nn.Linear(inputs, outputs, bias=False, device="meta"), weight
        is_adapted, outputs, inputs = self._is_adapted(path), *cut.weight.shape
        if cut.transposed:
            outputs, inputs = inputs, outputs
        options: dict[str, Any] = {
            "bias": layer.bias is not None,
            "heads": cut.weight.heads,
            "transposed": cut.transposed,
            "sequence_parallel": cut.sequence_parallel,
            "tp_comm_overlap": self.overlap,
            "batch_first": True,
            "group": self.group,
            "axis": self.axis,
            "device": "meta",
        }
        if cut.kind in ("column", "joined"):
            parts = next(filter(None, cut.weight.parts), ())
            column = ColumnLinear(inputs, outputs, parts=parts, local=is_local, **options)
            return column, column.layouts()
        row = RowLinear(inputs, outputs, local=is_adapted, **options)
        if is_adapted:  # so that what the layer and its adapter make is summed as one
            self.modules[path].register_forward_hook(_Exit(self.group, row))
        return row, row.layouts()

    def _join(self, path: str, cut: LayerCut, column: nn.Module) -> None:
        """Give all ranks all outputs of a column layer, including those of its adapter."""
        dim, num = int(cut.transposed), self.group.size()
        sizes = [local_shape(cut.weight, self.mesh, index)[dim] for index in range(num)]
        behind = self.modules[path] if self._is_adapted(path) else column
        behind.register_forward_hook(_Joined(self.group, tuple(sizes)))

    def shard(self, full: nn.Parameter, layout: Layout) -> nn.Parameter:
        """Return this rank's shard of a parameter, one tensor for all of its names."""
        if full not in self._shards:
            shape = local_shape(layout, self.mesh, self.group.rank())
            part = torch.empty(shape, dtype=full.dtype, device=full.device)
            if not full.is_meta:
                copy_part(part, full, layout, self.mesh, self.group.rank())
            self._shards[full] = nn.Parameter(part, full.requires_grad)
        return self._shards[full]


# -- hooks ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Entrance:
    """Handles the input of a module, its first argument, for column layers with local matmuls."""

    group: Group
    sequence_parallel: bool

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (self._entered(args[0]), *args[1:]), kwargs
        name = _argument_names(module)[0]
        return args, {**kwargs, name: self._entered(kwargs[name])}

    def _entered(self, x: Tensor) -> Tensor:
        if not self.sequence_parallel:
            return collectives.copy(x, self.group)
        return collectives.all_gather(x, _sequence_dim(x), self.group).contiguous()


@dataclass(frozen=True, slots=True)
class _Exit:
    """Sums the ranks' results of an adapted row layer, and adds the layer's bias."""

    group: Group
    layer: RowLinear

    def __call__(self, module: nn.Module, args: object, partial: Tensor) -> Tensor:
        if self.layer.sequence_parallel:
            y = collectives.reduce_scatter(partial, _sequence_dim(partial), self.group)
        else:
            y = collectives.reduce(partial, self.group)
        return y if self.layer.bias is None else y + self.layer.bias


@dataclass(frozen=True, slots=True)
class _Joined:
    """Gathers all outputs of a column layer; sizes: those that each rank has."""

    group: Group
    sizes: tuple[int, ...]

    def __call__(self, module: nn.Module, args: object, y: Tensor) -> Tensor:
        return collectives.gather(y, -1, self.group, self.sizes)


def _argument_names(module: nn.Module) -> list[str]:
    return list(inspect.signature(module.forward).parameters)


def _sequence_dim(x: Tensor) -> int:
    """Return the sequence dim of (B, S, D).

    For rows (N, D) it is the rows' dim: all ranks have equally many, and get their own back.
    """
    return x.dim() - 2


def _count_heads(attention: nn.Module, cut: AttentionCut, group: Group) -> None:
    """Make a module work on this rank's heads; attributes that this release lacks are skipped."""
    for name, value in cut.on_rank(group.size(), group.rank()).items():
        if hasattr(attention, name):
            setattr(attention, name, value)
    if cut.by_head:
        names = _argument_names(attention)
        places = {name: names.index(name) for name in cut.by_head if name in names}
        first, num = cut.queries.head_range(group.size(), group.rank())
        hook = _HeadsHere(places, first, num, cut.queries.groups)
        attention.register_forward_pre_hook(hook, with_kwargs=True)


@dataclass(frozen=True, slots=True)
class _HeadsHere:
    """Replaces arguments with a value for each of `total` heads by the slice of this rank's heads.

    places: by name the position of each. first, num: this rank's heads.
    """

    places: Mapping[str, int]
    first: int
    num: int
    total: int

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        arguments = list(args)
        for name, index in self.places.items():
            if name in kwargs:
                kwargs = {**kwargs, name: self._mine(kwargs[name])}
            elif index < len(arguments):
                arguments[index] = self._mine(arguments[index])
        return tuple(arguments), kwargs

    def _mine(self, x: Any) -> Any:
        """Return this rank's heads of x (batch x heads, ...) or (batch, heads, ..., ...); one head
        may stand for all.
        """
        if not isinstance(x, Tensor):
            return x
        if x.dim() == 4:
            return x if x.shape[1] == 1 else x.narrow(1, self.first, self.num)
        return x.unflatten(0, (-1, self.total)).narrow(1, self.first, self.num).flatten(0, 1)
