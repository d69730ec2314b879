"""Arithmetic of ZeRO's buckets and shards, and the optimizers that may see shards. No torch.

The members of a bucket lie side by side in one flat tensor. Rank i owns elements bounds[i] to
bounds[i + 1] of it, at multiples of `SLICE_BYTES`; its part of one member is a ShardRange. Every
element of every member lies in exactly one range.

A parameter may be cut anywhere only if each element's update reads that element alone.
`ELEMENTWISE` lists the optimizers known to work so. All others get full parameters with one owner
each, and those that need all parameters at once are refused.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from torchdistpackage.ddp.bucket_plan import ALIGN_BYTES, SLIGHT
from torchdistpackage.errors import LayoutError

SLICE_BYTES = 128
"""Alignment of slices, in the narrowest dtype: without it NCCL and fused optimizers are slow."""


@dataclass(frozen=True, slots=True)
class ModuleParam:
    """A parameter to assign to a bucket.

    unit: the module it belongs to. key: parameters with equal keys may share a bucket.
    """

    unit: str
    num_bytes: int
    key: Hashable


def group_by_module(members: Sequence[ModuleParam], cap_bytes: int) -> list[int]:
    """Return the bucket number of each member, for members in the order of registration.

    The parameters of one module stay together, because their gradients come together: a bias in
    another bucket would delay that bucket until its module is done. Buckets are filled from the
    last member on, as gradients come, up to `cap_bytes`. A larger module gets its own bucket,
    together with slight ones just before it, because a norm alone would cost two calls. Numbers
    ascend in this order, over all keys.
    """
    unit_bytes: Counter[tuple[Hashable, str]] = Counter()
    for member in members:
        unit_bytes[member.key, member.unit] += member.num_bytes
    bucket_of: dict[tuple[Hashable, str], int] = {}
    open_bucket: dict[Hashable, tuple[int, int]] = {}  # number, bytes in it
    num_buckets = 0
    for member in reversed(members):
        unit = member.key, member.unit
        if unit in bucket_of:
            continue
        size = unit_bytes[unit]
        number, used_bytes = open_bucket.get(member.key, (-1, 0))
        is_over = used_bytes + size > cap_bytes and used_bytes > cap_bytes * SLIGHT
        if number < 0 or is_over:
            number, used_bytes = num_buckets, 0
            num_buckets += 1
        bucket_of[unit] = number
        open_bucket[member.key] = number, used_bytes + size
    return [bucket_of[member.key, member.unit] for member in members]


@dataclass(frozen=True, slots=True)
class ShardRange:
    """Elements [start, stop) of a member in memory order, at `offset` of their owner's slice."""

    member: int
    start: int
    stop: int
    offset: int

    @property
    def num_elements(self) -> int:
        return self.stop - self.start


def even_bounds(num_elements: int, num_ranks: int, itemsize: int) -> tuple[int, ...]:
    """Return bounds of equally long slices; the last may lie beyond the end, where padding is.

    They suit optimizers that treat every element alike, for which a parameter may be cut anywhere.
    itemsize: bytes of an element in the narrowest dtype that slices have.
    """
    length = even_length(num_elements, num_ranks, itemsize)
    return tuple(rank * length for rank in range(num_ranks + 1))


