"""Messages between stages by hand, under the names of the earlier package.

For loops that post their own sends and receives; new code takes `Pipeline` or `forward_backward`.
Each function moves a tensor, or a list of tensors and None, between this pipe rank and the next or
the previous one, all it moves in one batch; the ends of the pipeline have nobody there, and do
nothing.

One rule: a receiver must know what comes. Shapes it is given; dtypes are those that
`recv_obj_meta` was told for such shapes, else `dtype`. A gradient has the form of what it is of,
which the rank that sent that remembers: so numbers that are no floats get none, and one that is
None goes as zeros.
"""

import torch

from torchdistpackage.comm.messages import describe
from torchdistpackage.comm.meta_channel import MetaChannel
from torchdistpackage.comm.primitives import device_of
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.compat.torchdistpackage.moves import (
    Move,
    Object,
    Shapes,
    form_of,
    group_of,
    last_shapes_of,
)
from torchdistpackage.parallel.pipeline.scatter_gather import (
    gather_split_1d_tensor,
    split_tensor_into_1d_equal_chunks,
)

__all__ = [
    "gather_split_1d_tensor",
    "recv_backward",
    "recv_forward",
    "recv_obj_meta",
    "send_backward",
    "send_backward_recv_backward",
    "send_backward_recv_forward",
    "send_forward",
    "send_forward_backward_recv_forward_backward",
    "send_forward_recv_backward",
    "send_forward_recv_forward",
    "send_obj_meta",
    "split_tensor_into_1d_equal_chunks",
]


def send_obj_meta(obj: Object, need_meta: bool = True, next_rank: int | None = None) -> bool:
    """Tell the next stage the shapes and dtypes of `obj`, if `need_meta`; returns False."""
    peer = _next(next_rank)
    if need_meta and peer is not None:
        group = group_of(peer)
        last_shapes_of(group).sent[peer] = form_of(obj)
        headers = MetaChannel(group, device_of(group), None, always=True)
        obj = tuple(obj) if isinstance(obj, list) else obj
        headers.send(describe(obj, headers.device), peer)
        headers.settle()
    return False


def recv_obj_meta(obj_shape: Shapes, prev_rank: int | None = None) -> Shapes:
    """What the previous stage told; `obj_shape` itself if that is known already."""
    peer = _prev(prev_rank)
    if obj_shape is not None or peer is None:
        return obj_shape
    group = group_of(peer)
    headers = MetaChannel(group, device_of(group), None, always=True)
    description = headers.receive(peer).description
    form = list(description.members)
    last_shapes_of(group).received[peer] = form
    shapes = [m and torch.Size(m.shape) for m in form]
    return shapes[0] if description.form == "tensor" else shapes


def recv_forward(
    input_tensor_shape: Shapes,
    prev_rank: int | None = None,
    dtype: torch.dtype | None = None,
    scatter_gather_tensors: bool = False,
) -> Object:
    """What the previous stage sends: new leaves, of which floats require a gradient."""
    move = Move(dtype, scatter_gather_tensors)
    move.receive_forward(input_tensor_shape, _prev(prev_rank))
    return move.go()[0]


def recv_backward(
    output_grad_shape: Shapes,
    next_rank: int | None = None,
    dtype: torch.dtype | None = None,
    scatter_gather_tensors: bool = False,
) -> Object:
    """The gradient that the next stage sends."""
    move = Move(dtype, scatter_gather_tensors)
    move.receive_backward(output_grad_shape, _next(next_rank))
    return move.go()[1]


def send_forward(
    output_tensor: Object, next_rank: int | None = None, scatter_gather_tensors: bool = False
) -> None:
    """Send an output to the next stage."""
    move = Move(None, scatter_gather_tensors)
    move.send_forward(output_tensor, _next(next_rank))
    move.go()


def send_backward(
    input_tensor_grad: Object, prev_rank: int | None = None, scatter_gather_tensors: bool = False
) -> None:
    """Send the gradient of an input to the previous stage, which it came from."""
    move = Move(None, scatter_gather_tensors)
    move.send_backward(input_tensor_grad, _prev(prev_rank))
    move.go()


def send_forward_recv_backward(
    output_tensor: Object,
    output_grad_shape: Shapes,
    recv_next: bool = True,
    next_rank: int | None = None,
    dtype: torch.dtype | None = None,
    scatter_gather_tensors: bool = False,
) -> Object:
    """Both with the next stage; returns the gradient, None without `recv_next`."""
    move, peer = Move(dtype, scatter_gather_tensors), _next(next_rank)
    move.send_forward(output_tensor, peer)
    move.receive_backward(output_grad_shape, peer if recv_next else None)
    return move.go()[1]


def send_backward_recv_forward(
    input_tensor_grad: Object,
    input_tensor_shape: Shapes,
    recv_prev: bool = True,
    prev_rank: int | None = None,
    dtype: torch.dtype | None = None,
    scatter_gather_tensors: bool = False,
) -> Object:
    """Both with the previous stage; returns its output, None without `recv_prev`."""
    move, peer = Move(dtype, scatter_gather_tensors), _prev(prev_rank)
    move.send_backward(input_tensor_grad, peer)
    move.receive_forward(input_tensor_shape, peer if recv_prev else None)
    return move.go()[0]


def send_forward_recv_forward(
    output_tensor: Object,
    input_tensor_shape: Shapes,
    recv_prev: bool = True,
    prev_rank: int | None = None,
    next_rank: int | None = None,
    dtype: torch.dtype | None = None,
    scatter_gather_tensors: bool = False,
) -> Object:
    """Send to the next stage and receive from the previous one, which may be named beyond the ends
    where ranks run several stages; returns what came."""
    move = Move(dtype, scatter_gather_tensors)
    move.send_forward(output_tensor, _next(next_rank, named=True))
    move.receive_forward(input_tensor_shape, _prev(prev_rank, named=True) if recv_prev else None)
    return move.go()[0]


def send_backward_recv_backward(
    input_tensor_grad: Object,
    output_grad_shape: Shapes,
    recv_next: bool = True,
    prev_rank: int | None = None,
    next_rank: int | None = None,
    dtype: torch.dtype | None = None,
    scatter_gather_tensors: bool = False,
) -> Object:
    """Send a gradient to the previous stage and receive one from the next; as above."""
    move = Move(dtype, scatter_gather_tensors)
    move.send_backward(input_tensor_grad, _prev(prev_rank, named=True))
    move.receive_backward(output_grad_shape, _next(next_rank, named=True) if recv_next else None)
    return move.go()[1]


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
    """All four at once; returns (input, gradient of the output)."""
    move = Move(dtype, scatter_gather_tensors)
    ahead, behind = _next(next_rank, named=True), _prev(prev_rank, named=True)
    move.send_forward(output_tensor, ahead)
    move.send_backward(input_tensor_grad, behind)
    move.receive_forward(input_tensor_shape, behind if recv_prev else None)
    move.receive_backward(output_grad_shape, ahead if recv_next else None)
    return move.go()


def _next(rank: int | None, *, named: bool = False) -> int | None:
    """The global rank of the next stage: None after the last, unless it may be named there."""
    if tpc.is_last_in_pipeline_group() and not (named and rank is not None):
        return None
    return tpc.get_next_global_rank("pipe") if rank is None else rank


def _prev(rank: int | None, *, named: bool = False) -> int | None:
    if tpc.is_first_in_pipeline_group() and not (named and rank is not None):
        return None
    return tpc.get_prev_global_rank("pipe") if rank is None else rank
