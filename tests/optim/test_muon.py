"""Muon is torch's on each matrix, also where several are fused or stacked, and refuses the rest."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchdistpackage.layout.layout import Layout
from torchdistpackage.layout.mark import collect, mark_parameter
from torchdistpackage.optim.muon import Muon, orthogonalized
from torchdistpackage.parallel.tensor.linear import ParallelMlp

TORCH_NAMES = {"moonlight": "match_rms_adamw", "original": "original"}


def torchs(matrices: list[Tensor], grads: list[list[Tensor]], scale: str) -> list[Tensor]:
    """The matrices after a step of torch.optim.Muon with each of the gradients."""
    parameters = [nn.Parameter(x.clone()) for x in matrices]
    optimizer = torch.optim.Muon(
        parameters, 0.1, 0.1, momentum=0.9, adjust_lr_fn=TORCH_NAMES[scale]
    )
    for of_step in grads:
        for p, grad in zip(parameters, of_step, strict=True):
            p.grad = grad.clone()
        optimizer.step()
    return [p.detach() for p in parameters]


def ours(x: Tensor, grads: list[Tensor], scale: str, layout: Layout | None = None) -> Tensor:
    p = nn.Parameter(x.clone())
    if layout is not None:
        mark_parameter(p, layout, None)
    optimizer = Muon([p], 0.1, 0.1, momentum=0.9, scale=scale)
    for grad in grads:
        p.grad = grad
        optimizer.step()
    return p.detach()


@pytest.mark.parametrize("scale", TORCH_NAMES)
@pytest.mark.parametrize("shape", [(8, 12), (12, 8)])
def test_a_matrix_gets_the_bits_of_torchs(shape, scale):
    torch.manual_seed(1)
    x, grads = torch.randn(shape), [torch.randn(shape) for _ in range(3)]
    (truth,) = torchs([x], [[g] for g in grads], scale)
    assert torch.equal(ours(x, grads, scale), truth)


@pytest.mark.parametrize("scale", TORCH_NAMES)
def test_fused_parts_are_matrices_by_themselves(scale):
    torch.manual_seed(2)
    parts = (8, 4, 4)
    x, grads = torch.randn(16, 6), [torch.randn(16, 6) for _ in range(3)]
    truth = torchs([*x.split(parts)], [[*g.split(parts)] for g in grads], scale)
    rows = Layout("qkv", (16, 6), parts=(parts, ()))
    assert torch.equal(ours(x, grads, scale, rows), torch.cat(truth))
    columns = Layout("qkv", (6, 16), parts=((), parts))
    found = ours(x.mT.contiguous(), [g.mT.contiguous() for g in grads], scale, columns)
    transposed = torchs(
        [y.mT for y in x.split(parts)], [[y.mT for y in g.split(parts)] for g in grads], scale
    )
    assert torch.equal(found, torch.cat(transposed, 1))
    assert not torch.equal(ours(x, grads, scale), torch.cat(truth)), "as one matrix it is another"


def test_matrices_of_a_stack_are_matrices_by_themselves():
    torch.manual_seed(3)
    x, grads = torch.randn(3, 8, 6), [torch.randn(3, 8, 6) for _ in range(2)]
    truth = torchs([*x], [[*g] for g in grads], "moonlight")
    torch.testing.assert_close(ours(x, grads, "moonlight"), torch.stack(truth), rtol=0, atol=2e-3)


def test_iterations_lead_to_the_nearest_orthogonal_matrix():
    torch.manual_seed(4)
    x = torch.randn(6, 9, dtype=torch.float64)
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    found = orthogonalized(x)
    singular = torch.linalg.svdvals(found)
    assert singular.min() > 0.6 and singular.max() < 1.3, singular
    # same directions: in the basis of x only a diagonal is left
    inside = u.mT @ found @ v.mT
    assert (inside - torch.diag(inside.diagonal())).abs().max() < 1e-12


def stepped(num_ranks: int, exchange: str = "auto") -> list[Tensor]:
    """The whole weights of an MLP, on each rank, after two steps."""
    group = dist.group.WORLD if num_ranks > 1 else None
    mlp = ParallelMlp(6, 10, gated=True, group=group, dtype=torch.float64)
    generator = torch.Generator().manual_seed(5)
    weights = {
        name: torch.randn(x.shape, generator=generator, dtype=torch.float64)
        for name, x in collect(mlp).items()
    }
    mlp.from_full(weights)
    matrices = [p for p in mlp.parameters() if p.dim() == 2]
    optimizer = Muon(matrices, 0.1, exchange=exchange)
    for _ in range(2):
        optimizer.zero_grad()
        x = torch.randn(4, 2, 6, generator=generator, dtype=torch.float64)
        mlp(x).square().sum().backward()
        optimizer.step()
    return [*mlp.to_full().values()]


@pytest.mark.parametrize(
    ("num_ranks", "exchange"),
    [
        (2, "gather"),
        (2, "together"),
        pytest.param(3, "gather", marks=pytest.mark.full),
        pytest.param(3, "together", marks=pytest.mark.full),
    ],
)
def test_split_layers_of_a_loop_of_ones_own_step_as_whole_ones(ranks, num_ranks, exchange):
    """Over 3 ranks one owns no matrix, and the parts are uneven."""
    truth = ranks(1).run(stepped, 1)[0]
    for found in ranks(num_ranks).run(stepped, num_ranks, exchange):
        for x, y in zip(found, truth, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def test_vectors_and_unknown_words_are_refused():
    with pytest.raises(ValueError, match=r"shape \(3,\)"):
        Muon([nn.Parameter(torch.ones(3))])
    with pytest.raises(ValueError, match=r"'spectral'.*moonlight, original"):
        Muon([nn.Parameter(torch.ones(3, 3))], scale="spectral")
    with pytest.raises(ValueError, match=r"'all'.*auto, gather, together"):
        Muon([nn.Parameter(torch.ones(3, 3))], exchange="all")
