"""`test_comm`: every operation over every group that `tpc` made, on the device that they use.

No rank waits for ever and all learn the same. The operations run in a thread of their
own, which is left behind where it is stuck; what came of it is told beside the groups, over the
store (store_consensus.py). All ranks walk one list, so groups of one kind are busy at the same
time.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torchdistpackage.comm import primitives
from torchdistpackage.comm.creation import world
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.errors import CommError
from torchdistpackage.harness.bench.request import tournament
from torchdistpackage.harness.comm_test_report import Verdict, attendance_json, check_attendance
from torchdistpackage.harness.guarded import meet_at_end
from torchdistpackage.harness.store_consensus import SharedStatus
from torchdistpackage.harness.timeouts import limited
from torchdistpackage.harness.verify import checks
from torchdistpackage.harness.verify.checks import Check, GroupMember
from torchdistpackage.harness.verify.walk import CheckRunner, GroupClass
from torchdistpackage.launch.files import atomic_write
from torchdistpackage.topology.mesh import describe
from torchdistpackage.topology.views import topology


@dataclass(frozen=True, slots=True)
class Tested:
    """One kind of groups. name: its modes. time_s: for all operations, on the slowest rank."""

    name: str
    num_groups: int
    size: int
    num_operations: int
    time_s: float


@dataclass(frozen=True, slots=True)
class CommTest:
    """What `test_comm` did: a row for each kind of groups, and the seconds of all together."""

    rows: tuple[Tested, ...]
    time_s: float


def test_comm(*, pairs: bool = False, timeout_s: float = 30.0) -> CommTest:
    """Use each of tpc's groups in every way, and compare each element that arrives.

    Call it on every rank after `tpc.setup_process_groups`, or without it: then the default group is
    tested, and messages between rank 0 and each other rank. Rank 0 prints one line at the end.

    pairs: messages between all pairs of ranks too.
    timeout_s: how long the ranks may wait for each other in any one operation.

    Raises:
        CommError: data differed from what was sent, or a rank did not come in time; names
            operation, group, ranks, hosts, element and values, on every rank alike.
        LaunchError: the ranks have not joined.
    """
    tested = _test(pairs, timeout_s)
    if world().rank() == 0:
        shown = ", ".join(f"{row.name} {row.size}" for row in tested.rows)
        sys.stdout.write(f"test_comm passed: {shown or 'one rank, nothing to test'}\n")
        sys.stdout.flush()
    return tested


# its name is the earlier package's, and pytest would take it for a test
test_comm.__test__ = False  # type: ignore[attr-defined]


def test_and_note(pairs: bool, timeout_s: float, path: str) -> CommTest:
    """`test_comm` without its line; leaves the text of an error at `path` too, for a parent that
    ends this rank."""
    try:
        return _test(pairs, timeout_s)
    except CommError as error:
        atomic_write(Path(path), str(error))
        raise


test_and_note.__test__ = False  # type: ignore[attr-defined]


def _test(pairs: bool, timeout_s: float) -> CommTest:
    begin_s = time.monotonic()
    if timeout_s <= 0:
        raise CommError(f"timeout_s is {timeout_s:g}; give the ranks some seconds, e.g. 30")
    rows: tuple[Tested, ...] = ()
    with _topology() as (modes, extra):
        if tpc.topology.world_size > 1:
            rows = _test_together(modes, [_all_pairs()] if pairs else extra, timeout_s)
    return CommTest(rows, time.monotonic() - begin_s)


@contextmanager
def _topology() -> Iterator[tuple[list[str], list[GroupClass]]]:
    """Modes to test, and more: of the user's tpc, or of one that is the default group alone."""
    if tpc.is_set:
        yield _used_modes(), []
        return
    group = world()
    with tpc.isolated():
        tpc.setup(topology([("data", group.size())], group.size()), group.rank())
        try:
            yield ["global"], [_with_rank_0()]
        finally:
            tpc.destroy()


def _used_modes() -> list[str]:
    modes = [*tpc.topology.dense.names, "model", "moe_dp", "moe_ep", "global"]
    return [mode for mode in modes if tpc.is_mode_inited(mode)]


