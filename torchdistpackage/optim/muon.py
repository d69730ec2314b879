"""Muon for matrices that are whole on a rank, fused, stacked, or split over a group.

An update of Muon needs a whole matrix. Momentum is elementwise, so it stays split. There are two
ways to update a split matrix:

gather      Each matrix has an owner among the ranks that share it, chosen to balance the work. One
            all-to-all brings owners their matrices, and another returns the updates. A rank
            computes 1/n of the matmuls, and sends each of its elements once in each direction, in
            the dtype of the matmuls.
together    All ranks iterate on their parts, and all-reduce the Gram matrix of the unsplit side in
            each iteration.

`predict/newton_schulz.py` chooses between them from sizes alone, so all ranks choose alike.

Source: Jordan et al., Muon, 2024; the two scales: there, and Liu et al., arXiv:2502.16982.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, get_args

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
from torchdistpackage.predict.newton_schulz import (
    NUM_ITERATIONS,
    Exchange,
    Parameter,
    fused_dim,
    iterated_together,
    matrices_of,
    of_matrix,
    split_dim,
)
from torchdistpackage.topology.mesh import Mesh

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_EPS = 1e-7
_NO_MESH = Mesh(())

SCALES: dict[str, Callable[[int, int], float]] = {
    "moonlight": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "original": lambda rows, columns: math.sqrt(max(1, rows / columns)),
}
"""Factors of the learning rate by name; `moonlight` is torch.optim.Muon's `match_rms_adamw`."""


class Muon(Optimizer):
    """Muon over matrices (rows, columns), and over stacks of them (number, rows, columns).

    It updates fused parameters, such as q, k and v, part by part. A parameter that ranks split gets
    the update of the whole matrix. All ranks that share a parameter call `step` together. The
    iterations run in bfloat16, or in float64 for parameters in float64.

    params: parameters or groups of them, each with 2 dims, or 3 for a stack.
    scale: a name of `SCALES`.
    exchange: `gather` brings each split matrix to an owner; with `together` all ranks iterate on
        their parts, if no two hold the same elements; `auto` chooses by bytes and time.

    Raises:
        ValueError: a parameter has another number of dims, or `scale` or `exchange` is unknown.
    """

    takes_split = True
    """True: ZeRO and the check of optimizers let it step parameters that ranks split."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        scale: str = "moonlight",
        exchange: Exchange = "auto",
    ):
        if scale not in SCALES:
            raise ValueError(f"scale={scale!r} is unknown; use one of {', '.join(SCALES)}")
        if exchange not in (ways := get_args(Exchange)):
            raise ValueError(f"exchange={exchange!r} is unknown; use one of {', '.join(ways)}")
        self.exchange: Exchange = exchange
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
            _orthogonalize_split(directions, self.exchange)
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
        # bfloat16 is enough for a direction, as Jordan et al. show, and its matmuls are fast
        return update if update.dtype == torch.float64 else update.bfloat16()


def orthogonalized(x: Tensor) -> Tensor:
    """Return approximately U V^T for x = U S V^T (..., rows, columns), by Newton-Schulz."""
    y = x.mT if (is_tall := x.shape[-2] > x.shape[-1]) else x
    # the iteration needs singular values of at most 1, and the Frobenius norm bounds them
    y = y / y.norm(dim=(-2, -1), keepdim=True).clamp(min=_EPS)
    for _ in range(NUM_ITERATIONS):
        y = _iterated(y, y @ y.mT)
    return y.mT if is_tall else y


def _iterated(y: Tensor, gram: Tensor) -> Tensor:
    """Return y after one iteration. gram: y times its transpose, summed over ranks that split y."""
    a, b, c = COEFFICIENTS
    add_product = torch.addmm if y.dim() == 2 else torch.baddbmm
    return add_product(y, add_product(gram, gram, gram, beta=b, alpha=c), y, beta=a)


@dataclass(frozen=True, slots=True)
class _Sharing:
    """The split of a parameter's matrices over ranks.

    layout: the layout of one matrix; None: it is neither split nor fused. group: ranks that each
    hold a part of every matrix; None: this rank holds whole ones. ranks: the ranks of `group` on
    `mesh`. rank: this one's number there.
    """

    layout: Layout | None = None
    mesh: Mesh = _NO_MESH
    rank: int = 0
    group: Group | None = None
    ranks: tuple[int, ...] = (0,)


@dataclass(slots=True, eq=False)
class _Direction:
    """The direction of a parameter's update: at first its momentum, then the orthogonal matrix."""

    parameter: Tensor
    sharing: _Sharing
    values: Tensor

    def places(self) -> "Sequence[_PartPlace]":
        """Return the part of each rank of the group."""
        assert self.sharing.layout is not None
        return _places(self.sharing.layout, self.sharing.mesh, self.sharing.ranks)

    @property
    def stack(self) -> tuple[int, ...]:
        """The dims in front of a matrix's two; ranks do not split them."""
        return tuple(self.values.shape[:-2])

    @property
    def sizes(self) -> list[int]:
        """The number of elements on each rank of the group."""
        return [math.prod((*self.stack, *span.shape)) for span in self.places()]

    @property
    def matrices(self) -> Parameter:
        """The sizes of the parameter's matrices, whole."""
        assert self.sharing.layout is not None
        return matrices_of(self.sharing.layout, math.prod(self.stack))

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
            # padding in a part stays zero: no element of the matrix belongs there
            part = full.new_zeros((*self.stack, *span.shape))
            for region, local in span.boxes:
                part[..., *local] = full[..., *region]
            parts.append(part.reshape(-1))
        return parts

    def apply(self, options: dict[str, Any]) -> None:
        """Apply the update and the weight decay to the parameter."""
        p, scale, lr = self.parameter, SCALES[options["scale"]], float(options["lr"])
        p.mul_(1 - lr * options["weight_decay"])
        dim, lengths, shapes = _part_shapes(self.sharing, tuple(p.shape))
        values = self.values.to(p.dtype)
        for rows, update, shape in zip(
            p.split(lengths, dim), values.split(lengths, dim), shapes, strict=True
        ):
            rows.add_(update, alpha=-lr * scale(*shape))


