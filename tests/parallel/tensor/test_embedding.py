"""Embeddings cut by vocabulary or by features equal a table look-up, whatever the shares are."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.each import each
from tests.parallel.tensor.vocabularies import VOCABULARIES
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.errors import DataError, LayoutError
from torchdistpackage.layout.derive import blocks
from torchdistpackage.layout.mark import collect
from torchdistpackage.layout.partition import even_sizes
from torchdistpackage.parallel.tensor.embedding import (
    FeatureParallelEmbedding,
    VocabParallelEmbedding,
)
from torchdistpackage.parallel.tensor.init import initialize
from torchdistpackage.topology.mesh import Mesh

S, B, DIM = 12, 3, 5


def check_embedding(world, vocab: int, sequence_parallel: bool) -> None:
    tpc.setup_process_groups(list(world))
    mesh, group = tpc.topology.dense, tpc.get_group("tensor")
    common = {"dtype": torch.float64, "sequence_parallel": sequence_parallel}
    layer = VocabParallelEmbedding(vocab, DIM, **common)
    whole = VocabParallelEmbedding(vocab, DIM, group=tpc.groups.of([tpc.rank]), **common)
    layouts = collect(layer)
    initialize(layer, layouts, mesh, tpc.rank, 3)
    initialize(whole, layouts, Mesh(()), 0, 3)

    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(vocab, (S, B), generator=draw)
    factor = torch.randn(S, B, DIM, dtype=torch.float64, generator=draw)
    expected = F.embedding(ids, whole.weight)
    (expected * factor).sum().backward()

    rows = slice(0, S)
    if sequence_parallel:
        rows = slice(S // group.size() * group.rank(), S // group.size() * (group.rank() + 1))
    out = layer(ids)
    (out * factor[rows]).sum().backward()
    assert torch.equal(out, expected[rows])
    assert not layouts["weight"].unreduced
    for at, local in blocks(layouts["weight"], mesh, tpc.rank):
        torch.testing.assert_close(layer.weight.grad[local], whole.weight.grad[at])


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sequence"])
@pytest.mark.parametrize(
    ("world", "vocab"),
    VOCABULARIES,
    ids=str,
)
def test_the_sum_over_ranks_is_the_row(ranks, world, vocab, sequence_parallel):
    ranks(Mesh(world).size).run(check_embedding, world, vocab, sequence_parallel)


def refuse_ids() -> None:
    layer = VocabParallelEmbedding(10, 3)
    for bad in (10, -1):
        with pytest.raises(DataError, match=rf"ids of shape \(2,\).*{bad}.* 0 to 9"):
            layer(torch.tensor([0, bad]))
    assert layer(torch.empty(0, dtype=torch.int64)).shape == (0, 3)


@pytest.mark.parametrize("size", [1, 2])
def test_an_id_outside_the_vocabulary_is_no_zero_vector(ranks, size):
    ranks(size).run(refuse_ids)


OPTIONS = {
    "plain": {},
    "padding": {"padding_idx": 3},
    "padding from the end": {"padding_idx": -2},
    "norm": {"max_norm": 0.05},
    "largest": {"max_norm": 0.02, "norm_type": torch.inf, "padding_idx": 6},
    "frequency": {"scale_grad_by_freq": True, "padding_idx": 0},
    "sparse": {"sparse": True, "max_norm": 0.05, "norm_type": 1.0, "padding_idx": 1},
}
VOCAB, WIDTH, ROWS = 9, 11, 13
"""Of which no number of ranks divides any."""


def check_options(world, kind, option: str, sequence_parallel: bool) -> None:
    """Two backwards of `nn.Embedding` in one process: results, table, gradients, first weights."""
    tpc.setup_process_groups(list(world))
    mesh, group, options = tpc.topology.dense, tpc.get_group("tensor"), OPTIONS[option]
    common = {"dtype": torch.float64, **options}
    layer = kind(VOCAB, WIDTH, sequence_parallel=sequence_parallel, **common)
    whole = kind(VOCAB, WIDTH, group=tpc.groups.of([tpc.rank]), **common)
    for net, of, rank in ((layer, mesh, tpc.rank), (whole, Mesh(()), 0)):
        initialize(net, collect(layer), of, rank, 3)
    plain = nn.Embedding(VOCAB, WIDTH, _weight=whole.weight.detach().clone(), **options)
    assert torch.equal(layer.to_full()["weight"], plain.weight)
    if (padding := plain.padding_idx) is not None:
        assert not plain.weight[padding].any()
        layer.weight.data += 0.1  # so that a gradient of that row would show
        plain.weight.data += 0.1

    sizes = even_sizes(ROWS, group.size()) if sequence_parallel else None
    rows = slice(0, ROWS)
    if sizes is not None:
        rows = slice(sum(sizes[: group.rank()]), sum(sizes[: group.rank() + 1]))
    draw = torch.Generator().manual_seed(1)
    for _ in range(2):
        ids = torch.randint(VOCAB, (ROWS, B), generator=draw)
        factor = torch.randn(ROWS, B, WIDTH, dtype=torch.float64, generator=draw)
        expected, out = plain(ids), layer(ids, sizes)
        (expected * factor).sum().backward()
        (out * factor[rows]).sum().backward()
        torch.testing.assert_close(out, expected[rows], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(layer.to_full()["weight"], plain.weight.detach(), rtol=1e-12, atol=0)
    assert layer.weight.grad.is_sparse is (plain.sparse and layer.weight.numel() > 0)
    found, wanted = layer.weight.grad, plain.weight.grad
    if plain.sparse:
        found, wanted = found.to_dense(), wanted.to_dense()
    for at, local in blocks(collect(layer)["weight"], mesh, tpc.rank):
        torch.testing.assert_close(found[local], wanted[at], rtol=1e-12, atol=1e-12)


KINDS = (VocabParallelEmbedding, FeatureParallelEmbedding)
EVERY = [*itertools.product(KINDS, OPTIONS, (False, True))]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("world", "chosen"),
    [
        # each kind has every option, with and without sequence parallelism in turns
        pytest.param((("tensor", 3),), EVERY[::4] + EVERY[3::4], id="in turns"),
        ((("data", 2), ("tensor", 2)), EVERY),
        ((("tensor", 3),), EVERY),
        ((("tensor", 4),), EVERY),
        ((("tensor", 1),), EVERY),
    ],
    ids=lambda value: str(value) if isinstance(value, tuple) else "all",
)
def test_every_option_of_torchs_embedding(ranks, world, chosen):
    ranks(Mesh(world).size).run(each, check_options, [(world, *case) for case in chosen])


def features_that_stay_cut() -> None:
    layer = FeatureParallelEmbedding(5, 6, gather_output=False)
    ids = torch.tensor([[0, 4], [2, 2]])
    rank = layer.group.rank()
    whole = layer.to_full()["weight"]
    torch.testing.assert_close(layer(ids), whole[ids][..., 3 * rank : 3 * rank + 3])
    with pytest.raises(LayoutError, match=r"(?s)2 problems.*dim has 1 elements.*leave gather_out"):
        FeatureParallelEmbedding(5, 1, gather_output=False, sequence_parallel=True)
    with pytest.raises(LayoutError, match=r"padding_idx 5 .* vocabulary of 5; use -5 to 4"):
        VocabParallelEmbedding(5, 2, padding_idx=5)
    with pytest.raises(DataError, match="0 to 4"):
        layer(torch.tensor([5]))


def test_features_may_stay_cut_and_mistakes_are_named(ranks):
    ranks(2).run(features_that_stay_cut)
