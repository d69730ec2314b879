"""Broadcast and comparison of parameters and buffers, which a group's ranks must hold alike.

A difference raises on every rank of its group, naming the tensor and the ranks.

Before they send values, ranks compare 16-byte digests of names and shapes, and exchange the lists
only if these differ. One broadcast carries many tensors of a dtype and device, up to
`MESSAGE_BYTES`, so that no rank makes a copy of a full model.

To compare values, each rank takes the bits of a tensor as a table of 64-bit words, sums it by
column and by row modulo 2**64, and multiplies each sum by an odd number of its own. One flipped
bit always changes the result, and so do two small changes that would cancel in a plain sum.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from torchdistpackage.comm import primitives
from torchdistpackage.comm.groups import for_each_group
from torchdistpackage.comm.primitives import Group, ranks_of
from torchdistpackage.ddp.param_spec import ParamSpec, ReplicatedTensor
from torchdistpackage.errors import CommError

MESSAGE_BYTES = 8 * 2**20
COLUMNS, WORD_BYTES = 4096, 8
LAZY, EXPANDED = "not yet initialised", "expanded"
MAX_NAMES = 20
_ODD = 0x5851F42D4C957F2D


class Difference(NamedTuple):
    """A tensor whose bits differ among `ranks` (global).

    odd: the ranks in the minority; empty if there is no majority, as with two ranks.
    """

    name: str
    ranks: tuple[int, ...]
    odd: tuple[int, ...]

    def __str__(self) -> str:
        if self.odd:
            return f"{self.name} on rank {', '.join(map(str, self.odd))}"
        return f"{self.name} between ranks {self.ranks}, no majority"


class ReplicatedShard(NamedTuple):
    """Elements [start, stop) of a tensor, in memory order, which other ranks of `group` may hold
    too; tensor: None if this rank holds none.
    """

    name: str
    tensor: Tensor | None
    start: int
    stop: int
    group: Group


def verify_params_match(replicas: Iterable[ReplicatedTensor]) -> None:
    """Check that all ranks of each group have the same tensors, of equal shapes and dtypes.

    Raises:
        CommError: they differ, or a tensor cannot be sent. All ranks of the group raise it, with
            the first difference and both sides.
    """
    for group, members in for_each_group(replicas, min_size=2):
        facts = [(r.name, _kind(r.tensor)) for r in members]
        digest = hashlib.sha256(repr(facts).encode()).digest()
        words = [int.from_bytes(digest[start : start + 8], "big", signed=True) for start in (0, 8)]
        if _all_equal(torch.tensor(words, device=primitives.device_of(group)), group):
            _check_sendable(facts)
            continue
        lists = primitives.gather_objects(facts, group)
        raise CommError(_first_difference(cast(list[list[tuple[str, str]]], lists), group))


@torch.no_grad()
def sync_module_states(replicas: Iterable[ReplicatedTensor], source: int | None = None) -> None:
    """Set all tensors to those of global rank `source`, by default the first of each group.

    Raises:
        CommError: `source` is not in one of the groups.
    """
    for group, members in for_each_group(replicas, min_size=2):
        # through .data, which leaves autograd's version counters alone: batch norm saves buffers
        # for a backward that never reads them, and a new version would make it raise
        for tensors in _messages([r.tensor.data for r in members if r.tensor.numel()]):
            _broadcast(tensors, group, primitives.source_in(group, source))


def find_differences(replicas: Iterable[ReplicatedTensor]) -> list[Difference]:
    """Return the tensors whose bits differ between ranks of their groups; collective.

    It reads every tensor twice, on its device, and waits for the device once for each group.
    """
    differences: list[Difference] = []
    for group, members in for_each_group(replicas, min_size=2):
        table = torch.stack([_hash(r.tensor).to(primitives.device_of(group)) for r in members])
        if _all_equal((table * _odd_numbers(len(members), table)[:, None]).sum(0), group):
            continue
        ranks = ranks_of(group)
        tables = primitives.all_gather(table[None], group).tolist()
        for index, replica in enumerate(members):
            hashes = [tuple(of_rank[index]) for of_rank in tables]
            common, number = Counter(hashes).most_common(1)[0]
            if number < len(ranks):
                majority = 2 * number > len(ranks)
                odd = [r for r, h in zip(ranks, hashes, strict=True) if majority and h != common]
                differences.append(Difference(replica.name, ranks, tuple(odd)))
    return differences


def find_shard_differences(shards: Iterable[ReplicatedShard]) -> list[Difference]:
    """Return the shards whose bits differ between those ranks of their group that hold the same
    elements; collective.

    All ranks of a group pass the same names in the same order, also of shards that they do not
    hold. It reads every shard twice, and sends 32 bytes for each.
    """
    differences: list[Difference] = []
    for group, members in for_each_group(shards, min_size=2):
        device = primitives.device_of(group)
        rows = torch.zeros(len(members), 4, dtype=torch.int64, device=device)
        for row, shard in zip(rows, members, strict=True):
            if shard.tensor is not None:
                row[0], row[1] = shard.start, shard.stop
                row[2:] = _hash(shard.tensor).to(device)
        ranks = ranks_of(group)
        tables = primitives.all_gather(rows[None], group).tolist()
        for index, shard in enumerate(members):
            by_range: dict[tuple[int, int], list[tuple[int, tuple[int, int]]]] = {}
            for rank, of_rank in zip(ranks, tables, strict=True):
                start, stop, *both = of_rank[index]
                if stop > start:
                    by_range.setdefault((start, stop), []).append((rank, (both[0], both[1])))
            for shards_of_range in by_range.values():
                common, number = Counter(x for _, x in shards_of_range).most_common(1)[0]
                if number < len(shards_of_range):
                    majority = 2 * number > len(shards_of_range)
                    odd = tuple(r for r, x in shards_of_range if majority and x != common)
                    differences.append(
                        Difference(shard.name, tuple(r for r, _ in shards_of_range), odd)
                    )
    return differences


def check_replicas(replicas: Iterable[ReplicatedTensor]) -> None:
    """Raise if replicas differ in any bit; call it now and then, after the optimizer's step.

    Raises:
        CommError: replicas differ. All ranks of these tensors' groups raise it, naming tensors and
            ranks.
    """
    differences = find_differences(replicas)
    if differences:
        more = f" and {len(differences) - MAX_NAMES} more" if len(differences) > MAX_NAMES else ""
        raise CommError(
            f"{len(differences)} tensors that should be the same on all ranks of their groups "
            f"differ in bits: {'; '.join(map(str, differences[:MAX_NAMES]))}{more}; go back to a "
            f"checkpoint, and look for faulty memory there or a missed reduction or broadcast"
        )


def check_unused_parameters(specs: Sequence[ParamSpec], has_grad: Sequence[bool]) -> None:
    """Check that every parameter got a gradient on all ranks of its group.

    has_grad: whether each got a gradient on this rank.

    Raises:
        CommError: some rank did not use some parameters. All ranks of the group raise it, with the
            names.
    """
    used_here = {id(s): used for s, used in zip(specs, has_grad, strict=True)}
    unused: list[str] = []
    for group, members in for_each_group(specs):
        flags, device = [used_here[id(s)] for s in members], members[0].parameter.device
        used = torch.tensor(flags, dtype=torch.int32, device=device)
        primitives.all_reduce(used, group, primitives.MIN)
        unused += [s.name for s, by_all in zip(members, used.tolist(), strict=True) if not by_all]
    if unused:
        raise CommError(
            f"{len(unused)} of {len(specs)} parameters got no gradient on some rank in this step: "
            f"{', '.join(sorted(unused)[:MAX_NAMES])}; freeze them, use them in the forward, or "
            "leave strict off"
        )


def _messages(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield lists of tensors to send in one message; a large tensor is alone in its list."""
    by_kind: dict[object, list[Tensor]] = {}
    free_bytes: dict[object, int] = {}
    for x in tensors:
        kind = x.dtype, x.device
        if kind in by_kind and free_bytes[kind] < x.nbytes:
            yield by_kind.pop(kind)
        if kind not in by_kind:
            by_kind[kind], free_bytes[kind] = [], MESSAGE_BYTES
        by_kind[kind].append(x)
        free_bytes[kind] -= x.nbytes
    yield from by_kind.values()