def even_length(num_elements: int, num_ranks: int, itemsize: int) -> int:
    """Return the length of each slice of `even_bounds`."""
    return _aligned(-(-num_elements // num_ranks), itemsize)


def bounds_of(lengths: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Return bounds of slices of at least these lengths, for parameters that are not cut.

    All slices get the same length if that pads the bucket by `SLIGHT` at most, because a back end
    sends equal slices in one call, and others in a call each.
    """
    lengths = [_aligned(length, itemsize) for length in lengths]
    if max(lengths) * len(lengths) <= sum(lengths) * (1 + SLIGHT):
        lengths = [max(lengths)] * len(lengths)
    return (0, *accumulate(lengths))


def owned_bounds(
    sizes: Sequence[int],
    owners: Sequence[int],
    num_ranks: int,
    element_bytes: int,
    itemsize: int,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (offset of each member, bounds) for members that each belong to one rank.

    owners: index of each member's rank. element_bytes: bytes of a parameter's element.
    itemsize: as in `even_bounds`.
    """
    lengths = [0] * num_ranks
    starts: list[int] = []
    step = max(1, ALIGN_BYTES // element_bytes)
    for size, owner in zip(sizes, owners, strict=True):
        starts.append(lengths[owner])  # in the slice of the owner
        lengths[owner] += -(-size // step) * step
    bounds = bounds_of(lengths, itemsize)
    return tuple(bounds[owner] + start for owner, start in zip(owners, starts, strict=True)), bounds


def pieces(
    offsets: Sequence[int], sizes: Sequence[int], bounds: Sequence[int], index: int
) -> tuple[ShardRange, ...]:
    """Return the ranges that the rank at `index` owns; member i has sizes[i] elements at
    offsets[i].

    Raises:
        LayoutError: members overlap or are not in ascending order, bounds descend or leave
            elements without owner.
    """
    _check(offsets, sizes, bounds)
    first, end = bounds[index], bounds[index + 1]
    owned: list[ShardRange] = []
    for member, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        start, stop = max(first, offset), min(end, offset + size)
        if start < stop:
            owned.append(ShardRange(member, start - offset, stop - offset, start - first))
    return tuple(owned)


def _aligned(length: int, itemsize: int) -> int:
    step = max(1, SLICE_BYTES // itemsize)
    return -(-length // step) * step


def _check(offsets: Sequence[int], sizes: Sequence[int], bounds: Sequence[int]) -> None:
    ends = [offset + size for offset, size in zip(offsets, sizes, strict=True)]
    if any(end > offset for end, offset in zip(ends, offsets[1:], strict=False)):
        raise LayoutError(
            f"members of sizes {list(sizes)} at offsets {list(offsets)} overlap; each must begin "
            f"at or after the end of the one before"
        )
    if any(stop < start for start, stop in pairwise(bounds)):
        raise LayoutError(f"bounds {list(bounds)} are not ascending; sort them")
    if ends and (bounds[0] > offsets[0] or bounds[-1] < ends[-1]):
        raise LayoutError(
            f"bounds {bounds[0]} to {bounds[-1]} leave elements {offsets[0]} to {ends[-1]} partly "
            f"without an owner; let them span all members"
        )


# -- optimizers that may see shards of parameters ---------------------------------------------

ELEMENTWISE = frozenset(
    {
        "ASGD",
        "Adadelta",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SGD",
    }
)
"""Classes of torch.optim with an element-wise update. Subclasses do not count, because they may do
anything.
"""

MATRIXWISE = frozenset({"Adafactor", "Muon"})
"""Classes of torch.optim whose update of an element reads its rows and columns."""

REFUSED = {
    "LBFGS": "its step reads the gradients of all parameters as one vector, several times a step",
    "SparseAdam": "its gradients are rows, which no bucket holds",
}

SCALARS = frozenset({"step", "eta", "mu", "mu_product"})
"""State entries of torch.optim that are one number for a parameter of any shape."""


def requires_whole_params(
    optimizer: object, whole: bool | None = None, split: Sequence[str] = ()
) -> bool:
    """Return whether `optimizer` needs full parameters; if not, they may be cut anywhere.

    whole: the user's answer for a class of their own; None: True for every unknown class.
    split: names of parameters that tensor parallelism splits.

    Raises:
        LayoutError: the class cannot be sharded, or needs full parameters and some are split.
    """
    kind = type(optimizer)
    bases = {c.__name__ for c in kind.__mro__ if _is_torch(c)}
    for name in bases & REFUSED.keys():
        raise LayoutError(
            f"{kind.__name__} cannot be sharded: {REFUSED[name]}; use it without ZeRO, or use "
            f"one of {', '.join(sorted(ELEMENTWISE))}"
        )
    for number, group in enumerate(getattr(optimizer, "param_groups", ())):
        if group.get("differentiable"):
            raise LayoutError(
                f"param group {number} of {kind.__name__} is differentiable, but what follows its "
                f"step, the gather of parameters, has no gradient; set it to False"
            )
    class_name = kind.__name__ if _is_torch(kind) else ""
    if bases & MATRIXWISE and whole is False:
        raise LayoutError(
            f"{kind.__name__} reads rows and columns of a parameter, so whole=False would train "
            f"differently; leave whole= out"
        )
    needs = class_name not in ELEMENTWISE if whole is None else whole
    takes_split = class_name in ELEMENTWISE or getattr(optimizer, "takes_split", False)
    if needs and split and not takes_split:
        raise LayoutError(
            f"{kind.__name__} needs whole parameters, but {len(split)} are split over ranks of "
            f"the model: {', '.join(sorted(split)[:5])}; use one of "
            f"{', '.join(sorted(ELEMENTWISE))}, or whole=False if its update is element-wise"
        )
    return needs


def _is_torch(kind: type) -> bool:
    """Return whether a class is one of torch.optim's."""
    return kind.__module__.startswith("torch.optim.")
