"""Who is slow, judged from numbers alone: found wherever it is, never where there is only noise.

The noise is like that of real ranks on shared cores: steps that all ranks find slow, single steps
of one rank that take longer, and some percent in between.

No torch.
"""

import random

import pytest

from torchdistpackage.harness.stragglers.find import (
    PHASES,
    WINDOW,
    Alerts,
    Cost,
    Straggler,
    Times,
    fastest_of,
    find_between_steps,
    find_stragglers,
    measured,
    same_work,
)
from torchdistpackage.topology.mesh import Mesh

MESHES = {
    "data2": Mesh((("data", 2), ("pipe", 1), ("tensor", 1))),
    "data2xpipe2": Mesh((("data", 2), ("pipe", 2), ("tensor", 1))),
    "tensor2": Mesh((("data", 1), ("pipe", 1), ("tensor", 2))),
    "pipe4": Mesh((("data", 1), ("pipe", 4), ("tensor", 1))),
    "data4xpipe2xtensor2": Mesh((("data", 4), ("pipe", 2), ("tensor", 2))),
    "data16": Mesh((("data", 16),)),
}
TYPICAL_S = {"data": 0.001, "forward": 0.04, "backward": 0.08, "optimizer": 0.004}
SHARES = (1.0, 0.8, 0.8, 1.4)
"""What the stages cost: the last one has the loss."""

every_mesh = pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)


def window(mesh: Mesh, draw: random.Random, steps: int = WINDOW, noise: float = 0.03) -> Times:
    """Times of healthy ranks. noise: deviation of a time from its mean, as a part of it; in a
    third of that part of the steps it takes half as long again."""
    common = [draw.choice((1.0,) * 9 + (1.5,)) for _ in range(steps)]
    stage = [mesh.coord(rank).get("pipe", 0) for rank in range(mesh.size)]

    def time_s(phase: str, rank: int, k: int) -> float:
        share = 1.0 if phase == "data" else SHARES[stage[rank]]
        hiccup = 1.5 if draw.random() < noise / 3 else 1.0
        return TYPICAL_S[phase] * share * common[k] * hiccup * draw.lognormvariate(0, noise)

    return {
        phase: [[time_s(phase, rank, k) for k in range(steps)] for rank in range(mesh.size)]
        for phase in PHASES
    }


def delayed(times: Times, phase: str, rank: int, more_s: float, since: int = 0) -> Times:
    """The same with `more_s` added to each step of one rank from step `since` on."""
    rows = [list(row) for row in times[phase]]
    rows[rank] = [t + more_s * (k >= since) for k, t in enumerate(rows[rank])]
    return {**times, phase: rows}


def planned(mesh: Mesh) -> dict[str, Cost]:
    """Of stages that are equal, which they are not."""
    return {phase: Cost([1.0] * mesh.size) for phase in PHASES if phase != "data"}


def named(found: list[Straggler]) -> list[tuple[int, str]]:
    return [(straggler.rank, straggler.phase) for straggler in found]


@pytest.mark.few(6)
@every_mesh
@pytest.mark.parametrize("phase", PHASES)
def test_50_ms_are_found_on_every_rank_and_nobody_else_is(mesh, phase):
    """One window is enough in nearly all cases, and two in the others."""
    draw, alike = random.Random(phase), same_work(mesh, ("data",))
    num_clear = 0
    for case in range(48):
        rank = case % mesh.size
        costs = measured(window(mesh, draw), {}, [])
        found = find_stragglers(delayed(window(mesh, draw), phase, rank, 0.05), alike, costs)
        assert named(found) == [(rank, phase)]
        assert found[0].excess_s == pytest.approx(0.05, rel=0.5)
        num_clear += found[0].clear
    assert num_clear >= 45


