"""Every option of the vocabulary-parallel losses equals torch's cross entropy in one process.

Over 1 to 4 ranks, vocabularies that do not divide and ranks without a column, a few rows at a time
or all at once; used twice, differentiated twice, under autocast.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchdistpackage.comm.tpc import tpc
from torchdistpackage.errors import LayoutError, NotAvailableError
from torchdistpackage.layout.derive import even_share
from torchdistpackage.parallel.tensor import loss_terms
from torchdistpackage.parallel.tensor.cross_entropy import (
    linear_cross_entropy,
    vocab_parallel_cross_entropy,
)

IGNORED = -100
SPLITS = [(2, 11), (1, 11), (4, 11), (3, 11), (4, 3)]
"""(ranks, vocabulary); of the last one the fourth rank holds nothing."""
by_split = pytest.mark.parametrize(("size", "vocab"), SPLITS)
TIGHT = {"rtol": 1e-11, "atol": 1e-14}
OPTIONS = [
    {},
    {"weight": True},
    {"label_smoothing": 0.3},
    {"weight": True, "label_smoothing": 0.1},
    {"z_loss": 0.2},
    {"weight": True, "label_smoothing": 0.2, "z_loss": 0.1, "ignore_index": 3},
]


def with_torch(logits: Tensor, target: Tensor, reduction: str, z_loss: float = 0, **options):
    """torch's own loss of (..., V), with the z-loss written out."""
    flat, targets = logits.flatten(0, -2), target.flatten()
    ignore = options.get("ignore_index", IGNORED)
    losses = F.cross_entropy(flat, targets, reduction="none", **options)
    kept = targets != ignore
    losses = losses + z_loss * flat.logsumexp(-1).square() * kept
    if reduction == "none":
        return losses.view(target.shape)
    if reduction == "sum":
        return losses.sum()
    weight = options.get("weight")
    factor = kept.double() if weight is None else weight[targets.clamp_min(0)] * kept
    mean = losses.sum() / factor.sum()
    if not z_loss:
        torch.testing.assert_close(mean, F.cross_entropy(flat, targets, **options))
    return mean


def begin(size: int, vocab: int):
    """My group, and where my columns are."""
    tpc.setup_process_groups([("tensor", size)])
    group = tpc.get_group("tensor")
    start, width = even_share(vocab, group.size(), group.rank())
    return group, slice(start, start + width)


def draw(shape: tuple[int, ...], vocab: int) -> tuple[Tensor, Tensor]:
    """Logits (*shape, vocab) and targets, of which some are ignored."""
    generator = torch.Generator().manual_seed(len(shape))
    logits = 3 * torch.randn(*shape, vocab, dtype=torch.float64, generator=generator)
    target = torch.randint(vocab, shape, generator=generator)
    target.view(-1)[0], target.view(-1)[-1] = IGNORED, vocab - 1
    return logits, target


def with_weights(chosen: dict, vocab: int) -> dict:
    """Class weights of which one counts nothing, where they are asked for."""
    weight = torch.linspace(0, 2, vocab, dtype=torch.float64)
    return {**chosen, "weight": weight} if "weight" in chosen else dict(chosen)


def few_rows(monkeypatch: pytest.MonkeyPatch, vocab: int) -> None:
    """Two rows at a time."""
    monkeypatch.setattr(loss_terms, "CACHED_BYTES", 2 * 8 * vocab)


def check_options(size: int, vocab: int) -> None:
    group, columns = begin(size, vocab)
    for shape in ((6, 4), (2, 3, 2), (7,)):
        whole, target = draw(shape, vocab)
        for chosen in OPTIONS:
            options = with_weights(chosen, vocab)
            if (ignore := options.get("ignore_index")) is not None:
                ignore = options["ignore_index"] = ignore % vocab
                target = target.masked_fill(target == IGNORED, ignore)
            for reduction in ("none", "mean", "sum"):
                logits = whole.clone().requires_grad_()
                expected = with_torch(logits, target, reduction, **options)
                mine = whole[..., columns].clone().requires_grad_()
                with pytest.MonkeyPatch.context() as patch:
                    if shape != (7,):
                        few_rows(patch, vocab)
                    loss = vocab_parallel_cross_entropy(
                        mine, target, group, vocab=vocab, reduction=reduction, **options
                    )
                    torch.testing.assert_close(loss, expected, **TIGHT)
                    factor = torch.linspace(1, 2, loss.numel(), dtype=torch.float64)
                    factor = factor.view(loss.shape)
                    (expected * factor).sum().backward()
                    (loss * factor).sum().backward()
                torch.testing.assert_close(mine.grad, logits.grad[..., columns], **TIGHT)


