"""Pictures hold what the timeline holds: each is read back and compared with it."""

import io
import json
import re
import sys
import xml.etree.ElementTree as ET

import matplotlib.image
import numpy as np
import pytest

from tests.tells import facts_pattern
from torchdistpackage.errors import ConfigError
from torchdistpackage.schedule import draw
from torchdistpackage.schedule.actions import Action, ActionKind, flatten
from torchdistpackage.schedule.costs import StageCosts
from torchdistpackage.schedule.draw import trace
from torchdistpackage.schedule.engine import Span, Timeline, simulate
from torchdistpackage.schedule.generators import GENERATORS, build

SVG = "{http://www.w3.org/2000/svg}"


def boxes(panel: ET.Element, attribute: str = "data-action") -> dict[str, tuple[float, ...]]:
    found = [box for box in panel.iter(f"{SVG}rect") if box.get(attribute)]
    read = {
        box.get(attribute, ""): tuple(float(box.get(key, "nan")) for key in ("x", "y", "width"))
        for box in found
    }
    assert len(read) == len(found), "an action is drawn twice"
    return read


def expected(timeline: Timeline, px: float, top: float = 0.0) -> dict[str, tuple[float, ...]]:
    return {
        str(span.action): pytest.approx(
            (
                draw.LEFT_PX + span.start * px,
                top + draw.TOP_PX + index * draw.ROW_PX,
                (span.end - span.start) * px,
            ),
            rel=1e-5,
        )
        for index, row in enumerate(timeline.spans)
        for span in row
        if not span.action.kind.is_message
    }


def measured() -> Timeline:
    """1F1B on two ranks as a run might record it, in seconds."""

    def span(stage: int, kind: ActionKind, m: int, start: float, end: float) -> Span:
        return Span(Action(stage, kind, m), start, end)

    rows = [
        [span(0, ActionKind.F, 0, 0, 0.01), span(0, ActionKind.RECV_B, 0, 0.011, 0.05),
         span(0, ActionKind.B, 0, 0.05, 0.07)],
        [span(1, ActionKind.RECV_F, 0, 0, 0.012), span(1, ActionKind.F, 0, 0.012, 0.022),
         span(1, ActionKind.B, 0, 0.023, 0.045)],
    ]  # fmt: skip
    return Timeline.of("1f1b", rows, 2)


def predicted() -> Timeline:
    return simulate(build("1f1b", 2, 1), StageCosts.uniform(2, 0.01, 0.01, 0.01))


@pytest.mark.parametrize("name", GENERATORS)
def test_the_svg_has_one_box_an_action_where_the_timeline_has_it(name: str):
    timeline = simulate(build(name, 3, 5))
    root = ET.fromstring(draw.svg(timeline))
    assert boxes(root) == expected(timeline, draw.UNIT_PX)
    assert len(boxes(root)) == sum(map(len, timeline.spans))
    assert float(root.get("width", "0")) >= draw.LEFT_PX + timeline.total * draw.UNIT_PX
    texts = [text.text or "" for text in root.iter(f"{SVG}text")]
    assert texts[0].startswith(f"{timeline.name}: {timeline.total:g} units, bubble ")


def test_colours_tell_the_kinds_apart_and_shades_the_chunks():
    root = ET.fromstring(draw.svg(simulate(build("zb-v", 3, 4))))
    fills: dict[tuple[str, str], set[str]] = {}
    for box in root.iter(f"{SVG}rect"):
        action = box.get("data-action", "")
        fills.setdefault((action[0], action[1]), set()).add(box.get("fill", ""))
    assert {kind for _, kind in fills} == set("FBIW")
    assert all(len(colours) == 1 for colours in fills.values())
    for rank in range(3):
        of_rank = [next(iter(c)) for (s, _), c in fills.items() if int(s) in (rank, 5 - rank)]
        assert len(set(of_rank)) == len(of_rank)
    assert fills["0", "F"] == fills["2", "F"] == {draw.COLOURS[ActionKind.F]}


def test_short_times_get_wide_boxes_and_long_pictures_stay_in_bounds():
    fast = simulate(build("1f1b", 2, 3), StageCosts.uniform(2, 1e-4, 1e-4, 1e-4))
    box = boxes(ET.fromstring(draw.svg(fast)))["0F0"]
    assert box[2] == pytest.approx(draw.UNIT_PX)
    uneven = StageCosts((1e-6, 1.0), (1.0, 1.0), (0.5, 0.5), (0.5, 0.5), (0.0, 0.0))
    root = ET.fromstring(draw.svg(simulate(build("1f1b", 2, 30), uneven)))
    assert float(root.get("width", "0")) <= draw.WIDEST_PX + draw.LEFT_PX + 10
    nothing = draw.svg(simulate(build("forward", 2, 2), {ActionKind.B: 1.0}))
    assert len(boxes(ET.fromstring(nothing))) == 4


