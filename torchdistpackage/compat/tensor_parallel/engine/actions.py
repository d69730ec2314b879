"""Actions on parameters and buffers: a shard's part, how parts are joined, and who owns the
gradient.

A shard computes with its part, and every shard that works on from a replicated tensor does so for
itself. So the gradient that autograd leaves on a parameter is the derivative by the copy of this
shard. For a part that no other shard holds that is the gradient. What several shards hold
(`is_shared`) needs the sum over them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchdistpackage.errors import LayoutError


class StateAction(ABC):
    """Part of a tensor for a rank, and the tensor again from the parts of all ranks."""

    is_shared = False
    """True if several ranks hold some element, so that their gradients are summed."""

    @abstractmethod
    def __call__(self, tensor: Tensor, rank: int) -> Tensor: ...

    @abstractmethod
    def undo(self, tensors: Sequence[Tensor]) -> Tensor: ...

    def num_parts(self) -> int | None:
        """Return how many ranks the action is made for; None: any number."""
        return getattr(self, "world_size", None)

    def local_gradient(self, grad: Tensor, rank: int) -> Tensor:
        """Return the gradient that `rank` applies to its part, where no other shard is needed."""
        return grad

    def spread(self, grad: Tensor, rank: int) -> Tensor:
        """Return the gradient of a shared part in the form in which ranks add theirs up."""
        return grad

    def collect(self, total: Tensor, rank: int) -> Tensor:
        """Return the slice of `rank` from the sum of the ranks' `spread`."""
        return total


class Whole(StateAction):
    """Every rank holds all of it: what no rule of a plan speaks of."""

    is_shared = True

    def __call__(self, tensor: Tensor, rank: int) -> Tensor:
        return tensor

    def undo(self, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0]


class Partial(Whole):
    """Every rank holds all of it and uses it for its part of a layer, so gradients are summed."""


class FunctionAction(StateAction):
    """A plain function as an action. reverse_action: joins the parts."""

    def __init__(
        self,
        action: Callable[..., Tensor],
        reverse_action: Callable[[Sequence[Tensor]], Tensor] | None = None,
    ):
        self.action, self.reverse_action = action, reverse_action

    def __call__(self, tensor: Tensor, rank: int) -> Tensor:
        return self.action(tensor, rank)

    def undo(self, tensors: Sequence[Tensor]) -> Tensor:
        """Raises LayoutError where no reverse action was given."""
        if self.reverse_action is None:
            raise LayoutError(
                f"the parts made by {self.action} cannot be joined: no reverse action was given; "
                f"use a pair (split, join), or Split, SplitInChunks, ..."
            )
        return self.reverse_action(tensors)


class Split(StateAction):
    """Parts along `dim` as `torch.tensor_split` makes them: the first ones are one longer."""

    def __init__(self, world_size: int, dim: int):
        self.world_size, self.dim = world_size, dim

    def __call__(self, tensor: Tensor, rank: int) -> Tensor:
        return torch.tensor_split(tensor, self.world_size, dim=self.dim)[rank]

    def undo(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat([tensor.cpu() for tensor in tensors], dim=self.dim)

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value}" for name, value in vars(self).items())
        return f"{type(self).__name__}({fields})"

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    def __hash__(self) -> int:
        return hash((type(self), *(str(value) for value in vars(self).values())))


class SplitInChunks(Split):
    """`Split` that keeps runs of `chunk_size` elements, such as heads, together.

    15 elements by 3 over 3 ranks are 6, 6 and 3. optional: None stays None.
    """

    def __init__(self, world_size: int, dim: int, chunk_size: int, optional: bool = False):
        super().__init__(world_size, dim)
        self.chunk_size, self.optional = chunk_size, optional

    def __call__(self, tensor: Tensor, rank: int) -> Tensor:
        """Raises LayoutError where the dim is not a multiple of the chunk."""
        if tensor is None and self.optional:
            return tensor
        parts = in_chunks(tensor, self.dim, 1, self.chunk_size)
        dim = self.dim % tensor.dim()
        return torch.tensor_split(parts, self.world_size, dim + 1)[rank].flatten(dim, dim + 2)


class SplitInGroupedChunks(Split):
    """`SplitInChunks` within each of `num_groups` equal fused parts, such as q, k and v.

    30 elements in 3 groups by 2 over 3 ranks are 12, 12 and 6.
    """

    def __init__(self, world_size: int, dim: int, num_groups: int, chunk_size: int):
        super().__init__(world_size, dim)
        self.num_groups, self.chunk_size = num_groups, chunk_size

    def __call__(self, tensor: Tensor, rank: int) -> Tensor:
        """Raises LayoutError where the dim is not a multiple of groups times chunk."""
        dim = self.dim % tensor.dim()
        parts = in_chunks(tensor, dim, self.num_groups, self.chunk_size)
        return torch.tensor_split(parts, self.world_size, dim + 1)[rank].flatten(dim, dim + 2)

    def undo(self, tensors: Sequence[Tensor]) -> Tensor:
        dim = self.dim % tensors[0].dim()
        grouped = [t.cpu().unflatten(dim, (self.num_groups, -1)) for t in tensors if t.numel()]
        if not grouped:
            return tensors[0].cpu()
        return torch.cat(grouped, dim + 1).flatten(dim, dim + 1)


