"""The named schedules: the issue's bubbles, their memory, and a legal answer for every size."""

import itertools

import pytest

from torchdistpackage.errors import ScheduleError
from torchdistpackage.schedule.actions import ActionKind, Schedule, flatten
from torchdistpackage.schedule.engine import simulate
from torchdistpackage.schedule.generators import (
    GENERATORS,
    TWO_CHUNKS,
    build,
    canonical,
    evaluation,
)
from torchdistpackage.schedule.orders import looped, zigzag
from torchdistpackage.schedule.passes import check

WHOLE = ["gpipe", "1f1b", "interleaved", "looped-bfs"]
SPLIT = ["zb-h1", "zb-h2", "interleaved-zb", "zb-v", "dualpipe-v"]
FEW = [(1, 1), (1, 5), (2, 1), (2, 5), (3, 2), (3, 16), (5, 5), (5, 19), (8, 2), (8, 19)]
SOME = list(itertools.product((1, 2, 3, 5, 8), (1, 2, 5, 16, 19)))
ALL = list(itertools.product(range(1, 9), range(1, 33)))


sizes = pytest.mark.parametrize("sizes", [FEW, pytest.param(SOME, marks=pytest.mark.full)], ids=len)


def orders(schedule: Schedule) -> list[str]:
    return [
        " ".join(str(a) for a in flatten(program) if not a.kind.is_message)
        for program in schedule.programs
    ]


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("name", "chunks", "percent"),
    [
        ("gpipe", 1, (27.3, 15.8, 17.9)),
        ("1f1b", 1, (27.3, 15.8, 17.9)),
        ("interleaved", 2, (15.8, 8.6, 9.9)),
        ("interleaved", 4, (8.6, 4.5, 5.2)),
        ("looped-bfs", 2, (15.8, 8.6, 9.9)),
        ("zb-h1", 1, (11.1, 5.9, 6.8)),
        ("zb-h2", 1, (11.1, 5.9, 6.8)),
        ("interleaved-zb", 2, (5.9, 3.0, 3.5)),
        ("zb-v", 2, (5.9, 3.0, 3.5)),
        ("dualpipe-v", 2, (5.9, 3.0, 3.5)),
    ],
)
def test_bubbles_are_the_known_ones(name: str, chunks: int, percent: tuple[float, ...]):
    for (p, m), expected in zip([(4, 8), (4, 16), (8, 32)], percent, strict=True):
        schedule = build(name, p, m, chunks)
        assert schedule.name == name
        assert round(100 * simulate(schedule).bubble, 1) == expected


def is_legal(name: str, p: int, m: int, chunks: int) -> None:
    schedule = build(name, p, m, chunks)
    check(schedule)
    assert schedule.name.partition("~")[0] == name
    assert (schedule.num_stages, schedule.num_microbatches) == (p * chunks, m)
    assert schedule.placement in (looped(p, chunks), zigzag(p, chunks))
    assert schedule.has_backward == (name != "forward")


@sizes
@pytest.mark.parametrize("name", GENERATORS)
def test_every_size_has_a_legal_answer(name: str, sizes: list[tuple[int, int]]):
    for p, m in sizes:
        for chunks in (1, 2, 3) if p < 4 and m < 16 else (1 + (name in TWO_CHUNKS),):
            is_legal(name, p, m, chunks)


@pytest.mark.full
@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("name", GENERATORS)
def test_really_every_size_has_a_legal_answer(name: str, chunks: int):
    for p, m in ALL:
        is_legal(name, p, m, chunks)


def test_orders_are_the_tables_that_everybody_draws():
    assert orders(build("1f1b", 3, 4)) == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]
    assert orders(build("interleaved", 2, 4)) == [
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
    ]
    assert orders(build("looped-bfs", 2, 2))[0] == "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1"
    assert orders(build("zb-h1", 3, 4)) == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1I0 1F2 1B1 1F3 1I2 1W0 1I3 1W2 1W3",
        "2F0 2I0 2F1 2I1 2F2 2B2 2F3 2I3 2W0 2W1 2W3",
    ]


@pytest.mark.few(2)
@sizes
@pytest.mark.parametrize("name", WHOLE)
def test_whole_backwards_leave_the_bubble_of_the_formula(name: str, sizes: list[tuple[int, int]]):
    for p, m in sizes:
        for chunks in (1, 2, 3):
            if m >= p or (chunks == 1 and name in ("gpipe", "1f1b")):
                costs = (
                    {ActionKind.F: 3.0, ActionKind.B: 1.0}
                    if m % 2
                    else {ActionKind.F: 1.0, ActionKind.B: 2.0}
                )
                bubble = simulate(build(name, p, m, chunks), costs).bubble
                assert bubble == pytest.approx((p - 1) / (chunks * m + p - 1), abs=1e-12), (p, m)


@sizes
@pytest.mark.parametrize("name", SPLIT)
def test_split_backwards_leave_only_the_late_start(name: str, sizes: list[tuple[int, int]]):
    for p, m in sizes:
        chunks = 2 if name in TWO_CHUNKS else 1
        if m >= 2 * p:
            assert simulate(build(name, p, m)).total == 3 * chunks * m + p - 1, (p, m)


