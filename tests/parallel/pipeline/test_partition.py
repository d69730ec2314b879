"""Pieces, what they cost, and which of them are mine."""

import random
from itertools import chain as joined
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.tells import facts_pattern
from torchdistpackage.comm import primitives
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.errors import ScheduleError
from torchdistpackage.parallel.pipeline.partition import layer_costs
from torchdistpackage.parallel.pipeline.partition.layer_costs import measure, measure_link
from torchdistpackage.parallel.pipeline.partition.policies import (
    flat_and_partition,
    partition_balanced,
    partition_by_time,
    partition_uniform,
)
from torchdistpackage.parallel.pipeline.partition.sequential import (
    chunks_of,
    flatten_model,
    flatten_sequence,
    halves,
)
from torchdistpackage.topology.mesh import topology


class Slow(nn.Module):
    """Takes that many seconds of a clock that only such modules move."""

    now_s = 0.0

    def __init__(self, seconds: float):
        super().__init__()
        self.seconds, self.scale = seconds, nn.Parameter(torch.ones(()))

    def forward(self, x):
        Slow.now_s += self.seconds
        return x * self.scale


def test_measuring_finds_what_is_slow(monkeypatch):
    monkeypatch.setattr(layer_costs, "clock_of", lambda _: lambda: Slow.now_s)
    chain = [Slow(1.0), nn.Linear(2, 2), Slow(3.0)]
    assert [cost.forward_s for cost in measure(chain, torch.ones(2))] == [1.0, 0.0, 3.0]


def test_measuring_finds_what_is_kept():
    dim, rows = 64, 8
    chain = [nn.Embedding(10, dim), nn.Linear(dim, dim), lambda x: x * 2]
    costs = measure(chain, torch.arange(rows) % 10)
    one = rows * dim * 4
    assert [(c.parameter_bytes, c.activation_bytes, c.output_bytes) for c in costs] == [
        (10 * dim * 4, rows * 8, one),  # of ids: int64
        ((dim + 1) * dim * 4, one, one),
        (0, 0, one),
    ]
    assert costs[0].input_s == 0.0 and costs[0].backward_s > 0.0  # ids ask for no gradient
    assert costs[1].input_s > 0.0
    assert costs[2].input_s == costs[2].backward_s  # no weights: all of it is the input's


def test_measuring_leaves_no_trace():
    torch.manual_seed(0)
    chain = [nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.ReLU(inplace=True)]
    fired = []
    chain[0].weight.register_post_accumulate_grad_hook(lambda _: fired.append(1))
    before, state = [b.clone() for b in chain[1].buffers()], torch.get_rng_state()
    measure(chain, torch.ones(8, 4))
    assert all(torch.equal(a, b) for a, b in zip(before, chain[1].buffers(), strict=True))
    assert torch.equal(state, torch.get_rng_state())
    assert fired == [] and chain[0].weight.grad is None


def cut_by_measured_time() -> None:
    """Ranks see different times and cut alike: what is slow for most of them is slow."""
    rank, p = dist.get_rank(), dist.get_world_size()
    tpc.setup_process_groups([("pipe", p)])
    slow = {0: 0, 1: 0, 2: 3}[rank]
    chain = [Slow(9.0 if i == slow else 1.0) for i in range(6)]
    patch = pytest.MonkeyPatch()
    patch.setattr(layer_costs, "clock_of", lambda _: lambda: Slow.now_s)
    for whole in (chain, nn.Sequential(*chain)):
        mine = partition_by_time(whole, torch.ones(2), rounds=1)
        spans = [None] * p
        dist.all_gather_object(spans, [chain.index(piece) for piece in mine])
        assert [*joined(*spans)] == list(range(6))
        assert spans[0] == [0]
    loop = partition_by_time(chain, torch.ones(2), placement=[0, 1, 2, 0, 1, 2], rounds=1)
    assert [len(stage) for stage in loop] == [1, 1]
    named = flat_and_partition([chain], 1, "time", microbatch=torch.ones(2), rounds=1)
    assert (len(named) == 1) == (rank == 0)
    patch.undo()


@pytest.mark.late_in_full
def test_ranks_that_measure_differently_cut_alike(ranks):
    ranks(3).run(cut_by_measured_time)


