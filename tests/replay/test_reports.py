"""The list of published bugs: real reports, every kind of mistake, a plant for each."""

import re
from collections import Counter

from tests.replay.blind import BLIND
from tests.replay.reports import KINDS, REPORTS

REPORT = re.compile(r"[\w.-]+/[\w.-]+#\d+")


def planted() -> tuple[set[str], str]:
    """Names of plants in parts of this package, and the source of those in a user's own loop."""
    import inspect

    from tests.replay import own_loop
    from tests.replay.plants import PLANTS

    return set(PLANTS), inspect.getsource(own_loop)


def test_every_kind_of_mistake_is_among_them():
    assert len(REPORTS) >= 40
    assert {x.kind for x in REPORTS} == set(KINDS)
    assert {axis for x in REPORTS for axis in x.axis} >= {
        *("data", "pipe", "context", "tensor", "expert", "accumulation", "resume"),
    }


def test_reports_are_named_as_they_are_found():
    assert all(x.reports and all(map(REPORT.fullmatch, x.reports)) for x in REPORTS)
    assert len(BLIND) == 20 and not any(x.reports for x in BLIND)
    names = Counter(x.name for x in (*REPORTS, *BLIND))
    assert [name for name, times in names.items() if times > 1] == []


def test_each_has_its_plant(ranks):
    ((of_runs, own_loop),) = ranks(1).run(planted)
    all_reports = (*REPORTS, *BLIND)
    assert of_runs == {x.name for x in all_reports if x.is_run}
    assert [x.name for x in all_reports if not x.is_run and x.name not in own_loop] == []
