"""Exchange of tokens and results between ranks, for experts on other ranks.

Chosen tokens are sorted by expert. This is also the order of ranks, as each rank holds a range of
experts. One all-gather of counts says how many rows each rank sends. One all-to-all sends the
tokens, another returns the results; the backward is these two with their roles exchanged. Only
chosen tokens travel. A rank without tokens, or without tokens for its experts, makes the same calls
as all others, so collectives have one order on all ranks for every routing.

With `places` there is no gather: every expert is sent that many rows, some of them padding, and no
size depends on the routing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from torchdistpackage.comm import primitives
from torchdistpackage.comm.backends import is_queued
from torchdistpackage.comm.creation import PerGroup
from torchdistpackage.comm.moments import OnHost
from torchdistpackage.comm.primitives import Group
from torchdistpackage.comm.streams import CudaStreams, Stream, streams_of
from torchdistpackage.comm.work import Work


@dataclass(frozen=True)
class Choices:
    """The choices of this rank's tokens that are sent, in sending order.

    order: (n,) the choice, token * top_k + place, of each sent row, sorted by expert. num_tokens,
    top_k: of this rank. is_padded: some rows are padding, with the choice number num_tokens *
    top_k, which no token has.
    """

    order: Tensor
    num_tokens: int
    top_k: int
    is_padded: bool = field(default=False, kw_only=True)

    @property
    def num_choices(self) -> int:
        return self.num_tokens * self.top_k

    @property
    def is_complete(self) -> bool:
        """True if every choice is sent, none dropped, and nothing else."""
        return not self.is_padded and len(self.order) == self.num_choices

    def rows_of(self, x: Tensor) -> Tensor:
        """Return the rows (n, D) to send from the tokens x (num_tokens, D)."""
        return _Rows.apply(x, self)


@dataclass(frozen=True)
class Dispatch(Choices):
    """A plan of how the tokens of one forward travel within `group`.

    sent, received: rows to and from each rank.
    blocks: (ranks, experts here) rows that arrive from each rank for each expert of this one, in
    this order. lengths: the same numbers for the host, where it has them.
    """

    group: Group
    sent: tuple[int, ...]
    received: tuple[int, ...]
    blocks: Tensor
    lengths: Sequence[Sequence[int]] | None = None

    @cached_property
    def counts(self) -> Tensor:
        """Number of rows of each expert of this rank, (local experts,)."""
        return self.blocks.sum(0)

    @cached_property
    def runs(self) -> list[list[slice]]:
        """The rows of each expert of this rank in order of arrival, one slice from each rank.

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

    def start(self, rows: Tensor) -> "TokenExchange":
        """Start to send rows (n, D) to the ranks of their experts."""
        return TokenExchange(rows, self.group).begin(self.sent, self.received)

    def by_expert(self, rows: Tensor) -> Tensor:
        """Return the rows that arrived, sorted by expert."""
        return rows if self._regroup is None else _Permute.apply(rows, self._regroup, False)

    def by_rank(self, rows: Tensor) -> Tensor:
        """Return the experts' results in the order in which the rows arrived."""
        return rows if self._regroup is None else _Permute.apply(rows, self._regroup, True)

    def send_back(self, rows: Tensor) -> Tensor:
        """Return each result to the rank of its token: rows (n, D) in the order of `rows_of`."""
        # the tokens are combined next, so nothing is left to compute meanwhile
        return TokenExchange(rows, self.group).begin(self.received, self.sent).wait()

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
    return PendingDispatch(experts, kept, bad, bounds, group).plan()


