"""Who is to blame for a hang: tables of what ranks may leave, and the words that must come out.

No torch.
"""

import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from tests.tells import tells
from torchdistpackage.environment.failure import Failure, FailureKind, report, root_cause, to_json
from torchdistpackage.harness.hang import dump as dumps
from torchdistpackage.harness.hang import shutdown
from torchdistpackage.harness.hang.diagnosis import Cause, Diagnosis, diagnose
from torchdistpackage.harness.hang.dump import Dump, Process, State
from torchdistpackage.topology.mesh import topology as topology_of

BATCH = '"/home/me/loader.py", line 31, in batch'
STACK = '  File "/home/me/loader.py", line 31, in batch\n    time.sleep(60)\n'
INSIDE = '  File "/usr/lib/python3.11/threading.py", line 9, in wait\n'
GIVEN = {"all_reduce": [1000], "broadcast": [1000], "all_gather": [8], "barrier": []}


def call(
    operation, sequence, state="waiting", *, shape=None, peer=None, action=None, dtype="float32"
):
    return {
        "group": 0,
        "operation": operation,
        "sequence": sequence,
        "shape": GIVEN.get(operation, [8, 16]) if shape is None else shape,
        "dtype": dtype,
        "peer": peer,
        "action": action,
        "state": state,
        "age_s": 12.3,
    }


def snapshot(group, *calls, issued=None, axis="data", phase="forward", device=False, peers=()):
    """Of one group; a collective that is noted last was issued last, unless `issued` says so."""
    own = [c["sequence"] for c in calls if c["peer"] is None]
    issued = issued if issued is not None else max(own, default=0)
    done = (
        None if device else issued - sum(c["state"] != "done" for c in calls if c["peer"] is None)
    )
    messages = {
        peer: [c for c in calls if c["peer"] == peer]
        for peer in {c["peer"] for c in calls} - {None}
    }
    counted = {
        peer: {
            word: max((c["sequence"] for c in found if c["operation"] == operation), default=0)
            for word, operation in (("sent", "send"), ("received", "receive"))
        }
        for peer, found in messages.items()
    } | dict(peers)
    return {
        "time_s": 0.0,
        "step": 12,
        "phase": phase,
        "groups": [{"ranks": list(group), "axis": axis, "issued": issued, "done": done}],
        "peers": [{"group": 0, "peer": peer, **counts} for peer, counts in counted.items()],
        "calls": list(calls),
    }


def one(rank, snapshot=None, state=State.DUMPED, host="", stack=STACK, **more) -> Dump:
    process = Process(host or f"node{rank:02}", 100 + rank, "7", "pid:[1]")
    return Dump(rank, state, process, 50.0, 12, 9.0, snapshot, (stack,), **more)


def told(*found: Dump, world_size=None, axes=None, expert=1, stacks=None) -> Diagnosis:
    by_rank = {dump.rank: dump for dump in found}
    size = world_size or len(found)
    places = None if axes is None else topology_of(axes, size, expert=expert)
    return diagnose(size, by_rank, stacks, topology=places)


def in_line(text: str, *parts: str) -> None:
    assert any(all(part in line for part in parts) for line in text.splitlines()), (parts, text)


REPORT = """\
hang: rank 2 (data 1 pipe 0 on node02) is in data loading while 3 other ranks wait for it
the longest step has taken 9.0 s, and may take 8 s
rank 2:
    File "/home/me/loader.py", line 31, in batch
      time.sleep(60)
who waits for whom:
  data 0 pipe 0 on node00 waits in all_reduce number 57 of the data group of ranks 0, 2; \
data 1 pipe 0 on node02, which has issued 56, is in data loading: {batch}
    (rank 0: all_reduce number 57, the data group of ranks 0, 2, float32[1000], for 12.3 s)
  data 0 pipe 1 on node01 waits in RECV_F stage 1 microbatch 0; its sender data 0 pipe 0 on \
node00 itself waits in all_reduce number 57 of the data group of ranks 0, 2
    (rank 1: receive number 49 from rank 0, the pipe group of ranks 0, 1, float32[8, 16], for \
12.3 s)
  data 1 pipe 1 on node03 waits in RECV_F stage 1 microbatch 0; its sender data 1 pipe 0 on \
node02 is in data loading: {batch}
    (rank 3: receive number 49 from rank 2, the pipe group of ranks 2, 3, float32[8, 16], for \
12.3 s)
stacks:
  rank 0:
      File "/home/me/loader.py", line 31, in batch
        time.sleep(60)
  ranks 1, 3:
      File "/usr/lib/python3.11/threading.py", line 9, in wait"""


