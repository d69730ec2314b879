"""What NCCL's flight recorder has of a hang: dumps as torch writes them, and what they tell.

No torch.
"""

import json
from dataclasses import replace

import pytest

from tests.harness.test_hang import call, in_line, one, snapshot, told
from tests.tells import tells
from torchdistpackage.harness.hang import dump as dumps
from torchdistpackage.harness.hang.diagnosis import Cause
from torchdistpackage.harness.hang.flights import (
    KEPT,
    InFlightCall,
    met,
    of_trace,
    order_conflict,
    to_json,
)

ITEM = '  File "/home/me/train.py", line 12, in step\n    loss.item()\n'
GROUPS = {
    "0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"},
    "7": {"name": "7", "desc": "data", "ranks": "[0, 1]"},
}


def entry(number: int, group: str, sequence: int, state: str, name="all_reduce", **more) -> dict:
    """As torch 2.13 writes one; what is not read is left out."""
    return {
        "record_id": number,
        "process_group": [group, GROUPS[group]["desc"]],
        "collective_seq_id": sequence,
        "p2p_seq_id": 0,
        "profiling_name": f"nccl:{name}",
        "input_sizes": [[1024]],
        "state": state,
        "is_p2p": False,
        **more,
    }


def trace(*entries: dict) -> dict:
    return json.loads(json.dumps({"version": "2.10", "pg_config": GROUPS, "entries": entries}))


def hung(rank: int, *entries: dict) -> dumps.Dump:
    """A rank that has issued what the other has, and whose device is at `entries`."""
    same = snapshot((0, 1), call("all_reduce", 7, "issued"), device=True)
    return replace(one(rank, same, stack=ITEM), flights=to_json(of_trace(trace(*entries))))


def test_a_dump_is_read_in_the_order_of_issue_without_what_has_ended():
    message = entry(3, "0", 0, "scheduled", "send 0->1", is_p2p=True, p2p_seq_id=5)
    found = of_trace(trace(message, entry(2, "7", 9, "started"), entry(1, "7", 8, "completed")))
    assert found == (
        InFlightCall("all_reduce", "7", (0, 1), 9, is_message=False, state="started"),
        InFlightCall("send 0->1", "0", (0, 1), 5, is_message=True, state="scheduled"),
    )
    assert of_trace({"version": "2.10", "pg_config": {}}) == ()
    many = of_trace(trace(*(entry(n, "7", n, "scheduled") for n in range(100))))
    assert [flight.sequence for flight in many] == list(range(KEPT))


def test_a_dump_of_another_form_is_no_dump():
    with pytest.raises(KeyError):
        of_trace({"entries": [{"status": "?"}]})


def test_two_calls_in_different_orders_are_the_culprit():
    """What no count can tell: both ranks have issued both, and each device stands in the other."""
    one_first = hung(0, entry(1, "0", 4, "started"), entry(2, "7", 9, "scheduled", "all_gather"))
    other_first = hung(1, entry(1, "7", 9, "started", "all_gather"), entry(2, "0", 4, "scheduled"))
    found = told(one_first, other_first)
    assert [(c.rank, c.cause) for c in found.suspects] == [(0, Cause.CIRCLE)]
    in_line(
        found.text,
        "hang: rank 0 on node00 and rank 1 on node01 have issued all_reduce number 4 of ranks 0, 1",
        "and all_gather number 9 of ranks 0, 1 in different orders",
    )
    in_line(found.text, "all_reduce number 4 of ranks 0, 1: started on rank 0, scheduled on rank 1")


def test_who_is_behind_only_because_of_that_is_not_to_blame():
    both = (entry(1, "0", 4, "started"), entry(2, "7", 9, "scheduled"))
    behind = replace(
        hung(1, *(both[1], both[0] | {"record_id": 3})),
        snapshot=snapshot((0, 1), call("all_reduce", 6, "issued"), device=True),
    )
    (culprit,) = told(hung(0, *both), behind).suspects
    assert culprit.cause is Cause.CIRCLE and "in different orders" in culprit.what


def test_a_call_that_all_have_issued_and_no_device_ends_is_named():
    alike = (entry(1, "0", 4, "started"), entry(2, "7", 9, "scheduled"))
    found = told(hung(0, *alike), hung(1, *alike))
    head = found.text.splitlines()[0]
    assert tells(head, "all_reduce", "number 4", "ranks 0, 1")
    in_line(found.text, "all_reduce number 4 of ranks 0, 1: started on ranks 0, 1")


def test_orders_within_a_group_and_calls_of_one_rank_are_no_crossing():
    a, b, c = (f for f in of_trace(trace(*(entry(n, "7", n, "started") for n in range(3)))))
    other = replace(c, group="0")
    assert order_conflict({0: [a, b], 1: [b, a]}) is None, "one group has one queue"
    assert order_conflict({0: [a, other], 1: [a, b]}) is None
    found = order_conflict({0: [a, other, b], 1: [other, a]})
    assert found is not None and (found.first, found.second) == (0, 1)
    assert (found.one.sequence, found.other.group) == (0, "0")
    assert met({0: [a, b], 1: [b]}) == b
    assert met({0: [a]}) is None


def test_a_dump_with_flights_comes_back_from_json():
    mine = hung(0, entry(1, "0", 4, "started"))
    text = json.dumps(dumps.asdict(mine))
    assert dumps.from_json(text) == mine
