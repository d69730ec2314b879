"""Point-to-point messages between stages, under the names of the earlier package.

They are for loops that post their own sends and receives; new code uses `Pipeline` or
`forward_backward`. Each function moves a tensor, or a list of tensors and None, between this pipe
rank and the next or previous one, in one batch. At an end of the pipeline, where there is no such
rank, it does nothing.

A receiver must know the form of a message. The caller gives shapes; dtypes are those that
`recv_obj_meta` received for these shapes, else `dtype`. A gradient has the form of its tensor,
which the rank that sent the tensor remembers. So integers get no gradient, and None goes as zeros.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torchdistpackage.comm.creation import PerGroup, world
from torchdistpackage.comm.p2p import Post
from torchdistpackage.comm.primitives import Group, device_of, ranks_of
from torchdistpackage.comm.tensor_channel import TensorChannel, expect_payload
from torchdistpackage.comm.tensor_meta import Description, MessageSpec, TensorMeta, describe
from torchdistpackage.comm.tpc import resolve_group, tpc
from torchdistpackage.compat.torchdistpackage.scatter_gather import (
    divides,
    gather_split_1d_tensor,
    split_tensor_into_1d_equal_chunks,
)
from torchdistpackage.errors import CommError

Object = Tensor | Sequence[Tensor | None] | None
Shapes = torch.Size | Sequence["torch.Size | None"] | None
Form = list[TensorMeta | None]
"""The shape and dtype of each tensor of a message, None for a None."""

_last_forms: PerGroup[dict[tuple[str, int], Form]] = PerGroup()
"""The form of the last message `sent` to and `received` from each global rank of a group."""


def send_obj_meta(obj: Object, need_meta: bool = True, next_rank: int | None = None) -> bool:
    """Send the next stage the shapes and dtypes of `obj`, if `need_meta`; returns False."""
    peer = _next(next_rank)
    if need_meta and peer is not None:
        group = _group_of(peer)
        _forms(group)["sent", peer] = _form_of(obj)
        channel = TensorChannel(group, device_of(group))
        obj = tuple(obj) if isinstance(obj, list) else obj
        channel.send_header(describe(obj, channel.device), peer)
        channel.settle()
    return False


def recv_obj_meta(obj_shape: Shapes, prev_rank: int | None = None) -> Shapes:
    """Return the shapes that the previous stage sent; `obj_shape` itself unless it is None."""
    peer = _prev(prev_rank)
    if obj_shape is not None or peer is None:
        return obj_shape
    group = _group_of(peer)
    description = TensorChannel(group, device_of(group)).receive_header(peer).description
    form = _forms(group)["received", peer] = list(description.members)
    shapes = [m and torch.Size(m.shape) for m in form]
    return shapes[0] if description.form == "tensor" else shapes


def recv_forward(
    input_tensor_shape: Shapes,
    prev_rank: int | None = None,
    dtype: torch.dtype | None = None,
    scatter_gather_tensors: bool = False,
) -> Object:
    """Receive the previous stage's output: new leaves; floats among them require a gradient."""
    exchange = _Exchange(dtype, scatter_gather_tensors)
    exchange.receive_forward(input_tensor_shape, _prev(prev_rank))
    return exchange.go()[0]


def recv_backward(
    output_grad_shape: Shapes,
    next_rank: int | None = None,
    dtype: torch.dtype | None = None,
    scatter_gather_tensors: bool = False,
) -> Object:
    """Receive the gradient that the next stage sends."""
    exchange = _Exchange(dtype, scatter_gather_tensors)
    exchange.receive_backward(output_grad_shape, _next(next_rank))
    return exchange.go()[1]


def send_forward(
    output_tensor: Object, next_rank: int | None = None, scatter_gather_tensors: bool = False
) -> None:
    """Send an output to the next stage."""
    exchange = _Exchange(None, scatter_gather_tensors)
    exchange.send_forward(output_tensor, _next(next_rank))
    exchange.go()


def send_backward(
    input_tensor_grad: Object, prev_rank: int | None = None, scatter_gather_tensors: bool = False
) -> None:
    """Send the gradient of an input back to the previous stage."""
    exchange = _Exchange(None, scatter_gather_tensors)
    exchange.send_backward(input_tensor_grad, _prev(prev_rank))
    exchange.go()


def send_forward_recv_backward(
    output_tensor: Object,
    output_grad_shape: Shapes,
    recv_next: bool = True,
    next_rank: int | None = None,
    dtype: torch.dtype | None = None,
    scatter_gather_tensors: bool = False,
) -> Object:
    """Send to and receive from the next stage; returns the gradient, None without `recv_next`."""
    exchange = _Exchange(dtype, scatter_gather_tensors)
    peer = _next(next_rank)
    exchange.send_forward(output_tensor, peer)
    exchange.receive_backward(output_grad_shape, peer if recv_next else None)
    return exchange.go()[1]


