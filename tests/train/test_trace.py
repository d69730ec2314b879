"""`train.profile`: one trace of all ranks, with schedule actions and the calls of groups."""

import itertools
import json
from collections import Counter
from pathlib import Path

import pytest

from tests.tells import facts_pattern
from tests.train import parity
from torchdistpackage.cli.main import main
from torchdistpackage.config.schema import ProfileSection
from torchdistpackage.errors import ConfigError
from torchdistpackage.schedule.actions import Action, ActionKind, flatten
from torchdistpackage.schedule.engine import Span
from torchdistpackage.schedule.generators import build
from torchdistpackage.train import trace_file
from torchdistpackage.train.build import make_loop
from torchdistpackage.train.stop import StopController
from torchdistpackage.train.trace_file import CallSlice, RankTrace, events, write_trace
from torchdistpackage.train.train_state import TrainState

RUN = [
    *("model.layers=2", "model.dim=16", "model.heads=2", "data.seq_len=16", "log.every=2"),
    *("data.global_batch=8", "pipeline.microbatches=2", "train.steps=5", "train.eval_every=0"),
    *("train.eval_batches=1", "checkpoint.save_every=0", "optim.warmup_steps=1"),
    *("train.straggler_every=0", "log.plot=false", "train.profile.steps=3..4", "run.name=traced"),
]


STEP_PHASES = ("data", "forward", "backward", "messages", "reduce", "optimizer")


def traced(extra: list[str], folder: str, start: int = 0, stop_at: int = 99) -> tuple[str, ...]:
    """Train on; the files that are left. stop_at: the step in which a rank asks for the end."""
    run = parity.trainer([*RUN, *extra])
    done: list[int] = []
    train_step = run.train_step

    def step(number: int, **more):
        done.append(number)
        return train_step(number, **more)

    run.train_step = step  # type: ignore[method-assign]
    stop = StopController()
    stop.should_stop = lambda: bool(done) and done[-1] >= stop_at  # type: ignore[method-assign]
    loop = make_loop(run, TrainState(step=start), Path(folder), stop)
    loop.run()
    return loop.artifacts


def slices(value: dict, rank: int, track: str) -> list[dict]:
    """The slices on the tracks of a rank whose name begins so, by start."""
    tids = {
        e["tid"]
        for e in value["traceEvents"]
        if e["ph"] == "M"
        and e["pid"] == rank
        and e["name"] == "thread_name"
        and e["args"]["name"].startswith(track)
    }
    found = [e for e in value["traceEvents"] if e["ph"] == "X" and e["pid"] == rank]
    return sorted((e for e in found if e["tid"] in tids), key=lambda e: e["ts"])


