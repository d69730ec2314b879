"""The attention of a model whose context ranks share its sequences.

A model gets it as a constructor argument, like a group. Its layers do not know whether they see a
full sequence.
"""

from typing import Any

import torch
from torch import Tensor

from torchdistpackage.comm.primitives import Group, ranks_of
from torchdistpackage.comm.random import differ
from torchdistpackage.comm.tpc import group_again
from torchdistpackage.errors import LayoutError
from torchdistpackage.layout.exchanges import check_comm_type
from torchdistpackage.parallel.context.attention import plan_attention
from torchdistpackage.parallel.context.order import OrderName, Ranges, SequenceOrder
from torchdistpackage.parallel.context.sequence import sequence_positions
from torchdistpackage.parallel.context.visibility import Documents, Visibility, places
from torchdistpackage.parallel.tensor.attention import SequenceAttention, Tokens, WholeSequence


class ContextSequence:
    """A `SequenceAttention` for ranks that each hold equally many tokens of every sequence.

    The tokens of a rank are those that `shard_sequence` returns.

    comm_type, a2a_size: as in `context_attention`.
    """

    def __init__(
        self,
        group: Group,
        comm_type: str = "p2p",
        *,
        order: OrderName = "zigzag",
        a2a_size: int | None = None,
    ):
        check_comm_type(comm_type)
        self.group, self.comm_type = group, comm_type
        self.order_name, self.a2a_size = order, a2a_size

    def order(self, num: int) -> SequenceOrder:
        """Return the order of a sequence of which each rank holds `num` tokens.

        Raises:
            LayoutError: not all chunks would be equally long.
        """
        size = self.group.size()
        order = SequenceOrder(num * size, size, self.order_name)
        if set(order.lengths) != {num} or (num * size) % order.num_chunks:
            raise LayoutError(
                f"{num} tokens on each of {size} context ranks are not equal chunks; use sequences "
                f"of a multiple of {order.num_chunks} tokens"
            )
        return order

    @property
    def multiple(self) -> int:
        """Number that the length of a sequence must be a multiple of."""
        return SequenceOrder(2 * self.group.size(), self.group.size(), self.order_name).num_chunks

    def ranges(self, seq_len: int) -> Ranges:
        """Return the ranges of positions that this rank holds."""
        return self.order(seq_len // self.group.size()).parts[self.group.rank()]

    def part(self, x: Tensor) -> Tensor:
        """Return this rank's slice of the sequences `x` (B, S, ...)."""
        size = self.group.size()
        if x.dim() < 2 or x.shape[1] % self.multiple:
            raise LayoutError(
                f"a batch of shape {tuple(x.shape)} cannot be cut along its sequence for {size} "
                f"context ranks; use (B, S, ...) with S a multiple of {self.multiple}"
            )
        return torch.cat([x[:, each.start : each.stop] for each in self.ranges(x.shape[1])], 1)

    def place(self, position: int, seq_len: int) -> tuple[int, int]:
        """Return (index of the rank, offset in its slice) of a position of the sequence."""
        for index, part in enumerate(self.order(seq_len // self.group.size()).parts):
            for positions, local in zip(part, places(part), strict=True):
                if position in positions:
                    return index, local.start + position - positions.start
        raise LayoutError(
            f"position {position} is outside of a sequence of {seq_len}; use 0 to {seq_len - 1}"
        )

    def tokens(self, num: int, position_ids: Tensor | None, device: torch.device) -> Tokens:
        """Return the positions of this rank's `num` tokens and, for packed samples, their
        documents.
        """
        order = self.order(num)
        if position_ids is None:
            positions = sequence_positions(
                order.seq_len, order=self.order_name, device=device, group=self.group
            )
            return Tokens(order.seq_len, positions)
        if position_ids.shape[1] != order.seq_len:
            raise LayoutError(
                f"position_ids of {position_ids.shape[1]} tokens for {num} on each of "
                f"{self.group.size()} context ranks; pass those of the whole sequence"
            )
        documents = Documents((position_ids == 0).cumsum(1))
        return Tokens(order.seq_len, self.part(position_ids), documents)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool,
        dropout: float,
        group: Group | None,
        mask: Any = None,
        *,
        scale: float | None = None,
        window: int | None = None,
    ) -> Tensor:
        """Attend from this rank's queries over the full sequence."""
        visibility = Visibility(causal, window, mask)
        plan = plan_attention(
            self.group, self.order(q.shape[2]), visibility, self.comm_type, self.a2a_size, q, k
        )
        if not dropout or group is None:
            return plan(q, k, v, scale=scale, dropout=dropout)
        with differ(group.rank(), q.device):
            return plan(q, k, v, scale=scale, dropout=dropout)

    def __deepcopy__(self, memo: dict[int, object]) -> "ContextSequence":
        return self  # a process group cannot be copied

    def __reduce__(self) -> tuple[Any, ...]:
        # a process group cannot be pickled: name its ranks, and look the group up when unpickling
        return _again, (ranks_of(self.group), self.comm_type, self.order_name, self.a2a_size)


def sequence_over(group: Group, comm_type: str) -> SequenceAttention:
    """Return the attention of a model whose sequences the ranks of `group` share."""
    return WholeSequence() if group.size() == 1 else ContextSequence(group, comm_type)


def _again(
    ranks: tuple[int, ...], comm_type: str, order: OrderName, a2a_size: int | None
) -> ContextSequence:
    """Rebuild a pickled `ContextSequence` from the ranks of its group."""
    return ContextSequence(group_again(ranks), comm_type, order=order, a2a_size=a2a_size)
