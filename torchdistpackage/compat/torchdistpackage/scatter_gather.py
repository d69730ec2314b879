"""Scattered messages between stages: each of n tensor ranks sends 1/n of a message they all have.

The receiving rank gathers the slices over its own tensor group; gradients go back the same way.
Only tensors whose number of elements divides are scattered. The original shape travels as the shape
of an empty tensor, which has a description and no bytes.
"""

import torch
from torch import Tensor

from torchdistpackage.comm import collectives, primitives
from torchdistpackage.comm.primitives import Group
from torchdistpackage.comm.tensor_meta import Message, pack_message, unpack_message
from torchdistpackage.comm.tpc import resolve_group
from torchdistpackage.errors import LayoutError


def part(message: Message, group: Group) -> Message:
    """Return this rank's slices of `message`, which all ranks of `group` have.

    The backward gathers the gradients.
    """
    sealed = pack_message(message, {})
    shapes: dict[str, Tensor | None] = {}
    for key, x in sealed.items():
        if x is not None and divides(x.numel(), group):
            sealed[key] = collectives.scatter(x.reshape(-1), 0, group)
            shapes[key] = x.new_empty((0, *x.shape))
    return sealed | {f"+{key}": x for key, x in shapes.items()}


def join(parts: Message, group: Group) -> Message:
    """Gather the message of which `parts` is this rank's slice."""
    assert isinstance(parts, dict)
    message, shapes = unpack_message(parts)
    if not shapes:
        return message
    sealed = pack_message(message, {})
    for key, shape in shapes.items():
        x = sealed[key]
        assert x is not None and shape is not None
        sealed[key] = collectives.gather(x, 0, group).view(shape.shape[1:])
    return unpack_message(sealed)[0]


def join_gradients(
    parts: Message, gradients: tuple[Tensor | None, ...], group: Group
) -> tuple[Tensor | None, ...]:
    """Return the gradients of a message, from the gradients of its slices `parts`."""
    assert isinstance(parts, dict)
    keys = [key for key in parts if key[0] != "+"]
    with torch.no_grad():
        return tuple(
            collectives.gather(x, 0, group).view(shape.shape[1:])
            if x is not None and (shape := parts.get(f"+{key}")) is not None
            else x
            for key, x in zip(keys, gradients, strict=False)
        )


def split_tensor_into_1d_equal_chunks(
    tensor: Tensor, new_buffer: bool = False, *, group: Group | None = None
) -> Tensor:
    """Return this rank's 1/n of the elements of `tensor`, of any shape and stride: (numel / n,).

    new_buffer: copy them. group: default tpc's tensor group. Raises LayoutError if the group's size
    does not divide the number of elements.
    """
    group = resolve_group(group, "tensor")
    flat = tensor.detach().reshape(-1)
    if flat.numel() % group.size():
        raise LayoutError(
            f"a tensor of shape {list(tensor.shape)} has {flat.numel()} elements, which "
            f"{group.size()} tensor ranks cannot share evenly; send it whole"
        )
    local = flat.chunk(group.size())[group.rank()] if flat.numel() else flat
    return local.clone() if new_buffer else local


def gather_split_1d_tensor(tensor: Tensor, *, group: Group | None = None) -> Tensor:
    """Gather the slices of all tensor ranks: (n,) -> (n * ranks,)."""
    with torch.no_grad():
        return primitives.all_gather(tensor.reshape(-1), resolve_group(group, "tensor"))


def divides(num: int, group: Group | None) -> bool:
    """Return whether `group` can share `num` elements evenly."""
    return group is not None and group.size() > 1 and num > 0 and num % group.size() == 0
