"""The trace of a run, `trace.json`: writing, reading, summary and drawing. No torch.

It is a Chrome trace for ui.perfetto.dev and chrome://tracing: one process for each rank, with
tracks for the steps, the actions of the schedule, the phases, and each group's calls. Arrows lead
from an action to the one on another rank that waits for its message.
"""

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple, cast

from torchdistpackage.bounded import parse_json, read_regular
from torchdistpackage.errors import ConfigError
from torchdistpackage.files import atomic_write
from torchdistpackage.schedule.actions import ActionKind
from torchdistpackage.schedule.draw import COLOURS, WAIT_COLOUR, message_arrows, slice_event
from torchdistpackage.schedule.engine import Span

TRACE = "trace.json"
_US = 1e6
_MOST_BYTES = 1 << 30
_STEPS, _SCHEDULE, _PHASES, _GROUPS = range(4)
"""Tracks of a rank; those of the groups' calls come last."""
_MOST_RANKS = 64
"""Largest number of drawn ranks."""
_CALL_COLOURS = ("#d1605e", "#4c9f9f", "#a87c5f", "#8a8a3d", "#b25d9b", "#5a78b8")


class CallSlice(NamedTuple):
    """A call of a group, from its issue until its host, which waited waited_s, continued."""

    group: str
    what: str
    start_s: float
    end_s: float
    waited_s: float
    shape: tuple[int, ...]
    dtype: str
    action: str


@dataclass(frozen=True, slots=True)
class RankTrace:
    """The events that one rank recorded, in seconds of its host's clock, on which a barrier ended
    at clock_s.

    steps, phases: (number or name, start, end). spans: of each pass over the microbatches, with
    waits for messages under the message's kind.
    """

    rank: int
    coord: Mapping[str, int]
    host: str
    clock_s: float
    steps: list[tuple[int, float, float]]
    spans: list[list[Span]]
    phases: list[tuple[str, float, float]]
    calls: list[CallSlice]


def write_trace(path: Path, ranks: Sequence[RankTrace], run: str, schedule: str) -> None:
    """Write the trace of all `ranks`, on the clock of the first one's host."""
    steps = [step for step, _, _ in ranks[0].steps]
    value = {
        "displayTimeUnit": "ms",
        "otherData": {"run": run, "schedule": schedule, "steps": steps, "ranks": len(ranks)},
        "traceEvents": events(ranks),
    }
    atomic_write(path, json.dumps(value, separators=(",", ":")) + "\n")


def events(ranks: Sequence[RankTrace]) -> list[dict[str, Any]]:
    """Return the trace events of all ranks; times in microseconds from the first."""
    shift = shifts_s(ranks)
    first_s = min(
        (start + shift[r.host] for r in ranks for _, start, _ in r.steps), default=ranks[0].clock_s
    )
    all_events: list[dict[str, Any]] = []
    rows: dict[tuple[object, ...], list[tuple[dict[str, int], list[Span]]]] = {}
    for rank in ranks:
        by_s = shift[rank.host] - first_s
        all_events += _rank_events(rank, by_s)
        peers = tuple(index for axis, index in rank.coord.items() if axis != "pipe")
        for number, row in enumerate(rank.spans):
            track = {"pid": rank.rank, "tid": _SCHEDULE}
            rows.setdefault((*peers, number), []).append((track, _moved(row, by_s)))
    for key, messages in rows.items():
        all_events += message_arrows(messages, ".".join(map(str, key)))
    return all_events


def shifts_s(ranks: Iterable[RankTrace]) -> dict[str, float]:
    """Return the seconds to add to each host's clock, because all ranks left one barrier at the
    same time.
    """
    hosts: dict[str, list[float]] = {}
    for rank in ranks:
        hosts.setdefault(rank.host, []).append(rank.clock_s)
    middle = {host: statistics.median(offsets) for host, offsets in hosts.items()}
    reference = next(iter(middle.values()))
    return {host: reference - at for host, at in middle.items()}


