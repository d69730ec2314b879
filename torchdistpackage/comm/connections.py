"""Connects a group before its first use, where the back end would connect in its first calls.

A back end on devices connects the ranks of a group in their first collective, and two ranks in
their first message, and the host is blocked meanwhile. In the middle of a pipeline that is too
late: a first batch of messages needs all ranks of the group, of which some wait for others.
"""

from functools import partial

import torch
import torch.distributed as dist

from torchdistpackage.comm.creation import (
    PerGroup,
    creation_limit,
    default_store,
    default_timeout_s,
)
from torchdistpackage.comm.primitives import Group, device_of, is_queued, ranks_of, transport_of
from torchdistpackage.errors import CommError

_connected: PerGroup[bool] = PerGroup()
"""Group -> whether neighbours are connected for messages, too."""


def connect(group: Group, *, neighbours: bool = False, limit_s: float | None = None) -> None:
    """Connect all ranks of the group, once; nothing on gloo, or of one rank.

    All of them call it, before any sends another one a message on the group. It returns when all
    have come.

    neighbours: also those in the ring of its ranks, for messages. limit_s: for the others to come.

    Raises:
        CommError: they did not come, or the back end joined other ranks than those of the group.
    """
    known = _connected.get(group)
    if group.size() == 1 or known or (known is False and not neighbours) or not is_queued(group):
        return
    ranks, store, key = ranks_of(group), default_store(), f"connect/{group.group_name}"
    store.set(f"{key}/{dist.get_rank()}", "")
    came = partial(_came, key)
    limit_s = limit_s or default_timeout_s(transport_of(group).name)
    with creation_limit(f"connecting ranks {ranks}", ranks, came, store, limit_s):
        if known is None:
            _sum(group)
        if neighbours:
            _messages(group)
    _connected[group] = neighbours


def _came(key: str, store: dist.Store, rank: int) -> bool:
    return store.check([f"{key}/{rank}"])


def _sum(group: Group) -> None:
    number = torch.ones(1, device=device_of(group))
    dist.all_reduce(number, group=group)
    if int(number) != group.size():  # reading it waits for all
        raise CommError(
            f"a sum over the {group.size()} ranks {ranks_of(group)} is one over {int(number)}: "
            f"torch {torch.__version__} connected other ranks; report this"
        )


def _messages(group: Group) -> None:
    ranks, at = ranks_of(group), group.rank()
    peers = sorted({ranks[at - 1], ranks[(at + 1) % len(ranks)]})
    mine = torch.full((1,), float(ranks[at]), device=device_of(group))
    rooms = [torch.zeros_like(mine) for _ in peers]
    batch = [dist.P2POp(dist.isend, mine, peer, group) for peer in peers]
    batch += [dist.P2POp(dist.irecv, x, peer, group) for x, peer in zip(rooms, peers, strict=True)]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    came = [int(x) for x in rooms]
    if came != peers:
        raise CommError(f"messages of ranks {peers} to rank {ranks[at]} came from ranks {came}")