def test_the_report():
    """The one of docs/hang.md: who waits where, for whom, and what that one does."""
    behind = snapshot((0, 2), call("all_reduce", 56, "done"), phase="data")
    receives = [
        snapshot((peer, peer + 1), call("receive", 49, peer=peer, action="1RECV_F0"), axis="pipe")
        for peer in (0, 2)
    ]
    found = told(
        one(0, snapshot((0, 2), call("all_reduce", 57)), limit_s=8.0),
        one(1, receives[0], stack=INSIDE, limit_s=8.0),
        one(2, behind, limit_s=8.0),
        one(3, receives[1], stack=INSIDE, limit_s=8.0),
        axes=(("data", 2), ("pipe", 2)),
    )
    assert found.text == REPORT.format(batch=BATCH)


def test_ranks_that_share_experts_are_named_by_their_place_among_them():
    found = told(
        one(0, snapshot((0, 1), call("all_to_all", 5))),
        one(1, snapshot((0, 1), call("all_gather", 4, "done"), phase="data")),
        axes=(("data", 4),),
        expert=2,
        world_size=4,
    )
    assert tells(found.text, "rank 1", "data 1", "expert 1", "node01")


def test_ranks_along_context_have_their_coordinates():
    """Of two that share a sequence one waits in a hop of the ring for the other one."""
    found = told(
        one(0, snapshot((0, 1), call("receive", 7, peer=1), axis="context")),
        one(1, snapshot((0, 1), call("receive", 6, "done", peer=0), axis="context", phase="data")),
        one(2, snapshot((2, 3), call("receive", 7, peer=3), axis="context")),
        one(3, snapshot((2, 3), call("all_reduce", 2), axis="data")),
        axes=(("data", 2), ("context", 2)),
    )
    assert [(c.rank, c.cause) for c in found.suspects][:1] == [(1, Cause.BUSY)]
    assert found.text.startswith("hang: rank 1 (data 0 context 1 on node01) is in data loading")
    in_line(found.text, "data 0 context 0", "waits in receive", "data 0 context 1")
    in_line(found.text, "receive number 7 from rank 1, the context group of ranks 0, 1")


def test_the_culprit_is_at_the_end_of_the_waits():
    """0 waits for 1, which waits for 2, which loads data: only 2 is to blame."""
    chain = told(
        one(0, snapshot((0, 1), call("receive", 1, peer=1))),
        one(1, snapshot((1, 2), call("all_reduce", 4), phase="backward")),
        one(2, snapshot((1, 2), call("all_reduce", 3, "done"), phase="data")),
    )
    assert [(c.rank, c.cause) for c in chain.suspects] == [(2, Cause.BUSY)]


@pytest.mark.parametrize("state", ["waiting", "issued", "done"])
def test_on_a_device_the_counts_of_issued_calls_say_who_is_behind(state):
    """There the host does not block, and what the record says of a call's state is worth little."""
    group = (0, 1, 2)
    ahead = snapshot(group, call("all_reduce", 7, state), device=True)
    late = snapshot(group, call("all_reduce", 6, "issued"), device=True, phase="optimizer")
    found = told(one(0, ahead), one(1, late), one(2, ahead))
    assert [(c.rank, c.cause) for c in found.suspects] == [(1, Cause.BUSY)]
    in_line(found.text, "rank 0 on node00 waits in all_reduce number 7", "which has issued 6")
    in_line(found.text, "so does rank 2")


