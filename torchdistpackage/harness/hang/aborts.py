"""A rank that aborted in a call: what the others brought to that call. No torch.

One rule: whoever aborts is not blamed alone. gloo aborts the rank that is sent more than it has
room for, and that may be the one that did right. What it brought itself is lost with it: its stack
says in which operation it was, and the records of the others say with what they met it.
"""

import re
from collections.abc import Mapping

from torchdistpackage.harness.hang.format_call import called, numbered, ranks_listed
from torchdistpackage.harness.hang.waits import RankRecord, RecordedCall, differ

_ABORTED = "Fatal Python error: Aborted"
_OURS = "/torchdistpackage/comm/"
_ENTRY = re.compile(rf'{_OURS}primitives\.py", line \d+ in ([a-z]\w*)$', re.MULTILINE)
_ADVICE = (
    "gloo aborts the rank that is sent more than it expects, so compare the calls: "
    "`with comm.checked_calls():`, or train.check_calls"
)


def aborted(rank: int, stack: str, records: Mapping[int, RankRecord]) -> str:
    """How `rank` ended, as said after "rank 0 "; "" where it did not abort in a call of gloo's.

    stack: as faulthandler wrote it. records: of the others.
    """
    if not stack.startswith(_ABORTED) or _OURS not in stack:
        return ""
    entries = _ENTRY.findall(stack)
    # the innermost frame comes first, and the call that was numbered is the outermost
    operation = entries[-1].removeprefix("start_") if entries else ""
    met = _met(rank, records)
    if not met:
        return ""
    first = next((call for call in met.values() if call.operation == operation), None)
    first = first or next(iter(met.values()))
    there = {peer: call for peer, call in met.items() if call.line == first.line}
    there = {peer: call for peer, call in there.items() if call.sequence == first.sequence}
    versions = dict[str, list[int]]()
    for peer, call in there.items():
        versions.setdefault(called(call), []).append(peer)
    said = ", ".join(f"{text} ({ranks_listed(ranks)})" for text, ranks in versions.items())
    inside = f"inside {operation}" if operation else "there"
    other_operation = bool(operation) and first.peer is None and operation != first.operation
    if other_operation or any(differ(first, call) for call in there.values()):
        return (
            f"and {ranks_listed(sorted(there))} do not agree on {numbered(first)}: it crashed "
            f"({_ABORTED}) {inside}, where the others have {said}"
        )
    return (
        f"is gone: it crashed ({_ABORTED}) {inside}, {numbered(first)}, to which the others "
        f"brought {said}; {_ADVICE}"
    )


def _met(rank: int, records: Mapping[int, RankRecord]) -> dict[int, RecordedCall]:
    """By peer its last call with `rank` that has not ended, where no device does the waiting."""
    found: dict[int, RecordedCall] = {}
    for peer, record in records.items():
        for call in reversed(record.calls):
            together = call.peer == rank if call.peer is not None else rank in call.ranks
            if together and call.state != "done" and not call.on_device:
                found[peer] = call
                break
    return found
