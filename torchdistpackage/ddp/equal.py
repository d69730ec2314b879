"""Tensors that become those of one rank, many in a message.

One rule: what is alike travels together: one broadcast for all of a dtype and device, cut where it
would be longer than `MESSAGE_BYTES`, so that no copy of a whole model is ever made.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from torchdistpackage.comm import primitives
from torchdistpackage.comm.primitives import Group, ranks_of
from torchdistpackage.ddp.param_sync import ReplicatedTensor, by_group

MESSAGE_BYTES = 8 * 2**20


@torch.no_grad()
def sync_module_states(replicas: Iterable[ReplicatedTensor], source: int | None = None) -> None:
    """Set all of them to those of global rank `source`, by default the first of each group.

    Raises:
        CommError: `source` is not in one of the groups.
    """
    for group, held in by_group(replicas):
        # not through autograd's count of changes: batch norm saves buffers that it never reads
        for tensors in _messages([r.tensor.data for r in held if r.tensor.numel()]):
            _send(tensors, group, primitives.source_in(group, source))


def _messages(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Those that travel together; a large one alone."""
    alike: dict[object, list[Tensor]] = {}
    room: dict[object, int] = {}
    for x in tensors:
        kind = x.dtype, x.device
        if kind in alike and room[kind] < x.nbytes:
            yield alike.pop(kind)
        if kind not in alike:
            alike[kind], room[kind] = [], MESSAGE_BYTES
        alike[kind].append(x)
        room[kind] -= x.nbytes
    yield from alike.values()


def _send(tensors: list[Tensor], group: Group, source: int) -> None:
    if len(tensors) == 1 and tensors[0].is_contiguous():
        primitives.broadcast(tensors[0], group, source)
        return
    flat = torch.cat([x.reshape(-1) for x in tensors])
    primitives.broadcast(flat, group, source)
    if ranks_of(group)[group.rank()] != source:
        arrived = flat.split([x.numel() for x in tensors])
        torch._foreach_copy_(
            tensors, [a.view(x.shape) for a, x in zip(arrived, tensors, strict=True)]
        )
