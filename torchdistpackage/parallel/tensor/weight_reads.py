"""Weights of split layers, read by code outside of the layer: complete there, as in one process.

Some modules compute with `layer.weight` themselves: torch's TransformerEncoderLayer and
MultiheadAttention in their fast paths, or, in a model that knows nothing of its split, a head that
multiplies by the table of an embedding. A read in their forward gives a `SplitWeight`, which
torch's fast paths leave alone. Operations get all of it, joined over the group, so all ranks must
take the same way. Anywhere else a read gives this rank's parameter: who puts a split layer into a
module of their own, as torchshard's users do, computes with the part.
"""

import sys
from collections.abc import Callable
from functools import lru_cache
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from torchdistpackage.comm import collectives
from torchdistpackage.comm.nested import map_tensors
from torchdistpackage.comm.primitives import Group
from torchdistpackage.errors import LayoutError
from torchdistpackage.layout.derive import blocks, local_shape
from torchdistpackage.layout.layout import Layout
from torchdistpackage.layout.mark import mark_of
from torchdistpackage.parallel.tensor.full import copy_part
from torchdistpackage.parallel.tensor.sharing import copy_to_sharing
from torchdistpackage.topology.mesh import Mesh

ALIKE = ("dtype", "device", "layout", "requires_grad", "is_cuda", "is_meta", "ndim")
KNOWN = {getattr(Tensor, name).__get__ for name in ALIKE}
KNOWN |= {Tensor.is_floating_point, Tensor.is_complex, Tensor.dim}
"""Attributes of a tensor that its slices have alike."""
OUTLINE = {Tensor.shape.__get__, Tensor.size, Tensor.numel, Tensor.nelement, Tensor.__len__}
"""Attributes that follow from the shape of the full tensor."""
WRITES = ("__set__", "__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__")
CALLS = ("forward", "_call_impl")
"""Functions of a module that run in a forward; hooks run in the second."""
PACKAGE = __name__.partition(".")[0] + "."
RESUMED = "torch_dynamo_resume_in_"
"""Prefix of the name of a function at which a graph was interrupted; `_at_` and a line follow the
name.
"""
CHECKPOINT = "torch/utils/checkpoint.py"


