"""The communication of a rank in a step, call by call, as a plan counts it. No torch.

A model says what its layers send of one microbatch (`ModelSpec.layer_numbers`), plan/traffic.py the
rest; tests hold both to the record of real ranks. Bytes are those of what a rank gives to a call,
as the record has them: to a gather its part, to a reduce-scatter or an all-reduce all of it.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from typing import Self

ITEM_BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class CallCount:
    """`number` calls of `operation`, each of `num_elements` of `dtype` (torch's name).

    axis: the mesh axis along which the ranks of the group lie. operation: "send", or its name in
    comm/primitives.py. what: the tensors that are sent. ranks: the group, where a plan has put the
    calls in place.
    """

    axis: str
    operation: str
    num_elements: float
    dtype: str
    what: str
    number: int = 1
    ranks: tuple[int, ...] = ()

    @property
    def call_bytes(self) -> float:
        """Bytes of one call."""
        return self.num_elements * ITEM_BYTES[self.dtype]

    @property
    def num_bytes(self) -> float:
        """Bytes of all calls."""
        return self.number * self.call_bytes

    def times(self, number: int) -> Self:
        return replace(self, number=self.number * number)


@dataclass(frozen=True, slots=True)
class Microbatch:
    """The input that the layers of a rank get at a time.

    samples, tokens: rows, and the tokens of each that this rank has of its sequence.
    tensor, index: ranks along tensor, and this rank's place among them. expert: ranks along expert.
    stream: dtype of what goes from block to block; products: of what layers multiply; losses: of
    the sums of a loss. recomputed: blocks are computed again in the backward. drops: with dropout.
    has_positions: each sample has its own, as documents have. trains: a backward follows. by_row:
    the loss is asked of each sample. smooths: with label smoothing.
    """

    samples: int
    tokens: int
    tensor: int
    index: int
    expert: int
    stream: str
    products: str
    losses: str
    recomputed: bool = False
    drops: bool = False
    has_positions: bool = False
    trains: bool = True
    by_row: bool = False
    smooths: bool = False

    @property
    def forward_alone(self) -> "Microbatch":
        """Return the same without a backward: nothing is dropped out, smoothed or recomputed."""
        return replace(self, trains=False, recomputed=False, drops=False, smooths=False)

    @property
    def rows(self) -> int:
        return self.samples * self.tokens


def merged(calls: Iterable[CallCount]) -> tuple[CallCount, ...]:
    """Return equal calls merged into one entry with their number, in order of first occurrence."""
    calls = [each for each in calls if each.number]
    groups: dict[tuple[int, ...], int] = {}
    # by identity, since hashing thousands of ranks takes longer than all else
    ranks_of = {id(each.ranks): each.ranks for each in calls}
    group_of = {key: groups.setdefault(ranks, len(groups)) for key, ranks in ranks_of.items()}
    equal_calls: dict[Hashable, list[CallCount]] = {}
    for each in calls:
        call_key = each.axis, each.operation, each.num_elements, each.dtype, each.what
        equal_calls.setdefault((*call_key, group_of[id(each.ranks)]), []).append(each)
    return tuple(
        replace(same[0], number=sum(each.number for each in same)) for same in equal_calls.values()
    )