def test_all_ranks_are_in_one_trace_with_actions_and_groups(ranks, tmp_path, capsys):
    extra = ["parallel.pipe=2", "parallel.tensor=2", "train.accumulate=2"]
    left = ranks(4).run(traced, extra, str(tmp_path))
    assert "trace.json" in left[0] and "trace.json" not in left[1]
    value = json.loads((tmp_path / "trace.json").read_text())
    assert value["otherData"] == {"run": "traced", "schedule": "1f1b", "steps": [3, 4], "ranks": 4}
    names = [e["args"]["name"] for e in value["traceEvents"] if e["name"] == "process_name"]
    assert names[3].startswith("rank 3: data 0, pipe 1, context 0, tensor 1 on ")

    schedule = build("1f1b", 2, 2)
    for rank in range(4):
        pipe = rank // 2
        steps = slices(value, rank, "steps")
        assert [e["name"] for e in steps] == ["step 3", "step 4"]
        first, end = steps[0]["ts"], steps[-1]["ts"] + steps[-1]["dur"]
        program = [a for a in flatten(schedule.programs[pipe]) if not a.kind.is_message]
        shown = slices(value, rank, "schedule")
        computed = [e["name"] for e in shown if e["cat"] != "wait"]
        assert computed == [str(a) for a in program] * 4, "2 rounds of 2 steps, in order"
        assert all(e["dur"] >= 0 for e in shown)
        for track in ("schedule", "phases", "group tensor", "group pipe"):
            held = slices(value, rank, track)
            assert held, track
            assert all(first - 1 <= e["ts"] and e["ts"] + e["dur"] <= end + 1 for e in held), track
        calls = Counter(e["name"] for e in slices(value, rank, "group tensor"))
        assert calls["all_reduce"] > 8
        to, source = f"send to {(rank + 2) % 4}", f"receive from {(rank + 2) % 4}"
        messages = Counter(e["name"] for e in slices(value, rank, "group pipe"))
        assert messages[to] == messages[source] == 8
        # slices of a track follow each other, or a viewer would nest them
        for number in range(20):
            row = [e for e in value["traceEvents"] if e["ph"] == "X" and e["pid"] == rank]
            row = sorted((e for e in row if e["tid"] == number), key=lambda e: e["ts"])
            pairs = itertools.pairwise(row)
            assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-3 for a, b in pairs), number
    starts = [e for e in value["traceEvents"] if e["ph"] == "s"]
    ends = {e["id"]: e for e in value["traceEvents"] if e["ph"] == "f"}
    # forward and back, of 2 microbatches, 2 rounds, 2 steps, 2 tensor ranks
    assert len(starts) == len(ends) == 2 * 2 * 2 * 2 * 2
    assert all(abs(e["pid"] - ends[e["id"]]["pid"]) == 2 for e in starts)
    assert all(e["ts"] < ends[e["id"]]["ts"] for e in starts), "sent before it is used"

    picture = tmp_path / "trace.png"
    assert main(["profile", str(tmp_path), "--png", str(picture)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "traced: 1f1b, 4 ranks, steps 3, 4"
    assert shown[1].split("  ")[-1].strip() == "world" or "tensor" in shown[1]
    assert len(shown) == 2 + 4 + 1 and shown[-1] == f"wrote {picture}"
    computing = [float(line.split()[2].rstrip("%")) for line in shown[2:6]]
    assert all(1 < x < 100 for x in computing)
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 10_000


@pytest.mark.parametrize(
    ("start", "stop_at", "steps"),
    [(0, 3, [3]), (3, 99, [4]), pytest.param(4, 99, None, marks=pytest.mark.full)],
)
def test_a_run_that_begins_or_ends_among_the_steps_leaves_those_it_did(
    ranks, tmp_path, start, stop_at, steps
):
    ranks(2).run(traced, ["parallel.data=2"], str(tmp_path), start, stop_at)
    path = tmp_path / "trace.json"
    assert path.exists() == (steps is not None)
    if steps:
        value = json.loads(path.read_text())
        assert value["otherData"]["steps"] == steps
        for rank in (0, 1):
            assert slices(value, rank, "schedule") and slices(value, rank, "group data")


def test_a_validation_or_save_between_steps_is_of_no_step(ranks, tmp_path):
    extra = ["parallel.data=2", "train.eval_every=3", "checkpoint.save_every=3"]
    ranks(2).run(traced, [*extra, "train.eval_batches=3"], str(tmp_path))
    value = json.loads((tmp_path / "trace.json").read_text())
    for rank in (0, 1):
        (first, second) = steps = slices(value, rank, "steps")
        assert first["ts"] + first["dur"] < second["ts"]
        phases = slices(value, rank, "phases")
        assert {"forward", "reduce"} <= {e["name"] for e in phases} <= {*STEP_PHASES}
        for e in (*phases, *slices(value, rank, "group data")):
            assert any(0 <= e["ts"] - s["ts"] <= s["dur"] for s in steps), e["name"]


@pytest.mark.full
def test_a_host_that_runs_ahead_records_the_same(pool, tmp_path):
    pool(2).run(traced, ["parallel.pipe=2"], str(tmp_path), transport="late")
    value = json.loads((tmp_path / "trace.json").read_text())
    computed = [e["name"] for e in slices(value, 0, "schedule") if e["cat"] != "wait"]
    assert sorted(computed) == sorted(["0F0", "0F1", "0B0", "0B1"] * 2)


def invented() -> list[RankTrace]:
    """Two hosts, the clock of the second 100 s ahead; rank 1 waits for rank 0's forward."""
    f0, f1 = Action(0, ActionKind.F, 0), Action(1, ActionKind.F, 0)
    calls = [
        CallSlice("data", "all_reduce", 11.0, 13.0, 1.0, (4,), "float32", ""),
        CallSlice("data", "all_reduce", 12.0, 14.0, 0.5, (2,), "float32", ""),
        CallSlice("data", "broadcast", 13.0, 15.0, 2.0, (), "", "0F0"),
    ]
    steps = [(7, 10.0, 20.0)]
    later = [(7, 110.0, 120.0)]
    return [
        RankTrace(0, {"pipe": 0}, "a", 10.0, steps, [[Span(f0, 11.0, 14.0)]], [], calls),
        RankTrace(1, {"pipe": 1}, "b", 110.0, later, [[Span(f1, 115.0, 118.0)]], [], []),
    ]


def test_hosts_are_brought_to_one_clock_and_calls_that_overlap_apart():
    value = {"traceEvents": events(invented())}
    (forward,), (later,) = slices(value, 0, "schedule"), slices(value, 1, "schedule")
    assert (forward["ts"], forward["dur"]) == (1e6, 3e6)
    assert (later["ts"], later["dur"]) == (5e6, 3e6)
    lanes = {
        e["args"]["name"]: e["tid"]
        for e in value["traceEvents"]
        if e["name"] == "thread_name" and "group" in e["args"]["name"]
    }
    assert set(lanes) == {"group data", "group data (2)"}
    by_lane = Counter(e["tid"] for e in slices(value, 0, "group data"))
    assert by_lane == {lanes["group data"]: 2, lanes["group data (2)"]: 1}
    assert slices(value, 0, "group data")[2]["args"] == {
        "shape": [],
        "dtype": "",
        "action": "0F0",
        "waited_us": 2e6,
    }
    (sent,) = (e for e in value["traceEvents"] if e["ph"] == "s")
    (used,) = (e for e in value["traceEvents"] if e["ph"] == "f")
    assert (sent["pid"], used["pid"], used["ts"]) == (0, 1, 5e6)


def test_a_trace_is_summed_up(tmp_path):
    write_trace(tmp_path / "trace.json", invented(), "mine", "gpipe")
    trace = trace_file.read_trace(tmp_path)
    assert (trace.run, trace.schedule, trace.steps) == ("mine", "gpipe", (7,))
    assert trace_file.summary(trace) == [
        ["rank", "ms a step", "computing", "waiting", "data"],
        ["0", "10000.00", "30.0%", "0.0%", "35.0%"],
        ["1", "10000.00", "30.0%", "0.0%", "0.0%"],
    ]
    assert trace_file.read_trace(tmp_path / "trace.json") == trace
    assert trace_file.png(trace).startswith(b"\x89PNG")


def test_the_picture_has_bars_as_long_as_the_slices(tmp_path, monkeypatch):
    axes, rows = pytest.importorskip("matplotlib.axes").Axes, []
    draw = axes.broken_barh

    def note(self, bars, *place, **style):
        rows.append(sum(length for _, length in bars))
        return draw(self, bars, *place, **style)

    monkeypatch.setattr(axes, "broken_barh", note)
    write_trace(tmp_path / "trace.json", invented(), "mine", "gpipe")
    trace_file.png(trace_file.read_trace(tmp_path))
    # milliseconds of the schedule of rank 0, of its waits for calls, and of the schedule of rank 1
    assert rows == pytest.approx([3000, 3500, 3000])


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "there is no trace; train with train.profile.steps=10..12"),
        ("{", "not a trace that can be read: Expecting property name"),
        ("[" * 100_000, "not a trace that can be read: it is nested too deeply"),
        ("[]", "not the trace of a run (TypeError"),
        ('{"traceEvents": []}', "not the trace of a run (KeyError: 'otherData')"),
        ('{"otherData": {}, "traceEvents": []}', "not the trace of a run (ValueError: no slices)"),
        ('{"otherData": {}, "traceEvents": [{"ph": "X"}]}', "(KeyError: 'pid'); pass the folder"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path, capsys, content, text):
    if content is not None:
        (tmp_path / "trace.json").write_text(content)
    assert main(["profile", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert not said.out and text in said.err and str(tmp_path / "trace.json") in said.err


def test_a_picture_that_cannot_be_written_is_refused(tmp_path, capsys):
    write_trace(tmp_path / "trace.json", invented(), "mine", "gpipe")
    assert main(["profile", str(tmp_path), "--png", str(tmp_path / "no" / "x.png")]) == 2
    assert "x.png cannot be written: there is no folder" in capsys.readouterr().err
    nowhere = [str(tmp_path / "none"), "--png", str(tmp_path / "no" / "x.png")]
    assert main(["profile", *nowhere]) == 2
    said = capsys.readouterr().err
    assert said.startswith("tdp: 2 problems in tdp profile:")
    assert "none: there is no trace" in said and "x.png cannot be written" in said


@pytest.mark.parametrize(
    ("steps", "found"),
    [("10..12", [10, 11, 12]), (7, [7]), ("7..7", [7]), (None, []), ("1..100", range(1, 101))],
)
def test_steps_are_a_range(steps, found):
    section = ProfileSection(steps=steps)
    assert list(section.range) == list(found)
    assert ProfileSection.model_validate(section.model_dump()) == section


@pytest.mark.parametrize("steps", ["12..10", "0..3", "10-12", "10..", "1..101", "-1..2", "a..b"])
def test_what_is_no_range_of_steps_is_refused(steps):
    with pytest.raises(ConfigError, match=r"train\.profile\.steps.*FIRST\.\.LAST, such as"):
        parity.config([*RUN, f"train.profile.steps={steps}"])


def test_steps_after_the_end_are_refused():
    with pytest.raises(ConfigError, match=facts_pattern("steps=3..9", "train.steps=5")):
        parity.config([*RUN, "train.profile.steps=3..9"])
