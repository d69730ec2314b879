"""Collectives made of direct messages between all pairs of ranks, for gloo.

On gloo a message travels at the full rate of the link in both directions at once, if its receive
was posted before this rank began to send. gloo's own reduce_scatter costs a full all_reduce, and
its all_gather knows no uneven parts. So: post every receive, then every send, then wait.

A message meets only those of the same kind of call with the same number. So ranks that issue
different calls wait for each other, as in any collective, and never mistake one for the other.
"""

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from torchdistpackage.comm.group_state import GroupState, state_of
from torchdistpackage.errors import CommError

Group = dist.ProcessGroup
GATHERED, SUMMED, EXPECTED_GATHERED, EXPECTED_SUMMED = range(4)
"""Kinds of calls that consist of messages."""
PIECE_BYTES = 2**20
"""Messages larger than this travel in even pieces of about this size.

A notice of readiness to receive queues behind the data being sent, so it then waits for at most 1.5
pieces."""
_FIRST_TAG, _NUM_TAGS = 2**12, 2**27
"""Tags above those of single messages in the same group; gloo's tags have 31 bits."""


def pairwise(
    kind: int,
    send: Sequence[Tensor],
    receive: Sequence[Tensor],
    group: Group,
    async_op: bool = False,
) -> list[dist.Work]:
    """Send send[i] to rank i of the group and fill receive[i] from it; the caller waits.

    This rank's own slice is copied. All tensors are contiguous. Empty ones do not travel, so both
    sides must know which are empty.
    """
    state = state_of(group)
    if state.left:
        state.settle()  # works that nobody awaited still hold their connections
    tag = call_tag(kind, state.issued)
    works = post_receives(receive, group, tag, state=state)
    works += post_sends(send, group, tag, state=state)
    if (own_part := receive[state.index]) is not send[state.index]:
        own_part.copy_(send[state.index])
    return works


def expected_tag(kind: int, group: Group) -> int:
    """Return the tag of a call whose receives are posted ahead.

    Members count these calls consistently, separately from other calls, which may come in between.
    """
    state = state_of(group)
    state.settle()
    state.expected += 1
    return call_tag(kind, state.expected)


def call_tag(kind: int, number: int) -> int:
    """Return the tag of call `number` of this kind."""
    return _FIRST_TAG + 8 * (number % _NUM_TAGS) + kind


def post_receives(
    parts: Sequence[Tensor],
    group: Group,
    tag: int,
    reverse: Group | None = None,
    state: GroupState | None = None,
) -> list[dist.Work]:
    """Post the receive of parts[i] from rank i of the group, for all ranks except this one.

    reverse: a group of the same ranks (groups.py, `make_duplex_groups`) for data sent to a lower
    rank; None: the same group. A rank that posts on a connection waits while gloo reads from it,
    possibly for long if all cores compute, so traffic that should overlap computation has one
    connection for each direction. state: that of the group, if known.

    Raises:
        CommError: a peer is gone; this comes ahead of the call that is noted and would say so.
    """
    state, reverse = state or state_of(group), reverse or group
    index = state.index
    try:
        # gloo announces receives one by one: announce first the one whose message comes first
        return [
            (reverse if i > index else group).recv([x], i, tag)
            for i in reversed(state.others)
            for x in _pieces(parts[i])
        ]
    except RuntimeError as error:
        raise _peer_gone("receiving from", state, error) from error


def post_sends(
    parts: Sequence[Tensor],
    group: Group,
    tag: int,
    reverse: Group | None = None,
    state: GroupState | None = None,
) -> list[dist.Work]:
    """Post the send of parts[i] to rank i of the group, for all ranks except this one.

    Raises:
        CommError: a peer is gone.
    """
    state, reverse = state or state_of(group), reverse or group
    index = state.index
    try:
        return [
            (reverse if i < index else group).send([x], i, tag)
            for i in state.others
            for x in _pieces(parts[i])
        ]
    except RuntimeError as error:
        raise _peer_gone("sending to", state, error) from error


def _peer_gone(action: str, state: GroupState, error: RuntimeError) -> CommError:
    """Return the error that names the peers of a call refused by the back end."""
    others = ", ".join(str(state.ranks[i]) for i in sorted(state.others))
    return CommError(f"{action} ranks {others} failed: {error}")


def _pieces(x: Tensor) -> Sequence[Tensor]:
    """Return `x` cut into even pieces of about PIECE_BYTES; nothing for an empty tensor."""
    num_elements = x.numel()
    num_pieces = round(num_elements * x.itemsize / PIECE_BYTES)
    if num_pieces <= 1:
        return (x,) if num_elements else ()
    return x.view(-1).split(-(-num_elements // num_pieces))
