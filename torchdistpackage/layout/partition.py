"""Lengths cut evenly, and unsplit parameters shared out among ranks, the fullest share small.

Of parameters the largest comes first, and each goes where least is so far (Graham, "Bounds on
Multiprocessing Timing Anomalies", 1969). The fullest share is then at most 4/3 of the smallest
possible one, and the same sizes give the same shares on every rank. No torch.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from torchdistpackage.errors import LayoutError


class Sized(Protocol):
    """A parameter, as far as it matters here."""

    def numel(self) -> int: ...


SomeParameter = TypeVar("SomeParameter", bound=Sized, covariant=True)


class HasParameters(Protocol[SomeParameter]):
    """A module, as far as it matters here."""

    def named_parameters(self) -> Iterable[tuple[str, SomeParameter]]: ...


def even_sizes(length: int, parts: int) -> tuple[int, ...]:
    """`length` in `parts` as equal as can be, the longer ones first: (3, 2, 2) for 7 in 3.

    Raises:
        LayoutError: there are no parts, or the length is negative.
    """
    if parts < 1 or length < 0:
        raise LayoutError(
            f"a length of {length} cannot be cut into {parts} parts; "
            f"use a length of 0 or more and 1 part or more"
        )
    each, longer = divmod(length, parts)
    return (each + 1,) * longer + (each,) * (parts - longer)


def greedy_partition(sizes: Sequence[int], num_shares: int) -> tuple[tuple[int, ...], ...]:
    """Indices of each share, ascending, so that the sums of sizes differ little.

    Of equal sizes the first comes first, of equal sums the first share gets it. With fewer sizes
    than shares, some shares are empty.

    Raises:
        LayoutError: fewer than one share.
    """
    if num_shares < 1:
        raise LayoutError(f"cannot share {len(sizes)} parameters among {num_shares} ranks; use 1+")
    sums = [0] * num_shares
    shares: list[list[int]] = [[] for _ in sums]
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        least = sums.index(min(sums))
        sums[least] += sizes[i]
        shares[least].append(i)
    return tuple(tuple(sorted(share)) for share in shares)


def partition_params(
    model: HasParameters[SomeParameter], num_partitions: int, return_dict: bool = False
) -> list[list[SomeParameter]] | list[dict[str, SomeParameter]]:
    """The model's parameters in `num_partitions` parts with about equally many elements.

    Each part keeps the model's order; a parameter with several names counts once.

    return_dict: parts are dicts name -> parameter instead of lists.

    Raises:
        LayoutError: fewer than one part.
    """
    named = list(model.named_parameters())
    shares = greedy_partition([p.numel() for _, p in named], num_partitions)
    if return_dict:
        return [dict(named[i] for i in share) for share in shares]
    return [[named[i][1] for i in share] for share in shares]
