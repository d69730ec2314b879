"""The memory of one bucket: gradients side by side, each the `.grad` of its parameter.

A parameter's `.grad` is a view of the bucket or nothing. What autograd or the user put there
instead (a fresh one, after `set_to_none`) is copied in and dropped. Where another reducer has the
parameter too, its gradient stays in whichever bucket it came to until the other one sends.
Gradients of bf16 and fp16 parameters live here in fp32, in which autograd then adds up
microbatches; `narrow` gives an optimizer that wants them in the parameters' dtype a copy, and lets
go of the memory meanwhile.
"""

from collections.abc import Iterable, Sequence
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from torchdistpackage.ddp.shared import Shared
from torchdistpackage.errors import CommError

_living: "WeakValueDictionary[int, Gradients]" = WeakValueDictionary()
"""By the id of their flat memory."""


class Gradients:
    """`flat` holds `num_elements`; the gradient of member i begins at `offsets[i]`."""

    def __init__(self, members: Sequence[Shared], offsets: Sequence[int], num_elements: int):
        self.members = tuple(members)
        self.is_wider = members[0].is_wider
        self.flat = members[0].parameter.new_zeros(num_elements, dtype=members[0].sum_dtype)
        self.views = [m.view(self.flat, at) for m, at in zip(members, offsets, strict=True)]
        self._parameters = [m.parameter for m in members]
        self._offsets = list(offsets)
        start = self.flat.data_ptr()
        self._begins = [v.data_ptr() - start if v.numel() else None for v in self.views]
        _living[id(self.flat)] = self
        self._num_bytes = self.flat.untyped_storage().nbytes()
        if self.is_wider:
            for member in members:
                member.parameter.grad_dtype = None  # `.grad` is now this fp32, now a narrow copy

    def adopt(self, place: int) -> None:
        """Move the gradient that autograd or the user made for this member in here."""
        self.open()
        move([self.views[place]], [self.members[place]])

    def complete(self) -> list[int]:
        """Bring in what is elsewhere, zeros for members without gradient; returns these."""
        self.open()
        self._come_back()
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
            move([self.views[place]], [self.members[place]], shared_too=True)
        return without

    def _come_back(self) -> None:
        """Views that were given other memory, by `.grad.data = ` or `module.to`, lie here again."""
        start = self.flat.data_ptr()
        for place, (view, begin) in enumerate(zip(self.views, self._begins, strict=True)):
            if begin is not None and view.data_ptr() != start + begin:
                home = self.members[place].view(self.flat, self._offsets[place])
                home.copy_(view.detach())
                view.data = home

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


def move(views: Sequence[Tensor], members: Sequence[Shared], *, shared_too: bool = False) -> None:
    """Copy each member's gradient to its view, which takes its place.

    shared_too: also from the bucket of another reducer; if not, one in there stays.

    Raises:
        CommError: a gradient is sparse.
    """
    homes: list[Tensor] = []
    grads: list[Tensor] = []
    for view, shared in zip(views, members, strict=True):
        parameter = shared.parameter
        grad = parameter.grad
        if grad is not view and grad is not None:
            if grad.is_sparse:
                raise _sparse(shared)
            if not shared_too and _is_of_another(grad, view):
                continue
            # after backward(create_graph=True) it is part of a graph, which no sum can be
            grads.append(grad.detach() if grad.requires_grad else grad)
            homes.append(view)
            parameter.grad = view
    if len(grads) == 1:
        homes[0].copy_(grads[0])
    elif grads:
        torch._foreach_copy_(homes, grads)


def _is_of_another(grad: Tensor, view: Tensor) -> bool:
    base = grad._base
    return base is not None and base is not view._base and id(base) in _living


def gives_any(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether the backward that runs gives any of them its `.grad`."""
    edges = map(torch.autograd.graph.get_gradient_edge, parameters)
    try:
        return any(torch._C._will_engine_execute_node(edge.node) for edge in edges)
    except RuntimeError:  # so torch answers of a leaf that autograd.grad was asked for
        return False


def came_late(shared: Shared) -> CommError:
    return CommError(
        f"parameter {shared.name} received a gradient after its bucket had left: call finish() "
        f"before the next backward, and where reentrant checkpointing uses it at times, give "
        f"torch.utils.checkpoint use_reentrant=False"
    )


def _sparse(shared: Shared) -> CommError:
    return CommError(
        f"parameter {shared.name} has a sparse gradient, which no Embedding(sparse=True) of "
        f"the wrapped module announced; look it up through one, or use sparse=False"
    )
