"""Attendance checks of methods that all ranks must call but users may call on rank 0 alone.

If only some ranks enter such a method, its collectives would wait for ever, or meet other calls of
the ranks that went on. So each rank first records in the store that it has arrived.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from torchdistpackage.comm.creation import PerGroup, default_store, is_alive, is_joined
from torchdistpackage.comm.primitives import Group, ranks_of
from torchdistpackage.errors import CommError

LIMIT_S = 8.0
"""Time limit in seconds for ranks that share a step. They are never far apart, except that rank 0
may be saving.
"""
FIRST_CALL_LIMIT_S = 60.0
"""Time limit in seconds for the first call within a step, before which one rank may compile longer
than another.
"""
_NAMED = 8
_calls: PerGroup[dict[str, int]] = PerGroup()
"""Group -> number of calls of each method."""
_num_without_peers = 0


@contextmanager
def without_peers() -> Iterator[None]:
    """Do not wait for other ranks in the block, because this process stands for all ranks of its
    groups.
    """
    global _num_without_peers
    _num_without_peers += 1
    try:
        yield
    finally:
        _num_without_peers -= 1


def expect_all_once(call_name: str, group: Group) -> None:
    """Run `expect_all` only at the first call of `call_name`, with FIRST_CALL_LIMIT_S.

    It is for calls in every step: a call under `if rank == 0:` is missing from the first step on,
    and later steps need not wait on the host.
    """
    if call_name not in _calls.get(group, {}):
        expect_all(call_name, group, limit_s=FIRST_CALL_LIMIT_S)


def expect_all(call_name: str, group: Group, limit_s: float | None = None) -> None:
    """Wait until all ranks of `group` have called this for the collective method `call_name`.

    If only the group's first rank is missing at the limit, it may be saving or printing, so the
    others continue and wait in the collective itself.

    Raises:
        CommError: other ranks did not call it within `limit_s`, by default LIMIT_S; names them.
    """
    if group.size() == 1 or _num_without_peers or not is_joined() or not is_alive(group):
        return  # threads and rehearsals have no store
    numbers = _calls.setdefault(group, {})
    numbers[call_name] = number = numbers.get(call_name, 0) + 1
    store, ranks = default_store(), ranks_of(group)
    key = f"attendance/{group.group_name}/{call_name}/{number}"
    # signed before it is counted, so that no counted rank is named as absent
    store.set(f"{key}/{dist.get_rank()}", "")
    limit_s = LIMIT_S if limit_s is None else limit_s
    if store.add(key, 1) == len(ranks):
        store.set(f"{key}/all", "")
    try:
        # the last rank to come sets the key, so this returns when all are there
        store.wait([f"{key}/all"], timedelta(seconds=limit_s))
    except RuntimeError as error:
        absent = [rank for rank in ranks if not store.check([f"{key}/{rank}"])]
        if set(absent) <= {ranks[0]}:
            return
        shown = ", ".join(map(str, absent[:_NAMED])) + ", ..." * (len(absent) > _NAMED)
        raise CommError(
            f"{call_name} is collective, but {len(absent)} of its {len(ranks)} ranks have not "
            f"called it within {limit_s:g} s (ranks {shown}): call it on all ranks, even if only "
            f"one of them saves or prints what it returns"
        ) from error
