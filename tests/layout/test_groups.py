"""Every rank gets through its groups, where each waits for all of its members and nobody else."""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from torchdistpackage.config.load import load
from torchdistpackage.layout.derive import Creation, creations, gradient_ranks, replica_ranks
from torchdistpackage.layout.layout import Layout
from torchdistpackage.models.gpt_layout import GPTShape, layouts, pieces
from torchdistpackage.plan.run_plan import Plan, local_procs, make_plan
from torchdistpackage.topology.mesh import Topology, topology

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
AXES = ("data", "pipe", "context", "tensor")
MAX_RANKS = 16
Lists = list[tuple[int, ...]]


def stuck(orders: Sequence[Lists]) -> dict[int, tuple[int, ...]]:
    """Rank -> the group that it waits in for ever, where members alone make a group."""
    at = [0] * len(orders)

    def head(rank: int) -> tuple[int, ...] | None:
        return orders[rank][at[rank]] if at[rank] < len(orders[rank]) else None

    ready = list(range(len(orders)))
    while ready:
        group = head(ready.pop())
        if group is not None and all(head(member) == group for member in group):
            for member in group:
                at[member] += 1
            ready += group
    return {rank: group for rank in range(len(orders)) if (group := head(rank)) is not None}


def wrong_splits(orders: Sequence[Lists]) -> list[tuple[int, ...]]:
    """Groups that get other members, or none, where each is split off from everybody.

    The k-th split of all ranks is one collective; those that name one group get it.
    """
    wrong: list[tuple[int, ...]] = []
    for turn in itertools.zip_longest(*orders):
        for group in dict.fromkeys(turn):
            came = tuple(rank for rank, named in enumerate(turn) if named == group)
            if group is not None and (came != group or None in turn):
                wrong.append(group)
    return wrong


def orders_of(
    topo: Topology, held: Sequence[Sequence[Layout]], num_data: int | None = None
) -> list[Lists]:
    """All groups of all ranks; held: layouts by index along pipe. num_data: data ranks that shard
    sums."""
    found: list[Lists] = []
    for rank in range(topo.world_size):
        mine = held[topo.dense.coord(rank).get("pipe", 0)]
        made = creations(topo, rank, sums=mine, copies=mine, num_data=num_data)
        first = creations(topo, rank, sums=mine, num_data=num_data)
        assert [one.ranks for one in made][: len(first)] == [one.ranks for one in first]
        found.append([one.ranks for one in made])
    return found


def held_by_stage(whole: Sequence[Layout], num_stages: int) -> list[list[Layout]]:
    """One of each kind is enough: the others want the same groups."""
    kinds = {(x.split_axes, x.unreduced, x.stages, x.view): x for x in whole}
    return [
        [x for x in kinds.values() if not x.stages or stage in x.stages]
        for stage in range(num_stages)
    ]


def orders_of_plan(plan: Plan) -> list[Lists]:
    num_stages = plan.topology.dense.axis_size("pipe")
    return orders_of(plan.topology, held_by_stage(list(plan.layouts.values()), num_stages))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_no_rank_of_a_config_waits_for_ever(path: Path):
    sizes = {local_procs(load(path)), 4, 8, MAX_RANKS}
    worlds = [n for n in sorted(sizes) if n % load(path).parallel.model_size == 0]
    for world in worlds:
        changes = ["parallel.data=auto", "data.global_batch=1024"]
        orders = orders_of_plan(make_plan(load(path, changes, world), world))
        assert stuck(orders) == {} and all(map(len, orders))


def meshes(num_ranks: int) -> Iterator[tuple[tuple[str, int], ...]]:
    """All of up to so many ranks, each in one of three orders of its axes, which take turns."""
    orders = itertools.cycle(((0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2)))
    for sizes in itertools.product(range(1, num_ranks + 1), repeat=4):
        if sizes[0] * sizes[1] * sizes[2] * sizes[3] <= num_ranks:
            yield tuple((AXES[i], sizes[i]) for i in next(orders))