def test_groups_of_the_same_ranks_are_counted_apart():
    """Many calls of the second group do not hide that the first lacks one."""
    ahead = snapshot((0, 1), call("all_reduce", 4))
    late = snapshot((0, 1), call("all_reduce", 3, "done"))
    for found in (ahead, late):
        found["groups"].append({"ranks": [0, 1], "axis": "pipe", "issued": 90, "done": 90})
    assert [c.rank for c in told(one(0, ahead), one(1, late)).suspects] == [1]


def test_messages_on_a_device_count_as_well():
    ahead = snapshot((0, 1), call("receive", 3, "issued", peer=1), device=True)
    late = snapshot((0, 1), call("send", 2, "issued", peer=0), device=True, phase="forward")
    assert [c.rank for c in told(one(0, ahead), one(1, late)).suspects] == [1]


RAISED = Failure(
    1, "node01", 101, 40.0, FailureKind.ERROR, 1, "ValueError: no sample", "Traceback ..."
)
LOST = replace(RAISED, rank=0, error="CommError: Connection closed by peer")
WAITING = snapshot((0, 1, 2, 3), call("all_reduce", 4))


@pytest.mark.parametrize(
    ("silent", "letter", "fault", "words"),
    [
        (one(1, state=State.RAISED, error=to_json(RAISED)), None, Cause.RAISED, "ValueError: no"),
        (one(1, state=State.HERE), "", Cause.GONE, "its process (101) has ended without a word"),
        (one(1, state=State.HERE), "T", Cause.STOPPED, "is stopped (process state T, process 101)"),
        (one(1, state=State.HERE), "t", Cause.STOPPED, "by a debugger"),
        (one(1, state=State.HERE), "S", Cause.SILENT, "its interpreter does not run"),
        (one(1, state=State.HERE), "D", Cause.SILENT, "state D"),
        (one(1, state=State.HERE), None, Cause.LOST, "no rank on node01 does"),
        (one(1, state=State.LEFT), None, Cause.LEFT, "has ended its loop after 12 steps"),
        (None, None, Cause.LOST, "has never come"),
    ],
)  # fmt: skip
def test_ranks_that_do_not_wait_any_more_are_named_before_all_others(silent, letter, fault, words):
    """Rank 3 is late as well, but somebody who is gone explains more."""
    letters = {} if letter is None else {1: letter}
    late = snapshot((0, 1, 2, 3), call("all_reduce", 3, "done"))
    others = [one(0, WAITING, neighbours=letters), one(2, WAITING), one(3, late)]
    found = told(*others, *([silent] if silent else []), world_size=4, stacks={1: "its C stack"})
    assert [(c.rank, c.cause) for c in found.suspects] == [(1, fault), (3, Cause.BUSY)]
    first, second, *_ = found.text.splitlines()
    assert first.startswith("hang: rank 1 ") and words in first
    assert "rank 3 on node03" in second
    in_line(found.text, "rank 0 on node00 waits", words)
    in_line(found.text, "so does rank 2")
    if fault is Cause.SILENT:
        assert "its C stack" in found.text
    if fault is Cause.RAISED:
        assert "Traceback ..." in found.text


def test_who_raised_because_a_peer_was_gone_is_no_culprit_while_there_is_one():
    raised = one(0, state=State.RAISED, error=to_json(LOST))
    gone = one(1, state=State.HERE)
    found = told(replace(raised, neighbours={1: ""}), gone)
    assert [c.rank for c in found.suspects] == [1, 0]
    first, second, *_ = found.text.splitlines()
    assert first.startswith("hang: rank 1 on node01 is gone") and "then rank 0 raised" in second
    alone = told(raised, one(1, snapshot((0, 1), call("all_reduce", 4))))
    assert [c.rank for c in alone.suspects] == [0], "a time limit of its own, say"


def lost_a_peer(tmp_path: Path, then: Dump) -> str:
    """The report of rank 1, which raised as rank 0 is gone, while rank 2 is about to say `then`."""
    folder = dumps.Folder(tmp_path, "1")
    folder.make()
    error = to_json(replace(LOST, rank=1))
    folder.write(one(0, state=State.HERE))
    folder.write(one(1, state=State.RAISED, error=error, neighbours={0: ""}, reports=True))
    folder.write(one(2, WAITING, reports=True))
    soon = threading.Timer(0.3, folder.write, [then])
    soon.start()
    found = shutdown.Shutdown(folder, 1, 3, None, None).report(alarm_s=50.0)
    soon.join()
    assert found is not None and [c.rank for c in found.suspects][:2] == [0, 1]
    return found.text