def a_link_of_each_kind() -> None:
    p = dist.get_world_size()
    tpc.setup_process_groups([("pipe", p)])
    rates = primitives.gather_objects(measure_link(tpc.get_group("pipe")), dist.group.WORLD)
    assert len(set(rates)) == 1
    if p == 1:
        assert rates == [float("inf")]
        return
    assert 1e6 < rates[0] < 1e12
    # the middle is the fastest place, and the widest: over a slow link it is left alone
    widths = [64, 64, 64, 4096, 64, 64, 64]
    chain = [nn.Linear(a, b) for a, b in pairwise(widths)]
    for bytes_per_s, wide in ((1e15, True), (1e4, False)):
        spans = [None] * p
        mine = partition_by_time(chain, torch.ones(8, 64), bytes_per_s=bytes_per_s)
        dist.all_gather_object(spans, [chain.index(piece) for piece in mine])
        assert (spans[0][-1] == 2) == wide


@pytest.mark.late_in_full
def test_the_link_is_measured_and_weighs_on_the_cut(ranks):
    ranks(1).run(a_link_of_each_kind)
    ranks(2).run(a_link_of_each_kind)


class Block(nn.Module):
    """A pre-norm block; its "attention" is a layer like any other here."""

    def __init__(self, dim: int):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(dim), nn.Linear(dim, dim)
        self.ln_2, self.mlp = nn.LayerNorm(dim), nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


def test_a_block_opens_into_attention_and_mlp():
    """Three blocks over two stages: whole ones cannot be balanced, halves can."""
    torch.manual_seed(0)
    blocks = [Block(8) for _ in range(3)]
    pieces = [half for b in blocks for half in halves(b, ("ln_1", "attn"), ("ln_2", "mlp"))]
    names = [name for piece in pieces[:2] for name, _ in piece.named_parameters()]
    assert names == [name for name, _ in blocks[0].named_parameters()]
    x = torch.randn(2, 4, 8)
    assert torch.equal(nn.Sequential(*pieces)(x), nn.Sequential(*blocks)(x))
    assert [len(stage) for stage in of_each_rank(2, partition_uniform, pieces)] == [3, 3]
    with pytest.raises(ScheduleError, match=facts_pattern("'norm3'", "ln_1")):
        halves(blocks[0], ("norm3",))


def of_each_rank(p: int, policy, *args, **options) -> list:
    found = []
    for rank in range(p):
        with tpc.using(topology([("pipe", p)], p), rank):
            found.append(policy(*args, **options))
    return found


def test_embedding_and_head_are_weighted():
    chain = [nn.Embedding(1000, 4), *(nn.Linear(4, 4, bias=False) for _ in range(7))]
    assert [len(s) for s in of_each_rank(2, partition_uniform, chain)] == [4, 4]
    found = of_each_rank(2, partition_uniform, chain, embedding=0.0, head=4.0)
    assert [len(s) for s in found] == [6, 2]
    assert [len(s) for s in of_each_rank(2, partition_balanced, chain)] == [1, 7]
    found = of_each_rank(2, partition_balanced, chain, weights={nn.Embedding: 0.0})
    assert [len(s) for s in found] in ([4, 4], [5, 3])


def test_an_uneven_number_of_pieces_is_cut_as_by_the_earlier_package():
    """There all that is left over goes to the last stage; one piece is the same cut."""
    draw = random.Random(0)
    for _ in range(60):
        p, short, over = draw.randint(1, 8), draw.randint(1, 9), draw.randint(0, 1)
        over = min(over, p - 1)
        extra = draw.randint(0, min(2, short))
        chain = [object() for _ in range(p * short + over - extra)]
        edges = [stage * short for stage in range(p)] + [len(chain)]
        earlier = [chain[a:b] for a, b in pairwise(edges)]
        assert of_each_rank(p, partition_uniform, chain, extra) == earlier
    spread = of_each_rank(4, partition_uniform, list(range(7)))
    assert [len(s) for s in spread] == [1, 2, 2, 2], "the earlier one: 1, 1, 1, 4"


def test_the_earlier_example_of_five_modules_has_weights_on_both_stages():
    whole = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.ReLU())
    stages = of_each_rank(2, partition_uniform, whole)
    assert [len(s) for s in stages] == [2, 3]
    assert all(list(s.parameters()) for s in stages)
    x = torch.randn(3, 4)
    assert torch.equal(stages[1](stages[0](x)), whole(x)), "a stage of a Sequential can be called"