@pytest.mark.few(1)
@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.full)])
@pytest.mark.parametrize("num_ranks", [8, pytest.param(MAX_RANKS, marks=pytest.mark.full)])
def test_no_rank_of_any_layout_waits_for_ever(num_ranks: int, tied: bool, sequence_parallel: bool):
    number = 0
    for axes in meshes(num_ranks):
        sizes = dict(axes)
        shape = GPTShape(16, 64, 16, 64, 64, tied=tied, sequence_parallel=sequence_parallel)
        per_stage = -(-len(pieces(shape)) // sizes["pipe"])
        stage_of = [at // per_stage for at in range(len(pieces(shape)))]
        whole = list(layouts(shape, stage_of).values())
        for expert in (n for n in range(1, sizes["data"] + 1) if sizes["data"] % n == 0):
            topo = topology(axes, sizes["data"] * topo_model(sizes), expert=expert)
            experts = [
                Layout("expert", (8, 8), (("expert",), ()), view="expert", stages=(stage,))
                for stage in range(sizes["pipe"])
            ]
            held = held_by_stage([*whole, *experts], sizes["pipe"])
            # ZeRO over all data ranks, and over the fewest neighbours that experts allow
            for num_data in {None, next((n for n in (2, 3) if expert % n == 0), expert)}:
                if num_data is None or sizes["data"] % num_data == 0:
                    assert stuck(orders_of(topo, held, num_data)) == {}, (axes, expert, num_data)
            number += 1
    assert number > {8: 80, MAX_RANKS: 300}[num_ranks]


def topo_model(sizes: dict[str, int]) -> int:
    return sizes["pipe"] * sizes["context"] * sizes["tensor"]


def tied_pipeline(pipe: int, **sizes: int) -> list[Lists]:
    axes = [("data", sizes.get("data", 1)), ("pipe", pipe), ("tensor", sizes.get("tensor", 1))]
    world = pipe * sizes.get("data", 1) * sizes.get("tensor", 1)
    shape = GPTShape(pipe, 8, 2, 8, 8, sequence_parallel="tensor" in sizes)
    stage_of = [min(at // 2, pipe - 1) for at in range(len(pieces(shape)))]
    return orders_of(
        topology(axes, world), held_by_stage([*layouts(shape, stage_of).values()], pipe)
    )


def test_the_same_order_fails_where_groups_are_split_off_from_everybody():
    """Which is what torch does while the default group is bound to a device."""
    of_four = tied_pipeline(4, data=2)
    assert stuck(of_four) == {}
    assert (0, 3, 4, 7) in wrong_splits(of_four)
    assert (0, 2, 4, 6) in wrong_splits(tied_pipeline(2, data=2, tensor=2))
    assert wrong_splits([[(0, 1)], [(0, 1)], [(2, 3)], [(2, 3)]]) == []


def test_another_order_of_one_rank_is_a_circle():
    first, *rest = [(0, 1), (0, 2)], [(1, 2), (0, 1)], [(0, 2), (1, 2)]
    assert stuck([first, *rest]) == {0: (0, 1), 1: (1, 2), 2: (0, 2)}
    assert stuck([sorted(order) for order in (first, *rest)]) == {}


def test_what_is_made_connects_but_for_the_group_of_a_whole_model():
    topo = topology([("data", 2), ("pipe", 4), ("tensor", 2)], 16)
    assert creations(topo, 3) == (
        Creation(tuple(range(16))),
        Creation((3, 11)),
        Creation((1, 3, 5, 7), neighbours=True),
        Creation((2, 3)),
        Creation(tuple(range(8)), connects=False),
    )
    # a gradient is summed over it: then it is used in each step
    summed = Layout("norm", (4,), unreduced=("pipe", "tensor"))
    made = creations(topo, 3, sums=[Layout("rows", (4,), (("data",),)), summed])
    assert Creation(tuple(range(8)), connects=False) in made
    whole = Layout("cut", (4,), (("data",),), unreduced=("pipe", "tensor"))
    assert Creation(tuple(range(8))) in creations(topo, 3, sums=[whole])


def test_a_list_that_several_want_is_made_once_where_the_first_wants_it():
    topo = topology([("data", 2), ("pipe", 2)], 4)
    held = [Layout("whole", (4,), stages=(0,)), Layout("tied", (4,), stages=(0, 1))]
    made = [one.ranks for one in creations(topo, 1, sums=held[1:], copies=held)]
    assert made == [(0, 1, 2, 3), (1, 3), (0, 1)]
    assert gradient_ranks(held[1], topo.dense, 1) == replica_ranks(held[1], topo.dense, 1)
    assert creations(topo, 1)[-1] == Creation((0, 1), neighbours=True), "it is the model's, too"