class _PartPlace(NamedTuple):
    """The shape of a rank's part of a matrix, and boxes as (in the matrix, in the part)."""

    shape: tuple[int, ...]
    boxes: tuple[Block, ...]


@lru_cache(maxsize=4096)
def _places(layout: Layout, mesh: Mesh, ranks: tuple[int, ...]) -> tuple[_PartPlace, ...]:
    return tuple(
        _PartPlace(local_shape(layout, mesh, rank), blocks(layout, mesh, rank)) for rank in ranks
    )


def _sharing_of(p: Tensor) -> _Sharing:
    full = layout_of(p)
    if full is None:
        return _Sharing()
    layout, group = of_matrix(full), group_of(p)
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


def _by_parts(x: Tensor, layout: Layout | None) -> Tensor:
    """Orthogonalize whole matrices, each fused part by itself."""
    dim, lengths = (-1, ()) if layout is None else fused_dim(layout)
    if not lengths:
        return orthogonalized(x)
    return torch.cat([orthogonalized(part) for part in x.split(lengths, dim)], dim)


def _part_shapes(
    sharing: _Sharing, shape: tuple[int, ...]
) -> tuple[int, list[int], list[tuple[int, int]]]:
    """Return (dim, this rank's length of each fused part, (rows, columns) of each whole part)."""
    dim, lengths = (-1, ()) if sharing.layout is None else fused_dim(sharing.layout)
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


def _orthogonalize_split(directions: Sequence[_Direction], exchange: Exchange) -> None:
    """Replace momenta that the ranks of one group split by orthogonal updates."""
    group = directions[0].sharing.group
    assert group is not None
    layouts = [x.sharing.layout for x in directions]
    able = [layout is not None and split_dim(layout) is not None for layout in layouts]
    sizes = tuple(zip((x.matrices for x in directions), able, strict=True))
    item_bytes = directions[0].values.element_size()
    chosen = iterated_together(sizes, group.size(), item_bytes, exchange)
    if together := [directions[i] for i in sorted(chosen)]:
        _iterate_together(together)
    if owned := [x for i, x in enumerate(directions) if i not in chosen]:
        _iterate_at_owners(owned)


def _iterate_together(directions: Sequence[_Direction]) -> None:
    """Iterate on each rank's parts, and all-reduce the Gram matrices."""
    group = directions[0].sharing.group
    assert group is not None
    parts: list[list[Tensor]] = []
    for x in directions:
        assert x.sharing.layout is not None
        dim, lengths, _ = _part_shapes(x.sharing, tuple(x.values.shape))
        is_across = split_dim(x.sharing.layout) == -1
        parts.append([y if is_across else y.mT for y in x.values.split(lengths, dim)])
    ys = [y for some in parts for y in some]
    # in float32, because a sum of squares in bfloat16 loses most of its digits
    wide = torch.promote_types(ys[0].dtype, torch.float32)
    squares = _summed([y.to(wide).square().sum((-2, -1)) for y in ys], group)
    ys = [
        y / square.sqrt().clamp(min=_EPS).to(y.dtype)[..., None, None]
        for y, square in zip(ys, squares, strict=True)
    ]
    for _ in range(NUM_ITERATIONS):
        grams = _summed([y @ y.mT for y in ys], group)
        ys = [_iterated(y, gram) for y, gram in zip(ys, grams, strict=True)]
    results = iter(ys)
    for x, some in zip(directions, parts, strict=True):
        assert x.sharing.layout is not None
        dim, is_across = fused_dim(x.sharing.layout)[0], split_dim(x.sharing.layout) == -1
        updates = [next(results) for _ in some]
        x.values = torch.cat([y if is_across else y.mT for y in updates], dim)


def _summed(tensors: Sequence[Tensor], group: Group) -> list[Tensor]:
    """Return the sums of these tensors over the group, with one all-reduce."""
    flat = primitives.all_reduce(torch.cat([x.reshape(-1) for x in tensors]), group)
    parts = flat.split([x.numel() for x in tensors])
    return [part.view(x.shape) for part, x in zip(parts, tensors, strict=True)]


def _iterate_at_owners(directions: Sequence[_Direction]) -> None:
    """Send each matrix to its owner, iterate there, and send the updates back."""
    group, values = directions[0].sharing.group, directions[0].values
    assert group is not None
    owned = greedy_partition(
        [int(sum(x.flops for x in each.matrices)) for each in directions], group.size()
    )
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
    # an empty tensor in front, because torch.cat refuses an empty list and a rank may own nothing
    flat = torch.cat([values.new_empty(0), *(part for answer in answers for part in answer)])
    returned = primitives.all_to_all(flat, group, received, sent)
    for x, part in zip(ordered, returned.split([x.values.numel() for x in ordered]), strict=True):
        x.values = part.view(x.values.shape)