def _rank_events(rank: RankTrace, by_s: float) -> list[dict[str, Any]]:
    pid = rank.rank
    coords = ", ".join(f"{axis} {index}" for axis, index in rank.coord.items())
    tracks = {_STEPS: "steps", _SCHEDULE: "schedule", _PHASES: "phases"}
    all_events: list[dict[str, Any]] = []

    def add(tid: int, name: str, cat: str, start_s: float, end_s: float, **args: object) -> None:
        times = {"ts": (start_s + by_s) * _US, "dur": max(end_s - start_s, 0.0) * _US}
        all_events.append({"ph": "X", "name": name, "cat": cat, **times, "pid": pid, "tid": tid})
        all_events[-1]["args"] = args

    for step, start, end in rank.steps:
        add(_STEPS, f"step {step}", "step", start, end)
    for name, start, end in rank.phases:
        add(_PHASES, name, "phase", start, end)
    for row in rank.spans:
        all_events += (slice_event(span, pid, _SCHEDULE) for span in _moved(row, by_s))
    groups = sorted({call.group for call in rank.calls})
    for group in groups:
        lanes = _lanes([call for call in rank.calls if call.group == group])
        for number, lane in enumerate(lanes):
            tid = len(tracks)
            tracks[tid] = f"group {group}" + (f" ({number + 1})" if number else "")
            for call in lane:
                more = {"shape": list(call.shape), "dtype": call.dtype, "action": call.action}
                more |= {"waited_us": call.waited_s * _US}
                add(tid, call.what, f"group {group}", call.start_s, call.end_s, **more)
    names = [("process_name", 0, {"name": f"rank {pid}: {coords} on {rank.host}"})]
    names += [("process_sort_index", 0, {"sort_index": pid})]
    names += [("thread_name", tid, {"name": name}) for tid, name in tracks.items()]
    names += [("thread_sort_index", tid, {"sort_index": tid}) for tid in tracks]
    all_events += (
        {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args} for kind, tid, args in names
    )
    return all_events


def _moved(row: Iterable[Span], by_s: float) -> list[Span]:
    return [Span(action, start + by_s, end + by_s) for action, start, end in row]


def _lanes(calls: list[CallSlice]) -> list[list[CallSlice]]:
    """Put overlapping calls on separate tracks, because slices of one track must not overlap."""
    lanes: list[list[CallSlice]] = []
    for call in sorted(calls, key=lambda call: call.start_s):
        free = (lane for lane in lanes if lane[-1].end_s <= call.start_s)
        if (lane := next(free, None)) is None:
            lanes.append(lane := [])
        lane.append(call)
    return lanes


# -- read -----------------------------------------------------------------------------------------


class TraceSlice(NamedTuple):
    """One slice of a trace, in seconds from the first. waited_s: for a call, at its end."""

    name: str
    category: str
    start_s: float
    end_s: float
    waited_s: float


@dataclass(slots=True)
class RankSlices:
    """All slices of one rank. name: as in the trace."""

    name: str = ""
    slices: list[TraceSlice] = field(default_factory=list[TraceSlice])

    def seconds(self, *categories: str) -> float:
        """Return the arguments of slices; for calls, how long the host waited."""
        return sum(
            s.waited_s if s.category.startswith("group ") else s.end_s - s.start_s
            for s in self.slices
            if s.category in categories
        )

    @property
    def groups(self) -> list[str]:
        """Categories of the calls."""
        return sorted({s.category for s in self.slices if s.category.startswith("group ")})


@dataclass(frozen=True, slots=True)
class RunTrace:
    """A trace read from a file. ranks: by number."""

    run: str
    schedule: str
    steps: tuple[int, ...]
    ranks: dict[int, RankSlices]


def read_trace(run: Path) -> RunTrace:
    """Return the trace in a run folder, or of the file itself.

    Raises:
        ConfigError: there is none, or it is not one that a run wrote.
    """
    path = run / TRACE if run.is_dir() else run
    try:
        value = parse_json(read_regular(path, _MOST_BYTES).decode())
    except FileNotFoundError as error:
        raise ConfigError(
            f"{path}: there is no trace; train with train.profile.steps=10..12, say, which writes "
            f"one into the run folder"
        ) from error
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{path}: not a trace that can be read: {why}") from error
    try:
        return _run_trace(value)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{path}: not the trace of a run ({type(error).__name__}: {error}); pass the folder of "
            f"a run that was trained with train.profile.steps"
        ) from error


