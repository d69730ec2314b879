"""Debug mode: before a call, its members compare the operations they are about to run.

A difference raises an error on every member, with both sides, before any data moves. Without this
check a back end would compute wrong numbers or wait for ever. The comparison costs one small
collective per call; texts are exchanged only if their digests differ.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from torchdistpackage.comm.backends import device_of
from torchdistpackage.comm.flight_recorder import dtype_name, recorder
from torchdistpackage.comm.group_state import state_of
from torchdistpackage.errors import CommError

TEXT_BYTES = 192
"""Largest text in bytes that describes a call; longer ones are cut."""
_SENDS, _RECEIVES = 0x7DD, 0x7DE
"""Tags of the descriptions by senders and receivers, different from the tags of all data."""


@contextmanager
def checked_calls(on: bool = True) -> Iterator[None]:
    """Compare every collective and message of this package in the block; all ranks enter it.

    A call that differs between the members of its group raises CommError on all of them.
    """
    previous, recorder.checks = recorder.checks, on
    try:
        yield
    finally:
        recorder.checks = previous


def agree(
    operation: str, group: dist.ProcessGroup, x: Tensor | None, facts: Sequence[object]
) -> None:
    """Compare a collective that is about to be issued, over its group.

    facts: values that must be equal besides the shape. If they mention varying rows, or the rows of
    each rank, the first dim may differ.

    Raises:
        CommError: on all members, if any differs.
    """
    described = _description(operation, x, facts)
    digest = int.from_bytes(
        hashlib.sha1(described.encode(), usedforsecurity=False).digest()[:7], "big"
    )
    digests = _gathered(torch.tensor([digest], dtype=torch.int64), group, described)
    if len({int(x) for x in digests}) > 1:
        raise _difference(
            group, [_decoded(x) for x in _gathered(_encoded(described), group, described)]
        )


def agree_pairs(
    operation: str, group: dist.ProcessGroup, sent: Sequence[int], received: Sequence[int]
) -> None:
    """Compare the rows that each rank sends to each other rank with those that it expects.

    Raises:
        CommError: on all members, if a pair differs.
    """
    ranks = dist.get_process_group_ranks(group)
    own_rows = torch.tensor([*sent, *received], dtype=torch.int64)
    table = [x.tolist() for x in _gathered(own_rows, group, operation)]
    wrong = [
        f"rank {ranks[i]} sends {table[i][j]} rows to rank {ranks[j]}, "
        f"which expects {table[j][len(ranks) + i]}"
        for i in range(len(ranks))
        for j in range(len(ranks))
        if table[i][j] != table[j][len(ranks) + i]
    ]
    if wrong:
        raise CommError(
            f"{operation} over ranks {tuple(ranks)} does not fit: {'; '.join(wrong[:8])}; give "
            "each rank the receive_sizes that the others have for it in send_sizes"
        )


def agree_messages(group: dist.ProcessGroup, messages: Sequence[tuple[str, Tensor, int]]) -> None:
    """Compare messages (`send` or `receive`, tensor, global peer) with those of each peer.

    The k-th send to a rank is compared with its k-th receive from this rank. So this waits until
    every peer compares its own. Asynchronous messages (`start_send`) are therefore not compared.

    Raises:
        CommError: on both sides of a pair, if they differ or a peer did not come in time.
    """
    device, rank = device_of(group), dist.get_rank()
    # NCCL has no tags, so both sides of a pair use one order: messages to higher ranks first
    messages = sorted(messages, key=lambda m: (m[0] == "send") != (rank < m[2]))
    tags = (_SENDS, _RECEIVES) if state_of(group).direct else (0, 0)
    described = [
        f"{direction} {dtype_name(x.dtype)}{list(x.shape)}" for direction, x, _ in messages
    ]
    buffers = [torch.empty(TEXT_BYTES, dtype=torch.uint8, device=device) for _ in messages]
    operations: list[dist.P2POp] = []
    for (direction, _, peer), buffer, text in zip(messages, buffers, described, strict=True):
        own_tag, peer_tag = tags if direction == "send" else reversed(tags)
        operations.append(dist.P2POp(dist.irecv, buffer, peer, group, peer_tag))
        operations.append(dist.P2POp(dist.isend, _encoded(text).to(device), peer, group, own_tag))
    limit = state_of(group).limit
    try:
        for work in dist.batch_isend_irecv(operations) if operations else ():
            # the answers must be here before they are compared
            work.wait() if limit is None else work.wait(limit)
    except RuntimeError as error:
        peers = sorted({peer for _, _, peer in messages})
        raise CommError(
            f"rank {rank} and ranks {peers} could not compare their messages "
            f"({', '.join(described)}); see the error of the rank that did not come: {error}"
        ) from error
    wrong = [
        f"rank {rank} is about to {own_text}, rank {peer} to {peer_text}"
        for (_, _, peer), own_text, peer_text in zip(
            messages, described, map(_decoded, buffers), strict=True
        )
        if peer_text != _mirrored(own_text)
    ]
    if wrong:
        raise CommError(
            f"messages do not fit: {'; '.join(wrong)}; give both sides the same shape and dtype"
        )


def _gathered(local: Tensor, group: dist.ProcessGroup, described: str) -> list[Tensor]:
    """Gather a tensor of all members, without recording the call."""
    local = local.to(device_of(group))
    gathered = [torch.empty_like(local) for _ in range(group.size())]
    try:
        dist.all_gather(gathered, local, group=group)
    except RuntimeError as error:
        state = state_of(group)
        raise CommError(
            f"call number {state.issued + 1} of ranks {state.ranks}, here {described}, could not "
            "be compared: a member did not make the call, or refused it; see its own error: "
            f"{error}"
        ) from error
    return gathered


def _description(operation: str, x: Tensor | None, facts: Sequence[object]) -> str:
    """Return the text that describes a collective; members must have equal ones."""
    described = operation
    if x is not None:
        varies = bool(facts) and str(facts[0]).startswith("rows")
        shape = ["rows", *x.shape[1:]] if varies else list(x.shape)
        described += f" of {dtype_name(x.dtype)}[{', '.join(map(str, shape))}]"
    return described + "".join(f", {fact}" for fact in facts)


def _difference(group: dist.ProcessGroup, texts: list[str]) -> CommError:
    """Return the error that shows what each rank is about to run."""
    ranks, state = dist.get_process_group_ranks(group), state_of(group)
    sides: dict[str, list[int]] = {}
    for rank, text in zip(ranks, texts, strict=True):
        sides.setdefault(text, []).append(rank)
    shown = "; ".join(f"{_ranks(who)} {text}" for text, who in sides.items())
    where = f"the {state.axis} group of ranks" if state.axis else "the group of ranks"
    return CommError(
        f"call number {state.issued + 1} over {where} {tuple(ranks)} differs: {shown}; "
        f"all members must make the same calls in the same order"
    )


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}:" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}:"


def _mirrored(described: str) -> str:
    """Return the peer's description of the message that this rank describes as `described`."""
    direction, _, suffix = described.partition(" ")
    return f"{'receive' if direction == 'send' else 'send'} {suffix}"


def _encoded(text: str) -> Tensor:
    """Return text as a tensor of TEXT_BYTES bytes."""
    raw = text.encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def _decoded(x: Tensor) -> str:
    """Return the text in a tensor of bytes."""
    return bytes(x.tolist()).rstrip(b"\0").decode(errors="replace")
