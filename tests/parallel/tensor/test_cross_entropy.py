"""The vocabulary-parallel loss and its gradient equal torch's cross entropy."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.parallel.tensor.vocabularies import VOCABULARIES
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.errors import DataError, LayoutError
from torchdistpackage.layout.derive import even_share
from torchdistpackage.parallel.tensor.cross_entropy import (
    linear_cross_entropy,
    vocab_parallel_cross_entropy,
)
from torchdistpackage.topology.mesh import Mesh

IGNORED = -100


def columns(x: Tensor, vocab: int) -> Tensor:
    """My columns, as a leaf."""
    group = tpc.get_group("tensor")
    start, width = even_share(vocab, group.size(), group.rank())
    return x[..., start : start + width].detach().clone().requires_grad_()


def sample(vocab: int, shape=(6, 4), dtype=torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(vocab)
    logits = 4 * torch.randn(*shape, vocab, dtype=torch.float64, generator=draw)
    target = torch.randint(vocab, shape, generator=draw)
    target[0, 0], target[0, 1], target[1, 1] = 0, vocab - 1, IGNORED
    return logits.to(dtype).requires_grad_(), target, torch.rand(shape, generator=draw)


def plain(logits: Tensor, target: Tensor) -> Tensor:
    loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
    return loss.view(target.shape)


def check_loss(world, vocab: int) -> None:
    tpc.setup_process_groups(list(world))
    logits, target, factor = sample(vocab)
    expected = plain(logits, target)
    (expected * factor).sum().backward()

    mine = columns(logits, vocab)
    loss = vocab_parallel_cross_entropy(mine, target, tpc.get_group("tensor"), vocab=vocab)
    (loss * factor).sum().backward(retain_graph=True)
    assert loss.dtype == torch.float64
    assert loss[1, 1] == 0
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(
        mine.grad, columns(logits.grad, vocab).detach(), rtol=1e-11, atol=1e-15
    )
    (loss * factor).sum().backward()  # the first one left what was saved alone
    torch.testing.assert_close(mine.grad, 2 * columns(logits.grad, vocab).detach())


@pytest.mark.parametrize(
    ("world", "vocab"),
    [*VOCABULARIES, ((("tensor", 4),), 2)],
    ids=str,
)
def test_loss_and_gradient_are_torchs(ranks, world, vocab):
    ranks(Mesh(world).size).run(check_loss, world, vocab)


def check_own_sizes(sizes: tuple[int, ...]) -> None:
    """Ranks that hold other columns than `even_sizes` gives them."""
    tpc.setup_process_groups([("tensor", len(sizes))])
    group, vocab = tpc.get_group("tensor"), sum(sizes)
    draw = torch.Generator().manual_seed(3)
    x, weight = (
        torch.randn(*n, 4, dtype=torch.float64, generator=draw) for n in ((2, 5), (vocab,))
    )
    target = torch.arange(10).view(2, 5) % vocab
    leaf = weight.clone().requires_grad_()
    expected = plain(x @ leaf.t(), target).sum()
    expected.backward()
    options = {"vocab": vocab, "sizes": sizes, "reduction": "sum"}
    mine, grad = (
        t.split(sizes)[group.rank()].clone().requires_grad_() for t in (weight, leaf.grad)
    )
    for loss in (
        vocab_parallel_cross_entropy(x @ mine.t(), target, group, **options),
        linear_cross_entropy(x, mine, target, group, **options),
    ):
        mine.grad = None
        loss.backward()
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
        torch.testing.assert_close(mine.grad, grad.detach(), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("sizes", [(1, 6), (3, 0, 4)])
def test_ranks_may_hold_as_many_columns_as_they_say(ranks, sizes):
    ranks(len(sizes)).run(check_own_sizes, sizes)


def check_low_precision(dtype: torch.dtype) -> None:
    tpc.setup_process_groups([("tensor", 2)])
    group = tpc.get_group("tensor")
    logits, target, _ = sample(64, dtype=dtype)
    expected = plain(logits.float(), target)
    expected.sum().backward()
    mine = columns(logits, 64)
    loss = vocab_parallel_cross_entropy(mine, target, group, vocab=64)
    loss.sum().backward()
    assert loss.dtype == torch.float32
    assert mine.grad.dtype == dtype
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(mine.grad, columns(logits.grad, 64).detach())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precisions_are_computed_in_float32(ranks, dtype):
    ranks(2).run(check_low_precision, dtype)


def check_extremes() -> None:
    tpc.setup_process_groups([("tensor", 2)])
    group = tpc.get_group("tensor")
    logits = torch.tensor([[1e4, -1e4, 0.0, 9e3], [-torch.inf, 0.0, 1.0, -torch.inf]])
    logits.requires_grad_()
    target = torch.tensor([3, 2])
    expected = F.cross_entropy(logits, target, reduction="none")
    expected.sum().backward()
    mine = columns(logits, 4)
    loss = vocab_parallel_cross_entropy(mine, target, group, vocab=4)
    loss.sum().backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(mine.grad, columns(logits.grad, 4).detach())
    skipped = vocab_parallel_cross_entropy(
        mine, torch.tensor([3, 0]), group, vocab=4, ignore_index=0
    )
    assert skipped[1] == 0


def test_large_and_masked_logits_do_not_overflow(ranks):
    ranks(2).run(check_extremes)


def refuse_mistakes() -> None:
    tpc.setup_process_groups([("tensor", 2)])
    group = tpc.get_group("tensor")
    with pytest.raises(LayoutError, match=r"holds 4 of 8 vocabulary columns.* must be \(3, 4\)"):
        vocab_parallel_cross_entropy(torch.ones(3, 8), torch.zeros(3).long(), group, vocab=8)
    with pytest.raises(LayoutError, match=r"targets \(2,\)"):
        vocab_parallel_cross_entropy(torch.ones(3, 4), torch.zeros(2).long(), group, vocab=8)
    with pytest.raises(DataError, match=r"targets .* from 0 to 8, .* 0 to 7"):
        vocab_parallel_cross_entropy(torch.ones(2, 4), torch.tensor([-100, 8]), group, vocab=8)


def test_mistakes_are_named(ranks):
    ranks(2).run(refuse_mistakes)


def refuse_options() -> None:
    tpc.setup_process_groups([("tensor", 2)])
    group = tpc.get_group("tensor")
    x, target = torch.ones(3, 4), torch.zeros(3).long()
    for options, text in (
        ({"label_smoothing": 1.5}, "label_smoothing=1.5"),
        ({"z_loss": -1.0}, "z_loss=-1.0"),
        ({"reduction": "max"}, "none, mean or sum"),
        ({"weight": torch.ones(4)}, r"shape \(4,\) for a vocabulary of 8"),
        ({"sizes": (3, 4)}, r"sizes=\(3, 4\) add up to 7, but the vocabulary has 8"),
        ({"sizes": (8,)}, r"sizes=\(8,\) for a group of 2"),
    ):
        with pytest.raises(LayoutError, match=text):
            vocab_parallel_cross_entropy(x, target, group, vocab=8, **options)
    with pytest.raises(LayoutError, match=r"weight must be \(4, 4\)"):
        linear_cross_entropy(x, torch.ones(8, 4), target, group, vocab=8)
    with pytest.raises(LayoutError, match="chunk_tokens is 0"):
        linear_cross_entropy(x, torch.ones(4, 4), target, group, vocab=8, chunk_tokens=0)


def test_options_out_of_range_are_refused(ranks):
    ranks(2).run(refuse_options)
