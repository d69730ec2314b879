"""Tensors, modules and operations that live on one place of a placed program.

On ranks of their place they hold the data; on other ranks they are placeholders. Every rank makes
the same calls on them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from torchdistpackage.compat.placed.gradients import Content
from torchdistpackage.compat.placed.kinds import Kind, Kinds
from torchdistpackage.compat.placed.place import Place
from torchdistpackage.compat.placed.program import PlacedValue, Program
from torchdistpackage.compat.placed.structure import (
    Hole,
    fill,
    flatten,
    member,
    parts_of,
    signature,
)
from torchdistpackage.compat.placed.tensor_methods import TensorMethods
from torchdistpackage.errors import PlacementError

KindsOf = Kinds | Callable[[], Kinds] | None


class ManagedTensor(TensorMethods):
    """A tensor on one place, or another output of an operation there.

    All ranks unpack (`a, b = y`) or index (`y["loss"]`, `y[0]`) an output of several parts the same
    way; the ranks outside of its place learn its parts once for each operation.

    tensor: the data on ranks of the place, a placeholder elsewhere. data_device: the place.
    """

    def __init__(self, tensor: Tensor, place: Place, program: Program, is_leaf: bool = True):
        if tensor.grad_fn is not None and is_leaf:
            raise PlacementError(
                "a managed tensor begins with one that has no graph behind it (grad_fn is set): "
                "compute it by an operation on a place, or pass its detach()"
            )
        self._set(program.leaf(tensor, place), program, is_leaf, None)

    def _set(self, value: PlacedValue, program: Program, is_leaf: bool, kinds: KindsOf) -> None:
        self._value = value
        self._program = program
        self.is_leaf = is_leaf
        self._kinds = kinds
        self._kind: Kind | None = ("tensor", []) if is_leaf else None

    def _like(self, value: PlacedValue, kinds: Kinds | None) -> Any:
        """Return a managed tensor of this class with another value."""
        result = object.__new__(type(self))
        result._set(value, self._program, False, kinds)
        return result

    @property
    def data_device(self) -> Place:
        """The place of the data."""
        return self._value.place

    @property
    def is_here(self) -> bool:
        """True on ranks of its place."""
        return self._program.is_on(self.data_device)

    def _content(self) -> Content | None:
        """Run a pending operation and return this rank's content; None outside of the place."""
        if self._value.pending:
            self._program.flush()
        return self._value.content

    @property
    def tensor(self) -> Any:
        """The data on ranks of its place, a zero as a placeholder elsewhere."""
        content = self._content()
        return torch.zeros([]) if content is None else content.value()

    @property
    def grad(self) -> Tensor | None:
        """The gradient of a leaf on ranks of its place, None elsewhere."""
        content = self._content()
        if not self.is_leaf or content is None:
            return None
        return content.tensors[0].grad

    def __repr__(self) -> str:
        this = self.tensor
        data = this.data if isinstance(this, Tensor) else this
        return (
            f"{type(self).__name__}(this_data={data}, is_leaf={self.is_leaf}, "
            f"data_rank={self.data_device.rank})"
        )

    def to_device(self, place: Place) -> Any:
        """Return the value on another place."""
        if not isinstance(place, Place):
            raise PlacementError(
                f"to_device() takes a place (F.place(rank) gives one), not {place!r}"
            )
        if place == self.data_device:
            return self
        moved = run_on(place, self._program, _same, "to_device", (self,), {}, self._own_kinds())
        moved._kind = self._kind
        return moved

    def detach(self) -> Any:
        """Return the value without its graph: no gradient goes through it."""
        content = self._content()
        if content is not None:
            content = content.detached()
        result = self._like(self._value.but(content, ()), self._own_kinds())
        result._kind = self._kind
        return result

    def backward(self, gradient: Any = None, retain_graph: bool = False) -> None:
        """Add the gradients of this tensor to all leaves it depends on, each on the leaf's ranks.

        gradient: a tensor of its shape, or a managed one; None if it has a single element.

        Raises:
            PlacementError: it is a leaf or has several parts, or the gradient is not a tensor.
            RuntimeError: on its place, as torch does: it requires no gradient, has several
                elements, or its graph was freed.
        """
        if self.is_leaf:
            raise PlacementError("Cannot call backward on a leaf tensor")
        if isinstance(gradient, ManagedTensor):
            gradient = gradient.to_device(self.data_device).tensor
        elif not isinstance(gradient, Tensor | None):
            raise PlacementError(
                f"the gradient of a backward is a tensor, not a {type(gradient).__name__}; give "
                f"torch.tensor({gradient!r})"
            )
        self._program.backward(self._value, gradient, retain_graph)

    def full(self) -> Any:
        """Return the value on every rank, without its graph; all ranks call it and wait."""
        return self._program.everywhere(self._value, "full")

    def item(self) -> Any:
        """Return the number on every rank; all ranks call it and wait."""
        value = self.full()
        return value.item() if isinstance(value, Tensor) else value

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __bool__(self) -> bool:
        raise PlacementError(
            "only the place of a managed tensor knows whether it is true; write `if x.item():`, "
            "which gives the value to all ranks"
        )

    # -- parts ---------------------------------------------------------------------------

    def _parts(self) -> Kind:
        """Return the kind and the names of its parts, on every rank."""
        if self._kind is None:
            content = self._content()
            local = None if content is None else parts_of(content.skeleton)
            kinds = self._own_kinds() or Kinds()
            self._kind = kinds.of(self._program, self._value, local)
        return self._kind

    def _own_kinds(self) -> Kinds | None:
        """Return the kinds of this output.

        They are looked up on first use, as most outputs are one tensor and never unpacked.
        """
        if callable(self._kinds):
            self._kinds = self._kinds()
        return self._kinds

    def _part(self, key: Any) -> Any:
        content = self._content()
        parent_kinds = self._own_kinds()
        kinds = None if parent_kinds is None else parent_kinds.part(key)
        if content is not None:
            content = content.part(member(content.skeleton, key))
        return self._like(self._value.but(content), kinds)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str) or (isinstance(key, int) and not isinstance(key, bool)):
            kind, names = self._parts()
            if kind != "tensor":
                part_name = key + len(names) if isinstance(key, int) and key < 0 else key
                if kind == "named" and isinstance(key, int) and key not in names:
                    part_name = names[key] if -len(names) <= key < len(names) else key
                if part_name not in names:
                    raise PlacementError(
                        f"an output has no part {key!r}; use one of its parts {names}"
                    )
                return self._part(part_name)
        return run_together(operator.getitem, (self, key), {})

    def __len__(self) -> int:
        kind, names = self._parts()
        if kind == "tensor":
            return run_together(len, (self,), {}).item()
        return len(names)

    def __iter__(self) -> Iterator[Any]:
        kind, names = self._parts()
        if kind == "tensor":
            return iter(run_together(torch.unbind, (self,), {}))
        if kind == "value":
            raise PlacementError(
                "this output is a single value, which has no parts to unpack; use it as it is"
            )
        return iter(names) if kind == "named" else iter([self._part(name) for name in names])

    def keys(self) -> list[Any]:
        """Return the names of the parts."""
        return list(self._parts()[1])

    def __getattr__(self, name: str) -> Any:
        if hasattr(Tensor, name):
            raise AttributeError(
                f"a managed tensor has no {name!r} on every rank: .tensor.{name} is there on its "
                f"place, and an operation can use it"
            )
        raise AttributeError(
            f"{type(self).__name__} has no attribute {name!r}; a part of an output is x[{name!r}]"
        )

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return run_together(func, args, kwargs or {})


