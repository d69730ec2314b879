"""The memory of one bucket: gradients side by side, each the `.grad` of its parameter.

A parameter's `.grad` is a view of the bucket or None. If autograd or the user puts another tensor
there (autograd does after `set_to_none`), it is copied in and dropped. If another reducer has the
parameter too, its gradient stays in the first bucket that it reached until the other one sends.

For a mean, gradients are divided before the sum, while they are copied in, which needs no extra
pass.

Gradients of bf16 and fp16 parameters are kept here in fp32, in which autograd accumulates them. For
an optimizer that wants the parameters' dtype, `cast_grads` makes copies and frees the memory.
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
    """A flat tensor of `num_elements`, in which the gradient of member i begins at `offsets[i]`.

    divide: number that gradients are divided by before they are sent.
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
        self._addresses = [view.data_ptr() for view in self.views]  # 0 for an empty view
        _living[id(self.flat)] = self
        self._num_bytes = self.flat.untyped_storage().nbytes()
        if self.is_wider:
            for member in members:
                # allow both: `.grad` is this fp32 view or, after cast_grads, a narrow copy
                member.parameter.grad_dtype = None

    def absorb(self, member: int, *, is_final: bool = False) -> None:
        """Copy in the gradient that autograd or the user made for this member.

        is_final: nothing is added to it before it is sent, so it can be divided now.
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
        """Return whether this gradient is divided already, so that nothing may be added to it."""
        return member in self._divided

    def undivide(self) -> None:
        """After a backward that failed before sending, multiply divided gradients back."""
        for member in self._divided:
            self.views[member].mul_(self._divide)
        self._divided.clear()

    def complete(self) -> list[int]:
        """Copy in gradients that are elsewhere, or zeros, divide, and return the unused members."""
        self.allocate()
        self._come_back()
        grads = [parameter.grad for parameter in self._parameters]
        unused: list[int] = []
        # A model has thousands of parameters: `map` compares them in C, not in Python.
        if not all(map(is_, grads, self.views)):
            for member, (grad, view) in enumerate(zip(grads, self.views, strict=True)):
                if grad is None:
                    view.zero_()
                    unused.append(member)
                elif (grad := _taken(view, self.members[member], shared_too=True)) is not None:
                    view.copy_(grad)
        if self._divide > 1:
            self._divide_rest()
        return unused

    def _divide_rest(self) -> None:
        """Divide the gradients that are not divided yet."""
        divided, self._divided = self._divided, set()
        if not divided:
            self.flat.div_(self._divide)
        elif views := [view for member, view in enumerate(self.views) if member not in divided]:
            torch._foreach_div_(views, self._divide)

    def _come_back(self) -> None:
        """Move views back that got other memory through `.grad.data = ` or `module.to`."""
        start = self.flat.data_ptr()
        if start != self._start:
            self._addresses = [
                address and address - self._start + start for address in self._addresses
            ]
            self._start = start
        addresses = [view.data_ptr() for view in self.views]
        if addresses == self._addresses:
            return
        for member, view in enumerate(self.views):
            if addresses[member] != self._addresses[member]:
                home = self.members[member].view(self.flat, self._offsets[member])
                home.copy_(view.detach())
                view.data = home

    def cast_grads(self) -> None:
        """Give each `.grad` its parameter's dtype, and free this memory until it is needed
        again.
        """
        for spec, view in zip(self.members, self.views, strict=True):
            if spec.parameter.grad is view:
                spec.parameter.grad = view.to(spec.parameter.dtype)
        self.flat.untyped_storage().resize_(0)

    def detach_views(self) -> list[int]:
        """Give each gradient in this bucket its own memory, and return their members."""
        detached: list[int] = []
        for member, (spec, view) in enumerate(zip(self.members, self.views, strict=True)):
            if spec.parameter.grad is view:
                spec.parameter.grad = view.clone()
                detached.append(member)
        return detached

    def allocate(self) -> None:
        """Allocate the memory, if it was freed, for gradients about to be computed."""
        storage = self.flat.untyped_storage()
        if storage.nbytes() < self._num_bytes:
            storage.resize_(self._num_bytes)
            self.flat.zero_()


def move(views: Sequence[Tensor], members: Sequence[ParamSpec]) -> None:
    """Copy many gradients to their views at once, and make each view the `.grad`."""
    homes: list[Tensor] = []
    grads: list[Tensor] = []
    for view, spec in zip(views, members, strict=True):
        parameter, grad = spec.parameter, spec.parameter.grad
        # Nearly all gradients are plain. Calling `_taken` for each would take as long as the copy.
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
    """Make `view` the `.grad`, and return the gradient to copy to it; None if it stays in place.

    shared_too: also take a gradient that is in the bucket of another reducer.
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
    # after backward(create_graph=True) the gradient belongs to a graph, but the sum must not
    return grad.detach() if grad.requires_grad else grad
