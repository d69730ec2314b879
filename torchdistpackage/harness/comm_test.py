"""`test_comm`: run every operation over every group that `tpc` made, on the groups' device.

No rank waits for ever, and all learn the same result. The operations run in a guarded thread, and
their outcome is decided over the store (guarded.py). All ranks walk one list, so groups of one kind
are busy at the same time.
"""

import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from torchdistpackage.comm import primitives
from torchdistpackage.comm.creation import world
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.errors import CommError
from torchdistpackage.harness import comm_checks
from torchdistpackage.harness.bench.request import tournament
from torchdistpackage.harness.calls import GroupMember, compare
from torchdistpackage.harness.comm_checks import Check
from torchdistpackage.harness.comm_test_report import RankReport
from torchdistpackage.harness.guarded import GuardedThread, SharedStatus, limited, run_guarded
from torchdistpackage.topology.mesh import describe, topology

_LOOK_S = 0.05


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
    """The result of `test_comm`: a row for each kind of groups, and the seconds of all together."""

    rows: tuple[Tested, ...]
    time_s: float


@dataclass(frozen=True, slots=True)
class GroupClass:
    """A kind of groups that are busy at the same time: modes whose groups have the same ranks.

    which: name of one of them. size: its ranks. steps: what this rank does in turn, as many as any
    other rank.
    """

    modes: tuple[str, ...]
    which: str
    size: int
    num_groups: int
    steps: tuple[tuple[Check, GroupMember], ...]


def test_comm(*, pairs: bool = False, timeout_s: float = 30.0) -> CommTest:
    """Use each of tpc's groups with every operation, and compare each arriving element.

    Call it on every rank after `tpc.setup_process_groups`, or without it: then the default group is
    tested, and messages between rank 0 and each other rank. Rank 0 prints one line at the end.

    pairs: messages between all pairs of ranks too. timeout_s: how long the ranks may wait for each
    other in any one operation.

    Raises:
        CommError: data differed from what was sent, or a rank did not come in time; names
            operation, group, ranks, hosts, element and values, on every rank alike.
        LaunchError: the ranks have not joined.
    """
    tested = run_comm_test(pairs, timeout_s)
    if world().rank() == 0:
        shown = ", ".join(f"{row.name} {row.size}" for row in tested.rows)
        sys.stdout.write(f"test_comm passed: {shown or 'one rank, nothing to test'}\n")
        sys.stdout.flush()
    return tested


# its name is the earlier package's, and pytest would take it for a test
test_comm.__test__ = False  # type: ignore[attr-defined]


def run_comm_test(pairs: bool, timeout_s: float) -> CommTest:
    """Run `test_comm` without printing its line."""
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
    """Yield the modes to test and further kinds of groups: those of the user's tpc, or of a tpc
    with only the default group.
    """
    if tpc.is_set:
        modes = [*tpc.topology.dense.names, "model", "moe_dp", "moe_ep", "global"]
        yield [mode for mode in modes if tpc.is_mode_inited(mode)], []
        return
    with world_only():
        yield ["global"], [_with_rank_0()]


@contextmanager
def world_only() -> Iterator[None]:
    """Set up a tpc inside the block that has only the default group."""
    group = world()
    with tpc.isolated():
        tpc.setup(topology([("data", group.size())], group.size()), group.rank())
        try:
            yield
        finally:
            tpc.destroy()


def _test_together(
    used: list[str], extra: list[GroupClass], timeout_s: float
) -> tuple[Tested, ...]:
    """Test all kinds of groups, and return what was tested. used: modes of tpc. extra: kinds of
    groups beyond theirs.
    """
    # of the limit a part is kept for the decision at the end
    settle_s = min(3.0, timeout_s / 4)
    step_s = timeout_s - settle_s
    status = SharedStatus("test_comm")
    more = "".join(f" and {name}" for kind in extra for name in kind.modes)
    plan = f"{describe(tpc.topology.dense.axes)}{more}, {', '.join(used)}"
    wrong = tuple(text for mode in used for text in _wrong_members(mode))
    roll_call = f"the roll call over the global group of {tpc.topology.world_size} ranks"
    report = RankReport(wrong, plan=plan)
    status.meet(
        roll_call, report, limit_s=timeout_s, wait_s=step_s, settle_s=settle_s / 3
    ).raise_problems()
    kinds = [*_kinds(used), *extra]
    groups = [member.group for kind in kinds for _, member in kind.steps]
    with limited(groups, timeout_s):
        end = run_guarded(
            partial(_walk, kinds),
            status,
            groups[0],
            limit_s=timeout_s,
            step_s=step_s,
            settle_s=settle_s,
            look_s=_LOOK_S,
        )
    return tuple(
        Tested(", ".join(kind.modes), kind.num_groups, kind.size, len(kind.steps), time_s)
        for kind, time_s in zip(kinds, end.times_s, strict=True)
    )