def test_predicted_stands_above_measured_on_one_time_axis():
    first, second = predicted(), measured()
    root = ET.fromstring(draw.svg(first, second))
    panels = {g.get("data-timeline"): g for g in root.iter(f"{SVG}g")}
    assert list(panels) == ["predicted", "measured"]
    px = draw.px_per_unit(first, second)
    below = draw.TOP_PX + 2 * draw.ROW_PX
    assert boxes(panels["predicted"]) == expected(first, px)
    assert boxes(panels["measured"]) == expected(second, px, top=below)
    waits = boxes(panels["measured"], "data-wait")
    assert waits.keys() == {"0RECV_B0", "1RECV_F0"}
    assert waits["0RECV_B0"][2] == pytest.approx(0.039 * px, rel=1e-5)
    assert not boxes(panels["predicted"], "data-wait")
    heads = [(g[0].text or "").split(",")[0] for g in panels.values()]
    assert heads == ["predicted: 1f1b: 0.06 s", "measured: 1f1b: 0.07 s"]


def test_the_table_shows_each_tick():
    rows = draw.table(simulate(build("1f1b", 2, 2))).splitlines()
    assert rows == [
        "  0 | F0 F1 .. .. B0 -- .. B1 --",
        "  1 | .. F0 B0 -- F1 B1 -- .. ..",
    ]


def test_the_table_names_the_stage_where_a_rank_has_several():
    """Here at half a unit a cell."""
    rows = draw.table(simulate(build("interleaved", 1, 1, 2)), unit=0.5).splitlines()
    assert rows == ["  0 | 0F0 --- 1F0 --- 1B0 --- --- --- 0B0 --- --- ---"]


def test_the_last_chunk_of_a_rank_is_half_as_pale():
    timeline = simulate(build("zb-v", 3, 4))
    found = draw.colours(timeline.spans[0])
    assert found[0, ActionKind.F] == draw.COLOURS[ActionKind.F]
    channels = lambda colour: [int(colour[at : at + 2], 16) for at in (1, 3, 5)]  # noqa: E731
    half = [(part + 255) / 2 for part in channels(draw.COLOURS[ActionKind.F])]
    assert channels(found[5, ActionKind.F]) == pytest.approx(half, abs=0.5)


def test_a_box_bears_its_microbatch_and_a_wait_bears_nothing():
    timeline = simulate(build("1f1b", 2, 3))
    for content, wanted in ((draw.svg(timeline), "012" * 4), (draw.svg(measured()), "0" * 4)):
        texts = ET.fromstring(content).iter(f"{SVG}text")
        numbers = [x.text for x in texts if x.get("pointer-events") == "none"]
        assert sorted(numbers) == sorted(wanted)


def test_the_axis_has_round_times_where_the_timeline_has_them():
    assert draw.ticks(40.0) == [0.0, 5.0, 10.0, 15.0, 20.0, 25.0, 30.0, 35.0, 40.0]
    assert draw.ticks(0.07) == pytest.approx([0.01 * i for i in range(8)])
    assert draw.ticks(11.0) == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    assert draw.ticks(0.0) == [0.0]
    timeline = simulate(build("1f1b", 2, 2))
    lines = list(ET.fromstring(draw.svg(timeline)).iter(f"{SVG}line"))
    wanted = [draw.LEFT_PX + time * draw.UNIT_PX for time in draw.ticks(timeline.total)]
    assert [float(line.get("x1", "nan")) for line in lines] == pytest.approx(wanted)


def test_a_shared_axis_fits_the_longer_and_is_read_by_the_first():
    """The shortest box of the prediction is of full width, unless the measured step is long."""
    quick = simulate(build("1f1b", 2, 2), StageCosts.uniform(2, 0.01, 0.01, 0.01))
    slow = simulate(build("1f1b", 2, 2), StageCosts.uniform(2, 0.02, 0.01, 0.01))
    assert draw.px_per_unit(quick, slow) == pytest.approx(draw.UNIT_PX / 0.01)
    assert draw.px_per_unit(slow, quick) == pytest.approx(draw.UNIT_PX / 0.02)
    endless = simulate(build("1f1b", 2, 2), StageCosts.uniform(2, 1e3, 1e3, 1e3))
    assert draw.px_per_unit(quick, endless) * endless.total == pytest.approx(draw.WIDEST_PX)


def test_the_legend_names_waits_where_there_are_any():
    assert [*draw.legend([predicted()])] == ["F forward", "B backward"]
    assert [*draw.legend([predicted(), measured()])] == ["F forward", "B backward", "wait"]


def test_what_takes_no_time_has_no_cell():
    timeline = simulate(
        build("zb-h1", 2, 2), {ActionKind.F: 1.0, ActionKind.I: 1.0, ActionKind.W: 0.0}
    )
    rows = draw.table(timeline).splitlines()
    assert "W" not in "".join(rows)
    assert {len(row) for row in rows} == {len("  0 | ") + 3 * round(timeline.total) - 1}


def pixels(content: bytes) -> np.ndarray:
    image = matplotlib.image.imread(io.BytesIO(content), format="png")
    return np.round(image[:, :, :3] * 255).astype(int)


