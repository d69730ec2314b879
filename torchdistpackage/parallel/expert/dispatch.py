"""Exchange of tokens and results between ranks, for experts on other ranks.

Chosen tokens are sorted by expert. This is also the order of ranks, as each rank holds a range of
experts. One all-gather of counts says how many rows each rank sends. One all-to-all sends the
tokens, another returns the results; the backward is these two with their roles exchanged. Only
chosen tokens travel. A rank without tokens, or without tokens for its experts, makes the same calls
as all others, so collectives have one order on all ranks for every routing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from torchdistpackage.comm import primitives
from torchdistpackage.comm.primitives import Group
from torchdistpackage.comm.work import Work


@dataclass(frozen=True)
class Dispatch:
    """A plan of how the tokens of one forward travel within `group`.

    order: (n,) which choice, token * top_k + place, each row that is sent is, sorted by expert.
    num_tokens, top_k: of this rank. sent, received: rows to and from each rank.
    blocks: (ranks, experts here) rows that arrive from each rank for each expert of this one, in
    this order. lengths: the same numbers for the host, where it has them.
    """

    group: Group
    order: Tensor
    num_tokens: int
    top_k: int
    sent: tuple[int, ...]
    received: tuple[int, ...]
    blocks: Tensor
    lengths: Sequence[Sequence[int]] | None = None

    @cached_property
    def counts(self) -> Tensor:
        """The number of rows of each expert of this rank, (experts here,)."""
        return self.blocks.sum(0)

    @cached_property
    def runs(self) -> list[list[slice]]:
        """The rows of each expert of this rank as they arrive, one slice from each rank.

        A device's host may have to wait for the counts.
        """
        lengths = self.lengths or self.blocks.tolist()
        ends = accumulate((n for row in lengths for n in row), initial=0)
        spans = [slice(*bounds) for bounds in pairwise(ends)]
        num = self.blocks.shape[1]
        return [spans[e::num] for e in range(num)]

    @cached_property
    def _regroup(self) -> Tensor | None:
        """The permutation from the order of arrival to that by expert; None if they are equal."""
        return None if 1 in self.blocks.shape else _regroup(self.blocks, sum(self.received))

    @property
    def is_complete(self) -> bool:
        """True if every choice is sent, none dropped."""
        return len(self.order) == self.num_tokens * self.top_k

    def rows_of(self, x: Tensor) -> Tensor:
        """Return the rows (n, D) to send from the tokens x (num_tokens, D)."""
        return _Rows.apply(x, self)

    def start(self, rows: Tensor) -> "TokenExchange":
        """Start to send rows (n, D) to the ranks of their experts."""
        return TokenExchange(rows, self.group, self.sent, self.received)

    def by_expert(self, rows: Tensor) -> Tensor:
        """Return the rows that arrived, sorted by expert."""
        return rows if self._regroup is None else _Permute.apply(rows, self._regroup, False)

    def by_rank(self, rows: Tensor) -> Tensor:
        """Return the experts' results in the order in which the rows arrived."""
        return rows if self._regroup is None else _Permute.apply(rows, self._regroup, True)

    def send_back(self, rows: Tensor) -> Tensor:
        """Return each result to the rank of its token: rows (n, D) in the order of `rows_of`."""
        return TokenExchange(rows, self.group, self.received, self.sent).wait()

    def combine(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Return each token's weighted sum: results (n, D), weights (num_tokens, k) -> (num_tokens,
        D).

        A dropped choice adds nothing.
        """
        return _Combine.apply(rows, weights, self)


def plan_dispatch(
    experts: Tensor,
    kept: Tensor | None,
    bad: Tensor,
    bounds: Sequence[int],
    group: Group,
) -> tuple[Dispatch, list[int]]:
    """Return the dispatch of experts (N, k) int64, and the ranks of `group` whose `bad` is true.

    kept: (N, k) bool, False for dropped choices. bounds: the first expert of each rank of the
    group, and their number. A collective of the group; on a device its host waits for the counts,
    which sizes of messages need.
    """
    num_experts, size, index = bounds[-1], group.size(), group.rank()
    flat = experts.flatten()
    if kept is not None:
        flat = torch.where(kept.flatten(), flat, num_experts)
    by_expert, order = flat.sort(stable=True)
    # bincount would do, but on a device its host waits for the largest number
    numbers = torch.arange(num_experts + 2, device=flat.device)
    counts = torch.searchsorted(by_expert, numbers).diff()
    counts[num_experts] = bad  # in place of those that were dropped, which nobody asks for
    if size == 1:
        blocks, flags = counts[None, :-1], []
        if flat.device.type == "cpu" and bool(bad):  # a device is not waited for
            flags = [0]
        num = flat.numel() if kept is None else int(blocks.sum())
        return Dispatch(group, order[:num], *experts.shape, (num,), (num,), blocks), flags
    all_counts = primitives.all_gather(counts.unsqueeze(0), group)
    table = all_counts.tolist()
    spans = [slice(*bounds[r : r + 2]) for r in range(size)]
    sent = tuple(sum(table[index][span]) for span in spans)
    received = tuple(sum(row[spans[index]]) for row in table)
    blocks, lengths = all_counts[:, spans[index]], [row[spans[index]] for row in table]
    plan = Dispatch(group, order[: sum(sent)], *experts.shape, sent, received, blocks, lengths)
    return plan, [r for r, row in enumerate(table) if row[num_experts]]


def _regroup(blocks: Tensor, num: int) -> Tensor:
    """Return the permutation that sorts rows from the order (rank, expert) to (expert, rank).

    blocks: (ranks, experts) the number of rows of each.
    """
    lengths = blocks.t().flatten()
    first = blocks.flatten().cumsum(0).sub(blocks.flatten()).view_as(blocks).t().flatten()
    start = lengths.cumsum(0) - lengths
    shift = torch.repeat_interleave(first - start, lengths, output_size=num)
    return shift + torch.arange(num, device=blocks.device)


class TokenExchange:
    """An exchange of rows between ranks, in the forward and in the backward alike.

    Computation between the construction and `wait()` overlaps with the exchange, and so does its
    backward. Autograd runs the node of `wait` first, which sends the gradients, and the node that
    waits for them last, because it is the older one.
    """

    def __init__(self, rows: Tensor, group: Group, sent: Sequence[int], received: Sequence[int]):
        self.group, self.sent, self.received = group, sent, received
        self.work: Work | None = None
        self._rows = rows if group.size() == 1 else _BeginExchange.apply(rows, self)

    def wait(self) -> Tensor:
        """Return the rows received, (sum of received, D), by rank."""
        if self.group.size() == 1:
            return self._rows
        return _EndExchange.apply(self._rows, self)

    def send(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Start the exchange; return the tensor to keep alive until `finish`."""
        rows = rows.contiguous()
        self.work = primitives.all_to_all(rows, self.group, sent, received, async_op=True)
        return rows

    def finish(self) -> Tensor:
        """Wait for the exchange, and return the rows received."""
        assert self.work is not None
        rows, self.work = self.work.wait(), None
        return rows