class SplitWeight(Tensor):
    """A slice of a weight that operations read in full through `join`."""

    join: Callable[[Tensor], Tensor]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        named, is_known = kwargs or {}, func in KNOWN
        written = named.get("out", args[0] if args and is_write(func) else None)
        if isinstance(written, SplitWeight):
            return written.write(func, args, named)
        convert = plain if is_known else whole
        args, named = map_tensors(args, convert), map_tensors(named, convert)
        if not all(issubclass(kind, SplitWeight | nn.Parameter) for kind in types):
            return func(*args, **named)  # the others have rules of their own
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **named)

    def write(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Raise LayoutError, because a plan does not cover what a forward writes."""
        raise LayoutError(
            f"a forward writes to the weight of a layer that is split, of shape "
            f"{tuple(plain(self).shape)} on this shard, by {func.__name__}; write before "
            f"the model is split, or leave the layer whole by a tensor_parallel_config"
        )


def plain(x: Tensor) -> Tensor:
    """Return `x`; for a weight, this rank's slice of it."""
    return x.as_subclass(Tensor) if isinstance(x, SplitWeight) else x


def whole(x: Tensor) -> Tensor:
    """Return `x`; for a weight, the full one. All shards call this together."""
    return x.join(plain(x)) if isinstance(x, SplitWeight) else x


def is_write(func: Any) -> bool:
    """Return True if an operation writes to its first argument, or returns what can be written
    to.
    """
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in WRITES or func == Tensor.data.__get__


def split_weight(part: Tensor, join: Callable[[Tensor], Tensor]) -> SplitWeight:
    """Return `part` as a weight that operations read in full, by `join`."""
    weight = part.as_subclass(SplitWeight)
    weight.join = join
    return weight


# -- weights of layers that know their layout and group ------------------------------------


class LayerWeight(SplitWeight):
    """The weight of a split layer of this package, as another module's forward sees it."""

    join: "JoinParts"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in OUTLINE and isinstance(x := args[0], LayerWeight):
            return func(torch.empty(x.join.layout.shape, device="meta"), *args[1:])
        return super().__torch_function__(func, types, args, kwargs)

    def write(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Write to the full weight; this rank keeps its slice."""
        join, part = self.join, plain(self)
        if func == Tensor.data.__get__:
            return layer_weight(part.detach(), join)
        if "out" in named:
            raise LayoutError(
                f"{func.__name__} writes its result into the weight of a split layer, "
                f"{join.layout.shape} in all; leave out= out, and copy the result into the weight"
            )
        full = join(part.detach()).clone()
        with torch._C.DisableTorchFunctionSubclass():
            func(full, *map_tensors(args[1:], whole), **map_tensors(named, whole))
        join.write(part, full)
        return self


def layer_weight(part: Tensor, join: "JoinParts") -> LayerWeight:
    weight = part.as_subclass(LayerWeight)
    weight.__dict__.update(part.__dict__)  # its marks
    weight.join = join
    return weight


class JoinParts:
    """Joins the slices of a weight that a group splits; its gradient is this rank's slice.

    is_partial: each rank computes with its own rows, so gradients are summed first.
    """

    def __init__(self, layout: Layout, group: Group, is_partial: bool):
        self.layout, self.group, self.is_partial = layout, group, is_partial

    def __call__(self, part: Tensor) -> Tensor:
        layout, group = self.layout, self.group
        dim, lengths, order = _places(layout, group.size())
        mark = mark_of(part)
        if layout.is_shared and (mark is None or not mark.num_reducers):
            part = copy_to_sharing(part, layout, group)
        join = collectives.all_gather if self.is_partial else collectives.gather
        joined = join(part, dim, group, lengths)
        return joined if order is None else joined.index_select(dim, order.to(part.device))

    def write(self, part: Tensor, full: Tensor) -> None:
        """Overwrite this rank's slice."""
        copy_part(part, full, self.layout, _mesh(self.layout, self.group.size()), self.group.rank())


@lru_cache(maxsize=256)
def _places(layout: Layout, num: int) -> tuple[int, list[int], Tensor | None]:
    """Return (dim that is split, length of each rank's slice, index of each position in the joined
    slices).

    An index of None means that the slices are joined in order.
    """
    mesh, index_of, start = _mesh(layout, num), dict[int, int](), 0
    dim = next(d for d, axes in enumerate(layout.split) if axes)
    lengths = [local_shape(layout, mesh, rank)[dim] for rank in range(num)]
    if not (any(layout.parts) or layout.heads or layout.ranges):
        return dim, lengths, None
    for rank, length in enumerate(lengths):
        for box, local in blocks(layout, mesh, rank):
            for offset, position in enumerate(range(box[dim].start, box[dim].stop)):
                index_of.setdefault(position, start + local[dim].start + offset)
        start += length
    return dim, lengths, torch.tensor([index_of[position] for position in range(layout.shape[dim])])


def _mesh(layout: Layout, num: int) -> Mesh:
    return Mesh(((layout.split_axes[0], num),))


def read_whole(*names: str, by_any: bool = False) -> Callable[[type], type]:
    """Decorate a class of split layers so that forwards of torch's modules read these parameters in
    full.

    by_any: forwards of any other module do, because the model does not know that it is split.
    """

    def decorate(layer: type) -> type:
        for name in names:
            setattr(layer, name, _property(name, by_any))
        return layer

    return decorate


def own(layer: nn.Module, name: str) -> Any:
    """Return the parameter or buffer of that name in the form that the layer itself uses."""
    attributes = layer.__dict__
    if name in attributes:  # a tensor that stands in for a parameter
        return attributes[name]
    parameters = attributes["_parameters"]
    return parameters[name] if name in parameters else getattr(layer, name)


def _property(name: str, by_any: bool) -> property:
    def read(layer: nn.Module) -> Any:
        attributes = layer.__dict__
        if name in attributes:
            return attributes[name]
        parameters = attributes.get("_parameters", {})
        if name not in parameters:
            raise AttributeError(name)  # then torch's own look-up follows
        parameter = parameters[name]
        mark = mark_of(parameter)
        if mark is None or not mark.layout.split_axes or mark.group is None:
            return parameter
        if mark.group.size() == 1 or not _is_read_outside(layer, by_any):
            return parameter
        join = JoinParts(mark.layout, mark.group, getattr(layer, "sequence_parallel", False))
        return layer_weight(parameter, join)

    def write(layer: nn.Module, value: object) -> None:
        layer.__dict__[name] = value

    def delete(layer: nn.Module) -> None:
        del layer.__dict__[name]

    return property(read, write, delete)


def _is_read_outside(layer: nn.Module, by_any: bool) -> bool:
    """Return True if another module's forward, torch's or any, is reading a parameter of `layer`
    now.
    """
    if (
        torch.compiler.is_dynamo_compiling()
    ):  # a graph has no frames, and layers of this package read by `own`
        if not type(layer).forward.__module__.startswith(PACKAGE):
            return False
        torch._dynamo.graph_break("a module reads the weight of a split layer inside of it")
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        name = code.co_name.removeprefix(RESUMED).partition("_at_")[0]
        if name in CALLS or ".forward.<locals>" in code.co_qualname:
            reader = frame.f_locals.get("self")
            if isinstance(reader, nn.Module):
                return reader is not layer and (by_any or _is_of_torch(reader))
        elif code.co_filename.endswith(CHECKPOINT):
            return by_any  # a backward computes a part of a forward again
        frame = frame.f_back
    return False


def _is_of_torch(module: nn.Module) -> bool:
    """Return True if the forward of `module` is one of torch's own, also in a class derived from
    it.
    """
    return type(module).forward.__module__.partition(".")[0] == "torch"


def refuse_nested(x: Tensor, where: str) -> None:
    """Raises LayoutError for a nested tensor, whose rows no collective knows."""
    if x.is_nested:
        raise LayoutError(
            f"{where} got a nested tensor, as torch.nn.TransformerEncoder makes of padded input in "
            f"eval if its first layer is not split; set use_nested_tensor = False on the encoder"
        )
