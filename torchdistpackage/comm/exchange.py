"""Collectives made of direct messages between all pairs, for gloo.

There a message goes at the full rate of the link in both directions at once, if its receive was
posted before this rank began to send; gloo's own reduce_scatter costs a whole all_reduce, and its
all_gather knows no uneven parts. So: post every receive, then every send, then wait.

Messages of a call meet those of the same kind and number of call alone, so ranks that differ wait
for each other, as in any collective, and do not take one for the other.
"""

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from torchdistpackage.comm.record import calls

Group = dist.ProcessGroup
GATHERED, SUMMED = 0, 1
"""Kinds of calls that are made of messages."""
_FIRST_TAG, _NUM_TAGS = 2**12, 2**28
"""Above what messages by themselves use over the same group; gloo's tags have 31 bits."""


def exchange(
    kind: int, send: Sequence[Tensor], receive: Sequence[Tensor], group: Group
) -> list[dist.Work]:
    """send[i] to rank i of the group, receive[i] from it; mine are copied.

    All are contiguous. Empty ones do not travel, so both sides must know which are.
    """
    mine, size, line = group.rank(), group.size(), calls.line(group)
    line.settle()
    tag = _FIRST_TAG + 2 * (line.issued % _NUM_TAGS) + kind
    receive[mine].copy_(send[mine])
    # each begins with another peer, so that no rank is everybody's first
    others = [(mine + step) % size for step in range(1, size)]
    works = [group.recv([receive[i]], i, tag) for i in reversed(others) if receive[i].numel()]
    works += [group.send([send[i]], i, tag) for i in others if send[i].numel()]
    return works
