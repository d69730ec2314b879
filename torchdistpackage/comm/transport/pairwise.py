"""Collectives made of direct messages between all pairs, for gloo.

There a message goes at the full rate of the link in both directions at once, if its receive was
posted before this rank began to send; gloo's own reduce_scatter costs a full all_reduce, and its
all_gather knows no uneven parts. So: post every receive, then every send, then wait.

Messages of a call meet those of the same kind and number of call alone, so ranks that differ wait
for each other, as in any collective, and do not take one for the other.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor

from torchdistpackage.comm.group_state import GroupState, state_of
from torchdistpackage.errors import CommError

Group = dist.ProcessGroup
GATHERED, SUMMED, EXPECTED_GATHERED, EXPECTED_SUMMED = range(4)
"""Kinds of calls that are made of messages."""
PIECE_BYTES = 2**20
"""Longer messages travel in even pieces of about this, so that a notice of readiness to receive,
which queues behind what is being sent, waits for no more than half as much again."""
_FIRST_TAG, _NUM_TAGS = 2**12, 2**27
"""Above what messages by themselves use over the same group; gloo's tags have 31 bits."""


def pairwise(
    kind: int,
    send: Sequence[Tensor],
    receive: Sequence[Tensor],
    group: Group,
    async_op: bool = False,
) -> list[dist.Work]:
    """send[i] to rank i of the group, receive[i] from it; mine are copied. The caller waits.

    All are contiguous. Empty ones do not travel, so both sides must know which are.
    """
    state = state_of(group)
    if state.left:
        state.settle()
    tag = call_tag(kind, state.issued)
    works = post_receives(receive, group, tag, state=state)
    works += post_sends(send, group, tag, state=state)
    if (mine := receive[state.index]) is not send[state.index]:
        mine.copy_(send[state.index])
    return works


def expected_tag(kind: int, group: Group) -> int:
    """For a call of which receives are posted ahead: members count these alike, apart from calls
    in general, of which others may come first."""
    state = state_of(group)
    state.settle()
    state.expected += 1
    return call_tag(kind, state.expected)


def call_tag(kind: int, number: int) -> int:
    return _FIRST_TAG + 8 * (number % _NUM_TAGS) + kind


def post_receives(
    parts: Sequence[Tensor],
    group: Group,
    tag: int,
    reverse: Group | None = None,
    state: GroupState | None = None,
) -> list[dist.Work]:
    """parts[i] from rank i of the group, except mine.

    reverse: a group of the same ranks (groups.py, `make_duplex_groups`) for what goes from a
    rank to one before it, None: the same. A rank that posts on a connection waits while gloo reads
    from it, which may be for long where all cores compute, so traffic that computation is to hide
    has a connection for each way. state: that of the group, where it is known.

    Raises:
        CommError: a peer is gone; this comes ahead of the call that is noted and would say so.
    """
    state, reverse = state or state_of(group), reverse or group
    mine = state.index
    with _peer_gone("receiving from", state):
        # the first to be sent to me is the first that I say I am ready for
        return [
            (reverse if i > mine else group).recv([x], i, tag)
            for i in reversed(state.others)
            for x in _pieces(parts[i])
        ]


def post_sends(
    parts: Sequence[Tensor],
    group: Group,
    tag: int,
    reverse: Group | None = None,
    state: GroupState | None = None,
) -> list[dist.Work]:
    """parts[i] to rank i of the group, except mine; reverse, state: as above.

    Raises:
        CommError: a peer is gone.
    """
    state, reverse = state or state_of(group), reverse or group
    mine = state.index
    with _peer_gone("sending to", state):
        return [
            (reverse if i < mine else group).send([x], i, tag)
            for i in state.others
            for x in _pieces(parts[i])
        ]


@contextmanager
def _peer_gone(doing: str, state: GroupState) -> Generator[None]:
    """Turn what the back end raises inside the block into a CommError."""
    try:
        yield
    except RuntimeError as error:
        others = ", ".join(str(state.ranks[i]) for i in sorted(state.others))
        raise CommError(f"{doing} ranks {others} failed: {error}") from error


def _pieces(x: Tensor) -> Sequence[Tensor]:
    num_elements = x.numel()
    num_pieces = round(num_elements * x.itemsize / PIECE_BYTES)
    if num_pieces <= 1:
        return (x,) if num_elements else ()
    return x.view(-1).split(-(-num_elements // num_pieces))
