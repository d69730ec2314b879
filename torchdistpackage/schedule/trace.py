"""Timelines as a Chrome trace: a process for each timeline, in it a thread for each pipe rank.

For chrome://tracing and ui.perfetto.dev. Arrows lead from what is sent to what waits for it.
"""

import json
from typing import Any

from torchdistpackage.schedule.actions import Action, ActionKind
from torchdistpackage.schedule.timeline import Span, Timeline

_US = 1e6


def trace(timeline: Timeline) -> str:
    """JSON of one timeline; a unit of its time is shown as a second."""
    return _json({timeline.name: timeline})


def trace_pair(predicted: Timeline, measured: Timeline) -> str:
    """JSON of both, predicted first, in seconds; measured waits for messages are slices too."""
    return _json({"predicted": predicted, "measured": measured})


def _json(timelines: dict[str, Timeline]) -> str:
    events: list[dict[str, Any]] = []
    for process, (name, timeline) in enumerate(timelines.items()):
        text = f"{name}, bubble {timeline.bubble:.1%}"
        events.append(_name("process_name", text, process, 0))
        for rank, row in enumerate(timeline.spans):
            events.append(_name("thread_name", f"pipe {rank}", process, rank))
            events += (_slice(span, process, rank) for span in row)
        events += _arrows(timeline, process)
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}) + "\n"


def _name(what: str, text: str, process: int, thread: int) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": text}}


def _slice(span: Span, process: int, rank: int) -> dict[str, Any]:
    stage, kind, microbatch = span.action
    return {
        "ph": "X",
        "name": str(span.action),
        "cat": "wait" if kind.is_message else str(kind),
        "ts": span.start * _US,
        "dur": (span.end - span.start) * _US,
        "pid": process,
        "tid": rank,
        "args": {"stage": stage, "kind": str(kind), "microbatch": microbatch},
    }


def _arrows(timeline: Timeline, process: int) -> list[dict[str, Any]]:
    """Two flow events a message: from inside the slice that sends it to the start of its user."""
    at = {span.action: (rank, span) for rank, row in enumerate(timeline.spans) for span in row}
    arrows: list[dict[str, Any]] = []
    for action, (rank, span) in at.items():
        found = next((at[to] for to in _fed(action) if to in at), None)
        if found is None or found[0] == rank:
            continue
        shared = {"name": "message", "cat": "message", "id": f"{process}:{action}", "pid": process}
        middle = (span.start + span.end) / 2
        arrows.append({"ph": "s", "ts": middle * _US, "tid": rank, **shared})
        arrows.append({"ph": "f", "bp": "e", "ts": found[1].start * _US, "tid": found[0], **shared})
    return arrows


def _fed(action: Action) -> list[Action]:
    """The computation that uses what `action` sends: a whole backward or its first half."""
    if action.send is None:
        return []
    kinds = (ActionKind.F,) if action.kind is ActionKind.F else (ActionKind.B, ActionKind.I)
    return [Action(action.send.peer, kind, action.microbatch) for kind in kinds]