@pytest.mark.few(1)
@by_split
def test_every_option_is_torchs(ranks, size, vocab):
    ranks(size).run(check_options, size, vocab)


def check_fused(size: int, vocab: int) -> None:
    group, columns = begin(size, vocab)
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(4, 5, 6, dtype=torch.float64, generator=generator)
    weight = torch.randn(vocab, 6, dtype=torch.float64, generator=generator)
    target = torch.randint(vocab, (4, 5), generator=generator)
    for chosen in OPTIONS:
        options = with_weights(chosen, vocab)
        if "ignore_index" in options:
            options["ignore_index"] %= vocab
        else:
            target[0, 0] = IGNORED
        for reduction in ("mean", "sum"):
            whole_x, whole_weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
            targets = target.clamp_min(0) if "ignore_index" in options else target
            logits = whole_x @ whole_weight.t()
            expected = with_torch(logits, targets, reduction, **options)
            expected.backward()
            named = {k: v for k, v in options.items() if k != "weight"}
            for num_tokens in (3, 1000):
                mine_x, mine = x.clone().requires_grad_(), weight[columns].clone().requires_grad_()
                loss = linear_cross_entropy(
                    mine_x, mine, targets, group, vocab=vocab, reduction=reduction,
                    class_weight=options.get("weight"), chunk_tokens=num_tokens, **named,
                )  # fmt: skip
                loss.backward()
                torch.testing.assert_close(loss, expected, **TIGHT)
                torch.testing.assert_close(mine_x.grad, whole_x.grad, **TIGHT)
                torch.testing.assert_close(mine.grad, whole_weight.grad[columns], **TIGHT)


@pytest.mark.few(1)
@by_split
def test_the_fused_product_is_the_loss_of_the_logits(ranks, size, vocab):
    ranks(size).run(check_fused, size, vocab)


