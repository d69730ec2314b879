"""The split dim of an activation, and helpers for calls on split activations.

Also torchshard.utils, and `slice`: equal slices, and the vocabulary range of a rank.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from torchdistpackage.comm.collectives import as_dim
from torchdistpackage.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Cut:
    """A dim (>= 0) of a tensor that is split over the group, and its length over all ranks.

    loose: a view made the dim, it has length 1 here, and the next dim may be the split one instead:
        one head of 24 and 24 features behind a new dim have the same shape.
    by_hand: the user marked the tensor, and nothing else shows that it is a slice.
    """

    dim: int
    length: int
    loose: bool = field(default=False, compare=False)
    by_hand: bool = field(default=False, compare=False)

    def behind(self, x: Tensor) -> "Cut":
        """Return the cut of the next dim of `x`, which a loose cut may mean."""
        return Cut(self.dim + 1, self.length * x.shape[self.dim + 1])


class Touches(Exception):
    """Raised when an operation would mix values of different ranks."""


Args = Sequence[Any]
Kwargs = Mapping[str, Any]
Rule = Callable[[Args, Kwargs, Any], Cut | None]
"""Maps the arguments and result of a call to the cut of each tensor in the result."""


def cut_of(x: object) -> Cut | None:
    """Return how an activation is split; None: not split, or a parameter."""
    cut = getattr(x, "__dict__", {}).get("_cut")
    return None if cut is None or isinstance(x, nn.Parameter) else cut


def check_tensors(caller: str, **values: object) -> None:
    """Check that all values are tensors.

    Raises:
        ValueError: some are not tensors; it names all of them.
    """
    wrong = [
        f"a tensor{f' as {name}' if len(values) > 1 else ''}, not {type(value).__name__}"
        for name, value in values.items()
        if not isinstance(value, Tensor)
    ]
    if wrong:
        raise ValueError(f"{caller} takes {' and '.join(wrong)}")


def tensors(values: Iterable[object]) -> list[Tensor]:
    """Return the tensors among arguments, also those in lists and tuples."""
    flat: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            flat.append(value)
        elif isinstance(value, list | tuple):
            flat += tensors(value)
    return flat


def refusal(name: str, args: Args, kwargs: Kwargs) -> LayoutError:
    """Return the error for an operation that a mark cannot follow."""
    x = next(t for t in tensors([*args, *kwargs.values()]) if cut_of(t) is not None)
    cut = cut_of(x)
    assert cut is not None
    return LayoutError(
        f"{name} of a tensor of shape {tuple(x.shape)}, which is split along dim {cut.dim} (this "
        f"rank holds {x.shape[cut.dim]} of {cut.length}): {name} is not one of the operations that "
        f"leave a split dim alone; call torchshard.distributed.gather(x, {cut.dim}) before, or "
        "torchshard.register_parallel_dim(x, None) if only this rank's part is meant"
    )


def first_of(args: Args, kwargs: Kwargs) -> tuple[Tensor, Cut]:
    x = args[0] if args else kwargs.get("input", kwargs.get("self"))
    cut = cut_of(x)
    if cut is None or any(cut_of(t) is not None for t in tensors([*args[1:], *kwargs.values()])):
        raise Touches
    return x, cut


def argument(args: Args, kwargs: Kwargs, at: int, name: str, default: Any = None) -> Any:
    return args[at] if len(args) > at else kwargs.get(name, default)


def dims_of(x: Tensor, dim: Any) -> set[int]:
    dims = dim if isinstance(dim, list | tuple) else (dim,)
    if dim is None or not all(isinstance(d, int) for d in dims):
        raise Touches
    return {d % x.dim() for d in dims}


def check_divisibility(numerator: int, denominator: int) -> None:
    """Check that `denominator` divides `numerator`.

    Raises:
        AssertionError: it does not.
    """
    if not denominator or numerator % denominator:
        raise AssertionError(f"{numerator} is not divisible by {denominator}")


def divide(numerator: int, denominator: int) -> int:
    """Return numerator / denominator; see `check_divisibility`."""
    check_divisibility(numerator, denominator)
    return numerator // denominator


class VocabUtility:
    """Ranges of ids (first, one past the last) of a rank's slice of an evenly split vocabulary."""

    @staticmethod
    def vocab_range_from_per_partition_vocab_size(
        per_partition_vocab_size: int, rank: int, world_size: int
    ) -> tuple[int, int]:
        first = rank * per_partition_vocab_size
        return first, first + per_partition_vocab_size

    @staticmethod
    def vocab_range_from_global_vocab_size(
        global_vocab_size: int, rank: int, world_size: int
    ) -> tuple[int, int]:
        """Return the range of `rank`.

        Raises:
            AssertionError: world_size does not divide the vocabulary, or there is no such rank.
        """
        length = divide(global_vocab_size, world_size)
        if not 0 <= rank < world_size:
            raise AssertionError(f"rank {rank} is out of range for {world_size} ranks")
        return VocabUtility.vocab_range_from_per_partition_vocab_size(length, rank, world_size)


def slice(
    tensor: Tensor, num_partitions: int, dim: int | None = None, contiguous: bool = False
) -> tuple[Tensor, ...]:
    """Return equal slices along `dim`, by default the last one; contiguous: copies, not views.

    Raises:
        AssertionError: num_partitions does not divide it.
        ValueError: `tensor` is not a tensor or has no such dim, or num_partitions is not a whole
            number.
    """
    check_tensors("slice", tensor=tensor)
    if type(num_partitions) is not int or num_partitions < 0:
        raise ValueError(f"slice into {num_partitions!r} parts; use a whole number of at least 1")
    dim = as_dim(tensor, -1 if dim is None else dim)
    parts = tensor.split(divide(tensor.shape[dim], num_partitions), dim)
    return tuple(part.contiguous() for part in parts) if contiguous else tuple(parts)