class Scale(StateAction):
    """1/world_size of it on every rank: a bias that is added before a sum over the ranks.

    Each copy gets 1/world_size of the gradient, so that a step of SGD is that of the unsplit
    bias. Other optimizers do not scale with the gradient; `FirstOnly` is right for all of them.
    """

    def __init__(self, world_size: int):
        self.world_size = world_size

    def __call__(self, tensor: Tensor, rank: int) -> Tensor:
        return tensor / self.world_size

    def undo(self, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0] * self.world_size

    def local_gradient(self, grad: Tensor, rank: int) -> Tensor:
        return grad / self.world_size


class FirstOnly(StateAction):
    """Rank 0 holds it, the others zeros that stay zero: a bias that is added before a sum."""

    def __call__(self, tensor: Tensor, rank: int) -> Tensor:
        return tensor if rank == 0 else torch.zeros_like(tensor)

    def undo(self, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0]

    def local_gradient(self, grad: Tensor, rank: int) -> Tensor:
        return grad if rank == 0 else torch.zeros_like(grad)


class TakeChunks(StateAction):
    """Give each rank the chunks along `dim` that it works with; other ranks may hold some too.

    chunks: indices by rank, each list ascending or repeating; together all of them.
    If there are fewer key and value heads than ranks, they are dealt out in this way.
    """

    def __init__(self, dim: int, chunk_size: int, chunks: Sequence[Sequence[int]]):
        self.dim, self.chunk_size = dim, chunk_size
        self.chunks = tuple(map(tuple, chunks))
        self.num_chunks = max(max(of_rank, default=-1) for of_rank in self.chunks) + 1
        all_chunks = [chunk for of_rank in self.chunks for chunk in of_rank]
        self.is_shared = len(all_chunks) != len(set(all_chunks))

    def num_parts(self) -> int | None:
        return len(self.chunks)

    def __call__(self, tensor: Tensor, rank: int) -> Tensor:
        """Raises LayoutError where the dim is not all of the chunks."""
        extent = self.num_chunks * self.chunk_size
        if tensor.shape[self.dim] != extent:
            raise LayoutError(
                f"dim {self.dim} of a tensor of shape {tuple(tensor.shape)} is not "
                f"{self.num_chunks} x {self.chunk_size} = {extent}; make a plan for this model"
            )
        return tensor.index_select(self.dim, self._rows(rank, tensor.device))

    def undo(self, tensors: Sequence[Tensor]) -> Tensor:
        shape = list(tensors[0].shape)
        shape[self.dim] = self.num_chunks * self.chunk_size
        joined = tensors[0].new_empty(shape, device="cpu")
        for rank, tensor in reversed(tuple(enumerate(tensors))):
            joined.index_copy_(self.dim, self._rows(rank, "cpu"), tensor.cpu())
        return joined

    def spread(self, grad: Tensor, rank: int) -> Tensor:
        shape = list(grad.shape)
        shape[self.dim] = self.num_chunks * self.chunk_size
        rows = self._rows(rank, grad.device)
        return grad.new_zeros(shape).index_add_(self.dim, rows, grad)

    def collect(self, total: Tensor, rank: int) -> Tensor:
        return total.index_select(self.dim, self._rows(rank, total.device))

    def _rows(self, rank: int, device: torch.device | str) -> Tensor:
        starts = torch.tensor(self.chunks[rank], dtype=torch.int64, device=device)
        within = torch.arange(self.chunk_size, device=device)
        return (starts.unsqueeze(1) * self.chunk_size + within).flatten()


def on_dim(action: StateAction, dim: int) -> StateAction:
    """Return the same cut along another dim."""
    twin = object.__new__(type(action))
    twin.__dict__.update(action.__dict__, dim=dim)
    return twin


def in_chunks(tensor: Tensor, dim: int, num_groups: int, chunk_size: int) -> Tensor:
    """`dim` seen as (num_groups, chunks, chunk_size).

    Raises:
        LayoutError: it is not a multiple of the two.
    """
    extent = tensor.shape[dim]
    if extent % (num_groups * chunk_size):
        raise LayoutError(
            f"dim {dim} of a tensor of shape {tuple(tensor.shape)} has {extent} elements, which "
            f"are not a multiple of {num_groups} groups x chunks of {chunk_size}; correct "
            "chunk_size or num_groups of the rule"
        )
    num_chunks = extent // (num_groups * chunk_size)
    return tensor.unflatten(dim, (num_groups, num_chunks, chunk_size))


def as_state_action(action: Any) -> tuple[StateAction, bool]:
    """Return the action of a rule, and whether it was given in an earlier form.

    Raises:
        LayoutError: `action` is not an action of a rule, in today's form or an earlier one.
    """
    if isinstance(action, StateAction):
        return action, False
    if callable(action):
        return FunctionAction(action), True
    if isinstance(action, tuple) and len(action) == 2 and all(map(callable, action)):
        return FunctionAction(*action), True
    raise LayoutError(
        f"a state rule says {action!r}, of type {type(action).__name__}, which is not an action; "
        "use Split, SplitInChunks, ..., a function (tensor, rank) or a pair (split, join)"
    )