@torch.no_grad()
def _walk(kinds: Sequence[GroupClass], thread: GuardedThread) -> None:
    """Run all steps, and store the problems and the times of each kind in `thread`."""
    host = socket.gethostname()
    for kind in kinds:
        begin_s = time.monotonic()
        for check, member in kind.steps:
            title = f"{check.name} over the {kind.which} of ranks {list(member.ranks)}"
            thread.begin(title, member.ranks)
            for received, expected, source in check.run(member):
                if problem := compare(received, expected):
                    thread.wrong.append(f"{title}{source}: rank {member.rank} on {host} {problem}")
        thread.times_s.append(time.monotonic() - begin_s)


def _wrong_members(mode: str) -> Iterator[str]:
    """Yield a problem if the group has other ranks than its name says, because they would
    deadlock.
    """
    members, ranks = list(primitives.ranks_of(tpc.get_group(mode))), tpc.get_ranks_in_group(mode)
    if members != ranks:
        yield (
            f"the {mode} group of ranks {ranks}: rank {tpc.rank} on {socket.gethostname()} holds "
            f"that of ranks {members}"
        )


def _kinds(used: list[str]) -> list[GroupClass]:
    """Return one kind for all modes that have the same groups; all ranks list them in one order."""
    same: dict[str, list[str]] = {}
    for mode in used:
        same.setdefault(str(tpc.all_ranks(mode)), []).append(mode)
    kinds = []
    for modes in same.values():
        ranks = tuple(tpc.get_ranks_in_group(modes[0]))
        member = GroupMember(tpc.get_group(modes[0]), ranks, tpc.rank)
        checks = comm_checks.collectives() + (comm_checks.neighbours() if "pipe" in modes else [])
        steps = tuple((check, member) for check in checks)
        num_groups = tpc.topology.world_size // len(ranks)
        kinds.append(GroupClass(tuple(modes), f"{modes[0]} group", len(ranks), num_groups, steps))
    return kinds


def _all_pairs() -> GroupClass:
    """Return the pairs of all ranks as a tournament, so that every round occupies all ranks."""
    size, own_rank = tpc.topology.world_size, tpc.rank
    # of an odd number one sits out
    peers = [
        next((a + b - own_rank for a, b in x if own_rank in (a, b)), None) for x in tournament(size)
    ]
    return _pairs("all pairs", peers, size * (size - 1) // 2)


def _with_rank_0() -> GroupClass:
    """Return the pairs of rank 0 with each other rank in turn."""
    size, own_rank = tpc.topology.world_size, tpc.rank
    peers = [r if own_rank == 0 else 0 if own_rank == r else None for r in range(1, size)]
    return _pairs("pairs with rank 0", peers, size - 1)


def _pairs(name: str, peers: list[int | None], num_pairs: int) -> GroupClass:
    """Return messages in both directions with each of this rank's peers in turn; None: no peer in
    that turn.
    """
    group, own_rank, everyone = tpc.get_group("global"), tpc.rank, range(tpc.topology.world_size)
    nothing = Check("nothing", lambda _: iter(())), GroupMember(group, tuple(everyone), own_rank)
    steps = [
        nothing
        if peer is None
        else (
            comm_checks.pair(),
            GroupMember(group, (min(own_rank, peer), max(own_rank, peer)), own_rank),
        )
        for peer in peers
    ]
    return GroupClass((name,), "pair", 2, num_pairs, tuple(steps))