def _test_together(
    used: list[str], extra: list[GroupClass], timeout_s: float
) -> tuple[Tested, ...]:
    """used: modes of tpc. extra: kinds beyond theirs."""
    size = tpc.topology.world_size
    # of the limit a part is kept for telling each other
    settle_s = min(3.0, timeout_s / 4)
    patience_s = timeout_s - settle_s
    with SharedStatus("test_comm") as bulletin:
        more = "".join(f" and {name}" for kind in extra for name in kind.modes)
        plan = f"{describe(tpc.topology.dense.axes)}{more}, {', '.join(used)}"
        roll = bulletin.meet(
            "roll",
            attendance_json(plan, [text for mode in used for text in _wrong_members(mode)]),
            lambda texts, host_of: check_attendance(
                texts, host_of, world_size=size, limit_s=timeout_s
            ).to_json(),
            wait_s=patience_s,
            settle_s=settle_s / 3,
        )
        Verdict.from_json(roll).raise_problems()
        kinds = [*_kinds(used), *extra]
        with limited((kind.seat.group for kind in kinds), timeout_s):
            walk = CheckRunner(
                kinds, bulletin.alarmed, patience_s=patience_s, settle_s=settle_s / 4
            )
            end = meet_at_end(bulletin, walk.report(), limit_s=timeout_s, settle_s=settle_s)
        end.raise_problems()
    return tuple(
        Tested(
            ", ".join(kind.modes), kind.num_groups, len(kind.seat.ranks), len(kind.steps), time_s
        )
        for kind, time_s in zip(kinds, end.times_s, strict=True)
    )


def _wrong_members(mode: str) -> Iterator[str]:
    """Whether the group is of other ranks than its name says; they would wait for each other."""
    members, ranks = list(primitives.ranks_of(tpc.get_group(mode))), tpc.get_ranks_in_group(mode)
    if members != ranks:
        yield (
            f"the {mode} group of ranks {ranks}: rank {tpc.rank} on {socket.gethostname()} holds "
            f"that of ranks {members}"
        )


def _kinds(used: list[str]) -> list[GroupClass]:
    """Modes with the same groups are one kind; all ranks list them alike."""
    same: dict[str, list[str]] = {}
    for mode in used:
        same.setdefault(str(tpc.all_ranks(mode)), []).append(mode)
    kinds = []
    for modes in same.values():
        ranks = tuple(tpc.get_ranks_in_group(modes[0]))
        seat = GroupMember(tpc.get_group(modes[0]), ranks, tpc.rank)
        listed = checks.collectives() + (checks.neighbours() if "pipe" in modes else [])
        num_groups = tpc.topology.world_size // len(ranks)
        steps = tuple((check, seat) for check in listed)
        kinds.append(GroupClass(tuple(modes), f"{modes[0]} group", seat, num_groups, steps))
    return kinds


def _all_pairs() -> GroupClass:
    """Everybody with everybody, as a tournament: in each round all meet another one."""
    size, mine = tpc.topology.world_size, tpc.rank
    rounds = tournament(size)
    # of an odd number one sits out
    peers = [next((a + b - mine for a, b in pairs if mine in (a, b)), None) for pairs in rounds]
    return _pairs("all pairs", peers, size * (size - 1) // 2)


def _with_rank_0() -> GroupClass:
    """Rank 0 with each other rank in turn."""
    size, mine = tpc.topology.world_size, tpc.rank
    turns = range(1, size)
    peers = [other if mine == 0 else 0 if mine == other else None for other in turns]
    return _pairs("pairs with rank 0", peers, size - 1)


def _pairs(name: str, peers: list[int | None], number: int) -> GroupClass:
    """Messages both ways with each of my peers in turn; None: a turn in which I have none."""
    mine = tpc.rank
    seat = GroupMember(tpc.get_group("global"), tuple(range(tpc.topology.world_size)), mine)
    steps = []
    for peer in peers:
        if peer is None:
            steps.append((Check("nothing", lambda _: iter(())), seat))
        else:
            first, second = sorted((mine, peer))
            steps.append(
                (checks.pair(first, second), GroupMember(seat.group, (first, second), mine))
            )
    return GroupClass((name,), "pair", GroupMember(seat.group, (0, 1), mine), number, tuple(steps))