class Named(nn.Sequential):
    """Whose constructor takes something else than layers."""

    def __init__(self, width: int):
        relu = nn.ReLU()  # in two places
        super().__init__(nn.Linear(width, width), relu, nn.Linear(width, width), relu)


@pytest.mark.parametrize(
    "policy", [partition_uniform, lambda chain, **o: partition_balanced(chain, None, **o)]
)
def test_a_part_of_a_container_is_a_container(policy):
    whole = Named(2)
    x = torch.ones(1, 2)
    first, last = of_each_rank(2, policy, whole)
    assert type(first) is type(last) is nn.Sequential and torch.equal(last(first(x)), whole(x))
    named = [name for part in (first, last) for name, _ in part.named_parameters()]
    assert named == list(whole.state_dict()), "checkpoints of a stage keep the names"
    of_list = of_each_rank(2, policy, nn.ModuleList(whole))
    assert [type(part) for part in of_list] == [nn.ModuleList] * 2
    assert [m for part in of_list for m in part] == list(whole)
    chunks = of_each_rank(2, policy, whole, placement=[0, 1, 0, 1])
    assert [[type(part) for part in parts] for parts in chunks] == [[nn.Sequential] * 2] * 2
    assert [type(part) for part in of_each_rank(2, policy, list(whole))] == [list, list]


def test_ranks_with_several_stages_are_balanced_by_rank():
    """A zigzag gives the last stages to the first rank: a heavy head goes with few pieces."""
    chain = [nn.Linear(1, n, bias=False) for n in (1, 1, 1, 1, 1, 1, 1, 5)]
    found = of_each_rank(2, partition_balanced, chain, placement=[0, 1, 1, 0])
    weights = [[sum(p.weight.numel() for p in stage) for stage in rank] for rank in found]
    assert [sum(w) for w in weights] == [6, 6]
    assert [len(w) for w in weights] == [2, 2]


def test_lists_in_lists_are_opened_and_others_refused():
    relu, linear = nn.ReLU(), nn.Linear(1, 1)
    nested = [[relu, [linear]], nn.ModuleList([relu])]
    assert flatten_sequence(nested, 2) == [relu, linear, relu]
    with pytest.raises(ScheduleError, match="piece 1 of the chain is a list, which cannot be call"):
        flatten_sequence(nested, 1)
    with pytest.raises(ScheduleError, match="piece 0 of the chain is a int"):
        flatten_model(nn.Module(), [3])


def test_chunks_of_a_chain_keep_names_and_say_who_holds_what():
    torch.manual_seed(0)
    whole = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(4)))
    whole[3].weight = whole[0].weight
    placement = [0, 1, 1, 0]
    chunks, layouts = chunks_of(whole, placement, 0)
    assert list(chunks) == [0, 3]
    held = nn.ModuleDict({str(stage): chunk for stage, chunk in chunks.items()})
    assert layouts.keys() == dict(held.named_parameters()).keys() == {"0.0.weight"}
    assert layouts["0.0.weight"].name == "0.weight" and layouts["0.0.weight"].stages == (0,)
    chunks, layouts = chunks_of(whole, placement, 1)
    assert [layout.name for layout in layouts.values()] == ["1.weight", "2.weight"]
    assert {layout.stages for layout in layouts.values()} == {(1,)}
    _, layouts = chunks_of(whole, [0, 1, 2, 3], 3)
    assert layouts["3.3.weight"].stages == (0, 3)
    chunks, _ = chunks_of(whole, [0, 1], 0, cut=[range(1), range(1, 4)])
    assert [name for name, _ in chunks[0].named_children()] == ["0"]
    for wrong in ([range(1), range(1, 3)], [range(1), range(1, 2), range(2, 4)]):
        with pytest.raises(ScheduleError, match=facts_pattern("4 children", "2 stages")):
            chunks_of(whole, [0, 1], 0, cut=wrong)
    with pytest.raises(ScheduleError, match=facts_pattern("4 children", "5 pipeline")):
        chunks_of(whole, [0, 1, 2, 3, 4], 0)
    with pytest.raises(ScheduleError, match="a Linear cannot be cut into 2 pipeline stages"):
        chunks_of(whole[0], [0, 1], 0)
