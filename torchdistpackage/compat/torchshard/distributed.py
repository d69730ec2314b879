"""torchshard.distributed: model parallel groups, and collectives over this rank's group.

The collectives return tensors, not handles; autograd follows those without an underscore.
"""

import functools
from collections.abc import Callable

from torch import Tensor, nn

from torchdistpackage.comm import collectives
from torchdistpackage.compat import paths
from torchdistpackage.compat.torchshard import marks
from torchdistpackage.compat.torchshard.chunks import chunk
from torchdistpackage.compat.torchshard.cuts import check_tensors, cut_of
from torchdistpackage.compat.torchshard.model_groups import (
    all_reduce_,
    destroy_process_group,
    get_group,
    get_group_size,
    get_rank,
    get_world_size,
    init_process_group,
    is_initialized,
    summed_in_place,
)

__all__ = [
    "_gather",
    "_reduce",
    "_split",
    "copy",
    "destroy_process_group",
    "gather",
    "get_group",
    "get_group_size",
    "get_rank",
    "get_world_size",
    "init_process_group",
    "is_initialized",
    "reduce",
    "scatter",
]

__path__: list[str] = []
"""Makes this module a package: torchshard has modules below it, which are registered."""


def __getattr__(name: str) -> object:
    return paths.lookup(__name__, name)


# -- seen by autograd ----------------------------------------------------------------------


def _or_input(operation: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Accept the first parameter as `tensor`, the pages' name, or `input`, the code's."""

    @functools.wraps(operation)
    def call(*args: object, **kwargs: object) -> Tensor:
        if "input" in kwargs:
            kwargs["tensor"] = kwargs.pop("input")
        first = args[0] if args else kwargs.get("tensor")
        check_tensors(operation.__name__, input=first)
        return operation(*args, **kwargs)

    return call


@_or_input
def scatter(tensor: Tensor, dim: int | None = -1) -> Tensor:
    """Return this rank's slice along `dim` of a tensor that all ranks have; None: all of it.

    The result is marked as split along `dim`. The backward gathers gradients.
    """
    group = get_group()
    if dim is None:
        return tensor
    out = _another(collectives.scatter(marks.unmarked(tensor), dim, group), tensor)
    if dim in marks.LAST:
        return marks.mark(out, dim % out.dim(), value=dim)
    marks.set_attribute(out, dim)
    return out


@_or_input
def gather(tensor: Tensor, dim: int | None = -1) -> Tensor:
    """Join the slices of this rank's group along `dim`; None: return `tensor`.

    The mark of the result is None, unless another dim than `dim` is split. The backward returns the
    gradient of this rank's slice.
    """
    group = get_group()
    if dim is None:
        return tensor
    cut = cut_of(tensor)
    sizes = None
    if cut is not None and cut.loose and dim % tensor.dim() == cut.dim + 1:
        cut = cut.behind(tensor)
    is_split_dim = cut is not None and dim % tensor.dim() == cut.dim
    if is_split_dim:
        size = group.size()
        sizes = [chunk(cut.length, size, index)[1] for index in range(size)]
    out = _another(collectives.gather(marks.unmarked(tensor), dim, group, sizes), tensor)
    if cut is not None and not is_split_dim:
        marks.follow(out, cut)
        return out
    marks.set_attribute(out, None)
    return out


@_or_input
def reduce(tensor: Tensor) -> Tensor:
    """Sum `tensor` over this rank's group: in place, unless it needs a gradient.

    The backward passes the gradient through.
    """
    plain = marks.unmarked(tensor)
    total = all_reduce_(plain, get_group())
    return _marked_whole(tensor if total is plain else total)


@_or_input
def copy(tensor: Tensor) -> Tensor:
    """Return the tensor itself; the backward sums its gradient over this rank's group."""
    return collectives.copy(marks.unmarked(tensor), get_group())


def _another(out: Tensor, tensor: Tensor) -> Tensor:
    """Return `out`, or a view if it is `tensor`, as in a group of one: each has its mark."""
    return out.view(out.shape) if out is tensor else out


def _marked_whole(x: Tensor) -> Tensor:
    if not isinstance(x, nn.Parameter):
        marks.set_attribute(x, None)
    return x


# -- not seen by autograd ------------------------------------------------------------------


def _reduce(tensor: Tensor) -> Tensor:
    """Sum `tensor` over this rank's group in place, and return it."""
    summed_in_place(marks.unmarked(tensor), get_group())
    return _marked_whole(tensor)


def _split(tensor: Tensor, dim: int | None = -1) -> Tensor:
    return scatter(tensor.detach(), dim)


def _gather(tensor: Tensor, dim: int | None = -1) -> Tensor:
    return gather(tensor.detach(), dim)


def _applied(name: str, function: Callable[..., Tensor]) -> type:
    """Return a class of torchshard.distributed.comm; users call its `apply`."""
    return type(name, (), {"apply": staticmethod(function), "__doc__": function.__doc__})


Copy, Scatter = _applied("Copy", copy), _applied("Scatter", scatter)
Reduce, Gather = _applied("Reduce", reduce), _applied("Gather", gather)