def send_backward_recv_forward(
    input_tensor_grad: Object,
    input_tensor_shape: Shapes,
    recv_prev: bool = True,
    prev_rank: int | None = None,
    dtype: torch.dtype | None = None,
    scatter_gather_tensors: bool = False,
) -> Object:
    """Send to and receive from the previous stage; returns its output, None without `recv_prev`."""
    exchange = _Exchange(dtype, scatter_gather_tensors)
    peer = _prev(prev_rank)
    exchange.send_backward(input_tensor_grad, peer)
    exchange.receive_forward(input_tensor_shape, peer if recv_prev else None)
    return exchange.go()[0]


def send_forward_recv_forward(
    output_tensor: Object,
    input_tensor_shape: Shapes,
    recv_prev: bool = True,
    prev_rank: int | None = None,
    next_rank: int | None = None,
    dtype: torch.dtype | None = None,
    scatter_gather_tensors: bool = False,
) -> Object:
    """Send an output to the next stage and receive one from the previous stage; returns the latter.

    Where ranks run several stages, `next_rank` and `prev_rank` may name a rank beyond an end.
    """
    exchange = _Exchange(dtype, scatter_gather_tensors)
    exchange.send_forward(output_tensor, _next(next_rank, named=True))
    behind = _prev(prev_rank, named=True) if recv_prev else None
    exchange.receive_forward(input_tensor_shape, behind)
    return exchange.go()[0]


def send_backward_recv_backward(
    input_tensor_grad: Object,
    output_grad_shape: Shapes,
    recv_next: bool = True,
    prev_rank: int | None = None,
    next_rank: int | None = None,
    dtype: torch.dtype | None = None,
    scatter_gather_tensors: bool = False,
) -> Object:
    """Send a gradient to the previous stage and receive one from the next; returns the latter.

    Where ranks run several stages, `next_rank` and `prev_rank` may name a rank beyond an end.
    """
    exchange = _Exchange(dtype, scatter_gather_tensors)
    exchange.send_backward(input_tensor_grad, _prev(prev_rank, named=True))
    ahead = _next(next_rank, named=True) if recv_next else None
    exchange.receive_backward(output_grad_shape, ahead)
    return exchange.go()[1]


def send_forward_backward_recv_forward_backward(
    output_tensor: Object,
    input_tensor_grad: Object,
    input_tensor_shape: Shapes,
    output_grad_shape: Shapes,
    recv_prev: bool = True,
    recv_next: bool = True,
    prev_rank: int | None = None,
    next_rank: int | None = None,
    dtype: torch.dtype | None = None,
    scatter_gather_tensors: bool = False,
) -> tuple[Object, Object]:
    """Send and receive in both directions at once; returns (input, gradient of the output)."""
    exchange = _Exchange(dtype, scatter_gather_tensors)
    ahead = _next(next_rank, named=True)
    behind = _prev(prev_rank, named=True)
    exchange.send_forward(output_tensor, ahead)
    exchange.send_backward(input_tensor_grad, behind)
    exchange.receive_forward(input_tensor_shape, behind if recv_prev else None)
    exchange.receive_backward(output_grad_shape, ahead if recv_next else None)
    return exchange.go()


def _next(rank: int | None, *, named: bool = False) -> int | None:
    """Return the global rank of the next stage; None after the last, unless one was named."""
    if tpc.is_last_in_pipeline_group() and not (named and rank is not None):
        return None
    return tpc.get_next_global_rank("pipe") if rank is None else rank


def _prev(rank: int | None, *, named: bool = False) -> int | None:
    if tpc.is_first_in_pipeline_group() and not (named and rank is not None):
        return None
    return tpc.get_prev_global_rank("pipe") if rank is None else rank