def _broadcast(tensors: list[Tensor], group: Group, source: int) -> None:
    """Broadcast tensors of one dtype and device in one message."""
    if len(tensors) == 1 and tensors[0].is_contiguous():
        primitives.broadcast(tensors[0], group, source)
        return
    flat = torch.cat([x.reshape(-1) for x in tensors])
    primitives.broadcast(flat, group, source)
    if ranks_of(group)[group.rank()] != source:
        arrived = flat.split([x.numel() for x in tensors])
        torch._foreach_copy_(
            tensors, [a.view(x.shape) for a, x in zip(arrived, tensors, strict=True)]
        )


def _check_sendable(facts: Sequence[tuple[str, str]]) -> None:
    """Refuse lazy tensors, and expanded ones, which cannot be received into."""
    for name, kind in facts:
        if kind == LAZY:
            raise CommError(f"{name} is {kind}: run one forward of the module before wrapping it")
        if kind.endswith(EXPANDED):
            raise CommError(
                f"{name}, {kind}, has several elements in one place of memory, where nothing can "
                f"be received; register {name}.clone() instead"
            )


def _kind(x: Tensor) -> str:
    """Return the shape and dtype of a tensor as text."""
    if is_lazy(x):
        return LAZY
    kind = f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}"
    is_expanded = any(n > 1 and step == 0 for n, step in zip(x.shape, x.stride(), strict=True))
    return f"{kind} {EXPANDED}" if is_expanded else kind


