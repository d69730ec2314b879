"""Which parameters share a bucket, which elements each rank owns, and who may own parts. No torch.

The members of a bucket lie side by side in one flat tensor. Rank i owns elements bounds[i] to
bounds[i + 1] of it, multiples of `SLICE_BYTES`; what it owns of one member is a ShardRange. Every
element of every member lies in exactly one range over the ranks.

A parameter may be cut anywhere only if each element's update reads that element alone. Optimizers
that are known to be so are listed; all others get whole parameters, one owner each, and what needs
all of them at once is refused.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from torchdistpackage.ddp.bucket_plan import ALIGN_BYTES, SLIGHT
from torchdistpackage.errors import LayoutError

SLICE_BYTES = 128
"""Slices begin at its multiples in the narrowest dtype; NCCL and fused optimizers are slow else."""


@dataclass(frozen=True, slots=True)
class ModuleParam:
    """A parameter: the module it belongs to, its bytes, and what it may share a bucket with."""

    unit: str
    num_bytes: int
    key: Hashable


def group_by_module(members: Sequence[ModuleParam], cap_bytes: int) -> list[int]:
    """The bucket number of each, for members in the order of registration.

    The parameters of one module stay together, since their gradients come together: a bias in the
    bucket before would hold that up until its module is done. Buckets are filled from the last
    member on, as gradients come, up to `cap_bytes`; a larger module has one of its own, but for
    slight ones that come just before: a bias without a name, or a norm, would else cost two calls.
    Numbers ascend in this order, over all keys.
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
    """Elements [start, stop) of a member, in the order of its memory; `offset` into my slice."""

    member: int
    start: int
    stop: int
    offset: int

    @property
    def num_elements(self) -> int:
        return self.stop - self.start


def even_bounds(num_elements: int, num_ranks: int, itemsize: int) -> tuple[int, ...]:
    """Slices of one length, so the last bounds may lie beyond the end: the bucket is padded.

    For optimizers that treat every element alike, and so do not care where a parameter is cut.
    itemsize: bytes of an element in the narrowest dtype that slices have.
    """
    length = _aligned(-(-num_elements // num_ranks), itemsize)
    return tuple(rank * length for rank in range(num_ranks + 1))


def bounds_of(lengths: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Slices of at least these lengths, all of one where that pads the bucket by `SLIGHT` at most.

    For whole parameters. A back end sends slices of one length as one call, others as a call each.
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
    """(where each member begins, bounds), where all of a member belongs to one rank.

    owners: index of the rank of each. element_bytes: of a parameter. itemsize: see `even_bounds`.
    """
    lengths, starts, step = [0] * num_ranks, list[int](), max(1, ALIGN_BYTES // element_bytes)
    for size, owner in zip(sizes, owners, strict=True):
        starts.append(lengths[owner])  # in the slice of the owner
        lengths[owner] += -(-size // step) * step
    bounds = bounds_of(lengths, itemsize)
    return tuple(bounds[owner] + at for owner, at in zip(owners, starts, strict=True)), bounds


def pieces(
    offsets: Sequence[int], sizes: Sequence[int], bounds: Sequence[int], index: int
) -> tuple[ShardRange, ...]:
    """Ranges that the rank at `index` owns; member i is the sizes[i] elements from offsets[i] on.

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
        raise LayoutError(f"bounds {list(bounds)} descend; give ascending ones")
    if ends and (bounds[0] > offsets[0] or bounds[-1] < ends[-1]):
        raise LayoutError(
            f"bounds {bounds[0]} to {bounds[-1]} leave elements {offsets[0]} to {ends[-1]} partly "
            f"without an owner; let them span all members"
        )


# -- which optimizers may see parts of parameters ---------------------------------------------

ELEMENTWISE = frozenset(
    {
        *("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax"),
        *("NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
    }
)
"""Classes of torch.optim, exactly these: a class made from one may do anything."""

MATRIXWISE = frozenset({"Adafactor", "Muon"})
"""Classes of torch.optim whose update of an element reads its rows and columns."""

REFUSED = {
    "LBFGS": "its step reads the gradients of all parameters as one vector, several times a step",
    "SparseAdam": "its gradients are rows, which no bucket holds",
}

SCALARS = frozenset({"step", "eta", "mu", "mu_product"})
"""State of torch.optim's classes that is one number a parameter, whatever its shape."""


def requires_whole_params(
    optimizer: object, whole: bool | None = None, split: Sequence[str] = ()
) -> bool:
    """Whether `optimizer` gets whole parameters; False lets them be cut anywhere.

    whole: what the user knows of an own class; None takes whole parameters for every class that is
    not known. split: names of parameters of which each rank holds a part (tensor parallelism).

    Raises:
        LayoutError: the class cannot work on a part of the parameters, or needs whole ones and
            there are none.
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
    known = kind.__name__ if _is_torch(kind) else ""
    if bases & MATRIXWISE and whole is False:
        raise LayoutError(
            f"{kind.__name__} reads rows and columns of a parameter, so whole=False would train "
            f"differently; leave whole= out"
        )
    needs = known not in ELEMENTWISE if whole is None else whole
    if needs and split and known not in ELEMENTWISE:
        raise LayoutError(
            f"{kind.__name__} needs whole parameters, but {len(split)} are split over ranks of "
            f"the model: {', '.join(sorted(split)[:5])}; use one of "
            f"{', '.join(sorted(ELEMENTWISE))}, or whole=False if its update is element-wise"
        )
    return needs


def _is_torch(kind: type) -> bool:
    return kind.__module__.startswith("torch.optim.")
