"""Methods that all ranks must call and that users call on rank 0 alone: who has come, in time.

Where only some ranks enter such a method, its collectives would wait for ever, or meet other calls
of the ranks that went on. So the ranks first note in the store that they have come.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from torchdistpackage.comm.creation import PerGroup, default_store, is_alive, is_joined
from torchdistpackage.comm.primitives import Group, ranks_of
from torchdistpackage.errors import CommError

LIMIT_S = 8.0
"""Ranks that share a step are not apart for longer, but for the first, which saves and prints."""
FIRST_CALL_LIMIT_S = 60.0
"""For a call within a step, before which one rank may have compiled for longer than another."""
_FIRST_LOOK_S, _LAST_LOOK_S = 0.001, 0.1
_NAMED = 8
_calls: PerGroup[dict[str, int]] = PerGroup()
"""Group -> how often each method has been entered."""
_num_without_peers = 0


@contextmanager
def without_peers() -> Iterator[None]:
    """Inside, this process stands for all ranks of its groups, so none of them is waited for."""
    global _num_without_peers
    _num_without_peers += 1
    try:
        yield
    finally:
        _num_without_peers -= 1


def expect_all_once(what: str, group: Group) -> None:
    """Do as `expect_all` at the first call of `what` alone, with FIRST_CALL_LIMIT_S.

    For what is called in every step: a call that stands under `if rank == 0:` is missing from the
    first one on, and later steps need not wait on the host.
    """
    if what not in _calls.get(group, {}):
        expect_all(what, group, limit_s=FIRST_CALL_LIMIT_S)


def expect_all(what: str, group: Group, limit_s: float | None = None) -> None:
    """Return when all ranks of `group` have called this for `what`, a method that is collective.

    If only the group's first rank is missing at the limit, it may be saving or printing, so the
    others go on to wait in the collective itself.

    Raises:
        CommError: others have not come within `limit_s`, by default LIMIT_S; names them.
    """
    if group.size() == 1 or _num_without_peers or not is_joined() or not is_alive(group):
        return  # threads and rehearsals have no store
    numbers = _calls.setdefault(group, {})
    numbers[what] = number = numbers.get(what, 0) + 1
    store, ranks = default_store(), ranks_of(group)
    key = f"attendance/{group.group_name}/{what}/{number}"
    store.set(f"{key}/{dist.get_rank()}", "")
    limit_s = LIMIT_S if limit_s is None else limit_s
    num, until_s, look_s = store.add(key, 1), time.monotonic() + limit_s, _FIRST_LOOK_S
    while num < len(ranks):
        if time.monotonic() > until_s:
            absent = [rank for rank in ranks if not store.check([f"{key}/{rank}"])]
            if set(absent) <= {ranks[0]}:
                return
            shown = ", ".join(map(str, absent[:_NAMED])) + ", ..." * (len(absent) > _NAMED)
            raise CommError(
                f"{what} is collective, and of the {len(ranks)} ranks that share it "
                f"{len(absent)} have not called it within {limit_s:g} s (ranks {shown}): call it "
                f"on all ranks, also where one of them alone saves or prints what it returns"
            )
        time.sleep(look_s)
        look_s = min(2 * look_s, _LAST_LOOK_S)
        num = store.add(key, 0)