def _all_equal(tensor: Tensor, group: Group) -> bool:
    """Return whether all ranks of the group pass equal tensors."""
    rows = primitives.all_gather(tensor[None], group)
    return bool((rows == rows[0]).all())


def _first_difference(lists: Sequence[Sequence[tuple[str, str]]], group: Group) -> str:
    """Return a sentence about the first rank that differs from the group's first one."""
    ranks, first = ranks_of(group), lists[0]
    rank, theirs = next((r, x) for r, x in zip(ranks, lists, strict=True) if x != first)
    first_kinds, other_kinds = dict(first), dict(theirs)
    lead = f"ranks {ranks[0]} and {rank} do not hold the same parameters and buffers"
    for name in [*first_kinds, *other_kinds]:
        if first_kinds.get(name) != other_kinds.get(name):
            return (
                f"{lead}: {name} is {first_kinds.get(name, 'absent')} on rank {ranks[0]} and "
                f"{other_kinds.get(name, 'absent')} on rank {rank} ({len(first_kinds)} and "
                f"{len(other_kinds)} "
                f"in all); build the same module on both"
            )
    index, (first_entry, other_entry) = next(
        (i, pair) for i, pair in enumerate(zip(first, theirs, strict=True)) if pair[0] != pair[1]
    )
    return (
        f"{lead}: number {index} is {first_entry[0]} on rank {ranks[0]} and {other_entry[0]} on "
        f"rank {rank}; "
        f"register them in the same order on both"
    )


def _hash(x: Tensor) -> Tensor:
    """Return two int64 hashes (2,) of the bits of `x`, on its device."""
    bits = x.detach().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)
    if bits.storage_offset() % WORD_BYTES:
        bits = bits.clone()
    row_bytes = COLUMNS * WORD_BYTES
    end = bits.numel() // row_bytes * row_bytes
    table = bits[:end].view(torch.int64).view(-1, COLUMNS)
    last = bits.new_zeros(row_bytes)
    last[: bits.numel() - end] = bits[end:]
    rest = last.view(torch.int64)
    columns, rows = table.sum(0) + rest, torch.cat([table.sum(1), rest.sum()[None]])
    return torch.stack([(s * _odd_numbers(len(s), s)).sum() for s in (columns, rows)])


def _odd_numbers(count: int, like: Tensor) -> Tensor:
    """Return `count` different odd numbers modulo 2**64."""
    return torch.arange(1, count + 1, device=like.device).mul_(_ODD).mul_(2).add_(1)
