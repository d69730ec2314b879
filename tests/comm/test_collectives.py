"""Every collective and its backward are transposes, on groups that do not start at rank 0."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from torchdistpackage.comm import collectives as c
from torchdistpackage.comm import primitives
from torchdistpackage.comm.groups import Groups
from torchdistpackage.errors import CommError, LayoutError

# what each computes, written out with all ranks' inputs at hand
PLAIN = {
    "copy": lambda xs, r: xs[r],
    "reduce": lambda xs, r: sum(xs),
    "all_gather": lambda xs, r, d: torch.cat(xs, d),
    "reduce_scatter": lambda xs, r, d: sum(xs).chunk(len(xs), d)[r],
    "split": lambda xs, r, d: xs[r].chunk(len(xs), d)[r],
    "join": lambda xs, r, d: torch.cat(xs, d),
    "all_to_all": lambda xs, r, d, e: torch.cat([x.chunk(len(xs), d)[r] for x in xs], e),
}
CASES = [
    ("copy", ()),
    ("reduce", ()),
    *(
        (name, (d,))
        for name in ("all_gather", "reduce_scatter", "split", "join")
        for d in (0, 1, 2)
    ),
    *(("all_to_all", pair) for pair in ((0, 1), (1, 0), (2, 1), (0, 2))),
]
# pairs whose gradients assume that all ranks go on alike, so the law holds for equal y only
ALIKE = ("join", "reduce")
EQUAL_INPUT = ("copy", "split")


def my_group() -> dist.ProcessGroup:
    """Strided groups: {0, 2} and {1, 3} of four ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    ranks = list(range(rank % 2, size, 2)) if size == 4 else list(range(size))
    return Groups(rank).of(ranks)


def draw(seed: int, shape: torch.Size | tuple[int, ...]) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def right_and_transposed(name: str, dims: tuple[int, ...]) -> None:
    group = my_group()
    n, index = group.size(), group.rank()
    shape = (2 * n, 3 * n, 4 * n)
    xs = [draw(0 if name in EQUAL_INPUT else i, shape) for i in range(n)]
    # non-contiguous on purpose
    x = xs[index].transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    out = getattr(c, name)(x, *dims, group=group)
    torch.testing.assert_close(out, PLAIN[name](xs, index, *dims), rtol=0, atol=1e-12)

    y = draw(100 if name in ALIKE else 100 + index, out.shape)
    (out * y).sum().backward()
    assert torch.equal(x.detach(), xs[index]), "the input must not be written to"
    forward, backward = (out * y).sum().detach(), (x * x.grad).sum().detach()
    sides = primitives.all_reduce(torch.stack([forward, backward]), group)
    if name in ("reduce", "join", "copy", "split"):
        # one side is replicated: count it once
        replicated = 0 if name in ALIKE else 1
        sides[replicated] /= n
    torch.testing.assert_close(sides[0], sides[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize(("name", "dims"), CASES)
def test_each_is_right_and_its_backward_is_its_transpose(ranks, world_size, name, dims):
    ranks(world_size).run(right_and_transposed, name, dims)


def shared_gradient_is_not_written() -> None:
    """copy(h) + h: the incoming gradient is one expanded tensor for both uses."""
    h = torch.ones(3, dtype=torch.float64, requires_grad=True)
    (c.copy(h, dist.group.WORLD) + h).sum().backward()
    assert torch.equal(h.grad, torch.full((3,), dist.get_world_size() + 1.0, dtype=torch.float64))


def test_an_incoming_gradient_is_never_reduced_in_place(ranks):
    ranks(2).run(shared_gradient_is_not_written)


def uneven_is_refused() -> None:
    x = torch.zeros(3, 4)
    for call in (
        lambda: c.split(x, 0, dist.group.WORLD),
        lambda: c.reduce_scatter(x, 0, dist.group.WORLD),
        lambda: c.all_to_all(x, 0, 1, dist.group.WORLD),
    ):
        with pytest.raises(
            LayoutError, match=r"dim 0 of a tensor of shape \(3, 4\) has 3 elements"
        ):
            call()
    with pytest.raises(CommError, match=r"broadcast from rank 7, .* ranks \(0, 1\)"):
        primitives.broadcast(x, dist.group.WORLD, 7)


def test_what_does_not_divide_is_refused_on_every_rank(ranks):
    ranks(2).run(uneven_is_refused)
