"""The vocabulary-parallel embedding equals a table look-up, whatever the ranks' shares are."""

import pytest
import torch
import torch.nn.functional as F

from torchdistpackage.comm.tpc import tpc
from torchdistpackage.errors import DataError
from torchdistpackage.layout.derive import blocks
from torchdistpackage.parallel.tensor.collect import collect
from torchdistpackage.parallel.tensor.embedding import VocabParallelEmbedding
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
    [
        ((("tensor", 1),), 7),
        ((("tensor", 2), ("data", 2)), 8),
        ((("tensor", 3),), 8),
        ((("tensor", 4),), 257),
        ((("tensor", 4),), 5),  # the last rank holds nothing
    ],
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
