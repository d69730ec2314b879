"""The memory of one bucket: gradients side by side, each the `.grad` of its parameter.

A parameter's `.grad` is a view of the bucket or nothing. What autograd or the user put there
instead (a fresh one, after `set_to_none`) is copied in and dropped. Where another reducer has the
parameter too, its gradient stays in whichever bucket it came to until the other one sends.

A mean is divided before it is summed, while a gradient is copied in: that costs no pass of its own.
Gradients of bf16 and fp16 parameters live here in fp32, in which autograd then adds up; for an
optimizer that wants them in the parameters' dtype `cast_grads` makes copies and frees the memory.
"""

from collections.abc import Sequence
from operator import is_
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from torchdistpackage.ddp.param_spec import ParamSpec
from torchdistpackage.errors import CommError

_living: "WeakValueDictionary[int, GradBucket]" = WeakValueDictionary()
"""Buckets by the id of their flat memory."""


class GradBucket:
    """`flat` holds `num_elements`; the gradient of member i begins at `offsets[i]`.

    divide: by what gradients are divided before they leave.
    """

    def __init__(
        self,
        members: Sequence[ParamSpec],
        offsets: Sequence[int],
        num_elements: int,
        *,
        divide: int = 1,
    ):
        self.members = tuple(members)
        self._divide = divide
        self._divided: set[int] = set()
        self.is_wider = members[0].is_wider
        self.flat = members[0].parameter.new_zeros(num_elements, dtype=members[0].sum_dtype)
        self.views = [m.view(self.flat, at) for m, at in zip(members, offsets, strict=True)]
        self._parameters = [m.parameter for m in members]
        self._offsets = list(offsets)
        self._start = self.flat.data_ptr()
        self._addresses = [view.data_ptr() for view in self.views]  # 0 of an empty one
        _living[id(self.flat)] = self
        self._num_bytes = self.flat.untyped_storage().nbytes()
        if self.is_wider:
            for member in members:
                member.parameter.grad_dtype = None  # `.grad` is now this fp32, now a narrow copy

    def absorb(self, member: int, *, is_final: bool = False) -> None:
        """Move the gradient that autograd or the user made for this member in here.

        is_final: nothing is added to it before it leaves.
        """
        self.allocate()
        view = self.views[member]
        grad = _taken(view, self.members[member])
        if grad is None:
            return
        if is_final and self._divide > 1 and grad.dtype == view.dtype:
            torch.div(grad, self._divide, out=view)
            self._divided.add(member)
        else:
            view.copy_(grad)

    def is_divided(self, member: int) -> bool:
        """Whether it is too late to add to this gradient."""
        return member in self._divided

    def undivide(self) -> None:
        """The backward failed before they left: multiply again what was divided on the way in."""
        for member in self._divided:
            self.views[member].mul_(self._divide)
        self._divided.clear()

    def complete(self) -> list[int]:
        """Bring in what is elsewhere, or zeros, and divide; returns members without gradient."""
        self.allocate()
        self._come_back()
        grads = [parameter.grad for parameter in self._parameters]
        without: list[int] = []
        # A model has thousands of parameters: one comparison of each in C, and not in Python.
        if not all(map(is_, grads, self.views)):
            for member, (grad, view) in enumerate(zip(grads, self.views, strict=True)):
                if grad is None:
                    view.zero_()
                    without.append(member)
                elif (grad := _taken(view, self.members[member], shared_too=True)) is not None:
                    view.copy_(grad)
        if self._divide > 1:
            self._divide_rest()
        return without

    def _divide_rest(self) -> None:
        divided, self._divided = self._divided, set()
        if not divided:
            self.flat.div_(self._divide)
        elif rest := [view for member, view in enumerate(self.views) if member not in divided]:
            torch._foreach_div_(rest, self._divide)

    def _come_back(self) -> None:
        """Views that were given other memory, by `.grad.data = ` or `module.to`, lie here again."""
        start = self.flat.data_ptr()
        if start != self._start:
            self._addresses = [at and at - self._start + start for at in self._addresses]
            self._start = start
        found = [view.data_ptr() for view in self.views]
        if found == self._addresses:
            return
        for member, view in enumerate(self.views):
            if found[member] != self._addresses[member]:
                home = self.members[member].view(self.flat, self._offsets[member])
                home.copy_(view.detach())
                view.data = home

    def cast_grads(self) -> None:
        """Each `.grad` in its parameter's dtype, and no memory here until it is needed again."""
        for spec, view in zip(self.members, self.views, strict=True):
            if spec.parameter.grad is view:
                spec.parameter.grad = view.to(spec.parameter.dtype)
        self.flat.untyped_storage().resize_(0)

    def detach_views(self) -> list[int]:
        """Give each gradient that lives here memory of its own; returns whose these are."""
        left: list[int] = []
        for member, (spec, view) in enumerate(zip(self.members, self.views, strict=True)):
            if spec.parameter.grad is view:
                spec.parameter.grad = view.clone()
                left.append(member)
        return left

    def allocate(self) -> None:
        """Have memory: gradients are about to come."""
        storage = self.flat.untyped_storage()
        if storage.nbytes() < self._num_bytes:
            storage.resize_(self._num_bytes)
            self.flat.zero_()


def move(views: Sequence[Tensor], members: Sequence[ParamSpec]) -> None:
    """Copy each member's gradient to its view, which takes its place, many at a time."""
    homes: list[Tensor] = []
    grads: list[Tensor] = []
    for view, spec in zip(views, members, strict=True):
        parameter, grad = spec.parameter, spec.parameter.grad
        # a call for each would be as long as the copy, and nearly all are plain
        if grad is None or grad.is_sparse or grad.requires_grad or grad._base is not None:
            grad = _taken(view, spec)
        else:
            parameter.grad = view
        if grad is not None:
            homes.append(view)
            grads.append(grad)
    if grads:
        torch._foreach_copy_(homes, grads)


def _taken(view: Tensor, spec: ParamSpec, *, shared_too: bool = False) -> Tensor | None:
    """The gradient to copy to `view`, which has taken its place; None if it stays where it is.

    shared_too: also one in the bucket of another reducer.
    """
    parameter, grad = spec.parameter, spec.parameter.grad
    if grad is None or grad is view:
        return None
    if grad.is_sparse:
        raise CommError(
            f"parameter {spec.name} has a sparse gradient, which no Embedding(sparse=True) of "
            f"the wrapped module announced; look it up through one, or use sparse=False"
        )
    base = grad._base
    if not shared_too and base is not None and base is not view._base and id(base) in _living:
        return None
    parameter.grad = view
    # after backward(create_graph=True) it is part of a graph, which no sum can be
    return grad.detach() if grad.requires_grad else grad
