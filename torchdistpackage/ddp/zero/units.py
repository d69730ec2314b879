"""Which parameters travel together in ZeRO: arithmetic on sizes, no torch.

One rule: the parameters of one module stay together, since their gradients come together: a bias
that went with the bucket before would hold that up until the module it belongs to is done.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModuleParam:
    """A parameter: the module it belongs to, its bytes, and what it may share a bucket with."""

    unit: str
    num_bytes: int
    key: Hashable


def group_by_module(members: Sequence[ModuleParam], cap_bytes: int) -> list[int]:
    """The bucket number of each, for members in the order of registration.

    Buckets are filled from the last member on, as gradients come, up to `cap_bytes`; a larger
    module has one of its own. Numbers ascend in this order, over all keys.
    """
    unit_bytes: dict[tuple[Hashable, str], int] = {}
    for member in members:
        unit = member.key, member.unit
        unit_bytes[unit] = unit_bytes.get(unit, 0) + member.num_bytes
    bucket_of: dict[tuple[Hashable, str], int] = {}
    open_bucket: dict[Hashable, tuple[int, int]] = {}  # number, bytes in it
    num_buckets = 0
    for member in reversed(members):
        unit = member.key, member.unit
        if unit in bucket_of:
            continue
        size = unit_bytes[unit]
        number, used_bytes = open_bucket.get(member.key, (-1, 0))
        if number < 0 or used_bytes + size > cap_bytes:
            number, used_bytes = num_buckets, 0
            num_buckets += 1
        bucket_of[unit] = number
        open_bucket[member.key] = number, used_bytes + size
    return [bucket_of[member.key, member.unit] for member in members]