def _run_trace(value: Any) -> RunTrace:
    facts, ranks = value["otherData"], dict[int, RankSlices]()
    for event in cast(list[dict[str, Any]], value["traceEvents"]):
        if event["ph"] not in ("X", "M"):
            continue
        rank = ranks.setdefault(int(event["pid"]), RankSlices())
        if event["ph"] == "X":
            start_s, length_s = float(event["ts"]) / _US, float(event["dur"]) / _US
            fields = str(event["name"]), str(event["cat"]), start_s, start_s + length_s
            waited_s = float(event["args"].get("waited_us", 0.0)) / _US
            rank.slices.append(TraceSlice(*fields, waited_s))
        elif event["name"] == "process_name":
            rank.name = str(event["args"]["name"])
    if not ranks:
        raise ValueError("no slices")
    steps = tuple(map(int, facts["steps"]))
    return RunTrace(str(facts["run"]), str(facts["schedule"]), steps, dict(sorted(ranks.items())))


_COMPUTES = tuple(map(str, COLOURS))
"""Categories of computations."""


def summary(trace: RunTrace) -> list[list[str]]:
    """Return a table with a header.

    For each rank it gives ms per step, and the fractions spent on computing, on waiting for the
    schedule's messages, and on waiting for calls of each group.
    """
    groups = sorted({group for rank in trace.ranks.values() for group in rank.groups})
    short = [group.removeprefix("group ") for group in groups]
    rows = [["rank", "ms a step", "computing", "waiting", *short]]
    for number, rank in trace.ranks.items():
        whole_s = rank.seconds("step")
        steps = max(sum(s.category == "step" for s in rank.slices), 1)
        shares = [rank.seconds(*_COMPUTES), rank.seconds("wait")]
        shares += [rank.seconds(group) for group in groups]
        shown = [f"{x / whole_s:.1%}" if whole_s else "-" for x in shares]
        rows.append([str(number), f"{whole_s / steps * 1e3:.2f}", *shown])
    return rows


def png(trace: RunTrace) -> bytes:
    """Return a picture with a row for the schedule of each rank, and one for its waits for each
    group.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ConfigError(
            f"a PNG needs matplotlib, which cannot be imported ({error}); "
            f'pip install "torchdistpackage[plot]", or open {TRACE} in ui.perfetto.dev'
        ) from error
    ranks = list(trace.ranks.values())[:_MOST_RANKS]
    groups = sorted({group for rank in ranks for group in rank.groups})
    colours = {str(kind): colour for kind, colour in COLOURS.items()} | {"wait": WAIT_COLOUR}
    colours |= {g: _CALL_COLOURS[i % len(_CALL_COLOURS)] for i, g in enumerate(groups)}
    labels: list[str] = []
    figure: Any = Figure(figsize=(14.0, 1.2 + 0.28 * len(ranks) * (1 + len(groups))), dpi=100)
    axes = figure.add_subplot()
    for rank in ranks:
        for row in (None, *rank.groups):
            kinds = [row] if row else [kind for kind in colours if not kind.startswith("group ")]
            slices = [s for s in rank.slices if s.category in kinds]
            lengths = [s.waited_s if row else s.end_s - s.start_s for s in slices]
            axes.broken_barh(
                [((s.end_s - n) * 1e3, n * 1e3) for s, n in zip(slices, lengths, strict=True)],
                (len(labels) - 0.4, 0.8 if row is None else 0.5),
                facecolors=[colours[s.category] for s in slices],
                edgecolors="white",
                linewidth=0.2,
            )
            labels.append(rank.name.partition(" on ")[0] if row is None else row)
    for step in (s for s in ranks[0].slices if s.category == "step"):
        axes.axvline(step.start_s * 1e3, color="black", linewidth=0.6)
        axes.text(step.start_s * 1e3, -0.8, step.name, fontsize=7)
    axes.set_yticks(range(len(labels)), labels, fontsize=7)
    axes.set_ylim(len(labels) - 0.4, -1.2)
    axes.set_xlabel("ms")
    hidden = len(trace.ranks) - len(ranks)
    more = f" (first {len(ranks)} of {len(trace.ranks)} ranks)" if hidden else ""
    axes.set_title(f"{trace.run}, {trace.schedule}, {_span(trace.steps)}{more}", loc="left")
    words = {str(kind): kind.name for kind in ActionKind}
    shown = {s.category for rank in ranks for s in rank.slices}
    entries = ((kind, c) for kind, c in colours.items() if kind in shown)
    patches = [Patch(color=c, label=words.get(kind, kind)) for kind, c in entries]
    figure.legend(handles=patches, loc="upper right", ncols=4, fontsize=7)
    figure.tight_layout()
    buffer = BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _span(steps: tuple[int, ...]) -> str:
    if not steps:
        return "no step"
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
