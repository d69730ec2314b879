"""A comparison in somebody's own loop, with and without a topology."""

import time

import pytest
import torch
import torch.distributed as dist

from torchdistpackage.comm import primitives
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.errors import TopologyError
from torchdistpackage.harness.stragglers.compare import Comparison, Phases
from torchdistpackage.topology.mesh import Mesh


def own_loop(every: int, with_topology: bool) -> list[tuple[int, str]]:
    """Rank 1 needs 20 ms for its data; the others wait for it in the forward. (step, line)s."""
    world = dist.group.WORLD
    assert world is not None
    if with_topology:
        tpc.setup_process_groups([("data", 3)])
    phases = Phases()
    compare = Comparison(phases, every=every)
    said: list[tuple[int, str]] = []
    for step in range(1, 24):
        phases.begin(step)
        with phases("data"):
            time.sleep(0.02 if dist.get_rank() == 1 else 0)
        with phases("forward"):
            primitives.all_reduce(torch.zeros(1), world)
        phases.end()
        said += [(step, line) for line in compare(step)]
    return said


@pytest.mark.parametrize(
    ("every", "with_topology", "at"), [(10, False, 11), (10, True, 11), (3, False, 10)]
)
def test_the_slow_one_is_named_and_not_those_that_wait_for_it(ranks, every, with_topology, at):
    said, *others = ranks(3).run(own_loop, every, with_topology)
    assert others == [[], []]
    assert [step for step, _ in said] == [at]
    assert said[0][1].startswith("straggler: rank 1 (data 1) on ")
    assert ": data loading takes " in said[0][1]


@pytest.mark.parametrize(("size", "every"), [(1, 10), (3, 0)])
def test_alone_or_switched_off_nothing_is_said(ranks, size, every):
    assert ranks(size).run(own_loop, every, False) == [[]] * size


def other_mesh() -> str:
    with pytest.raises(TopologyError) as refused:
        Comparison(Phases(), mesh=Mesh((("data", 3),)))
    return str(refused.value)


def test_a_mesh_of_other_ranks_is_refused(ranks):
    for text in ranks(2).run(other_mesh):
        assert "of 2 ranks got a mesh of 3 (data=3)" in text