def check_double_use(size: int, vocab: int) -> None:
    """The same logits in two losses; a graph that is kept; a derivative of the gradient."""
    group, columns = begin(size, vocab)
    whole, target = draw((5, 3), vocab)
    other = target.roll(2, 0)
    logits = whole.clone().requires_grad_()
    expected = with_torch(logits, target, "mean") * 2 + with_torch(
        logits, other, "sum", label_smoothing=0.2, z_loss=0.3
    )
    expected.backward(retain_graph=True)

    mine = whole[..., columns].clone().requires_grad_()
    loss = 2 * vocab_parallel_cross_entropy(mine, target, group, vocab=vocab, reduction="mean")
    options = {"vocab": vocab, "label_smoothing": 0.2, "z_loss": 0.3, "reduction": "sum"}
    loss = loss + vocab_parallel_cross_entropy(mine, other, group, **options)
    torch.testing.assert_close(loss, expected, **TIGHT)
    loss.backward(retain_graph=True)
    torch.testing.assert_close(mine.grad, logits.grad[..., columns], **TIGHT)
    expected.backward()
    loss.backward()
    torch.testing.assert_close(mine.grad, logits.grad[..., columns], **TIGHT)

    x = torch.ones(3, 2, dtype=torch.float64, requires_grad=True)
    weight = torch.arange(2.0 * vocab).double().view(vocab, 2)[columns].requires_grad_()
    ids = torch.zeros(3).long()
    for inputs, call in (
        ((mine,), lambda: vocab_parallel_cross_entropy(mine, target, group, vocab=vocab)),
        ((x, weight), lambda: linear_cross_entropy(x, weight, ids, group, vocab=vocab)),
    ):
        first = torch.autograd.grad(call().sum(), inputs)
        again = torch.autograd.grad(call().sum(), inputs, create_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        with pytest.raises(NotAvailableError, match="linear_cross_entropy has no derivative"):
            sum(grad.square().sum() for grad in again).backward()

    changed = mine.detach().requires_grad_()
    scaled = changed * 2
    loss = vocab_parallel_cross_entropy(scaled, target, group, vocab=vocab).sum()
    scaled.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@by_split
def test_logits_are_used_twice_and_differentiated_once(ranks, size, vocab):
    ranks(size).run(check_double_use, size, vocab)


def check_autocast() -> None:
    group, columns = begin(2, 64)
    generator = torch.Generator().manual_seed(5)
    x, weight = (torch.randn(n, 8, generator=generator) for n in (12, 64))
    target = torch.randint(64, (12,), generator=generator)
    found = []
    for size, part in ((1, slice(0, 64)), (2, columns), ("fused", columns)):
        for inside in (True, False):
            mine_x, mine = x.clone().requires_grad_(), weight[part].clone().requires_grad_()
            options = {"vocab": 64, "reduction": "mean"}
            with torch.autocast("cpu", torch.bfloat16):
                if size == 1:
                    loss = F.cross_entropy(F.linear(mine_x, mine), target)
                elif size == 2:
                    logits = F.linear(mine_x, mine)
                    assert logits.dtype == torch.bfloat16
                    loss = vocab_parallel_cross_entropy(logits, target, group, **options)
                else:
                    loss = linear_cross_entropy(
                        mine_x, mine, target, group, chunk_tokens=5, **options
                    )
                if inside:
                    loss.backward()
            if not inside:
                loss.backward()
            assert loss.dtype == mine.grad.dtype == torch.float32
            grad = mine.grad[columns] if size == 1 else mine.grad
            found.append((loss.detach(), grad))
    for loss, grad in found[1:]:
        torch.testing.assert_close(loss, found[0][0], rtol=1e-5, atol=0)
        torch.testing.assert_close(grad, found[0][1], rtol=2**-6, atol=2e-4)  # bfloat16
    assert torch.equal(found[4][1], found[5][1])  # where the backward runs changes nothing


def test_autocast_is_torchs(ranks):
    ranks(2).run(check_autocast)


class Largest(TorchDispatchMode):
    """Numbers in the largest new tensor that any operation gives."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in args if isinstance(t, Tensor)}
        for each in out if isinstance(out, list | tuple) else [out]:
            if isinstance(each, Tensor) and each.untyped_storage().data_ptr() not in given:
                self.numel = max(self.numel, each.numel())
        return out


def check_sizes() -> None:
    """Of 64 tokens x 128 columns."""
    group, columns = begin(2, 256)
    x = torch.ones(64, 4, requires_grad=True)
    weight = torch.ones(256, 4)[columns].clone().requires_grad_()
    logits, target = torch.ones(64, 128, requires_grad=True), torch.arange(0, 256, 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss_terms, "CACHED_BYTES", 128 * 4 * 5)
        with Largest() as seen:
            loss = vocab_parallel_cross_entropy(logits, target, group, vocab=256)
        assert seen.numel <= 5 * 128  # nothing of the logits' size, but their gradient
        kept: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            loss = vocab_parallel_cross_entropy(logits, target, group, vocab=256)
        assert [t.numel() for t in kept if t.data_ptr() != logits.data_ptr()] == [64, 64]
        loss.sum().backward()
        with Largest() as seen:
            loss = linear_cross_entropy(x, weight, target, group, vocab=256, chunk_tokens=8)
            loss.sum().backward()
        assert seen.numel <= 8 * 128


def test_no_tensor_of_the_logits_size_is_made(ranks):
    ranks(2).run(check_sizes)


def check_targets() -> None:
    group, columns = begin(2, 6)
    whole, target = draw((4, 2), 6)
    mine = whole[..., columns]
    expected = vocab_parallel_cross_entropy(mine, target, group, vocab=6)
    for dtype in (torch.int32, torch.int16):
        found = vocab_parallel_cross_entropy(mine, target.to(dtype), group, vocab=6)
        assert torch.equal(found, expected)
    with pytest.raises(LayoutError, match=r"targets are torch\.float64; use the numbers of"):
        vocab_parallel_cross_entropy(mine, target.double(), group, vocab=6)
    empty = torch.empty(0, 3, dtype=torch.float64, requires_grad=True)
    none = torch.empty(0).long()
    assert vocab_parallel_cross_entropy(empty, none, group, vocab=6).shape == (0,)
    loss = vocab_parallel_cross_entropy(empty, none, group, vocab=6, reduction="sum")
    loss.backward()
    assert loss == 0 and empty.grad.shape == (0, 3)
    x, weight = torch.empty(2, 0, 5).double().requires_grad_(), torch.ones(3, 5).double()
    weight.requires_grad_()
    loss = linear_cross_entropy(x, weight, none.view(2, 0), group, vocab=6, reduction="sum")
    loss.backward()
    assert loss == 0 and x.grad.shape == x.shape and not weight.grad.any()
    ignored = torch.full((4, 2), IGNORED)
    loss = vocab_parallel_cross_entropy(mine, ignored, group, vocab=6, reduction="mean")
    assert loss.isnan() and F.cross_entropy(whole.flatten(0, 1), ignored.flatten()).isnan()
    damaged = mine.clone()
    if group.rank() == 1:
        damaged[0, 1, 0] = torch.nan
    found = vocab_parallel_cross_entropy(damaged, target, group, vocab=6)
    assert found[0, 1].isnan() and found.isnan().sum() == 1  # on both ranks


def test_targets_of_any_integer_type_and_no_tokens(ranks):
    ranks(2).run(check_targets)
