"""What one call of p2p.py moves: shapes to rooms, members to parts, all in one batch."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from torchdistpackage.comm.messages import TensorMeta, describe
from torchdistpackage.comm.p2p import Post
from torchdistpackage.comm.per_group import PerGroup
from torchdistpackage.comm.primitives import Group, device_of, ranks_of
from torchdistpackage.comm.tpc import resolve_group
from torchdistpackage.comm.world import world
from torchdistpackage.errors import CommError
from torchdistpackage.parallel.pipeline.scatter_gather import (
    divides,
    gather_split_1d_tensor,
    split_tensor_into_1d_equal_chunks,
)

Object = Tensor | Sequence[Tensor | None] | None
Shapes = torch.Size | Sequence["torch.Size | None"] | None


Form = list[TensorMeta | None]
"""Of a message, its members."""


class LastShapes:
    """What last went to, and came from, each global rank of a group."""

    def __init__(self) -> None:
        self.sent: dict[int, Form] = {}
        self.received: dict[int, Form] = {}


_memories: PerGroup[LastShapes] = PerGroup()


class Room:
    """Where one message arrives. listed: it comes back as a list. parts: the tensor group, if each
    of its ranks gets a part."""

    def __init__(self, form: Form, listed: bool, parts: Group | None, device: torch.device):
        self._form, self._listed, self._parts = form, listed, parts
        self.tensors = [
            m and torch.empty(self._size(m), dtype=m.dtype, device=device) for m in form
        ]

    def _size(self, member: TensorMeta) -> Sequence[int]:
        num = math.prod(member.shape)
        return (num // self._parts.size(),) if divides(num, self._parts) else member.shape

    def arrived(self, leaf: bool) -> Object:
        """The message; `leaf`: its floats want gradients."""
        members: list[Tensor | None] = []
        for x, member in zip(self.tensors, self._form, strict=True):
            if x is not None and member is not None:
                if divides(math.prod(member.shape), self._parts):
                    x = gather_split_1d_tensor(x, group=self._parts).view(member.shape)
                x.requires_grad_(leaf and x.is_floating_point())
            members.append(x)
        return members if self._listed else members[0]


class Move:
    """What one call moves, posted together."""

    def __init__(self, dtype: torch.dtype | None, scatter_gather_tensors: bool):
        self._dtype = dtype
        self._parts = resolve_group(None, "tensor") if scatter_gather_tensors else None
        self._posts: dict[Group, Post] = {}
        self._forward: Room | None = None
        self._backward: Room | None = None

    def send_forward(self, obj: Object, peer: int | None) -> None:
        if peer is not None:
            last_shapes_of(group_of(peer)).sent[peer] = form_of(obj)
            self._send(members_of(obj), peer)

    def send_backward(self, obj: Object, peer: int | None) -> None:
        if peer is None:
            return
        gradients, form = members_of(obj), last_shapes_of(group_of(peer)).received.get(peer)
        if form is None or len(form) != len(gradients):
            form = form_of(obj)
        sent: list[Tensor | None] = []
        for x, member in zip(gradients, form, strict=True):
            if member is None or not member.dtype.is_floating_point:
                x = None
            elif x is None:
                device = device_of(group_of(peer))
                x = torch.zeros(member.shape, dtype=member.dtype, device=device)
            sent.append(x)
        self._send(sent, peer)

    def receive_forward(self, shapes: Shapes, peer: int | None) -> None:
        if peer is not None:
            memory = last_shapes_of(group_of(peer))
            form = self._expected(shapes, memory.received.get(peer), peer)
            memory.received[peer] = form
            self._forward = self._receive(form, shapes, peer)

    def receive_backward(self, shapes: Shapes, peer: int | None) -> None:
        if peer is not None:
            form = self._expected(shapes, last_shapes_of(group_of(peer)).sent.get(peer), peer)
            floats = [m if m is not None and m.dtype.is_floating_point else None for m in form]
            self._backward = self._receive(floats, shapes, peer)

    def go(self) -> tuple[Object, Object]:
        """(input, gradient of the output), None for what was not to be received."""
        for flight in [post.go() for post in self._posts.values()]:
            flight.wait()
        forward, backward = self._forward, self._backward
        return forward and forward.arrived(True), backward and backward.arrived(False)

    def _send(self, tensors: Sequence[Tensor | None], peer: int) -> None:
        sent = [
            split_tensor_into_1d_equal_chunks(x, group=self._parts)
            if x is not None and divides(x.numel(), self._parts)
            else x
            for x in tensors
        ]
        self._post(peer).send(sent, peer)

    def _receive(self, form: Form, shapes: Shapes, peer: int) -> Room:
        room = Room(form, is_list(shapes), self._parts, device_of(group_of(peer)))
        self._post(peer).receive(room.tensors, peer)
        return room

    def _post(self, peer: int) -> Post:
        group = group_of(peer)
        if group not in self._posts:
            self._posts[group] = Post(group)
        return self._posts[group]

    def _expected(self, shapes: Shapes, known: Form | None, peer: int) -> Form:
        """Members of these shapes; their dtypes as remembered for such, else as given."""
        if shapes is None:
            raise CommError(
                f"what rank {peer} sends has no shape here; give one, or ask recv_obj_meta(None)"
            )
        listed = list(shapes) if is_list(shapes) else [shapes]
        told = [None if shape is None else tuple(shape) for shape in listed]
        if known is None or [m and m.shape for m in known] != told:
            dtype = self._dtype or torch.float
            return [None if shape is None else TensorMeta(shape, dtype, False) for shape in told]
        if self._dtype is None:
            return known
        return [
            TensorMeta(m.shape, self._dtype, False) if m and m.dtype.is_floating_point else m
            for m in known
        ]


def members_of(obj: Object) -> list[Tensor | None]:
    return list(obj) if isinstance(obj, list | tuple) else [obj]  # type: ignore[list-item]


def form_of(obj: Object) -> Form:
    return list(describe(tuple(members_of(obj))).members)


def is_list(shapes: Shapes) -> bool:
    """Of several tensors: not one shape, which holds numbers."""
    if isinstance(shapes, torch.Size) or shapes is None:
        return False
    return not all(isinstance(extent, int) for extent in shapes)


def last_shapes_of(group: Group) -> LastShapes:
    return _memories.setdefault(group, LastShapes())


def group_of(peer: int) -> Group:
    """The pipe group, or everybody's for a peer outside it."""
    pipe = resolve_group(None, "pipe")
    return pipe if peer in ranks_of(pipe) else world()