class PendingDispatch:
    """A dispatch whose counts are on their way to the host; the arguments of `plan_dispatch`.

    places: rows that each expert is sent, at least as many as choose it: then there are no counts
    to wait for, and no rank hears of the others' `bad`.
    choices: what is sent, where that is known before the counts are, and where the host would wait
    for a device to have them. Compute something else first then: rows of `choices` can already
    travel from here on.
    """

    def __init__(
        self,
        experts: Tensor,
        kept: Tensor | None,
        bad: Tensor,
        bounds: Sequence[int],
        group: Group,
        places: int | None = None,
    ):
        self._kept, self._bad, self._bounds, self._group = kept, bad, bounds, group
        self._size: tuple[int, int] = (experts.shape[0], experts.shape[1])
        num_experts, flat = bounds[-1], experts.flatten()
        if kept is not None:
            flat = torch.where(kept.flatten(), flat, num_experts)
        by_expert, self._order = flat.sort(stable=True)
        # bincount would do, but on a device its host waits for the largest number
        numbers = torch.arange(num_experts + 2, device=flat.device)
        firsts = torch.searchsorted(by_expert, numbers)
        self._counts = firsts.diff()
        self.choices: Choices | None = None
        self._places = places
        if places is not None:
            self._order = _padded(self._order, firsts, places)
            return
        # in place of those that were dropped, which nobody asks for
        self._counts[num_experts] = bad
        if group.size() > 1:
            self._all_counts = primitives.all_gather(self._counts.unsqueeze(0), group)
            self._on_host = OnHost(self._all_counts)
            if kept is None and is_queued(group):
                self.choices = Choices(self._order, *self._size)

    def plan(self) -> tuple[Dispatch, list[int]]:
        """Return the dispatch, and the ranks of the group whose `bad` is true."""
        group, bounds, order = self._group, self._bounds, self._order
        size, index, num_experts = group.size(), group.rank(), bounds[-1]
        if self._places is not None:
            return self._padded_plan(self._places)
        if size == 1:
            blocks, flags = self._counts[None, :-1], []
            if order.device.type == "cpu" and bool(self._bad):  # a device is not waited for
                flags = [0]
            num = order.numel() if self._kept is None else int(blocks.sum())
            return Dispatch(order[:num], *self._size, group, (num,), (num,), blocks), flags
        table: list[list[int]] = self._on_host.read()
        spans = [slice(*bounds[r : r + 2]) for r in range(size)]
        sent = tuple(sum(table[index][span]) for span in spans)
        received = tuple(sum(row[spans[index]]) for row in table)
        blocks = self._all_counts[:, spans[index]]
        lengths = [row[spans[index]] for row in table]
        sent_order = order[: sum(sent)]
        plan = Dispatch(sent_order, *self._size, group, sent, received, blocks, lengths)
        return plan, [r for r, row in enumerate(table) if row[num_experts]]

    def _padded_plan(self, places: int) -> tuple[Dispatch, list[int]]:
        """Return the dispatch of `places` rows for each expert; no host waits for a device."""
        group, bounds, order = self._group, self._bounds, self._order
        size, index = group.size(), group.rank()
        num_experts_of = [last - first for first, last in pairwise(bounds)]
        sent = tuple(num * places for num in num_experts_of)
        num_local = num_experts_of[index]
        blocks = torch.full((size, num_local), places, device=order.device)
        received, lengths = (num_local * places,) * size, [[places] * num_local] * size
        plan = Dispatch(order, *self._size, group, sent, received, blocks, lengths, is_padded=True)
        return plan, [index] if not is_queued(group) and bool(self._bad) else []


