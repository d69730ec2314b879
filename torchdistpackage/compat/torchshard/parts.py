"""torchshard.utils, and `slice`: equal parts, and the vocabulary range of a rank."""

from torch import Tensor

from torchdistpackage.comm.collectives import as_dim
from torchdistpackage.compat.torchshard.cuts import check_tensors


def check_divisibility(numerator: int, denominator: int) -> None:
    """
    Raises:
        AssertionError: it is not.
    """
    if not denominator or numerator % denominator:
        raise AssertionError(f"{numerator} is not divisible by {denominator}")


def divide(numerator: int, denominator: int) -> int:
    """The quotient of what divides; see `check_divisibility`."""
    check_divisibility(numerator, denominator)
    return numerator // denominator


class VocabUtility:
    """First id, and one past the last, that a rank holds of an evenly split vocabulary."""

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
        """
        Raises:
            AssertionError: the vocabulary does not divide, or there is no such rank.
        """
        length = divide(global_vocab_size, world_size)
        if not 0 <= rank < world_size:
            raise AssertionError(f"there is no rank {rank} among {world_size}")
        return VocabUtility.vocab_range_from_per_partition_vocab_size(length, rank, world_size)


def slice(
    tensor: Tensor, num_partitions: int, dim: int | None = None, contiguous: bool = False
) -> tuple[Tensor, ...]:
    """Equal parts along `dim`, by default the last: views, or copies of their own.

    Raises:
        AssertionError: num_partitions does not divide it.
        ValueError: `tensor` is no tensor or has no such dim, or num_partitions is no whole number.
    """
    check_tensors("slice", tensor=tensor)
    if type(num_partitions) is not int or num_partitions < 0:
        raise ValueError(f"slice into {num_partitions!r} parts; use a whole number of at least 1")
    dim = as_dim(tensor, -1 if dim is None else dim)
    parts = tensor.split(divide(tensor.shape[dim], num_partitions), dim)
    return tuple(part.contiguous() for part in parts) if contiguous else tuple(parts)