def share(image: np.ndarray, colour: str) -> float:
    """Of the pixels that are of this colour."""
    wanted = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return float((np.abs(image - wanted).max(axis=2) <= 1).mean())


def test_the_png_shows_the_kinds_in_proportion():
    """Forwards are a third of 1F1B's work, and so of what is painted."""
    timeline = simulate(build("1f1b", 4, 4))
    image = pixels(draw.png(timeline))
    assert image.shape[1] == 1400 and image.shape[0] > 100
    forward, backward = (share(image, draw.COLOURS[k]) for k in (ActionKind.F, ActionKind.B))
    assert forward > 0.05
    assert backward / forward == pytest.approx(2.0, rel=0.2)
    assert max(share(image, c) for c in (draw.COLOURS[ActionKind.W], draw.WAIT_COLOUR)) < 1e-3
    split = pixels(draw.png(simulate(build("zb-h1", 4, 4))))
    assert share(split, draw.COLOURS[ActionKind.W]) > 0.05


def test_the_png_of_a_pair_has_both_panels_and_the_waits():
    alone, both = pixels(draw.png(predicted())), pixels(draw.png(predicted(), measured()))
    assert both.shape[0] > 1.8 * alone.shape[0]
    assert share(both, draw.WAIT_COLOUR) > 0.02
    half = both.shape[0] // 2
    for panel in (both[:half], both[half:]):
        assert share(panel, draw.COLOURS[ActionKind.F]) > 0.02
        assert share(panel, draw.COLOURS[ActionKind.B]) > 0.04


def test_without_matplotlib_a_png_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=facts_pattern('"torchdistpackage[plot]"', "SVG")):
        draw.png(predicted())


def events(text: str, phase: str, process: int = 0) -> list[dict]:
    found = json.loads(text)["traceEvents"]
    return [e for e in found if e["ph"] == phase and e["pid"] == process]


@pytest.mark.parametrize("name", GENERATORS)
def test_the_trace_has_a_thread_a_rank_a_slice_an_action_and_an_arrow_a_message(name: str):
    schedule = build(name, 3, 4)
    timeline = simulate(schedule)
    text = trace(timeline)
    slices = [(e["tid"], e["name"], e["ts"], e["dur"]) for e in events(text, "X")]
    assert slices == [
        (rank, str(span.action), span.start * 1e6, (span.end - span.start) * 1e6)
        for rank, row in enumerate(timeline.spans)
        for span in row
    ]
    for e in events(text, "X"):
        assert "{stage}{kind}{microbatch}".format(**e["args"]) == e["name"]
    names = {e["tid"]: e["args"]["name"] for e in events(text, "M") if e["name"] == "thread_name"}
    assert names == {0: "pipe 0", 1: "pipe 1", 2: "pipe 2"}
    sends = [a for program in schedule.programs for a in flatten(program) if a.kind.is_send]
    starts, ends = events(text, "s"), {e["id"]: e for e in events(text, "f")}
    assert len(starts) == len(ends) == len(sends)
    for start in starts:
        end = ends[start["id"]]
        assert end["tid"] != start["tid"] and end["ts"] > start["ts"]
        inside = [s for s in slices if s[0] == start["tid"] and s[2] < start["ts"] < s[2] + s[3]]
        assert len(inside) == 1
        stage, kind, microbatch = re.fullmatch(r"(\d+)(\w)(\d+)", inside[0][1]).groups()
        users = {f"{int(stage) + 1}F"} if kind == "F" else {f"{int(stage) - 1}{k}" for k in "BI"}
        used = {s[1][: -len(microbatch)] for s in slices if (s[0], s[2]) == (end["tid"], end["ts"])}
        assert used <= users and used


def test_the_trace_of_a_pair_has_a_process_for_each_with_the_waits():
    text = trace(predicted(), measured())
    assert len(events(text, "X", 0)) == 4
    waits = [e["name"] for e in events(text, "X", 1) if e["cat"] == "wait"]
    assert waits == ["0RECV_B0", "1RECV_F0"]
    arrows = [{e["id"] for e in events(text, "s", process)} for process in (0, 1)]
    assert arrows[0] and arrows[1] and not arrows[0] & arrows[1]
    names = [events(text, "M", process)[0]["args"]["name"] for process in (0, 1)]
    assert names[0].startswith("predicted, bubble 50.0%")
    assert names[1].startswith("measured, bubble ")


def test_an_arrow_leaves_before_its_use_where_the_sender_stamped_its_end_late():
    sender, user = Action(0, ActionKind.F, 0), Action(1, ActionKind.F, 0)
    rows = [({"pid": 0}, [Span(sender, 1.0, 9.0)]), ({"pid": 1}, [Span(user, 2.0, 3.0)])]
    start, end = draw.message_arrows(rows, "late")
    assert (start["pid"], start["ts"], end["pid"], end["ts"]) == (0, 1.5e6, 1, 2e6)
