"""Broadcasts of objects, tensors and dicts of tensors from one rank, and a gather to one rank.

No rank waits for a tensor that never comes: the source first announces what follows, or an error,
which every rank then raises. Descriptions and tensors in host memory travel over a group for host
memory, even if the group itself joins GPUs. A group is a process group or the name of one of tpc's
axes.
"""

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor

from torchdistpackage.comm import primitives
from torchdistpackage.comm.collectives import as_dim, as_group
from torchdistpackage.comm.groups import on_cpu
from torchdistpackage.comm.nested import map_leaves
from torchdistpackage.comm.p2p import Post
from torchdistpackage.comm.primitives import Group
from torchdistpackage.errors import CommError


class TensorMetadata(NamedTuple):
    """The dtype, shape and device type that a rank needs to receive a tensor."""

    dtype: torch.dtype
    size: Sequence[int]
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class _TensorPlaceholder:
    """A placeholder for tensor number `index` in a structure."""

    index: int


@dataclass(frozen=True, slots=True)
class _SendError:
    """The error that the source announces instead of a value."""

    why: str


def broadcast_object_list(objects: list, group: Group | str, source: int | None = None) -> list:
    """Replace the contents of `objects` by those of global rank `source`, and return the list.

    Objects are pickled, so use it only between your own ranks.

    source: default: the group's first rank.

    Raises:
        CommError: `source` is not in the group, or its objects cannot be pickled.
    """
    objects[:] = cast(list, _announced(lambda: list(objects), as_group(group), source))
    return objects


def broadcast_tensors(
    tensors: Sequence[Tensor], group: Group | str, source: int | None = None
) -> Sequence[Tensor]:
    """Overwrite each tensor with that of global rank `source`, all in flight at once.

    All ranks pass tensors of the same shapes and dtypes, of any dtype, on CPU or CUDA.

    Raises:
        CommError: `source` is not in the group.
    """
    group = as_group(group)
    source = primitives.source_in(group, source)
    is_source = source == primitives.ranks_of(group)[group.rank()]
    works = []
    for x in tensors:
        if not x.numel():
            continue
        carrier = _group_for(x, group)
        # contiguous, so that the broadcast writes nothing back: autograd may hold the source's
        # tensor
        sent = x.detach().resolve_conj().resolve_neg().contiguous() if is_source else x.detach()
        staged = sent.to(_device_for(x, carrier))
        works.append((x, primitives.broadcast(staged, carrier, source, async_op=True)))
    for x, pending in works:
        # all broadcasts have been started by now, so they travel side by side
        arrived = pending.wait()
        if not is_source and arrived.device != x.device:
            x.detach().copy_(arrived)
    return tensors


def broadcast_tensor_dict(
    tensors: dict | None, group: Group | str, source: int | None = None
) -> dict:
    """Return the dict of global rank `source` on every rank; the others may pass None.

    Values are tensors of any dtype, on CPU or CUDA, or objects that pickle; dicts, lists and tuples
    may nest. The source gets its own dict back. The others get equal containers with new tensors
    that share no memory, on CUDA if the source's are.

    Raises:
        CommError: `source` is not in the group, has no dict, or has a value that cannot be sent.
    """
    group = as_group(group)
    source = primitives.source_in(group, source)
    taken_out: list[Tensor] = []

    def take_out(x: Tensor) -> _TensorPlaceholder:
        taken_out.append(x)
        return _TensorPlaceholder(len(taken_out) - 1)

    def describe() -> tuple[object, list[TensorMetadata]]:
        if not isinstance(tensors, dict):
            raise CommError(f"the source must pass a dict, not a {type(tensors).__name__}")
        structure = map_leaves(take_out, tensors, _is_tensor, dataclasses=False)
        return structure, [_metadata(x) for x in taken_out]

    structure, metadata = cast(
        tuple[object, list[TensorMetadata]], _announced(describe, group, source)
    )
    is_source = source == primitives.ranks_of(group)[group.rank()]
    broadcast_tensors(
        received := taken_out if is_source else [_allocate(m) for m in metadata], group, source
    )
    if is_source:
        return cast(dict, tensors)
    placed = map_leaves(
        lambda slot: received[slot.index], structure, _is_placeholder, dataclasses=False
    )
    return cast(dict, placed)


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def _is_placeholder(value: object) -> bool:
    return isinstance(value, _TensorPlaceholder)