def test_zb_h2_gains_over_zb_h1_when_the_next_step_follows_at_once():
    first, second = build("zb-h1", 4, 16), build("zb-h2", 4, 16)
    assert simulate(first).total == simulate(second).total == 48 + 3
    assert simulate(first, steps=2).total == 2 * 48 + 6
    assert simulate(second, steps=2).total == 2 * 48 + 3


@sizes
def test_no_rank_holds_more_than_its_schedule_promises(sizes: list[tuple[int, int]]):
    for p, m in sizes:
        assert simulate(build("1f1b", p, m)).peak_live == tuple(min(m, p - s) for s in range(p))
        for name, most in [
            ("gpipe", [m] * p),
            ("looped-bfs", [2 * m] * p),
            ("interleaved", [2 * (p - r - 1) + p + 1 for r in range(p)]),
            ("zb-h1", [p] * p),
            ("zb-h2", [2 * p - 1] * p),
            ("interleaved-zb", [3 * p - 1] * p),
            ("zb-v", [2 * p] * p),
            ("dualpipe-v", [2 * p + 1] * p),
        ]:
            if "interleaved" in name and m % p:
                most = [peak + m % p for peak in most]
            held = simulate(build(name, p, m)).peak_live_of_rank
            assert all(now <= peak for now, peak in zip(held, most, strict=True)), (name, p, m)


@pytest.mark.parametrize("name", SPLIT)
def test_a_backward_is_split_only_where_that_gains_something(name: str):
    schedule = build(name, 4, 32)
    kinds = [a.kind for program in schedule.programs for a in flatten(program)]
    whole, split = kinds.count(ActionKind.B), kinds.count(ActionKind.I)
    assert split == kinds.count(ActionKind.W) > 0
    assert whole > 3 * split


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        (("gpipe", 2, 4, 2), "gpipe~looped"),
        (("1f1b", 2, 4, 2), "1f1b~interleaved"),
        (("interleaved", 2, 4, 1), "interleaved~1f1b"),
        (("interleaved", 2, 5, 2), "interleaved~uneven"),
        (("interleaved", 4, 2, 3), "interleaved~uneven"),
        (("interleaved", 2, 4, 3), "interleaved"),
        (("looped-bfs", 2, 3, 1), "looped-bfs~gpipe"),
        (("zb-h1", 2, 4, 2), "zb-h1~interleaved"),
        (("zb-h2", 3, 4, 1), "zb-h2~short"),
        (("zb-h2", 3, 5, 1), "zb-h2"),
        (("interleaved-zb", 2, 4, 1), "interleaved-zb~zb-h1"),
        (("interleaved-zb", 2, 5, 2), "interleaved-zb~uneven"),
        (("zb-v", 2, 3, 2), "zb-v~short"),
        (("zb-v", 2, 4, 2), "zb-v"),
        (("zb-v", 2, 4, 1), "zb-v~zb-h1"),
        (("dualpipe-v", 2, 8, 3), "dualpipe-v~zigzag"),
        (("dualpipe-v", 4, 7, 2), "dualpipe-v~short"),
        (("forward", 3, 2, 3), "forward"),
    ],
)
def test_the_name_says_what_became_of_it(asked: tuple[str, int, int, int], given: str):
    assert build(*asked).name == given


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("ZB_H1", "zb-h1"),
        ("zbh2", "zb-h2"),
        ("GPipe", "gpipe"),
        ("ScheduleGPipe", "gpipe"),
        ("1F1B", "1f1b"),
        ("Interleaved1F1B", "interleaved"),
        ("LoopedBFS", "looped-bfs"),
        ("InterleavedZeroBubble", "interleaved-zb"),
        ("ZBVZeroBubble", "zb-v"),
        ("ScheduleDualPipeV", "dualpipe-v"),
    ],
)
def test_names_may_be_written_as_elsewhere(written: str, meant: str):
    assert canonical(written) == meant
    assert build(written, 2, 4) == build(meant, 2, 4)


def test_what_cannot_be_built_is_answered_with_what_can():
    with pytest.raises(ScheduleError, match=r"no schedule 'pipedream'; .*forward, gpipe"):
        build("pipedream", 2, 2)
    for sizes in [(2, 0, 1), (0, 2, 1), (2, 2, 0)]:
        with pytest.raises(ScheduleError, match="use 1 or more of each"):
            build("1f1b", *sizes)
    with pytest.raises(ScheduleError, match="0 microbatches to evaluate"):
        evaluation(build("1f1b", 2, 2), 0)


@pytest.mark.parametrize("name", GENERATORS)
def test_evaluation_runs_the_forwards_alone_where_training_has_its_stages(name: str):
    for p, m in [(1, 1), (3, 2), (4, 9)]:
        training = build(name, p, 4)
        forwards = evaluation(training, m)
        check(forwards)
        assert forwards.placement == training.placement
        assert not forwards.has_backward
        if m >= p:
            chunks = training.num_stages // p
            assert simulate(forwards).total <= m * chunks + 2 * (p - 1)
