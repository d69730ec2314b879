"""Initial weights: one seed, one model, on any number of ranks and in any precision."""

import pytest
import torch
from torch import nn

from torchdistpackage.comm.random import seed_from
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.errors import LayoutError
from torchdistpackage.layout.derive import blocks
from torchdistpackage.layout.mark import collect
from torchdistpackage.parallel.tensor.embedding import VocabParallelEmbedding
from torchdistpackage.parallel.tensor.init import ONES, Initial, initialize
from torchdistpackage.parallel.tensor.linear import ColumnLinear, ParallelMlp, RowLinear
from torchdistpackage.parallel.tensor.norm import LayerNorm
from torchdistpackage.topology.mesh import Mesh


class Net(nn.Module):
    def __init__(self, **common):
        super().__init__()
        self.embed = VocabParallelEmbedding(13, 8, **common)
        self.qkv = ColumnLinear(8, 24, parts=(8, 8, 8), initial=Initial("uniform", 0.3), **common)
        self.norm = LayerNorm(8, dtype=common.get("dtype"))
        self.mlp = ParallelMlp(8, 12, down_initial=Initial("normal", 0.1), **common)
        self.plain = nn.Linear(8, 2, dtype=common.get("dtype"))


def full_tensors(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """What the docstring promises, written out: a float32 stream for each name."""
    stds = {"embed.weight": 0.02, "mlp.up.weight": 0.02, "mlp.down.weight": 0.1}
    shapes = {"embed.weight": (13, 8), "mlp.up.weight": (12, 8), "mlp.down.weight": (8, 12)}
    streams = {n: torch.Generator().manual_seed(seed_from(5, n)) for n in (*stds, "qkv.weight")}
    full = {n: torch.empty(shapes[n]).normal_(0, stds[n], generator=streams[n]) for n in stds}
    bound = 0.3 * 3**0.5
    qkv = torch.empty(24, 8).uniform_(-bound, bound, generator=streams["qkv.weight"])
    full |= {"qkv.weight": qkv, "qkv.bias": torch.zeros(24), "mlp.up.bias": torch.zeros(12)}
    full |= {"norm.weight": torch.ones(8), "norm.bias": torch.zeros(8)}
    full |= {"mlp.down.bias": torch.zeros(8)}
    return {name: tensor.to(dtype) for name, tensor in full.items()}


def check_slices(world, dtype: torch.dtype) -> None:
    tpc.setup_process_groups(list(world))
    mesh = tpc.topology.dense
    torch.manual_seed(tpc.rank)  # what a rank drew before does not matter
    net = Net(dtype=dtype)
    layouts = collect(net)
    before = net.plain.weight.clone()
    initialize(net, layouts, mesh, tpc.rank, 5)
    assert torch.equal(net.plain.weight, before), "nobody declared it"
    full = full_tensors(dtype)
    parameters = dict(net.named_parameters())
    assert parameters.keys() == full.keys() | {"plain.weight", "plain.bias"}
    for name, whole in full.items():
        for at, local in blocks(layouts[name], mesh, tpc.rank):
            assert torch.equal(parameters[name][local], whole[at]), name


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "world",
    [
        (("tensor", 1),),
        (("data", 2), ("tensor", 2)),
        (("tensor", 2), ("pipe", 2)),
        (("tensor", 4),),
    ],
    ids=str,
)
def test_each_rank_holds_its_slices_of_the_same_tensors(ranks, world, dtype):
    ranks(Mesh(world).size).run(check_slices, world, dtype)


def fresh_weights() -> tuple:
    """What the constructor alone gives: shards of one matrix, whole ones."""
    row = RowLinear(32, 8)
    assert row.bias.abs().max() == 0
    assert 0.01 < row.weight.std() < 0.03
    return row.weight.tolist(), torch.rand(()).item()


def test_a_layer_starts_with_different_shards_and_leaves_the_streams_alike(ranks):
    (one, after_one), (other, after_other) = ranks(2).run(fresh_weights)
    assert one != other
    assert after_one == after_other


def made_on_meta() -> None:
    tpc.setup_process_groups([("tensor", 2)])
    with torch.device("meta"):
        assert ColumnLinear(4, 4).weight.is_meta
    net = Net(device="meta").to_empty(device="cpu")
    initialize(net, collect(net), tpc.topology.dense, tpc.rank, 5)
    assert torch.equal(net.mlp.up.weight, full_tensors()["mlp.up.weight"].chunk(2)[tpc.rank])


def test_a_model_may_be_made_without_memory_first(ranks):
    ranks(2).run(made_on_meta)


def refuse_mistakes() -> None:
    tpc.setup_process_groups([("tensor", 2)])
    net = nn.ModuleDict({"up": ColumnLinear(4, 6)})
    layouts, mesh = collect(net), tpc.topology.dense
    with pytest.raises(LayoutError, match=r"up.weight has shape \(3, 4\) on rank 0, .* \(6, 4\)"):
        initialize(net, layouts, Mesh(()), 0, 5)
    with pytest.raises(LayoutError, match=r"down.weight: the module has no parameter"):
        initialize(net, layouts, mesh, tpc.rank, 5, {"down.weight": ONES})
    with pytest.raises(LayoutError, match=r"up.bias: the module has no layout"):
        initialize(net, {"up.weight": layouts["up.weight"]}, mesh, tpc.rank, 5)


def test_mistakes_are_named(ranks):
    ranks(2).run(refuse_mistakes)