def gather_to(x: Tensor, dim: int, group: Group | str, target: int) -> Tensor | None:
    """Join the tensors of all ranks along `dim` on the rank at index `target`; None elsewhere.

    x (..., n, ...), of one shape on all ranks -> (..., n * size, ...), without a gradient.

    Raises:
        CommError: the group has no index `target`.
        LayoutError: `x` has no such dim.
    """
    group, dim = as_group(group), as_dim(x, dim)
    size = group.size()
    if not 0 <= target < size:
        raise CommError(
            f"gather at position {target} of a group of {size} ranks; use a position from 0 to "
            f"{size - 1}"
        )
    ranks, carrier = primitives.ranks_of(group), _group_for(x, group)
    own_part = x.detach().to(_device_for(x, carrier)).contiguous()
    # one batch: NCCL would run messages that are posted one by one in turn
    post = Post(carrier)
    if group.rank() != target:
        post.send([own_part], ranks[target])
        # `own_part` may be a temporary copy, which must live until it has been sent
        post.go().wait()
        return None
    parts = [own_part if i == target else torch.empty_like(own_part) for i in range(size)]
    for rank, part in zip(ranks, parts, strict=True):
        if part is not own_part:
            post.receive([part], rank)
    # the parts are joined next, so all must have arrived
    post.go().wait()
    return torch.cat(parts, dim).to(x.device)


def _announced(make: Callable[[], object], group: Group, source: int | None) -> object:
    """Call `make` on the source, and return its value or raise its error on every rank."""
    source, announcement, cause = primitives.source_in(group, source), None, None
    if source == primitives.ranks_of(group)[group.rank()]:
        try:
            announcement = make()
            pickle.dumps(announcement)
        except Exception as error:  # a user's class may raise anything, and all ranks must raise
            cause = error
            reason = str(error) if isinstance(error, CommError) else f"it cannot be sent: {error!r}"
            announcement = _SendError(
                f"rank {source} of ranks {primitives.ranks_of(group)}: {reason}"
            )
    announcement = primitives.broadcast_object(announcement, group, source)
    if isinstance(announcement, _SendError):
        raise CommError(announcement.why) from cause
    return announcement


def _metadata(x: Tensor) -> TensorMetadata:
    """Describe a tensor; refuse one that cannot be sent."""
    if x.layout is not torch.strided or x.is_quantized or x.device.type not in ("cpu", "cuda"):
        kind = "quantized" if x.is_quantized else str(x.layout).removeprefix("torch.")
        raise CommError(
            f"a {kind} tensor of shape {tuple(x.shape)} on {x.device} cannot be sent; "
            f"only plain ones on CPU or CUDA can: convert it, and convert it back on arrival"
        )
    return TensorMetadata(x.dtype, tuple(x.shape), x.device.type)


def _allocate(metadata: TensorMetadata) -> Tensor:
    """Allocate memory for a described tensor."""
    on_cuda = metadata.device == "cuda" and torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
    return torch.empty(tuple(metadata.size), dtype=metadata.dtype, device=device)


def _group_for(x: Tensor, group: Group) -> Group:
    """Return the group that carries `x`: the companion for host memory if `x` is on the CPU."""
    return on_cpu(group) if x.device.type == "cpu" else group


def _device_for(x: Tensor, over: Group) -> torch.device:
    """Return the device that `x` must be on to travel over this group."""
    return x.device if primitives.is_queued(over) else torch.device("cpu")