def test_the_report_waits_a_moment_for_those_that_may_lose_the_same_peer(tmp_path):
    error = to_json(replace(LOST, rank=2))
    text = lost_a_peer(tmp_path, one(2, state=State.RAISED, error=error, reports=True))
    assert "then ranks 1, 2 raised what the loss of a peer brings about" in text


def test_the_report_says_who_waits_still_though_its_peer_is_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(shutdown, "GATHER_S", 0.5)
    text = lost_a_peer(tmp_path, one(2, WAITING, reports=True))
    assert "then rank 1 raised what the loss of a peer brings about" in text
    in_line(text, "rank 2 on node02 waits in all_reduce number 4")


def test_of_several_that_raised_the_first_comes_first():
    late = one(0, state=State.RAISED, error=to_json(replace(RAISED, rank=0, time_s=41.0)))
    early = one(1, state=State.RAISED, error=to_json(RAISED))
    assert [c.rank for c in told(late, early).suspects] == [1, 0]


def test_a_circle_of_messages_is_told_with_all_its_waits():
    found = told(
        *(one(r, snapshot((0, 1, 2), call("receive", 1, peer=(r + 1) % 3))) for r in range(3))
    )
    assert [c.cause for c in found.suspects] == [Cause.CIRCLE]
    head = found.text.splitlines()[0]
    assert "wait in a circle" in head
    for rank in range(3):
        assert f"rank {rank} waits in receive number 1 from rank {(rank + 1) % 3}" in head


@pytest.mark.parametrize("device", [False, True])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (call("all_reduce", 9), call("broadcast", 9)),
        (call("all_reduce", 9), call("all_reduce", 9, shape=[2000])),
        (call("all_gather", 9), call("all_gather", 9, dtype="float64")),
        (call("send", 9, peer=2), call("receive", 9, peer=0, shape=[8, 17])),
    ],
)
def test_calls_that_do_not_agree_are_both_named(ours, theirs, device):
    group = (0, 1, 2)
    found = told(
        one(0, snapshot(group, ours, device=device)),
        one(1, snapshot(group, ours if ours["peer"] is None else call("all_gather", 1, "done"))),
        one(2, snapshot(group, theirs, device=device)),
    )
    assert [c.cause for c in found.suspects] == [Cause.CIRCLE]
    head = found.text.splitlines()[0]
    assert "do not agree on" in head and tells(head, "number 9", "ranks 0, 1, 2")
    for said in (ours, theirs):
        assert f"{said['operation']} {said['dtype']}{said['shape']}" in head, head
    # of three ranks the one that makes another call; of two nobody knows
    collective = ours["peer"] is None
    assert found.suspects[0].rank == (2 if collective else 0)
    assert ("ranks 0, 1" if collective else "rank 2") in head


def test_one_that_disagrees_is_named_where_another_has_not_come():
    """Rank 2 waits for a message of rank 3, which is in a call too many with others."""
    group, lone = (0, 1, 2, 3), call("all_reduce", 9, shape=[3])
    found = told(
        one(0, snapshot(group, call("all_reduce", 9))),
        one(1, snapshot(group, call("all_reduce", 9))),
        one(2, snapshot(group, call("all_reduce", 8, "done"), call("receive", 1, peer=3))),
        one(3, snapshot(group, lone)),
    )
    assert found.suspects[0].rank == 3 and "do not agree" in found.suspects[0].what


def test_a_rank_without_a_link_is_to_blame_although_it_answers():
    whole, other = (one(r, snapshot((0, 1), call("all_reduce", 9))) for r in range(2))
    found = told(whole, replace(other, network="its interface eth0 is down"))
    assert [c.rank for c in found.suspects][:1] == [1] and "eth0" in found.suspects[0].what


