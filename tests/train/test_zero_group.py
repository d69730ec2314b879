"""`parallel.zero_group` shards inside groups of data ranks, and trains as plain ZeRO does."""

import math

import pytest
import torch

from tests.train import parity
from tests.train.test_parity import overrides
from tests.train.test_train_state_elsewhere import first_half, second_half, whole
from torchdistpackage.errors import ConfigError
from torchdistpackage.layout.derive import data_ranks_of_node
from torchdistpackage.plan.run_plan import make_plan
from torchdistpackage.plan.traffic import between_nodes, traffic
from torchdistpackage.topology.mesh import topology

Outcome = tuple[parity.Held, list[float], list[int]]
BASE = [*overrides({"data": 4, "pipe": 1, "tensor": 2}, True), "train.accumulate=2"]
MIXTURE = ["model.moe.num_experts=4", "model.moe.top_k=2"]


def three_steps(run_keys: list[list[str]]) -> list[Outcome]:
    """Of each run (weights after three steps, losses and norms, elements that this rank updates).

    Ranks make several runs, so that they start once.
    """
    results: list[Outcome] = []
    for keys in run_keys:
        run = parity.trainer(keys)
        numbers: list[float] = []
        for step in (1, 2, 3):
            result = run.train_step(step).wait()
            numbers += [result.loss, result.grad_norm]
        numbers.append(run.evaluate())
        shards = getattr(run.optimizer, "shards", ())
        sizes = [sum(shard.tensor.numel() for shard in shards)]
        results.append((parity.held(run, "data"), numbers, sizes))
        run.close()
    return results


def expect_equal_runs(ranks, degrees: list[str], more: list[str], stages: tuple[int, ...]) -> None:
    """With groups of two data ranks: as plain ZeRO to 1e-12, and as one process to 1e-9.

    The order of sums is another: inside a group first, and then over the groups.
    """
    base = [*BASE, *more]
    size = math.prod(int(x.partition("=")[2]) for x in degrees if "expert" not in x)
    degrees = [f"parallel.{x}" for x in degrees]
    runs = [
        [*base, *degrees, f"parallel.zero={stage}", *group]
        for stage in stages
        for group in ([], ["parallel.zero_group=2"])
    ]
    truth = ranks(1).run(three_steps, [base])[0][0]
    results = ranks(size).run(three_steps, runs)
    for i in range(0, len(runs), 2):
        plain, grouped = ([mine[at] for mine in results] for at in (i, i + 1))
        for one, other in zip(plain, grouped, strict=True):
            assert other[1] == pytest.approx(one[1], rel=1e-12, abs=0)
            assert other[1] == pytest.approx(truth[1], rel=1e-9, abs=0)
        weights = parity.whole(held for held, _, _ in grouped)
        for name, weight in parity.whole(held for held, _, _ in plain).items():
            torch.testing.assert_close(weights[name], weight, rtol=1e-12, atol=1e-12)
        parity.expect_close([held for held, _, _ in grouped], [truth[0]])
        held, plainly = (sum(sizes[0] for _, _, sizes in x) for x in (grouped, plain))
        # with expert=4 each rank has experts of its own, in groups or not
        least = 1.3 if "expert=4" in degrees[-1] else 1.8
        assert held >= least * plainly, "twice as many ranks hold each shard"


@pytest.mark.parametrize(
    "stage", [pytest.param(1, marks=pytest.mark.full), pytest.param(2, marks=pytest.mark.full), 3]
)
def test_four_ranks_in_two_groups_train_as_one_process(ranks, stage):
    expect_equal_runs(ranks, ["data=4"], [], (stage,))


@pytest.mark.full
@pytest.mark.parametrize(
    ("degrees", "more"),
    [
        (["data=4", "tensor=2"], ["parallel.sequence_parallel=true"]),
        (["data=4", "pipe=2"], []),
        (["data=4", "context=2"], ["data.seq_len=16", "data.args={seq_len: 16, vocab: 257}"]),
        (["data=4", "expert=2"], MIXTURE),
        (["data=4", "expert=4"], MIXTURE),
        (["data=4"], ["optim.name=muon"]),
    ],
    ids=lambda x: " ".join(x),
)
def test_groups_beside_other_axes(ranks, degrees, more):
    expect_equal_runs(ranks, degrees, more, (1, 2, 3))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("data4-zero3-group2", "data2-zero1"),
        pytest.param("data4-zero1", "data4-zero3-group2", marks=pytest.mark.full),
        pytest.param("data4-zero3-group2", "data8-zero2-group4", marks=pytest.mark.full),
    ],
)
def test_a_save_goes_on_with_another_group(ranks, tmp_path, before, after):
    """Each element is written once, and every rank finds its shards in any other cut."""
    folder, again = tmp_path / "run", tmp_path / "again"
    sizes = {x: next(n for n in (2, 4, 8) if f"data{n}" in x) for x in (before, after)}
    ranks(sizes[before]).run(first_half, before, str(folder))
    ranks(sizes[after]).run(second_half, after, str(folder), str(again))
    old, new = whole(folder), whole(again)
    assert old.keys() == new.keys() and any(name.endswith("#exp_avg_sq") for name in old)
    for name, tensor in old.items():
        assert torch.equal(tensor, new[name]), name


def plan_of(world_size: int, *keys: str, per_node: int | None = None):
    return make_plan(parity.config([*BASE, *keys]), world_size, ranks_per_node=per_node)


def test_only_sums_of_shards_cross_nodes():
    """Two nodes of two: what crosses is the half of a rank's gradients, beside flags and numbers of
    the step; without groups it is all of them, and the gathers too."""
    keys = ("parallel.data=4", "parallel.zero=3", "train.accumulate=1")
    plain = plan_of(4, *keys)
    grouped = plan_of(4, *keys, "parallel.zero_group=node", per_node=2)
    assert grouped.zero_group == 2
    calls = traffic(grouped, 0)
    by_kind = {(x.operation, x.what, x.ranks): x.num_bytes for x in calls}
    scattered = by_kind["reduce_scatter", "gradients", (0, 1)]
    assert by_kind["all_reduce", "sums of shards", (0, 2)] == scattered / 2
    small = sum(x.num_bytes for x in calls if "used" in x.what or "numbers" in x.what)
    outside = between_nodes(calls, 2)
    assert scattered / 2 < outside < scattered / 2 + small
    assert between_nodes(traffic(plain, 0), 2) > 2 * outside
    assert between_nodes(calls, 4) == 0


def test_a_node_gives_as_many_data_ranks_as_fit_in_it():
    mesh = topology([("data", 8), ("context", 2), ("tensor", 2)], 32)
    assert [data_ranks_of_node(mesh, n) for n in (32, 16, 8, 4, 2)] == [8, 4, 2, 1, 0]
    inner = topology([("tensor", 2), ("data", 8)], 16)
    assert [data_ranks_of_node(inner, n) for n in (16, 8, 4, 6)] == [8, 8, 4, 2]
    experts = topology([("data", 12)], 12, expert=4)
    assert [data_ranks_of_node(experts, n) for n in (12, 6, 4)] == [12, 2, 4]
    large = topology([("data", 1024), ("tensor", 8)], 8192)
    assert data_ranks_of_node(large, 64) == 8


def test_a_node_without_two_data_ranks_is_refused_with_its_numbers():
    with pytest.raises(ConfigError, match=r"4 data ranks .* node of 2 ranks.* tensor=2"):
        plan_of(8, "parallel.tensor=2", "parallel.zero=1", "parallel.zero_group=node", per_node=2)
    assert plan_of(8, "parallel.tensor=2", "parallel.zero=1").zero_group is None