def _padded(order: Tensor, firsts: Tensor, places: int) -> Tensor:
    """Return `places` choices of each expert, (experts x places): its own, then padding.

    order: all choices, sorted by expert. firsts: (experts + 2,) where those of each begin.
    """
    num = len(order)
    at = firsts[:-2, None] + torch.arange(places, device=order.device)
    chosen = order[at.clamp(max=num - 1)]
    return torch.where(at < firsts[1:-1, None], chosen, num).flatten()


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

    begins_late: other work comes between the construction and `begin`, which has the sizes. The
    exchange waits for none of it on a device.
    """

    def __init__(self, rows: Tensor, group: Group, *, begins_late: bool = False):
        self.group = group
        self.sent: Sequence[int] = ()
        self.received: Sequence[int] = ()
        self.work: Work | None = None
        self._source: Tensor | None = rows
        self._streams = streams_of(rows.device) if begins_late else None
        if self._streams is not None:
            self._there = self._streams.current().record_event()
        if group.size() > 1:
            self._edge: Tensor = _BeginExchange.apply(rows, self)

    def begin(self, sent: Sequence[int], received: Sequence[int]) -> "TokenExchange":
        """Send these numbers of rows to each rank, and receive these numbers from each."""
        self.sent, self.received = sent, received
        if self.group.size() == 1 or self._source is None:
            return self
        # the graph keeps this object, which must not keep the rows
        rows, self._source = self._source.detach(), None
        if self._streams is None:
            self.send(rows, sent, received)
            return self
        # a call of NCCL waits for all that the current stream was given before it: only here not
        stream = _stream_of(self.group, self._streams)
        stream.wait_event(self._there)
        with self._streams.on(stream):
            self.send(rows, sent, received)
        return self

    def wait(self) -> Tensor:
        """Wait for the received rows and return them by rank, (sum of received, D)."""
        if self._source is not None:  # it is of a group of one
            return self._source
        return _EndExchange.apply(self._edge, self)

    def send(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> None:
        """Start the exchange."""
        # the exchange cuts one block of memory by ranks; a view may have gaps
        rows = rows.contiguous()
        self.work = primitives.all_to_all(rows, self.group, sent, received, async_op=True)

    def finish(self) -> Tensor:
        """Wait for the exchange, and return the rows received."""
        assert self.work is not None
        # the experts read these rows next
        rows, self.work = self.work.wait(), None
        if self._streams is not None:
            self._streams.keep(rows)  # `begin` made them on another stream
        return rows


_exchange_streams: PerGroup[Stream] = PerGroup()
"""Group -> stream on which its exchanges begin."""


def _stream_of(group: Group, streams: CudaStreams) -> Stream:
    if group not in _exchange_streams:
        # a stream beside the current one, so that the exchange overlaps with what is computed there
        _exchange_streams[group] = streams.stream()
    return _exchange_streams[group]


class _BeginExchange(torch.autograd.Function):
    """The older half of an exchange: its backward awaits the gradients of the rows.

    Its result has no elements: it is an edge of the graph, not data.
    """

    @staticmethod
    def forward(ctx, rows: Tensor, exchange: TokenExchange) -> Tensor:
        ctx.exchange = exchange
        return rows.new_empty(())

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
        return grad.new_empty(()), None


class _Rows(torch.autograd.Function):
    """A copy of each token for each of its choices; the backward adds up a token's gradients.

    It writes each choice's gradient to its place and adds them in that order, so it needs no atomic
    additions.
    """

    @staticmethod
    def forward(ctx, x: Tensor, plan: Choices) -> Tensor:
        ctx.plan = plan
        return _of_choices(x, plan)

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
        grad_rows = _of_choices(grad, plan)
        grad_weights = None
        if ctx.needs_input_grad[1]:
            wide = torch.promote_types(rows.dtype, weights.dtype)
            # the dot product runs over the width of the model, and is rounded once
            dots = torch.linalg.vecdot(grad_rows.to(wide), rows.to(wide)).to(weights.dtype)
            grad_weights = weights.new_zeros(plan.num_choices + plan.is_padded)
            grad_weights.index_copy_(0, plan.order, dots)
            grad_weights = grad_weights[: plan.num_choices].view_as(weights)
        by_choice = F.pad(weights.flatten(), (0, int(plan.is_padded)))
        by_row = by_choice.index_select(0, plan.order)
        # in the dtype of the rows: wider weights would make a wide copy of all rows
        return grad_rows.mul_(by_row.unsqueeze(1).to(rows.dtype)), grad_weights, None


class _Permute(torch.autograd.Function):
    """A permutation of rows, or its inverse; each is the backward of the other."""

    @staticmethod
    def forward(ctx, rows: Tensor, index: Tensor, back: bool) -> Tensor:
        ctx.index, ctx.back = index, back
        return _permuted(rows, index, back)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor):
        return _permuted(grad, ctx.index, not ctx.back), None, None


def _permuted(rows: Tensor, index: Tensor, back: bool) -> Tensor:
    """Return rows[index], or with `back` the inverse: the rows from which that indexing would make
    these."""
    if not back:
        return rows.index_select(0, index)
    return torch.empty_like(rows).index_copy_(0, index, rows)


def _of_choices(x: Tensor, plan: Choices) -> Tensor:
    """Return the token of each row, (num_tokens, D) -> (n, D); zeros for padding."""
    if not plan.is_padded:
        return x.index_select(0, plan.order // plan.top_k)
    # not by a factor of 0, which leaves a NaN
    rows = x.index_select(0, (plan.order // plan.top_k).clamp(max=plan.num_tokens - 1))
    return rows.masked_fill_((plan.order == plan.num_choices).unsqueeze(1), 0)


def _of_tokens(rows: Tensor, plan: Choices, weights: Tensor | None = None) -> Tensor:
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
    full = make((plan.num_choices + plan.is_padded, *rows.shape[1:]))
    full.index_copy_(0, plan.order, rows)  # rows of padding all come to the last one
    full = full[: plan.num_choices].view(plan.num_tokens, plan.top_k, *rows.shape[1:])
    if weights is None:
        return full.sum(1)
    y = full[:, 0] * weights[:, :1]
    for choice in range(1, plan.top_k):
        # y has the wider dtype of rows and weights, so the sum over choices is rounded once below
        y.addcmul_(full[:, choice].to(y.dtype), weights[:, choice, None].to(y.dtype))
    return y.to(rows.dtype)
