"""Tensors, modules and operations that live on one place of a placed program.

On ranks of their place they hold the data, elsewhere they stand for it. What is done with them is
the same call on every rank.
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

    An output of several parts is unpacked (`a, b = y`) or indexed (`y["loss"]`, `y[0]`) on all
    ranks alike; the ranks outside of its place learn once for each operation what it consists of.

    tensor: on ranks of the place what it holds, elsewhere a placeholder. data_device: the place.
    """

    def __init__(self, tensor: Tensor, place: Place, program: Program, is_leaf: bool = True):
        if tensor.grad_fn is not None and is_leaf:
            raise PlacementError(
                "a managed tensor begins with one that has no graph behind it (grad_fn is set): "
                "compute it by an operation on a place, or give its detach()"
            )
        self._set(program.leaf(tensor, place), program, is_leaf, None)

    def _set(self, value: PlacedValue, program: Program, is_leaf: bool, kinds: KindsOf) -> None:
        self._value, self._program, self.is_leaf, self._kinds = value, program, is_leaf, kinds
        self._kind: Kind | None = ("tensor", []) if is_leaf else None

    def _like(self, value: PlacedValue, kinds: Kinds | None) -> Any:
        """Another output of this class."""
        made = object.__new__(type(self))
        made._set(value, self._program, False, kinds)
        return made

    @property
    def data_device(self) -> Place:
        """The place."""
        return self._value.place

    @property
    def is_here(self) -> bool:
        """Whether this rank is of its place."""
        return self._program.is_on(self.data_device)

    def _content(self) -> Content | None:
        """The part that this rank has, once the operation has run; None outside of the place."""
        if self._value.pending:
            self._program.flush()
        return self._value.content

    @property
    def tensor(self) -> Any:
        """The data, on ranks of its place; elsewhere a zero that stands for it."""
        content = self._content()
        return torch.zeros([]) if content is None else content.value()

    @property
    def grad(self) -> Tensor | None:
        """The gradient of a leaf, on ranks of its place; elsewhere None."""
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
        """The same on another place."""
        if not isinstance(place, Place):
            raise PlacementError(
                f"to_device() takes a place (F.place(rank) gives one), not {place!r}"
            )
        if place == self.data_device:
            return self
        made = run_on(place, self._program, _same, "to_device", (self,), {}, self._own_kinds())
        made._kind = self._kind
        return made

    def detach(self) -> Any:
        """The same without its graph: no gradient goes through it."""
        content = self._content()
        if content is not None:
            content = content.detached()
        made = self._like(self._value.but(content, ()), self._own_kinds())
        made._kind = self._kind
        return made

    def backward(self, gradient: Any = None, retain_graph: bool = False) -> None:
        """Add the gradients of this tensor to all that it was made of, each on its own ranks.

        gradient: a tensor of its shape, or a managed one; None where it is a single number.

        Raises:
            PlacementError: it is a leaf, or has several parts, or the gradient is no tensor.
            RuntimeError: on its place, as torch does: nothing in it wants a gradient, it is no
                single number, or its graph is gone.
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
        """The value on every rank, without its graph; all ranks call it and wait for it."""
        return self._program.everywhere(self._value, "full")

    def item(self) -> Any:
        """The number on every rank; all ranks call it and wait for it."""
        found = self.full()
        return found.item() if isinstance(found, Tensor) else found

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __bool__(self) -> bool:
        raise PlacementError(
            "whether a managed tensor is true is known on its place alone; `if x.item():` gives "
            "the value to all ranks"
        )

    # -- parts ---------------------------------------------------------------------------

    def _parts(self) -> Kind:
        """The kind and the names of its parts, on every rank."""
        if self._kind is None:
            content = self._content()
            mine = None if content is None else parts_of(content.skeleton)
            kinds = self._own_kinds() or Kinds()
            self._kind = kinds.of(self._program, self._value, mine)
        return self._kind

    def _own_kinds(self) -> Kinds | None:
        """Worked out when it is asked for: most outputs are one tensor, and are not unpacked."""
        if callable(self._kinds):
            self._kinds = self._kinds()
        return self._kinds

    def _part(self, key: Any) -> Any:
        content = self._content()
        own = self._own_kinds()
        kinds = None if own is None else own.part(key)
        if content is not None:
            content = content.part(member(content.skeleton, key))
        return self._like(self._value.but(content), kinds)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str) or (isinstance(key, int) and not isinstance(key, bool)):
            kind, names = self._parts()
            if kind != "tensor":
                found = key + len(names) if isinstance(key, int) and key < 0 else key
                if kind == "named" and isinstance(key, int) and key not in names:
                    found = names[key] if -len(names) <= key < len(names) else key
                if found not in names:
                    raise PlacementError(f"an output has no part {key!r}; its parts are {names}")
                return self._part(found)
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
            raise PlacementError("this output is a single value, which has no parts to unpack")
        return iter(names) if kind == "named" else iter([self._part(name) for name in names])

    def keys(self) -> list[Any]:
        """Names of the parts."""
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
    """A function that runs on one place, on arguments that are brought there.

    Arguments may nest in lists, tuples, dicts and dataclasses; what is no tensor is passed as it
    is.
    """

    def __init__(self, fn: Callable[..., Any], place: Place, program: Program):
        self.fn, self.data_device, self._program = fn, place, program
        self._dynamic = False
        self._kinds: dict[str, Kinds] = {}

    def set_dynamic(self, dynamic: bool) -> None:
        """Whether the number of its outputs may change from call to call."""
        self._dynamic = dynamic

    tensor_class: type[ManagedTensor] = ManagedTensor

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return run_on(self.data_device, self._program, self.fn, name_of(self.fn), args, kwargs,
                      self._kinds, self._dynamic, self.tensor_class)  # fmt: skip

    @property
    def program(self) -> Program:
        """The program whose ranks all make it."""
        return self._program

    @property
    def is_here(self) -> bool:
        """Whether this rank is of its place."""
        return self._program.is_on(self.data_device)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({name_of(self.fn)} on {self.data_device})"


class AbsentModule(Module):
    """Stands for a module on ranks that are not of its place."""


class ManagedModule(ManagedOperation):
    """A module on one place; other ranks hold no parameters of it."""

    def __init__(self, module: Module, place: Place, program: Program):
        self.module = module
        super().__init__(module, place, program)

    def parameters(self) -> Iterable[torch.nn.Parameter]:
        """The parameters of the module, on ranks of its place; elsewhere none."""
        return self.module.parameters() if self.is_here else []

    def named_parameters(self) -> Iterable[tuple[str, torch.nn.Parameter]]:
        """The parameters of the module with their names, on ranks of its place; elsewhere none."""
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
    """What a function or module is called in messages."""
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
    found, arguments = flatten((tuple(args), kwargs), _is_tensor_or_managed)
    values, order = list[ManagedTensor](), list[Any]()
    index: dict[int, int] = {}
    for one in found:
        if isinstance(one, Tensor):
            raise PlacementError(
                f"{name} on {place}: Tensor must be wrapped in DeviceManagedTensor: an argument of "
                f"shape {tuple(one.shape)} has no place; give F(tensor), made under one"
            )
        if one._program is not program:
            raise PlacementError(
                f"{name} on {place}: an argument belongs to another group of ranks"
            )
        if id(one) not in index:
            index[id(one)] = len(values)
            values.append(one)
        order.append(Hole(index[id(one)]))
    made = program.call(fn, name, place, fill(arguments, order), [one._value for one in values])
    result = object.__new__(tensor_class or (type(values[0]) if values else ManagedTensor))
    table = kinds
    if isinstance(table, dict):
        result._set(made, program, False, lambda: _known(table, arguments, dynamic))
    else:
        result._set(made, program, False, table)
    return result


def _known(table: dict[str, Kinds], arguments: Any, dynamic: bool) -> Kinds:
    """What is known of the outputs of a function called with arguments like these."""
    return table.setdefault(signature(arguments), Kinds(dynamic))


def run_together(fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run `fn` where all of its arguments are.

    Raises:
        PlacementError: they are on different places.
    """
    found, _ = flatten((tuple(args), kwargs), lambda x: isinstance(x, ManagedTensor))
    places = list(dict.fromkeys(one.data_device for one in found))
    if len(places) > 1:
        raise PlacementError(
            f"{name_of(fn)} mixes tensors on {'; '.join(map(str, places))}, and no place is named "
            f"for it; wrap it: with F.under(place): op = F({name_of(fn)})"
        )
    return run_on(places[0], found[0]._program, fn, name_of(fn), args, kwargs)


def _is_tensor_or_managed(x: object) -> bool:
    return isinstance(x, Tensor | ManagedTensor)
