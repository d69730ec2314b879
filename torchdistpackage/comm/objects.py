"""Broadcasts of objects, tensors and dicts of tensors from one rank, and a gather to one rank.

No rank waits for what will never come: the source says first what follows, or that nothing does and
why, and then every rank raises. Descriptions and what lives in host memory go over a group
that moves host memory, also where the group itself joins GPUs. A group is a process group or the
name of one of tpc's axes.
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
from torchdistpackage.comm.p2p import start_receive, start_send
from torchdistpackage.comm.primitives import Group
from torchdistpackage.errors import CommError


class TensorMetadata(NamedTuple):
    """Shape and dtype, without which a rank cannot receive a tensor."""

    dtype: torch.dtype
    size: Sequence[int]
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class _TensorPlaceholder:
    """Stands in a structure for the tensor number `index`."""

    index: int


@dataclass(frozen=True, slots=True)
class _SendError:
    """Stands for what the source could not send."""

    why: str


def broadcast_object_list(objects: list, group: Group | str, source: int | None = None) -> list:
    """Replace what is in `objects` by what global rank `source` has in its list; returns it.

    source: default the group's first. Objects are pickled: only between own ranks.

    Raises:
        CommError: `source` is not in the group, or its objects cannot be pickled.
    """
    objects[:] = cast(list, _announced(lambda: list(objects), as_group(group), source))
    return objects


def broadcast_tensors(
    tensors: Sequence[Tensor], group: Group | str, source: int | None = None
) -> Sequence[Tensor]:
    """Overwrite each tensor with that of global rank `source`, all of them under way at once.

    All ranks give tensors of the same shapes and dtypes, any dtype, on CPU or CUDA.

    Raises:
        CommError: `source` is not in the group.
    """
    group = as_group(group)
    source = primitives.source_in(group, source)
    mine = source == primitives.ranks_of(group)[group.rank()]
    begun = []
    for x in tensors:
        if not x.numel():
            continue
        over = _group_for(x, group)
        # in one piece, so that nothing is written back: autograd may hold the source's tensors
        sent = x.detach().resolve_conj().resolve_neg().contiguous() if mine else x.detach()
        staged = sent.to(_device_for(x, over))
        begun.append((x, primitives.broadcast(staged, over, source, async_op=True)))
    for x, pending in begun:
        arrived = pending.wait()
        if not mine and arrived.device != x.device:
            x.detach().copy_(arrived)
    return tensors


def broadcast_tensor_dict(
    tensors: dict | None, group: Group | str, source: int | None = None
) -> dict:
    """The dict that global rank `source` holds, on every rank; the others may give None.

    Values are tensors of any dtype, on CPU or CUDA, or anything that pickles; dicts, lists and
    tuples may hold more of both. The source gets its own dict back, the others the same containers
    with new tensors that share no memory, on CUDA where the source has them there.

    Raises:
        CommError: `source` is not in the group, has no dict, or has in it what cannot be sent.
    """
    group = as_group(group)
    source = primitives.source_in(group, source)
    found: list[Tensor] = []

    def take_out(x: Tensor) -> _TensorPlaceholder:
        found.append(x)
        return _TensorPlaceholder(len(found) - 1)

    def describe() -> tuple[object, list[TensorMetadata]]:
        if not isinstance(tensors, dict):
            raise CommError(f"a dict was expected of the source, not a {type(tensors).__name__}")
        structure = map_leaves(take_out, tensors, _is_tensor, dataclasses=False)
        return structure, [_metadata(x) for x in found]

    structure, metadata = cast(
        tuple[object, list[TensorMetadata]], _announced(describe, group, source)
    )
    mine = source == primitives.ranks_of(group)[group.rank()]
    broadcast_tensors(
        received := found if mine else [_allocate(m) for m in metadata], group, source
    )
    if mine:
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
    """The parts of all ranks joined along `dim` at position `target` of the group; None elsewhere.

    x (..., n, ...), alike on all ranks -> (..., n * size, ...), without a gradient.

    Raises:
        CommError: the group has no position `target`.
        LayoutError: there is no such dim.
    """
    group, dim = as_group(group), as_dim(x, dim)
    size = group.size()
    if not 0 <= target < size:
        raise CommError(
            f"gather at position {target} of a group of {size} ranks; positions are 0 to {size - 1}"
        )
    ranks, over = primitives.ranks_of(group), _group_for(x, group)
    mine = x.detach().to(_device_for(x, over))
    if group.rank() != target:
        start_send(mine, over, ranks[target]).wait()
        return None
    begun = [
        None if i == target else start_receive(torch.empty_like(mine), over, ranks[i])
        for i in range(size)
    ]
    parts = [mine if pending is None else pending.wait() for pending in begun]
    return torch.cat(parts, dim).to(x.device)


def _announced(make: Callable[[], object], group: Group, source: int | None) -> object:
    """Call `make` on the source; its value, or the error that it raised, on every rank."""
    source, announcement, cause = primitives.source_in(group, source), None, None
    if source == primitives.ranks_of(group)[group.rank()]:
        try:
            announcement = make()
            pickle.dumps(announcement)
        except Exception as error:  # whatever a user's class raises, the others must hear of it
            cause = error
            reason = str(error) if isinstance(error, CommError) else f"it cannot be sent: {error!r}"
            announcement = _SendError(
                f"rank {source} of ranks {primitives.ranks_of(group)}: {reason}"
            )
    announcement = primitives.broadcast_object(announcement, on_cpu(group), source)
    if isinstance(announcement, _SendError):
        raise CommError(announcement.why) from cause
    return announcement


def _metadata(x: Tensor) -> TensorMetadata:
    if x.layout is not torch.strided or x.is_quantized or x.device.type not in ("cpu", "cuda"):
        kind = "quantized" if x.is_quantized else str(x.layout).removeprefix("torch.")
        raise CommError(
            f"a {kind} tensor of shape {tuple(x.shape)} on {x.device} cannot be sent; "
            f"only plain ones on CPU or CUDA can: convert it, and convert it back on arrival"
        )
    return TensorMetadata(x.dtype, tuple(x.shape), x.device.type)


def _allocate(metadata: TensorMetadata) -> Tensor:
    on_cuda = metadata.device == "cuda" and torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
    return torch.empty(tuple(metadata.size), dtype=metadata.dtype, device=device)


def _group_for(x: Tensor, group: Group) -> Group:
    """The group over which `x` goes: not that of the GPUs if it lives in host memory."""
    return on_cpu(group) if x.device.type == "cpu" else group


def _device_for(x: Tensor, over: Group) -> torch.device:
    """The device where `x` must be to go over this group."""
    return x.device if primitives.is_queued(over) else torch.device("cpu")
