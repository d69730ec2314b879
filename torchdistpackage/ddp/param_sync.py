"""Whether ranks hold the same: names and shapes before values are sent, bits ever after.

One rule: what differs raises on every rank of its group, and says which tensor, on which ranks.
Usually the ranks exchange 16 bytes each, and lists only if these differ.

The bits of a tensor, taken as 64-bit words in a table, are summed by column and by row, modulo
2**64, each sum times an odd number of its own: one flipped bit always changes the result, and so
do two small changes that a plain sum would let cancel.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from torchdistpackage.comm import primitives
from torchdistpackage.comm.primitives import Group, ranks_of
from torchdistpackage.errors import CommError

COLUMNS, WORD_BYTES = 4096, 8
LAZY, EXPANDED = "not yet initialised", "expanded"
_ODD = 0x5851F42D4C957F2D


class ReplicatedTensor(NamedTuple):
    """A tensor of which every rank of `group` holds a copy."""

    name: str
    tensor: Tensor
    group: Group


class Difference(NamedTuple):
    """A tensor whose bits are not the same on `ranks` (global). odd: those in the minority, or
    none where there is no majority, as with two ranks."""

    name: str
    ranks: tuple[int, ...]
    odd: tuple[int, ...]

    def __str__(self) -> str:
        if self.odd:
            return f"{self.name} on rank {', '.join(map(str, self.odd))}"
        return f"{self.name} between ranks {self.ranks}, no majority"


def verify_params_match(replicas: Iterable[ReplicatedTensor]) -> None:
    """Return if all ranks of each group name the same tensors in it, of equal shapes and dtypes.

    Raises:
        CommError: they do not; with the first difference and both sides, on all ranks of the group.
            Or one of them cannot be sent.
    """
    for group, held in by_group(replicas):
        facts = [(r.name, _kind(r.tensor)) for r in held]
        digest = hashlib.sha256(repr(facts).encode()).digest()
        mine = [int.from_bytes(digest[at : at + 8], "big", signed=True) for at in (0, 8)]
        if _all_equal(torch.tensor(mine, device=primitives.device_of(group)), group):
            _check_sendable(facts)
            continue
        lists = primitives.gather_objects(facts, group)
        raise CommError(_first_difference(cast(list[list[tuple[str, str]]], lists), group))


def find_differences(replicas: Iterable[ReplicatedTensor]) -> list[Difference]:
    """Tensors that are not the same to the bit on all ranks of their groups; collective.

    Reads every tensor twice, on its device, and waits for that device once for each group.
    """
    found: list[Difference] = []
    for group, held in by_group(replicas):
        table = torch.stack([_hash(r.tensor).to(primitives.device_of(group)) for r in held])
        if _all_equal((table * _odd_numbers(len(held), table)[:, None]).sum(0), group):
            continue
        ranks = ranks_of(group)
        tables = primitives.all_gather(table[None], group).tolist()
        for place, replica in enumerate(held):
            hashes = [tuple(of_rank[place]) for of_rank in tables]
            common, number = Counter(hashes).most_common(1)[0]
            if number < len(ranks):
                majority = 2 * number > len(ranks)
                odd = [r for r, h in zip(ranks, hashes, strict=True) if majority and h != common]
                found.append(Difference(replica.name, ranks, tuple(odd)))
    return found


def check_replicas(replicas: Iterable[ReplicatedTensor]) -> None:
    """`find_differences`, as an error: call it every so many steps, after the optimizer's.

    Raises:
        CommError: replicas differ; names tensors and ranks, on all ranks of these tensors' groups.
    """
    differences = find_differences(replicas)
    if differences:
        more = f" and {len(differences) - 20} more" if len(differences) > 20 else ""
        raise CommError(
            f"{len(differences)} tensors that should be the same on all ranks of their groups "
            f"differ in bits: {'; '.join(map(str, differences[:20]))}{more}; go back to a "
            f"checkpoint, and look for faulty memory there or a missed reduction or broadcast"
        )


def by_group(replicas: Iterable[ReplicatedTensor]) -> list[tuple[Group, list[ReplicatedTensor]]]:
    """Those of groups of several ranks, in one order of groups on all ranks, so that nobody
    waits for one who waits elsewhere."""
    held: dict[tuple[int, ...], list[ReplicatedTensor]] = {}
    for replica in replicas:
        if replica.group.size() > 1:
            held.setdefault(ranks_of(replica.group), []).append(replica)
    return [(held[ranks][0].group, held[ranks]) for ranks in sorted(held)]


def _check_sendable(facts: Sequence[tuple[str, str]]) -> None:
    for name, kind in facts:
        if kind == LAZY:
            raise CommError(f"{name} is {kind}: run one forward of the module before wrapping it")
        if kind.endswith(EXPANDED):
            raise CommError(
                f"{name}, {kind}, has several elements in one place of memory, where nothing can "
                f"be received; register {name}.clone() instead"
            )


def _kind(x: Tensor) -> str:
    if is_lazy(x):
        return LAZY
    kind = f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}"
    is_expanded = any(n > 1 and step == 0 for n, step in zip(x.shape, x.stride(), strict=True))
    return f"{kind} {EXPANDED}" if is_expanded else kind


def _all_equal(mine: Tensor, group: Group) -> bool:
    rows = primitives.all_gather(mine[None], group)
    return bool((rows == rows[0]).all())


def _first_difference(lists: Sequence[Sequence[tuple[str, str]]], group: Group) -> str:
    ranks = ranks_of(group)
    for rank, theirs in zip(ranks, lists, strict=True):
        if theirs == lists[0]:
            continue
        ours, others = dict(lists[0]), dict(theirs)
        where = f"ranks {ranks[0]} and {rank} do not hold the same parameters and buffers"
        for name in [*ours, *others]:
            if ours.get(name) != others.get(name):
                return (
                    f"{where}: {name} is {ours.get(name, 'absent')} on rank {ranks[0]} and "
                    f"{others.get(name, 'absent')} on rank {rank} ({len(ours)} and {len(others)} "
                    f"in all); build the same module on both"
                )
        place = next(
            i for i, pair in enumerate(zip(lists[0], theirs, strict=True)) if pair[0] != pair[1]
        )
        return (
            f"{where}: number {place} is {lists[0][place][0]} on rank {ranks[0]} and "
            f"{theirs[place][0]} on rank {rank}; register them in the same order on both"
        )
    raise AssertionError("lists differ as texts and not as values")


def _hash(x: Tensor) -> Tensor:
    """(2) int64 of the bits of `x`, on its device."""
    bits = x.detach().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)
    if bits.storage_offset() % WORD_BYTES:
        bits = bits.clone()
    row_bytes = COLUMNS * WORD_BYTES
    end = bits.numel() // row_bytes * row_bytes
    whole = bits[:end].view(torch.int64).view(-1, COLUMNS)
    last = bits.new_zeros(row_bytes)
    last[: bits.numel() - end] = bits[end:]
    rest = last.view(torch.int64)
    columns, rows = whole.sum(0) + rest, torch.cat([whole.sum(1), rest.sum()[None]])
    return torch.stack([(s * _odd_numbers(len(s), s)).sum() for s in (columns, rows)])


def _odd_numbers(count: int, like: Tensor) -> Tensor:
    """`count` different odd numbers modulo 2**64."""
    return torch.arange(1, count + 1, device=like.device).mul_(_ODD).mul_(2).add_(1)
