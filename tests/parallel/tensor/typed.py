"""One process, typed as a rank of many: an unsummed gradient is an error before any rank runs.

`spmd_types` gives each tensor a type along each axis of the mesh, and follows it in a forward:

    I  equal on all ranks, and one thing: so is its gradient           dual I
    R  equal on all ranks, each of which uses it for itself            dual P
    V  each rank's own                                                 dual V
    P  a partial sum: what it means is the sum over the ranks          dual R

A gradient has the dual of its tensor's type. So R is for a parameter whose gradient somebody sums,
I for one that a plain optimizer steps; an I that meets a V without `copy` is an error. These are
the two kinds of tensors of comm/autograd.py: replicated is I, own is R, V or P.

A number that a rank makes of its own index (an offset, a length) is not seen to differ.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import spmd_types as spmd
import torch.distributed as dist
import torch.nn.functional as F
from spmd_types import I, MeshAxis, P, R, SpmdTypeError, V, _mesh_axis
from spmd_types.checker import typecheck
from torch import Tensor, nn
from torch.testing._internal.distributed import fake_pg

from torchdistpackage.comm import autograd, creation, primitives
from torchdistpackage.comm.collective_table import OPERATIONS
from torchdistpackage.comm.primitives import Group
from torchdistpackage.comm.runtime import leave
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.ddp.bucket_comm import BucketMember, Start
from torchdistpackage.ddp.naive_ddp import NaiveDDP
from torchdistpackage.layout.layout import Layout
from torchdistpackage.parallel.tensor import column_product, cross_entropy, loss_terms, row_product
from torchdistpackage.parallel.tensor.product_gradients import multiply

assert fake_pg  # which makes the back end `fake` known

Types = dict[str, spmd.PerMeshAxisLocalSpmdType]
"""By the name of an axis."""
DUAL = {I: I, R: P, P: R, V: V}
AXES = ("data", "tensor")
TYPES = {"I": I, "R": R, "V": V, "P": P}
MAPS = {
    spec.load(spec.map): (TYPES[spec.takes], TYPES[spec.gives])
    for spec in OPERATIONS.values()
    if spec.map
}
"""What each map takes, and what it gives; an own tensor passes for a partial sum."""


@contextmanager
def typed_world(data: int = 2, tensor: int = 2) -> Iterator[None]:
    """This process is rank 0 of data x tensor, and its collectives move nothing.

    The product knows nothing of types: here its autograd functions get theirs.
    """
    dist.init_process_group("fake", rank=0, world_size=data * tensor, store=dist.HashStore())
    hooks = (
        (autograd._LinearMapFunction, _through),
        (cross_entropy._CrossEntropy, _cross_entropy),
        (row_product._ScatterAdd, _scatter_add),
    )
    with pytest.MonkeyPatch.context() as patch:
        for function, hook in hooks:
            patch.setattr(function, "spmd_typecheck", staticmethod(hook), raising=False)
        # a node that does several things at once is typed as what it stands for
        for name, hook in (
            ("_ColumnProduct", _column_product),
            ("_ColumnProducts", _column_products),
            ("_GatheredProducts", _gathered_products),
        ):
            patch.setattr(column_product, name, SimpleNamespace(apply=hook))
        patch.setattr(row_product, "_RowProduct", SimpleNamespace(apply=_row_product))
        # and what is written in place keeps its first type
        patch.setattr(row_product, "Reduce", lambda group, in_place: autograd.Reduce(group))
        try:
            tpc.setup_process_groups([("data", data), ("tensor", tensor)])
            yield
        finally:
            for store, complete in creation._complete.values():
                store.set(complete, "")  # members that never come are not waited for
            tpc.destroy()
            leave()
            _mesh_axis._reset()  # it knows groups, which have ended, by their ids


@contextmanager
def checked() -> Iterator[None]:
    """What is computed inside has types; what is made before, such as modules, is given some."""
    with spmd.set_current_mesh({name: axis_of(name) for name in AXES}), typecheck():
        yield


def axis_of(name: str) -> MeshAxis:
    return MeshAxis.of(tpc.get_group(name))


def types_of(x: Tensor) -> Types:
    """Along the axes that have several ranks."""
    held = spmd.get_local_type(x)
    return {name: held[axis_of(name)] for name in AXES if axis_of(name) in held}


def give_type(x: Tensor, data=V, tensor=I) -> Tensor:
    """An input, or whatever else is not computed; without `tensor` what all tensor ranks have."""
    return spmd.assert_type(x, {axis_of("data"): data, axis_of("tensor"): tensor})


def type_parameters(module: nn.Module, layouts: Mapping[str, Layout]) -> None:
    """By who sums their gradients: a NaiveDDP, over its groups, or nobody, so a plain optimizer.

    layouts: say which parameters are cut; nothing else is taken from them.
    """
    summed: dict[int, Group] = {}
    if isinstance(module, NaiveDDP):
        summed = {id(s.parameter): s.group for s in module.reducer.specs}
        module = module.module
    for name, parameter in module.named_parameters():
        axes = axes_in(summed[id(parameter)]) if summed else ()
        cut = layouts[name].split_axes
        give_type(parameter, **{a: V if a in cut else R if a in axes else I for a in AXES})


def axes_in(group: Group) -> tuple[str, ...]:
    """Axes of the mesh along which members of `group` differ from this rank."""
    ranks = {*primitives.ranks_of(group)}
    return tuple(name for name in AXES if {*tpc.get_ranks_in_group(name)} <= ranks)


def backward(loss: Tensor) -> None:
    """Of the sum over all ranks that have a loss of their own.

    Raises:
        SpmdTypeError: it is replicated work, whose gradients would count once a rank.
    """
    for name, held in types_of(loss).items():
        if held is V:
            loss = spmd.reinterpret(loss, tpc.get_group(name), src=V, dst=P)
    loss.backward()


class Sums:
    """A communication hook of NaiveDDP: which gradient it sums along which axes, how often."""

    def __init__(self) -> None:
        self.of: Counter[tuple[int, str]] = Counter()

    def bind(self, members: Sequence[BucketMember], num_elements: int) -> Start:
        def start(flat: Tensor, group: Group, op: dist.ReduceOp.RedOpType):
            self.of.update((id(m.parameter), axis) for m in members for axis in axes_in(group))
            return primitives.start_all_reduce(flat, group, op)

        return start

    def check(self, module: nn.Module) -> None:
        """Each gradient is summed once along each axis where it is partial, and nowhere else.

        Raises:
            SpmdTypeError: one is left partial, or what is no partial sum is summed.
        """
        for name, parameter in module.named_parameters():
            for axis, held in types_of(parameter).items():
                times = self.of[id(parameter), axis]
                if times != (DUAL[held] is P):
                    raise SpmdTypeError(
                        f"{name}.grad is {DUAL[held].name}, summed {times}x on {axis}"
                    )


def _column_product(x: Tensor, group: object, *given: Tensor) -> Tensor:
    return _column_products(x, group, 1, *given)[0]


def _column_products(x: Tensor, group: object, num: int, *given: Tensor) -> list[Tensor]:
    return _gathered_products(x, column_product.IdentityForward(group), None, num, *given)[1:]


def _gathered_products(
    x: Tensor, into: autograd.LinearMap, chunks: object, num: int, *given: Tensor
) -> list[Tensor]:
    whole = autograd.apply(into, x)
    return [whole, *multiply(whole, given[:num], given[num:] or (None,) * num)]


def _row_product(x: Tensor, scatter: autograd.LinearMap, chunks: object, weight: Tensor) -> Tensor:
    return autograd.apply(scatter, F.linear(x, weight))


def _through(outputs: Tensor, *, x: Tensor, linear: autograd.LinearMap) -> None:
    """What a linear map takes and gives, and that its backward is of the dual types."""
    src, dst = _types(linear)
    back = _types(linear.transposed())
    if back != (DUAL[dst], DUAL[src]):
        raise SpmdTypeError(f"{linear} is {src} -> {dst}, so its backward cannot be {back}")
    held = spmd.get_local_type(x)[MeshAxis.of(linear.group)]
    if held is not src and (held, src) != (V, P):
        raise SpmdTypeError(f"{type(linear).__name__} takes {src}, not {held}")
    spmd.rules.ignore(x)
    spmd.assert_type_like(outputs, x, {linear.group: dst})


def _scatter_add(outputs: Tensor, *, x: Tensor, bias: Tensor, scatter: autograd.LinearMap) -> None:
    """Partial sums to rows, and a bias whose gradient is made of the rows of all ranks."""
    held = spmd.get_local_type(bias)[MeshAxis.of(scatter.group)]
    if held is not I:
        raise SpmdTypeError(f"the gradient of this bias is equal on all ranks; {held} is another's")
    if MAPS[type(scatter.transposed())] != (V, R):
        raise SpmdTypeError(f"{scatter.transposed()} brings no rows of other ranks")
    spmd.rules.ignore(bias)
    _through(outputs, x=x, linear=scatter)


def _types(linear: autograd.LinearMap) -> tuple[object, object]:
    return MAPS[type(getattr(linear, "plain", linear))]


def _cross_entropy(
    outputs: Tensor, *, logits: Tensor, terms: loss_terms.LossTerms, targets: object
) -> None:
    """My columns of the logits to the loss of each token, which all ranks have alike."""
    group = terms.group
    held = spmd.get_local_type(logits)[MeshAxis.of(group)]
    if held is not V:
        raise SpmdTypeError(f"cross entropy takes {V} logits, not {held}")
    spmd.rules.ignore(logits)
    spmd.assert_type_like(outputs, logits, {group: I})
