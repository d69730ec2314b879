"""A function on ranks, started here or found under a launcher; refused before anything starts.

No torch.
"""

import os

import pytest

from tests.tells import facts_pattern
from torchdistpackage.environment.rendezvous import detect
from torchdistpackage.errors import RankError, TopologyError
from torchdistpackage.harness.pool import num_ranks, run_on_topology

LAUNCHED = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "run",
}


def where(word: str) -> tuple[str, int, list[int], int, bool]:
    from torchdistpackage.comm.tpc import tpc

    data = tpc.get_ranks_in_group("data")
    return word, tpc.rank, data, tpc.topology.expert.axis_size("expert"), "RANK" in os.environ


def fails_on_rank_1() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("no such thing")


def test_new_ranks_have_their_groups_and_answer_in_order(forks):
    found = run_on_topology(where, ("a",), axes=[("data", None), ("pipe", 2)], procs=4, expert=2)
    assert found == [("a", r, [r % 2, r % 2 + 2], 2, True) for r in range(4)]


def test_the_rank_of_a_launcher_starts_none(ranks):
    [(found, pid, tidy)] = ranks(1).run(as_launched)
    assert found == [("b", 0, [0], 1, True)]
    assert pid != os.getpid()
    assert tidy


def as_launched() -> tuple[object, int, bool]:
    """One rank is enough to see that it joins, and answers for all ranks as rank 0."""
    import torch.distributed as dist

    dist.destroy_process_group()
    os.environ.update(LAUNCHED)
    found = run_on_topology("tests.harness.test_pool_start:where", ("b",), axes=[("data", 1)])
    return found, os.getpid(), not dist.is_initialized()


@pytest.mark.full  # tests/launch/test_workers.py has the failures of local ranks
def test_the_failure_of_a_new_rank_names_it():
    with pytest.raises(
        RankError, match=facts_pattern("rank 1", "2 failed", "code 1", "ValueError")
    ):
        run_on_topology(fails_on_rank_1, axes=[("data", 2)])


@pytest.mark.parametrize(
    ("axes", "procs", "text"),
    [
        ([("data", 2), ("pipe", 2)], 6, "data=2 x pipe=2 is 4 ranks, but the world has 6"),
        ([("data", None), ("pipe", 4)], 6, "does not divide the 6 ranks"),
        (
            [("data", None)],
            None,
            "size of data is left open, .*; give --procs, or every size in --axes",
        ),
        ([("data", 2)], 0, "of processes has size 0"),
        ([("data", 0)], None, "axis data has size 0"),
    ],
)
def test_axes_that_cannot_be_are_refused_before_a_process_starts(axes, procs, text, monkeypatch):
    monkeypatch.setattr("torchdistpackage.harness.pool.run_local", None)
    with pytest.raises(TopologyError, match=text):
        run_on_topology(where, ("c",), axes=axes, procs=procs)


def test_a_launcher_is_not_overruled():
    here = detect(LAUNCHED)
    assert num_ranks([("data", None)], None, here) == num_ranks([("data", None)], 1, here) == 1
    with pytest.raises(TopologyError, match="4 processes are asked for, but torchrun has started"):
        num_ranks([("data", None)], 4, here)