def test_uneven_parts_are_no_disagreement():
    """Members of an all_gather may hold different numbers of rows: then the network is to blame."""
    group = (0, 1)
    ours, theirs = call("all_gather", 9), call("all_gather", 9, shape=[3])
    found = told(one(0, snapshot(group, ours)), one(1, snapshot(group, theirs)))
    assert "look at the network" in found.text.splitlines()[0]


def test_a_call_in_flight_does_not_blame_who_has_issued_it():
    """Rank 1 has sent and computes; rank 2 never came. Only 2 holds anybody up."""
    found = told(
        one(0, snapshot((0, 1, 2), call("receive", 1, peer=1), call("all_reduce", 2))),
        one(
            1,
            snapshot((0, 1, 2), call("send", 1, "issued", peer=0), call("all_reduce", 2, "issued")),
        ),
        one(2, snapshot((0, 1, 2), call("all_reduce", 1, "done"))),
    )
    assert [c.rank for c in found.suspects] == [2]


def test_a_thousand_ranks_that_wait_alike_are_said_once():
    group = tuple(range(1000))
    waiting = snapshot(group, call("all_reduce", 4))
    late = snapshot(group, call("all_reduce", 3, "done"), phase="data")
    found = told(*(one(r, late if r == 700 else waiting) for r in group))
    assert found.text.startswith("hang: rank 700 on node700 is in data loading while 999 other")
    assert tells(found.text, "ranks 1, 2, 3, 4, 5, 6, 7, 8", "998 ranks")
    assert tells(found.text, "0, 1, 2, 3, 4, 5, 6, 7", "1000 ranks")
    assert len(found.text.splitlines()) < 20


def test_a_whole_host_that_is_silent_is_named():
    silent = [one(r, state=State.HERE, host="node09") for r in (2, 3)]
    found = told(one(0, WAITING, host="a"), one(1, WAITING, host="a"), *silent)
    assert [c.rank for c in found.suspects] == [2, 3]
    assert "no rank on node09 does, so the host or its network is gone" in found.text


def test_who_is_alone_on_its_host_is_stopped_if_its_watcher_says_so():
    silent, late = one(1, state=State.HERE), snapshot((0, 1), call("all_reduce", 3, "done"))
    found = diagnose(2, {0: one(0, late), 1: silent}, noted={1: "T"})
    assert [(c.rank, c.cause) for c in found.suspects] == [(1, Cause.STOPPED)]
    seen = one(0, late, neighbours={1: ""})
    (gone,) = diagnose(2, {0: seen, 1: silent}, noted={1: "T"}).suspects
    assert gone.cause is Cause.GONE, "what was seen in the hang counts more than what was noted"


def test_the_failure_is_the_culprits_and_comes_before_what_the_alarm_brought_about():
    late = snapshot((0, 1), call("all_reduce", 3, "done"), phase="data")
    found = told(one(0, snapshot((0, 1), call("all_reduce", 4))), one(1, late))
    hung = found.failure(time_s=100.0)
    assert (hung.rank, hung.host, hung.pid, hung.kind) == (1, "node01", 101, FailureKind.HUNG)
    killed = Failure(1, "node01", 101, 102.0, FailureKind.SIGNAL, -9)
    closed = Failure(
        0, "node00", 100, 101.0, FailureKind.ERROR, 1, "ValueError: a message is cut short"
    )
    assert root_cause([killed, hung, closed]) is hung
    before = replace(closed, time_s=90.0)
    assert root_cause([killed, hung, before]) is before, "an exception before the alarm explains it"
    assert report([killed, hung, closed], 2).endswith(found.text)


def test_a_dump_is_json_and_comes_back_equal():
    whole = one(3, WAITING, neighbours={1: "T"}, failure="/x", error=to_json(LOST), reports=True)
    assert dumps.from_json(json.dumps(dumps.asdict(whole))) == whole


def test_an_exit_is_told_as_one():
    left = replace(RAISED, kind=FailureKind.EXIT, exit_code=3, error="", detail="")
    gone = one(1, state=State.RAISED, error=to_json(left))
    head = told(one(0, WAITING), gone).text.splitlines()[0]
    assert head == "hang: rank 1 on node01 left its loop by sys.exit(3)"