class _BeginExchange(torch.autograd.Function):
    """The older half of an exchange: its forward sends rows, its backward awaits their gradients.

    Its result has the shape of what arrives and no numbers: an edge of the graph, not a tensor.
    """

    @staticmethod
    def forward(ctx, rows: Tensor, exchange: TokenExchange) -> Tensor:
        ctx.exchange = exchange
        exchange.send(rows, exchange.sent, exchange.received)
        return rows.new_empty(()).expand(sum(exchange.received), *rows.shape[1:])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, unused: Tensor):
        return ctx.exchange.finish(), None


class _EndExchange(torch.autograd.Function):
    """The younger half of an exchange: its forward awaits rows, its backward sends their
    gradients.
    """

    @staticmethod
    def forward(ctx, edge: Tensor, exchange: TokenExchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.finish()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor):
        exchange = ctx.exchange
        exchange.send(grad, exchange.received, exchange.sent)
        return grad.new_empty(()).expand_as(grad), None


class _Rows(torch.autograd.Function):
    """A copy of each token for each of its choices; the backward adds up a token's gradients.

    It writes each choice's gradient to its place and adds them in the order of places, so it needs
    no atomic additions.
    """

    @staticmethod
    def forward(ctx, x: Tensor, plan: Dispatch) -> Tensor:
        ctx.plan = plan
        return x.index_select(0, plan.order // plan.top_k)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor):
        return _of_tokens(grad, ctx.plan), None


class _Combine(torch.autograd.Function):
    """A weighted sum for each token, in float32 if rows are narrower than weights."""

    @staticmethod
    def forward(ctx, rows: Tensor, weights: Tensor, plan: Dispatch) -> Tensor:
        ctx.plan = plan
        ctx.save_for_backward(rows, weights)
        return _of_tokens(rows, plan, weights)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor):
        plan = ctx.plan
        rows, weights = ctx.saved_tensors
        grad_rows = grad.index_select(0, plan.order // plan.top_k)
        grad_weights = None
        if ctx.needs_input_grad[1]:
            wide = torch.promote_types(rows.dtype, weights.dtype)
            dots = torch.linalg.vecdot(grad_rows.to(wide), rows.to(wide)).to(weights.dtype)
            grad_weights = weights.new_zeros(plan.num_tokens * plan.top_k)
            grad_weights = grad_weights.index_copy_(0, plan.order, dots).view_as(weights)
        by_row = weights.flatten().index_select(0, plan.order)
        return grad_rows.mul_(by_row.unsqueeze(1).to(rows.dtype)), grad_weights, None


class _Permute(torch.autograd.Function):
    """A permutation of rows, or its inverse; each is the other's backward."""

    @staticmethod
    def forward(ctx, rows: Tensor, index: Tensor, back: bool) -> Tensor:
        ctx.index, ctx.back = index, back
        return _permuted(rows, index, back)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor):
        return _permuted(grad, ctx.index, not ctx.back), None, None


def _permuted(rows: Tensor, index: Tensor, back: bool) -> Tensor:
    """Return rows[index], or the rows that this would be made of if `back`."""
    if not back:
        return rows.index_select(0, index)
    return torch.empty_like(rows).index_copy_(0, index, rows)


def _of_tokens(rows: Tensor, plan: Dispatch, weights: Tensor | None = None) -> Tensor:
    """Return the sum of each token's rows in the order of its choices, times their weights.

    rows (n, D) -> (num_tokens, D).
    """
    is_like = weights is None or weights.dtype is rows.dtype
    if rows.is_cpu and len(rows) and is_like and plan.is_complete:
        places = torch.empty_like(plan.order)
        places[plan.order] = torch.arange(len(rows))
        places = places.view(-1, plan.top_k)
        # reads the rows where they are, without a copy in the order of choices
        return F.embedding_bag(places, rows, per_sample_weights=weights, mode="sum")
    make = rows.new_empty if plan.is_complete else rows.new_zeros
    full = make((plan.num_tokens * plan.top_k, *rows.shape[1:])).index_copy_(0, plan.order, rows)
    full = full.view(plan.num_tokens, plan.top_k, *rows.shape[1:])
    if weights is None:
        return full.sum(1)
    y = full[:, 0] * weights[:, :1]
    for place in range(1, plan.top_k):
        y.addcmul_(full[:, place].to(y.dtype), weights[:, place, None].to(y.dtype))
    return y.to(rows.dtype)
