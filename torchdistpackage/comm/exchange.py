"""Collectives made of direct messages between all pairs, for gloo.

There a message goes at the full rate of the link in both directions at once, if its receive was
posted before this rank began to send; gloo's own reduce_scatter costs a whole all_reduce, and its
all_gather knows no uneven parts. So: post every receive, then every send, then wait.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup
_TAG = 0x7DC
"""Apart from the messages that others exchange over the same group."""


def exchange(send: Sequence[Tensor], receive: Sequence[Tensor], group: Group) -> list[dist.Work]:
    """send[i] to rank i of the group, receive[i] from it; mine are copied.

    All are contiguous. Empty ones do not travel, so both sides must know which are.
    """
    mine, size = group.rank(), group.size()
    receive[mine].copy_(send[mine])
    # each begins with another peer, so that no rank is everybody's first
    others = [(mine + step) % size for step in range(1, size)]
    works = [
        group.recv([receive[i].view(torch.uint8)], i, _TAG)
        for i in reversed(others)
        if receive[i].numel()
    ]
    works += [group.send([send[i].view(torch.uint8)], i, _TAG) for i in others if send[i].numel()]
    return works
