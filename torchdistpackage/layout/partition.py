"""Rules that divide lengths and parameters among ranks, from sizes alone. No torch.

`greedy_partition` assigns whole parameters: the largest first, each to the share with the smallest
sum so far (Graham, "Bounds on Multiprocessing Timing Anomalies", 1969). The largest share is then
at most 4/3 of the optimum, and every rank computes the same shares from the same sizes.

A function `*_problems` returns sentences with the numbers and the nearest ones that work, so that a
layer, a model or a plan can refuse all of them in one error.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

from torchdistpackage.errors import LayoutError


class Sized(Protocol):
    """A parameter, reduced to the method that this file calls."""

    def numel(self) -> int: ...


SomeParameter = TypeVar("SomeParameter", bound=Sized, covariant=True)


class HasParameters(Protocol[SomeParameter]):
    """A module, reduced to the method that this file calls."""

    def named_parameters(self) -> Iterable[tuple[str, SomeParameter]]: ...


def even_sizes(length: int, parts: int) -> tuple[int, ...]:
    """Return `parts` sizes that differ by at most one, larger ones first: (3, 2, 2) for 7 in 3.

    Raises:
        LayoutError: there are no parts, or the length is negative.
    """
    if parts < 1 or length < 0:
        raise LayoutError(
            f"a length of {length} cannot be cut into {parts} parts; "
            f"use a length of 0 or more and 1 part or more"
        )
    # no divmod: the symbolic lengths of torch.compile do not have it
    each = length // parts
    longer = int(length % parts)
    return (each + 1,) * longer + (each,) * (parts - longer)


def greedy_partition(sizes: Sequence[int], num_shares: int) -> tuple[tuple[int, ...], ...]:
    """Return the indices of each share, ascending, so that the sums of sizes differ little.

    Among equal sizes the first index comes first; among equal sums the first share gets the item.
    With fewer sizes than shares, some shares are empty.

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
    """Divide the model's parameters into `num_partitions` lists of about equally many elements.

    Each part keeps the model's order; a parameter with several names counts once.

    return_dict: return dicts name -> parameter instead of lists.

    Raises:
        LayoutError: fewer than one part.
    """
    named = list(model.named_parameters())
    shares = greedy_partition([p.numel() for _, p in named], num_partitions)
    if return_dict:
        return [dict(named[i] for i in share) for share in shares]
    return [[named[i][1] for i in share] for share in shares]


def refuse(where: str, problems: Iterable[str]) -> None:
    """Raise one error for all problems, if there are any.

    Raises:
        LayoutError: `where`, and each problem.
    """
    unique = list(dict.fromkeys(problems))
    if unique:
        lead = f"{where}: " if len(unique) == 1 else f"{where}: {len(unique)} problems\n  "
        raise LayoutError(lead + "\n  ".join(unique))


def feature_problems(name: str, extent: int, num_ranks: int) -> list[str]:
    """Return why `num_ranks` ranks cannot each get some of `extent` features."""
    if extent >= 1 and all_have_some(extent, num_ranks):
        return []
    use = nearest(extent, lambda n: all_have_some(n, num_ranks))
    ranks = nearest(num_ranks, lambda n: all_have_some(extent, n)) if extent >= 1 else ()
    less = f", or {either(ranks)} tensor ranks" if ranks else ""
    return [
        f"{name} has {extent} elements, which {num_ranks} ranks cannot share so that each has "
        f"some; use {either(use)}{less}"
    ]


def attention_problems(
    dim: int,
    heads: int,
    num_ranks: int = 1,
    kv_heads: int | None = None,
    head_dim: int | None = None,
) -> list[str]:
    """Return why ranks cannot share these heads in groups with one key-value head each; see
    `HeadSplit`.
    """
    kv = heads if kv_heads is None else kv_heads
    problems: list[str] = []
    if heads < 1 or (head_dim is None and dim % heads):
        divisors = nearest(heads, lambda n: dim % n == 0, at_most=dim)
        dims = nearest(dim, lambda n: n % heads == 0) if heads >= 1 else ()
        instead = f", or dim {either(dims)}" if dims else ""
        problems.append(
            f"dim {dim} cannot be cut into {heads} heads of equal width; "
            f"use {either(divisors)} heads{instead}"
        )
    if head_dim is not None and head_dim < 1:
        problems.append(f"heads are {head_dim} channels wide; use 1 or more")
    if heads >= 1 and (kv < 1 or heads % kv):
        use = nearest(kv, lambda n: heads % n == 0, at_most=heads)
        problems.append(
            f"{heads} query heads cannot share {kv} key-value heads evenly; "
            f"use {either(use)} key-value heads"
        )
    elif heads >= 1 and not all_have_heads(heads, kv, num_ranks):
        ranks = nearest(num_ranks, lambda n: all_have_heads(heads, kv, n), at_most=num_ranks)
        more: tuple[int, ...] = (num_ranks,)
        if kv != heads:
            more = nearest(heads, lambda n: n % kv == 0 and all_have_heads(n, kv, num_ranks))
        more_heads = f", or {either(more)} heads" if more else ""
        groups, and_evenly = "", ""
        if kv != heads:
            groups = f" in {kv} groups"
            and_evenly = ", and each key-value head the same number of ranks"
        problems.append(
            f"{heads} heads{groups}, which {num_ranks} tensor ranks cannot share: each needs one"
            f"{and_evenly}; use {either(ranks)} tensor ranks{more_heads}"
        )
    return problems


def nearest(value: int, fits: Callable[[int], bool], at_most: int | None = None) -> tuple[int, ...]:
    """Return the largest number below `value` and the smallest above it that fit, from 1 to
    `at_most`.
    """
    limit = 2 * max(value, 1) + 1024 if at_most is None else at_most
    below = next((n for n in range(min(value, limit + 1) - 1, 0, -1) if fits(n)), None)
    above = next((n for n in range(max(value, 0) + 1, limit + 1) if fits(n)), None)
    return tuple(n for n in (below, above) if n is not None)


def either(numbers: Iterable[int]) -> str:
    """Return the numbers as text, such as `1, 2 or 4`."""
    *others, last = map(str, numbers)
    return f"{', '.join(others)} or {last}" if others else last


def all_have_some(extent: int, num_ranks: int) -> bool:
    """Return whether every rank gets at least one element."""
    return extent >= num_ranks


def share_heads_evenly(heads: int, kv_heads: int, num_ranks: int) -> bool:
    """Return whether ranks can have equal numbers of heads, or share a key-value head evenly.

    If every head has its own keys, ranks may differ by one head.
    """
    if num_ranks > heads or heads % kv_heads:
        return False
    if kv_heads == heads or num_ranks == 1:
        return True
    return kv_heads % num_ranks == 0 or (num_ranks % kv_heads == 0 and heads % num_ranks == 0)


def all_have_heads(heads: int, kv_heads: int, num_ranks: int) -> bool:
    """Return whether equally many ranks share each head, so that all reducers behave alike."""
    if num_ranks <= kv_heads:
        return True
    return num_ranks % kv_heads == 0 and num_ranks <= heads
