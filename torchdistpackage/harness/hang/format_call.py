"""A call of the record in the user's words: which, where, of what. No torch."""

from collections.abc import Sequence

from torchdistpackage.errors import ScheduleError
from torchdistpackage.harness.hang.waits import RecordedCall
from torchdistpackage.schedule.actions import parse_action

SHOWN = 8
"""Ranks that are listed one by one, where more of them say the same."""


def format_call(call: RecordedCall) -> str:
    """Where a rank waits: `RECV_F stage 2 microbatch 5`, `all_reduce number 41 of data`."""
    if call.peer is None:
        return f"{call.operation} number {call.sequence} of {_group(call)}"
    if call.action:
        try:
            action = parse_action(call.action)
        except ScheduleError:
            return f"{call.action} ({called(call)})"
        return f"{action.kind} stage {action.stage} microbatch {action.microbatch}"
    return f"{call.operation} number {call.sequence} {_towards(call)} rank {call.peer}"


def numbered(call: RecordedCall) -> str:
    """What both sides of a disagreement share."""
    what = "collective" if call.peer is None else "message"
    return f"{what} number {call.sequence} of {_group(call)}"


def called(call: RecordedCall) -> str:
    """`all_reduce float32[1000]`."""
    return f"{call.operation} {call.tensor}".rstrip()


def exactly(call: RecordedCall) -> str:
    """Everything that is known of a call."""
    to = "" if call.peer is None else f" {_towards(call)} rank {call.peer}"
    tensor = f", {call.tensor}" if call.tensor else ""
    what = f"{call.operation} number {call.sequence}{to}"
    return f"{what}, {_group(call)}{tensor}, for {call.age_s:.1f} s"


def _towards(call: RecordedCall) -> str:
    return "to" if call.operation == "send" else "from"


def _group(call: RecordedCall) -> str:
    name = f"the {call.axis} group" if call.axis else "the group"
    return f"{name} of ranks {listed(call.ranks)}"


def ranks_listed(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0, 4, 8`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {listed(ranks)}"


def listed(ranks: Sequence[int]) -> str:
    """`0, 4, 8, ... (32 ranks)`."""
    shown = ", ".join(map(str, ranks[:SHOWN]))
    return shown if len(ranks) <= SHOWN else f"{shown}, ... ({len(ranks)} ranks)"
