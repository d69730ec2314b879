"""Muon for matrices that are whole on a rank, fused, stacked, or split over a group.

An update of Muon needs a whole matrix. Momentum is elementwise, so it stays split. Each split
matrix has an owner among the ranks that share it, dealt out by cost: one all-to-all brings the
owners their matrices, and another returns the updates. So a rank computes 1/n of the products, and
sends each of its elements once in each direction, in the dtype that the products have.

Source: Jordan et al., Muon, 2024; the two scales: there, and Liu et al., arXiv:2502.16982.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchdistpackage.comm import primitives
from torchdistpackage.comm.primitives import Group, ranks_of
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.ddp.param_spec import follows, group_of
from torchdistpackage.layout.derive import Block, blocks, local_shape, local_slices
from torchdistpackage.layout.layout import Layout
from torchdistpackage.layout.mark import layout_of
from torchdistpackage.layout.partition import greedy_partition
from torchdistpackage.topology.mesh import Mesh

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NUM_ITERATIONS = 5
_EPS = 1e-7
_NO_MESH = Mesh(())

SCALES: dict[str, Callable[[int, int], float]] = {
    "moonlight": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "original": lambda rows, columns: math.sqrt(max(1, rows / columns)),
}
"""Factor of the learning rate, by the name that torch and Liu et al. know them under:
`match_rms_adamw` of torch.optim.Muon is `moonlight`."""


class Muon(Optimizer):
    """Muon over matrices (rows, columns), and over stacks of them (number, rows, columns).

    A parameter whose layout has fused parts, such as q, k and v, is updated part by part, and one
    that ranks split as the whole matrix is. All ranks that share a parameter call `step` together.
    Iterations run in bfloat16, and in float64 for parameters in float64.

    params: parameters or groups of them, each with 2 dims, or 3 for a stack.
    scale: a name of `SCALES`.

    Raises:
        ValueError: a parameter has another number of dims, or `scale` is unknown.
    """

    takes_split = True
    """ZeRO and the check of optimizers leave it parameters that ranks split."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        scale: str = "moonlight",
    ):
        if scale not in SCALES:
            raise ValueError(f"scale={scale!r} is unknown; use one of {', '.join(SCALES)}")
        options = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "scale": scale}
        super().__init__(params, options)
        for group in self.param_groups:
            for p in group["params"]:
                if p.dim() not in (2, 3):
                    raise ValueError(
                        f"Muon takes matrices and stacks of them, but a parameter has shape "
                        f"{tuple(p.shape)}; leave it to another optimizer"
                    )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for options in self.param_groups:
            self._step_group(options)
        return loss

    def _step_group(self, options: dict[str, Any]) -> None:
        split: dict[tuple[object, ...], list[_Direction]] = {}
        for p in options["params"]:
            if p.grad is None:
                continue
            direction = _Direction(p, _sharing_of(p), self._momentum(p, options["momentum"]))
            if direction.sharing.group is None:
                direction.values = _by_parts(direction.values, direction.sharing.layout)
                direction.apply(options)
                continue
            key = ranks_of(direction.sharing.group), direction.values.dtype, p.device
            split.setdefault(key, []).append(direction)
        for directions in split.values():
            _orthogonalize_split(directions)
            for direction in directions:
                direction.apply(options)

    def _momentum(self, p: Tensor, factor: float) -> Tensor:
        """Return Nesterov's momentum of a gradient, in the dtype of the iterations."""
        assert p.grad is not None
        state = self.state[p]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p.grad)
        buffer = state["momentum_buffer"].lerp_(p.grad, 1 - factor)
        update = p.grad.lerp(buffer, factor)
        return update if update.dtype == torch.float64 else update.bfloat16()