class _Exchange:
    """The messages of one call, all posted together."""

    def __init__(self, dtype: torch.dtype | None, scatter_gather_tensors: bool):
        self._dtype = dtype
        self._parts = resolve_group(None, "tensor") if scatter_gather_tensors else None
        self._posts: dict[Group, Post] = {}
        self._forward: Callable[[], Object] = lambda: None
        self._backward: Callable[[], Object] = lambda: None

    def send_forward(self, obj: Object, peer: int | None) -> None:
        if peer is not None:
            _forms(_group_of(peer))["sent", peer] = _form_of(obj)
            self._send(_members_of(obj), peer)

    def send_backward(self, obj: Object, peer: int | None) -> None:
        if peer is None:
            return
        gradients = _members_of(obj)
        group = _group_of(peer)
        form = _forms(group).get(("received", peer))
        if form is None or len(form) != len(gradients):
            form = _form_of(obj)
        sent: list[Tensor | None] = []
        for x, member in zip(gradients, form, strict=True):
            if member is None or not member.dtype.is_floating_point:
                x = None
            elif x is None:
                x = torch.zeros(member.shape, dtype=member.dtype, device=device_of(group))
            sent.append(x)
        self._send(sent, peer)

    def receive_forward(self, shapes: Shapes, peer: int | None) -> None:
        if peer is not None:
            forms = _forms(_group_of(peer))
            form = self._expected(shapes, forms.get(("received", peer)), peer)
            forms["received", peer] = form
            self._forward = self._receive(form, shapes, peer, leaves=True)

    def receive_backward(self, shapes: Shapes, peer: int | None) -> None:
        if peer is not None:
            form = self._expected(shapes, _forms(_group_of(peer)).get(("sent", peer)), peer)
            floats = [m if m is not None and m.dtype.is_floating_point else None for m in form]
            self._backward = self._receive(floats, shapes, peer, leaves=False)

    def go(self) -> tuple[Object, Object]:
        """Post all messages and wait; returns (input, gradient of the output), or None for each."""
        # post to all groups before waiting for one, or two ranks could wait for each other
        for work in [post.go() for post in self._posts.values()]:
            work.wait()
        return self._forward(), self._backward()

    def _send(self, tensors: Sequence[Tensor | None], peer: int) -> None:
        sent = [
            split_tensor_into_1d_equal_chunks(x, group=self._parts)
            if x is not None and divides(x.numel(), self._parts)
            else x
            for x in tensors
        ]
        self._post(peer).send(sent, peer)

    def _receive(
        self, form: Form, shapes: Shapes, peer: int, *, leaves: bool
    ) -> Callable[[], Object]:
        """Post a receive; returns a function that gives the message after the wait.

        leaves: floats in it require gradients.
        """
        parts = self._parts
        device = device_of(_group_of(peer))

        def sent(member: TensorMeta) -> TensorMeta:
            num = math.prod(member.shape)
            shape = (num // parts.size(),) if divides(num, parts) else member.shape
            return TensorMeta(shape, member.dtype, False)

        description = Description("tuple", (), tuple(m and sent(m) for m in form))
        incoming = expect_payload(self._post(peer), MessageSpec(description, device), peer)

        def arrived() -> Object:
            members: list[Tensor | None] = []
            for x, member in zip(incoming.buffers, form, strict=True):
                if x is not None and member is not None:
                    if divides(math.prod(member.shape), parts):
                        x = gather_split_1d_tensor(x, group=parts).view(member.shape)
                    x.requires_grad_(leaves and x.is_floating_point())
                members.append(x)
            return members if _is_list(shapes) else members[0]

        return arrived

    def _post(self, peer: int) -> Post:
        group = _group_of(peer)
        if group not in self._posts:
            self._posts[group] = Post(group)
        return self._posts[group]

    def _expected(self, shapes: Shapes, remembered: Form | None, peer: int) -> Form:
        """Return the form of a message of these shapes, with the remembered dtypes or `dtype`."""
        if shapes is None:
            raise CommError(
                f"the shape of the message from rank {peer} is None; pass it, or call "
                f"recv_obj_meta(None) first"
            )
        listed = list(shapes) if _is_list(shapes) else [shapes]
        listed = [None if shape is None else tuple(shape) for shape in listed]
        if remembered is None or [m and m.shape for m in remembered] != listed:
            dtype = self._dtype or torch.float
            return [None if shape is None else TensorMeta(shape, dtype, False) for shape in listed]
        if self._dtype is None:
            return remembered
        return [
            TensorMeta(m.shape, self._dtype, False) if m and m.dtype.is_floating_point else m
            for m in remembered
        ]


def _members_of(obj: Object) -> list[Tensor | None]:
    return list(obj) if isinstance(obj, list | tuple) else [obj]  # type: ignore[list-item]


def _form_of(obj: Object) -> Form:
    return list(describe(tuple(_members_of(obj))).members)


def _is_list(shapes: Shapes) -> bool:
    """Return whether `shapes` is a list of shapes, not one shape, which holds integers."""
    if isinstance(shapes, torch.Size) or shapes is None:
        return False
    return not all(isinstance(extent, int) for extent in shapes)


def _forms(group: Group) -> dict[tuple[str, int], Form]:
    return _last_forms.setdefault(group, {})


def _group_of(peer: int) -> Group:
    """Return the pipe group, or the group of all ranks for a peer outside it."""
    pipe = resolve_group(None, "pipe")
    return pipe if peer in ranks_of(pipe) else world()
