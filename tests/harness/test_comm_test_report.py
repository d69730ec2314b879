"""Who is to blame, from what the ranks saw. Those who wait never are. No torch."""

from functools import partial

import pytest

from tests.tells import facts_pattern, tells
from torchdistpackage.errors import CommError
from torchdistpackage.harness import comm_test_report
from torchdistpackage.harness.comm_test_report import (
    CommTestError,
    RankReport,
    StuckAt,
    Verdict,
)


def host_of(rank: int) -> str:
    return f"node{rank // 2}"


judge = partial(
    comm_test_report.judge,
    host_of=host_of,
    world_size=4,
    limit_s=30,
    meeting="the end of the test",
)
OK = RankReport(times_s=(0.5, 0.25))


def stop(step: int, what: str, *ranks: int, error: str = "") -> RankReport:
    return RankReport(stop=StuckAt(step, what, ranks, error))


def test_all_is_well_and_the_slowest_rank_counts():
    said = judge({0: OK, 1: OK, 2: OK, 3: RankReport(times_s=(0.125, 1.0))})
    assert said == Verdict((), 0, (0.5, 1.0))
    said.raise_problems()


def test_who_did_not_come_is_named_where_it_was_first_missed():
    """Rank 2 waits for rank 0, which itself waits for rank 3: neither is to blame."""
    seen = {
        0: stop(8, "max over [0, 3]", 0, 3),
        1: stop(7, "sum over [1, 3]", 1, 3),
        2: stop(9, "max over [0, 2]", 0, 2),
    }
    assert judge(seen).problems == (
        "sum over [1, 3]: rank 3 on node1 did not come within 30 s; rank 1 on node0 waited",
    )


def test_what_a_backend_says_of_the_absent_is_told():
    seen = {
        r: stop(7, "sum", 0, 1, 2, 3, error="Connection closed" if r == 2 else "") for r in (0, 2)
    }
    assert judge(seen).problems == (
        "sum: ranks 1 on node0, 3 on node1 did not come within 30 s; "
        "ranks 0 on node0, 2 on node1 waited, with the error: Connection closed",
    )


def test_who_is_missed_by_nobody_is_missed_at_the_end():
    (line,) = judge({0: OK, 1: OK, 2: OK}).problems
    assert line.startswith("the end of the test: rank 3 on node1 did not come within 30 s; ranks")


def test_a_failure_explains_those_who_wait():
    seen = {0: OK, 1: stop(5, "sum", 1, 2), 2: stop(5, "sum", 1, 2, error="out of memory"), 3: OK}
    assert judge(seen).problems == ("sum: rank 2 on node1 failed: out of memory",)


def test_where_all_run_and_nothing_arrives_the_hosts_are_named():
    seen = {0: OK, 1: stop(5, "sum", 1, 2), 2: stop(5, "sum", 1, 2), 3: stop(6, "max", 2, 3)}
    assert judge(seen).problems == (
        "sum: did not end within 30 s on ranks 1 on node0, 2 on node1, although all ranks run; "
        "see whether these hosts reach each other",
    )


def test_the_lowest_rank_that_came_speaks_for_all():
    said = judge({2: OK, 3: OK})
    assert said.speaker == 2
    with pytest.raises(CommTestError, match=facts_pattern("ranks 0, 1", "node0")) as caught:
        said.raise_problems()
    assert caught.value.speaker == 2
    assert isinstance(caught.value, CommError)


def test_a_roll_call_names_the_absent_and_those_with_other_plans():
    same = RankReport(plan="data=4")
    other = RankReport(("rank 2 holds another group",), plan="data=2")
    assert judge(dict.fromkeys(range(4), same)).problems == ()
    found = judge({0: same, 1: same, 2: other}, meeting="the roll call").problems
    absent, differs, wrong = found
    assert wrong == "rank 2 holds another group"
    assert tells(absent, "rank 3", "node1")
    assert tells(differs, "ranks 0, 1", "node0", "data=4", "rank 2", "node1", "data=2")


def test_the_advice_is_for_what_was_found():
    """Who was stopped is not told to set up groups, nor who got other data."""
    silent = partial(stop, 5, "sum", 0, 1, 2, 3)
    table = {
        judge({0: OK, 1: OK, 2: OK}).advice: "look at the log of rank 3 on node1, and at the host; "
        "if it is only slow, allow more with --timeout",
        judge({0: OK, 1: OK, 2: OK, 3: silent(error="out of memory")}).advice: "look at the log of "
        "rank 3 on node1, and at the host",
        judge(
            {0: OK, 1: OK, 2: OK, 3: RankReport(("got 9",))}
        ).advice: "exclude the hosts that got",
        judge(dict.fromkeys(range(4), RankReport(("other ranks",), plan="a"))).advice: "give all",
        judge(
            {r: RankReport(plan="ab"[r % 2]) for r in range(4)}
        ).advice: "give all ranks the same CONFIG or --axes",
    }
    for (said,), text in table.items():
        assert said.startswith(text)
    assert judge(dict.fromkeys(range(4), OK)).advice == ()


def test_long_lists_are_cut():
    with pytest.raises(
        CommTestError, match=r"11 checks(?s:.*)problem 7\n  and 3 more\nlook there$"
    ):
        Verdict(tuple(f"problem {i}" for i in range(11)), advice=("look there",)).raise_problems()
    assert comm_test_report.named(range(20), host_of).endswith("6, 7 on node3 and 12 more")


def test_reports_and_verdicts_travel_as_text():
    report = RankReport(("a", "b"), StuckAt(3, "sum", (1, 2), "why"), (0.5,))
    assert RankReport.from_json(report.to_json()) == report
    assert RankReport.from_json(OK.to_json()) == OK
    said = Verdict(("a",), 2, (0.5, 1.0), ("do",))
    assert Verdict.from_json(said.to_json()) == said