def orthogonalized(x: Tensor) -> Tensor:
    """Return about U V^T of x = U S V^T, by Newton-Schulz iterations: (..., rows, columns)."""
    a, b, c = COEFFICIENTS
    add_product = torch.addmm if x.dim() == 2 else torch.baddbmm
    y = x.mT if (is_tall := x.shape[-2] > x.shape[-1]) else x
    y = y / y.norm(dim=(-2, -1), keepdim=True).clamp(min=_EPS)  # no singular value above 1
    for _ in range(NUM_ITERATIONS):
        gram = y @ y.mT
        y = add_product(y, add_product(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return y.mT if is_tall else y


@dataclass(frozen=True, slots=True)
class _Sharing:
    """The part that this rank has of the matrices of a parameter.

    layout: of a matrix; None: one without parts. group: ranks that each hold a part of every
    matrix; None: they are whole here. ranks: those of `group` on `mesh`, this one is `rank`.
    """

    layout: Layout | None = None
    mesh: Mesh = _NO_MESH
    rank: int = 0
    group: Group | None = None
    ranks: tuple[int, ...] = (0,)


@dataclass(slots=True, eq=False)
class _Direction:
    """The direction in which a parameter is moved: its momentum at first, then orthogonal."""

    parameter: Tensor
    sharing: _Sharing
    values: Tensor

    def places(self) -> "Sequence[_PartPlace]":
        """Return the part of each rank of the group."""
        assert self.sharing.layout is not None
        return _places(self.sharing.layout, self.sharing.mesh, self.sharing.ranks)

    @property
    def stack(self) -> tuple[int, ...]:
        """The dims in front of those of a matrix, of which no other rank has a part."""
        return tuple(self.values.shape[:-2])

    @property
    def sizes(self) -> list[int]:
        """The number of elements on each rank of the group."""
        return [math.prod((*self.stack, *span.shape)) for span in self.places()]

    @property
    def cost(self) -> int:
        """The multiplications of a product of its matrices, up to a constant factor."""
        assert self.sharing.layout is not None
        rows, columns = self.sharing.layout.shape
        return math.prod(self.stack) * rows * columns * min(rows, columns)

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the whole matrices from the flat parts of all ranks."""
        assert self.sharing.layout is not None
        full = self.values.new_zeros((*self.stack, *self.sharing.layout.shape))
        for flat, span in zip(parts, self.places(), strict=True):
            part = flat.view(*self.stack, *span.shape)
            for region, local in span.boxes:
                full[..., *region] = part[..., *local]
        return full

    def divided(self, full: Tensor) -> list[Tensor]:
        """Return the flat part of each rank."""
        parts: list[Tensor] = []
        for span in self.places():
            # elements that pad a part, and stand for none of the whole, stay zero
            part = full.new_zeros((*self.stack, *span.shape))
            for region, local in span.boxes:
                part[..., *local] = full[..., *region]
            parts.append(part.reshape(-1))
        return parts

    def apply(self, options: dict[str, Any]) -> None:
        """Move the parameter."""
        p, scale, lr = self.parameter, SCALES[options["scale"]], float(options["lr"])
        p.mul_(1 - lr * options["weight_decay"])
        dim, lengths, shapes = _part_shapes(self.sharing, tuple(p.shape))
        values = self.values.to(p.dtype)
        for rows, update, shape in zip(
            p.split(lengths, dim), values.split(lengths, dim), shapes, strict=True
        ):
            rows.add_(update, alpha=-lr * scale(*shape))


class _PartPlace(NamedTuple):
    """The shape of a rank's part of a matrix, and its boxes in the whole and in the part."""

    shape: tuple[int, ...]
    boxes: tuple[Block, ...]


@lru_cache(maxsize=4096)
def _places(layout: Layout, mesh: Mesh, ranks: tuple[int, ...]) -> tuple[_PartPlace, ...]:
    return tuple(
        _PartPlace(local_shape(layout, mesh, rank), blocks(layout, mesh, rank)) for rank in ranks
    )


@lru_cache(maxsize=4096)
def _of_matrix(layout: Layout) -> Layout:
    """Return the layout of a matrix of a stack."""
    last = {name: getattr(layout, name)[-2:] for name in ("shape", "split", "parts")}
    return replace(layout, **last)


def _sharing_of(p: Tensor) -> _Sharing:
    full = layout_of(p)
    if full is None:
        return _Sharing()
    layout, group = _of_matrix(full), group_of(p)
    if follows(layout, p) or follows(full, p):
        mesh = tpc.topology.view(layout.view)
        axes = [axis for axis in layout.split_axes if mesh.axis_size(axis) > 1]
        if not axes:
            return _Sharing(layout)
        group = tpc.groups.along(mesh, axes)
        return _Sharing(layout, mesh, tpc.rank, group, ranks_of(group))
    if not layout.split_axes or group is None or group.size() == 1:
        return _Sharing(layout)
    mesh = Mesh(((layout.split_axes[0], group.size()),))
    return _Sharing(layout, mesh, group.rank(), group, tuple(range(group.size())))


def _fused(layout: Layout | None) -> tuple[int, tuple[int, ...]]:
    """Return (the dim from the end that is made of fused parts, their lengths), or (-1, ())."""
    for dim in (-2, -1):
        if layout is not None and layout.parts[dim]:
            return dim, layout.parts[dim]
    return -1, ()


def _by_parts(x: Tensor, layout: Layout | None) -> Tensor:
    """Return whole matrices made orthogonal, each fused part by itself."""
    dim, lengths = _fused(layout)
    if not lengths:
        return orthogonalized(x)
    return torch.cat([orthogonalized(part) for part in x.split(lengths, dim)], dim)


def _part_shapes(
    sharing: _Sharing, shape: tuple[int, ...]
) -> tuple[int, list[int], list[tuple[int, int]]]:
    """Return (dim, what this rank has of each fused part, (rows, columns) of each whole part)."""
    dim, lengths = _fused(sharing.layout)
    full = shape if sharing.layout is None else sharing.layout.shape
    if not lengths:
        return dim, [shape[dim]], [(full[-2], full[-1])]
    assert sharing.layout is not None
    local = (
        lengths
        if sharing.group is None
        else tuple(
            each.stop - each.start
            for each in local_slices(sharing.layout, sharing.mesh, sharing.rank)[dim]
        )
    )
    shapes = [(x, full[-1]) if dim == -2 else (full[-2], x) for x in lengths]
    return dim, list(local), shapes


def _orthogonalize_split(directions: Sequence[_Direction]) -> None:
    """Replace the momenta, of which all ranks of one group have parts, by orthogonal updates."""
    group, values = directions[0].sharing.group, directions[0].values
    assert group is not None
    owned = greedy_partition([x.cost for x in directions], group.size())
    own_directions = [directions[i] for i in owned[group.rank()]]
    own_sizes = list(zip(*(x.sizes for x in own_directions), strict=True)) or [()] * group.size()
    sent = [sum(directions[i].values.numel() for i in some) for some in owned]
    received = [sum(sizes) for sizes in own_sizes]
    ordered = [directions[i] for some in owned for i in some]
    parts = torch.cat([x.values.reshape(-1) for x in ordered])
    arrived = primitives.all_to_all(parts, group, sent, received)
    by_rank = [
        flat.split(sizes) for flat, sizes in zip(arrived.split(received), own_sizes, strict=True)
    ]
    answers: list[list[Tensor]] = [[] for _ in range(group.size())]
    for i, direction in enumerate(own_directions):
        full = _by_parts(direction.joined([flat[i] for flat in by_rank]), direction.sharing.layout)
        for answer, part in zip(answers, direction.divided(full), strict=True):
            answer.append(part)
    # the first value is empty: a rank may own nothing
    flat = torch.cat([values.new_empty(0), *(part for answer in answers for part in answer)])
    returned = primitives.all_to_all(flat, group, received, sent)
    for x, part in zip(ordered, returned.split([x.values.numel() for x in ordered]), strict=True):
        x.values = part.view(x.values.shape)