def _same(x: Any) -> Any:
    return x


class ManagedOperation:
    """A function that runs on one place; its arguments are moved there.

    Arguments may nest in lists, tuples, dicts and dataclasses; values that are not tensors are
    passed as they are.
    """

    def __init__(self, fn: Callable[..., Any], place: Place, program: Program):
        self.fn = fn
        self.data_device = place
        self._program = program
        self._dynamic = False
        self._kinds: dict[str, Kinds] = {}

    def set_dynamic(self, dynamic: bool) -> None:
        """Say whether the number of outputs may change from call to call."""
        self._dynamic = dynamic

    tensor_class: type[ManagedTensor] = ManagedTensor

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return run_on(self.data_device, self._program, self.fn, name_of(self.fn), args, kwargs,
                      self._kinds, self._dynamic, self.tensor_class)  # fmt: skip

    @property
    def program(self) -> Program:
        """The program whose ranks all have this operation."""
        return self._program

    @property
    def is_here(self) -> bool:
        """True on ranks of its place."""
        return self._program.is_on(self.data_device)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({name_of(self.fn)} on {self.data_device})"


class AbsentModule(Module):
    """A placeholder for a module on ranks outside of its place."""


class ManagedModule(ManagedOperation):
    """A module on one place; other ranks hold no parameters of it."""

    def __init__(self, module: Module, place: Place, program: Program):
        self.module = module
        super().__init__(module, place, program)

    def parameters(self) -> Iterable[torch.nn.Parameter]:
        """Return the parameters of the module on ranks of its place, none elsewhere."""
        return self.module.parameters() if self.is_here else []

    def named_parameters(self) -> Iterable[tuple[str, torch.nn.Parameter]]:
        """Return names and parameters of the module on ranks of its place, none elsewhere."""
        return self.module.named_parameters() if self.is_here else []

    def train(self, mode: bool = True) -> ManagedModule:
        """Put the module into training mode, or out of it."""
        self.module.train(mode)
        return self

    def eval(self) -> ManagedModule:
        """Put the module into evaluation mode."""
        return self.train(False)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients of the module."""
        self.module.zero_grad(set_to_none)


def name_of(fn: Any) -> str:
    """Return the name of a function or module for messages."""
    return getattr(fn, "__name__", None) or type(fn).__name__


def run_on(
    place: Place,
    program: Program,
    fn: Callable[..., Any],
    name: str,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    kinds: dict[str, Kinds] | Kinds | None = None,
    dynamic: bool = True,
    tensor_class: type[ManagedTensor] | None = None,
) -> Any:
    """Run `fn` on `place`.

    Raises:
        PlacementError: an argument is a tensor without a place, or of another program.
    """
    leaves, arguments = flatten((tuple(args), kwargs), _is_tensor_or_managed)
    values = list[ManagedTensor]()
    order = list[Any]()
    index: dict[int, int] = {}
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            raise PlacementError(
                f"{name} on {place}: Tensor must be wrapped in DeviceManagedTensor: an argument of "
                f"shape {tuple(leaf.shape)} has no place; pass F(tensor), called inside `with "
                "F.under(place)`"
            )
        if leaf._program is not program:
            raise PlacementError(
                f"{name} on {place}: an argument belongs to another group of ranks; move it there "
                "by .to(place) first"
            )
        if id(leaf) not in index:
            index[id(leaf)] = len(values)
            values.append(leaf)
        order.append(Hole(index[id(leaf)]))
    output = program.call(fn, name, place, fill(arguments, order), [leaf._value for leaf in values])
    result = object.__new__(tensor_class or (type(values[0]) if values else ManagedTensor))
    table = kinds
    if isinstance(table, dict):
        result._set(output, program, False, lambda: _kinds_for(table, arguments, dynamic))
    else:
        result._set(output, program, False, table)
    return result


def _kinds_for(table: dict[str, Kinds], arguments: Any, dynamic: bool) -> Kinds:
    """Return the kinds of a function's outputs for arguments like these."""
    return table.setdefault(signature(arguments), Kinds(dynamic))


def run_together(fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run `fn` on the place of its arguments.

    Raises:
        PlacementError: they are on different places.
    """
    tensors, _ = flatten((tuple(args), kwargs), lambda x: isinstance(x, ManagedTensor))
    places = list(dict.fromkeys(tensor.data_device for tensor in tensors))
    if len(places) > 1:
        raise PlacementError(
            f"{name_of(fn)} mixes tensors on {'; '.join(map(str, places))}, and no place is named "
            f"for it; wrap it: with F.under(place): op = F({name_of(fn)})"
        )
    return run_on(places[0], tensors[0]._program, fn, name_of(fn), args, kwargs)


def _is_tensor_or_managed(x: object) -> bool:
    return isinstance(x, Tensor | ManagedTensor)
