"""The memory of one bucket: gradients side by side, each the `.grad` of its parameter.

A parameter's `.grad` is a view of the bucket or nothing. What autograd or the user put there
instead (a fresh one, after `set_to_none`) is copied in and dropped. Gradients of bf16 and fp16
parameters live here in fp32, in which autograd then adds up microbatches; `narrow` gives an
optimizer that wants them in the parameters' dtype a copy, and lets go of the memory meanwhile.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from torchdistpackage.ddp.shared import Shared
from torchdistpackage.errors import CommError


class Gradients:
    """`flat` holds `num_elements`; the gradient of member i begins at `offsets[i]`."""

    def __init__(self, members: Sequence[Shared], offsets: Sequence[int], num_elements: int):
        self.members = tuple(members)
        self.is_wider = members[0].is_wider
        self.flat = members[0].parameter.new_zeros(num_elements, dtype=members[0].sum_dtype)
        self.views = [m.view(self.flat, at) for m, at in zip(members, offsets, strict=True)]
        self._parameters = [m.parameter for m in members]
        self._num_bytes = self.flat.untyped_storage().nbytes()
        if self.is_wider:
            for member in members:
                member.parameter.grad_dtype = None  # `.grad` is now this fp32, now a narrow copy

    def adopt(self, place: int) -> None:
        """Move the gradient that autograd or the user made for this member in here."""
        self.open()
        move([self.views[place]], [self.members[place].parameter])

    def complete(self) -> list[int]:
        """Bring in what is elsewhere, zeros for members without gradient; returns these."""
        self.open()
        without: list[int] = []
        elsewhere: list[int] = []
        for place, (parameter, view) in enumerate(zip(self._parameters, self.views, strict=True)):
            grad = parameter.grad
            if grad is None:
                view.zero_()
                without.append(place)
            elif grad is not view:
                elsewhere.append(place)
        for place in elsewhere:
            self.adopt(place)
        return without

    def narrow(self) -> None:
        """Each `.grad` in its parameter's dtype, and no memory here until it is needed again."""
        for shared, view in zip(self.members, self.views, strict=True):
            if shared.parameter.grad is view:
                shared.parameter.grad = view.to(shared.parameter.dtype)
        self.flat.untyped_storage().resize_(0)

    def leave(self) -> list[int]:
        """Give each gradient that lives here memory of its own; returns whose these are."""
        left: list[int] = []
        for place, (shared, view) in enumerate(zip(self.members, self.views, strict=True)):
            if shared.parameter.grad is view:
                shared.parameter.grad = view.clone()
                left.append(place)
        return left

    def open(self) -> None:
        """Have memory: gradients are about to come."""
        storage = self.flat.untyped_storage()
        if storage.nbytes() < self._num_bytes:
            storage.resize_(self._num_bytes)
            self.flat.zero_()


def move(views: Sequence[Tensor], parameters: Sequence[nn.Parameter]) -> None:
    """Copy each parameter's gradient to its view, which takes its place."""
    homes: list[Tensor] = []
    grads: list[Tensor] = []
    for view, parameter in zip(views, parameters, strict=True):
        grad = parameter.grad
        if grad is not view and grad is not None:
            # after backward(create_graph=True) it is part of a graph, which no sum can be
            grads.append(grad.detach() if grad.requires_grad else grad)
            homes.append(view)
            parameter.grad = view
    if len(grads) == 1:
        homes[0].copy_(grads[0])
    elif grads:
        torch._foreach_copy_(homes, grads)


def _check_dense(shared: Shared) -> None:
    grad = shared.parameter.grad
    if grad is not None and grad.is_sparse:
        raise CommError(
            f"parameter {shared.name} has a sparse gradient, which no Embedding(sparse=True) of "
            f"the wrapped module announced; look it up through one, or use sparse=False"
        )