@pytest.mark.few(6)
@every_mesh
@pytest.mark.parametrize("noise", [0.02, 0.05, 0.1, 0.2, 0.4])
def test_nobody_is_named_however_large_the_noise_is(mesh, noise):
    """Hundreds of windows one after another, as a run of thousands of steps has them."""
    draw, alike = random.Random(noise), same_work(mesh, ("data",))
    findings, costs = Alerts(mesh, [""] * mesh.size), planned(mesh)
    for _ in range(1000 // mesh.size):
        times = window(mesh, draw, noise=noise)
        found = find_stragglers(times, alike, costs)
        assert findings.alerts(found) == []
        costs = measured(times, costs, found)


@pytest.mark.few(4)
@pytest.mark.parametrize("since", range(1, WINDOW + 1))
def test_a_delay_is_named_within_20_steps_of_its_beginning(since):
    """Windows end every 10 steps and are judged a step later; the first step is left out."""
    mesh, draw = MESHES["data2"], random.Random(since)
    whole = delayed(window(mesh, draw, 31), "forward", 1, 0.05, since)
    for last in (10, 20, 30):
        first = max(1, last - WINDOW + 1)
        part = {p: [row[first : last + 1] for row in rows] for p, rows in whole.items()}
        if found := find_stragglers(part, same_work(mesh)):
            assert named(found) == [(1, "forward")]
            assert last + 1 - since < 20
            return
    pytest.fail("never named")


def test_some_slow_steps_are_no_straggler():
    """A hiccup of the host, or what a rank does every now and then, also if it takes a second."""
    mesh, draw = MESHES["data2"], random.Random(1)
    for num_slow in range(5):
        times = delayed(window(mesh, draw), "data", 1, 1.0, WINDOW - num_slow)
        assert find_stragglers(times, same_work(mesh)) == []


def test_a_delay_that_comes_and_goes_is_noise():
    mesh, draw = MESHES["data2"], random.Random(1)
    findings = Alerts(mesh, ["a", "b"])
    for _ in range(300):
        times = window(mesh, draw)
        rows = [[t + draw.uniform(0, 0.05) for t in row] for row in times["forward"]]
        assert findings.alerts(find_stragglers({**times, "forward": rows}, same_work(mesh))) == []


def test_what_is_not_clear_is_said_when_it_is_found_again():
    mesh = MESHES["data2"]
    doubtful = Straggler(1, "data", 0.06, 0.01, clear=False)
    findings = Alerts(mesh, ["a", "b"])
    heard = [len(findings.alerts(found)) for found in ([doubtful], [], [doubtful], [doubtful], [])]
    assert heard == [0, 0, 0, 1, 0]


def test_stages_differ_and_are_not_compared_with_each_other():
    mesh = MESHES["data2xpipe2"]
    times = {phase: [[0.1] * WINDOW, [0.5] * WINDOW] * 2 for phase in PHASES}
    assert find_stragglers(times, same_work(mesh)) == []
    assert find_stragglers(times, same_work(mesh), planned(mesh)) == []
    slow_loading = find_stragglers(times, same_work(mesh, ("data",)))
    assert named(slow_loading) == [(1, "data"), (3, "data")], "there all do the same work"


def test_stages_without_peers_are_held_against_their_cost():
    """Twice a planned cost is slow; of a measured one a sixth more is."""
    mesh = MESHES["pipe4"]
    alike = same_work(mesh)
    healthy = {phase: [[0.1 * share] * WINDOW for share in SHARES] for phase in PHASES}
    assert find_stragglers(healthy, alike) == [], "nothing is known of their work"
    slow = delayed(healthy, "forward", 1, 0.05)
    assert find_stragglers(slow, alike, planned(mesh)) == []
    assert named(
        find_stragglers(delayed(slow, "forward", 1, 0.1), alike, planned(mesh))
    ) == [(1, "forward")]  # fmt: skip
    costs = measured(healthy, planned(mesh), [])
    found = find_stragglers(slow, alike, costs)
    assert named(found) == [(1, "forward")]
    assert measured(slow, costs, found)["forward"] == costs["forward"], "that is not its cost"


def test_a_stage_that_recovers_does_not_make_the_others_slow():
    """It was slow when its cost was measured, so the others seem slow for theirs."""
    mesh = MESHES["pipe4"]
    healthy = {phase: [[0.1] * WINDOW] * 4 for phase in PHASES}
    for num_slow in (1, 2, 3):
        slow = healthy
        for rank in range(num_slow):
            slow = delayed(slow, "backward", rank, 0.1)
        costs = measured(slow, {}, [])
        assert find_stragglers(healthy, same_work(mesh), costs) == []


def test_a_short_window_names_nobody_and_measures_nothing():
    mesh = MESHES["data2"]
    times = {phase: [[0.01] * 7, [1.0] * 7] for phase in PHASES}
    assert find_stragglers(times, same_work(mesh)) == []
    assert measured(times, {}, []) == {}
    assert find_stragglers({phase: [[], []] for phase in PHASES}, same_work(mesh)) == []


def test_ranks_that_wait_for_each_other_are_judged_by_the_fastest():
    """The slow loader's tensor peer waits in its forward; a slow forward holds up both."""
    mesh = MESHES["data4xpipe2xtensor2"]
    tensor, alike = list(mesh.groups(("tensor",))), same_work(mesh)
    healthy = {phase: [[0.01] * WINDOW for _ in range(16)] for phase in PHASES}
    waits = delayed(delayed(healthy, "data", 4, 0.05), "forward", 5, 0.05)
    assert len(find_stragglers(waits, alike)) == 2
    seen = fastest_of(waits, tensor, ("forward", "backward"))
    assert named(find_stragglers(seen, alike)) == [(4, "data")]
    slow = delayed(delayed(healthy, "forward", 4, 0.05), "forward", 5, 0.05)
    seen = fastest_of(slow, tensor, ("forward", "backward"))
    assert sorted(named(find_stragglers(seen, alike))) == [(4, "forward"), (5, "forward")]


def test_what_is_said():
    mesh = Mesh((("data", 2), ("pipe", 2), ("tensor", 2)))
    hosts = [f"node{rank // 4:02}" for rank in range(8)]
    assert Straggler(5, "data", 0.061, 0.011).described(mesh, hosts) == (
        "rank 5 (data 1 pipe 0 tensor 1) on node01: data loading takes 61.0 ms a step, its peers "
        "11.0 ms (50.0 ms or 455% more)"
    )
    assert (
        Straggler(5, "data", 0.06, 0.001)
        .described(mesh, hosts)
        .endswith("its peers 1.0 ms (59.0 ms more)")
    )


def test_it_is_said_once_and_again_when_it_changes_or_is_over():
    mesh = Mesh((("data", 2),))
    findings = Alerts(mesh, ["a", "b"])
    slow, slower = Straggler(1, "data", 0.06, 0.01), Straggler(1, "data", 0.16, 0.01)
    other = Straggler(0, "forward", 0.06, 0.01)
    heard = [
        findings.alerts(found)
        for found in ([], [slow], [slow], [], [slow], [slower], [slower, other], [other], [other])
    ]
    assert [len(lines) for lines in heard] == [0, 1, 0, 0, 0, 1, 1, 0, 1]
    assert heard[1] == [f"straggler: {slow.described(mesh, 'ab')}"]
    assert heard[8] == [
        "straggler over: rank 1 (data 1) on b: data loading is as fast as that of its peers"
    ]
    assert len(findings.alerts([slow])) == 1, "it is back"


def test_a_rank_that_is_slow_nearly_each_time_between_steps_is_named():
    """Few times are known of a save, and they vary."""
    mesh = MESHES["data2xpipe2"]
    alike = same_work(mesh)
    own = [0.001, 0.002, 0.001, 0.004, 0.001]
    slow = [0.25, 0.5, 0.25, 0.01, 0.5]
    times = {"save": [own, own, own, slow], "validate": [[0.3] * 3, [0.6] * 3] * 2}
    (straggler,) = find_between_steps(times, alike)
    assert (straggler.rank, straggler.phase) == (3, "save")
    assert "saving takes 250.0 ms each time, its peers 1.0 ms" in straggler.described(mesh, "abcd")
    for few in ([0.5, 0.5], [0.5, 0.01, 0.5], [0.04] * 5):
        quiet = [[0.001] * len(few)] * 3
        assert find_between_steps({"save": [*quiet, few]}, alike) == []
