"""Attention over a sequence that is divided among the ranks of a group.

`context_attention` is `F.scaled_dot_product_attention` over the full sequence, for this rank's
queries. A `ContextPlan` holds all that does not depend on the numbers: which rank holds which
positions, which scores are visible, and how keys and values travel. Before that exchange, an
all-to-all may trade heads for sequence (Jacobs et al., DeepSpeed Ulysses, arXiv:2309.14509): then
each rank, or each block of adjacent ranks, has the full sequence for some of the heads.
"""

import logging
import math
import socket
from typing import Any, cast, get_args
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchdistpackage.comm import collectives, primitives
from torchdistpackage.comm.creation import PerGroup
from torchdistpackage.comm.groups import Groups
from torchdistpackage.comm.primitives import Group, ranks_of
from torchdistpackage.comm.random import differ
from torchdistpackage.comm.tpc import resolve_group, tpc
from torchdistpackage.errors import LayoutError
from torchdistpackage.layout.exchanges import (
    COMM_TYPES,
    EXCHANGES,
    AttentionSize,
    check_comm_type,
)
from torchdistpackage.lazy import resolve
from torchdistpackage.parallel.context import choice, kernels
from torchdistpackage.parallel.context.agreement import agree
from torchdistpackage.parallel.context.exchange import Alone, KeyExchange
from torchdistpackage.parallel.context.merge import Backward, Merged, Scoring
from torchdistpackage.parallel.context.order import (
    OrderName,
    SequenceOrder,
    joined,
    order_of,
)
from torchdistpackage.parallel.context.parts import ascending, by_position, in_ranks, reordered
from torchdistpackage.parallel.context.visibility import Documents, Visibility
from torchdistpackage.topology.mesh import adjacent_on_a_host

_LOG = logging.getLogger(__name__)


class ContextPlan:
    """The plan by which this rank attends over a sequence in `order`; all ranks of `group` make the
    same plan.

    comm_type: any but `auto`.
    a2a_size: for a2a+p2p, the number of adjacent ranks that exchange heads.
    """

    def __init__(
        self,
        group: Group,
        order: SequenceOrder,
        visibility: Visibility,
        comm_type: str,
        a2a_size: int = 1,
    ):
        self.comm_type, self.visibility = comm_type, visibility
        self._spec = EXCHANGES[comm_type]
        self._swap = None
        self._num_serving = group.size()
        parts, index = order.parts, group.rank()
        if self._spec.swap != "none":
            self._num_serving = size = self._spec.swap_size(group.size(), a2a_size)
            choice.check_a2a_size(group.size(), size)
            block, group = _blocks(group, size)
            self._swap = ref(block)
            first = index - index % size
            self._lengths = order.lengths[first : first + size]
            self._group_parts = parts[first : first + size]
            parts = tuple(
                joined(each for part in parts[i : i + size] for each in part)
                for i in range(0, len(parts), size)
            )
            index //= size
        self._exchange: KeyExchange
        if len(parts) == 1:
            self._exchange = Alone(parts[0], visibility)
        else:
            self._exchange = resolve(self._spec.exchange)(group, parts, visibility)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, dropout: float = 0.0
    ) -> Tensor:
        """Attend from q (B, H, S_local, D) to k and v (B, h, S_local, D); return (B, H, S_local,
        D).

        Raises:
            LayoutError: the ranks cannot exchange these heads, or no kernel supports the inputs.
        """
        q, k, v = _autocast(q, k, v)
        # documents and windows mask few of the rectangles: the others keep the fastest kernel
        kernel = kernels.choose(q, v, masked=False, dropout=dropout)
        masked = kernels.choose(q, v, masked=self.visibility.has_masks, dropout=dropout)
        scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        scoring = Scoring(kernel, self.visibility, scale, dropout, masked)
        if problem := self._spec.heads_problem(q.shape[1], k.shape[1], self._num_serving):
            raise LayoutError(problem)
        if self._swap is None:
            return _ContextAttention.apply(q, k, v, self._exchange, scoring)
        # fewer key heads than ranks: repeat them until every rank gets a whole one
        times = math.lcm(k.shape[1], self._num_serving) // k.shape[1]
        if times > 1:
            k, v = (x.repeat_interleave(times, 1) for x in (k, v))
        q = self._to_heads(q)
        if k.shape == v.shape:
            # one all-to-all for both: a call costs more than the copy
            k, v = self._to_heads(torch.stack((k, v))).unbind(0)
        else:
            k, v = self._to_heads(k), self._to_heads(v)
        return self._to_sequence(_ContextAttention.apply(q, k, v, self._exchange, scoring))

    def _to_heads(self, x: Tensor) -> Tensor:
        """Exchange sequence for heads: (..., H, S_local, D) -> (..., H / ranks, S_block, D), with
        positions ascending.
        """
        x = collectives.all_to_all(x, -3, -2, self._swap(), join_sizes=self._lengths)
        received = in_ranks(self._group_parts)
        return reordered(x, x.dim() - 2, received, ascending(received))

    def _to_sequence(self, x: Tensor) -> Tensor:
        """Exchange heads for sequence, the inverse of `_to_heads`."""
        received = in_ranks(self._group_parts)
        x = reordered(x, 2, ascending(received), received)
        return collectives.all_to_all(x, -2, -3, self._swap(), split_sizes=self._lengths)


class _ContextAttention(torch.autograd.Function):
    """Autograd of one attention: the backward exchanges keys and values once more."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, exchange: KeyExchange, scoring: Scoring):
        q, k, v = _dense(q), _dense(k), _dense(v)
        merged = Merged(q, scoring)
        exchange.run_forward(k, v, merged.add)
        out, lse = merged.take()
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.exchange, ctx.scoring, ctx.drawn = exchange, scoring, merged.drawn
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        q, k, v, out, lse = ctx.saved_tensors
        back = Backward(_dense(grad), q, out, lse, ctx.scoring, ctx.drawn)
        dk, dv = ctx.exchange.run_backward(k, v, back.part)
        # gradients are added over ranks in float32, and rounded once here
        return back.take(), dk.to(k.dtype), dv.to(v.dtype), None, None


def _dense(x: Tensor) -> Tensor:
    """Return `x` with a head's channels contiguous, because the kernels read out of bounds
    otherwise.

    torch's own attention checks this before it calls them; direct calls must do so themselves. A
    gradient may be one expanded number, and a batch of one may have any strides.
    """
    return x if x.stride(-1) == 1 else x.contiguous()


def context_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    dropout_p: float = 0.0,
    document_ids: Tensor | None = None,
    window: int | None = None,
    comm_type: str = "p2p",
    order: OrderName = "zigzag",
    a2a_size: int | None = None,
    seq_len: int | None = None,
    group: Group | None = None,
) -> Tensor:
    """Run `F.scaled_dot_product_attention` of this rank's queries over the full sequence.

    q (B, H, S_local, D), k and v (B, h, S_local, D) are this rank's parts, cut by `shard_sequence`;
    the result is (B, H, S_local, D). All ranks of the group call it together, and together run its
    backward.

    scale: factor of the scores; None: 1 / sqrt(D).
    enable_gqa: allow h < H; each key-value head serves H / h adjacent query heads.
    dropout_p: share of the weights to drop; each rank draws its own.
    document_ids: (B, S_local) integers; positions of different documents do not see each other.
    window: a query sees keys less than `window` positions away.
    comm_type: p2p (ring), all_gather, a2a (heads for sequence), a2a+p2p (a2a in blocks of
        `a2a_size` adjacent ranks and a ring of these blocks), another name in `EXCHANGES` of
        layout/exchanges.py, or auto, which logs its choice.
    seq_len: length of the full sequence. None: the ranks exchange their lengths and arguments in
        each call, and so find what they disagree on.
    group: default tpc's `context`.

    Raises:
        LayoutError: the ranks' parts do not form a sequence, their arguments differ, the ranks
            cannot share the heads, or the arguments are invalid. Without `seq_len`, all ranks raise
            the same error.
    """
    group = resolve_group(group, "context")
    check_comm_type(comm_type)
    _check_dims(q, k, v, document_ids)
    if seq_len is None:
        facts = {
            "positions of q": q.shape[2], "batch size": q.shape[0], "heads of q": q.shape[1],
            "heads of k": k.shape[1], "head dim": q.shape[3], "bytes of a number": q.itemsize,
            "is_causal": is_causal, "window": window or 0, "documents": document_ids is not None,
            "comm_type": COMM_TYPES.index(comm_type),
            "order": get_args(OrderName).index(order) if order in get_args(OrderName) else -1,
        }  # fmt: skip
        lengths = agree(facts, group)
        sequence = order_of(lengths, order, ranks_of(group))
    else:
        sequence = SequenceOrder(seq_len, group.size(), order)
        if sequence.lengths[group.rank()] != q.shape[2]:
            raise LayoutError(
                f"this rank holds {q.shape[2]} positions, but of a sequence of {seq_len} it would "
                f"hold {sequence.lengths[group.rank()]}; cut it with shard_sequence"
            )
    _check_arguments(q, k, v, enable_gqa, dropout_p)
    documents = None
    if document_ids is not None:
        documents = Documents(
            by_position(collectives.gather(document_ids, 1, group, sequence.lengths), 1, sequence)
        )
    plan = plan_attention(
        group, sequence, Visibility(is_causal, window, documents), comm_type, a2a_size, q, k
    )
    if not dropout_p:
        return plan(q, k, v, scale=scale)
    with differ(group.rank(), q.device):
        return plan(q, k, v, scale=scale, dropout=dropout_p)


_plans: PerGroup[dict[object, Any]] = PerGroup()
_logged: PerGroup[set[object]] = PerGroup()


def plan_attention(
    group: Group,
    order: SequenceOrder,
    visibility: Visibility,
    comm_type: str,
    a2a_size: int | None,
    q: Tensor,
    k: Tensor,
) -> ContextPlan:
    """Return the plan for these shapes, from a cache of the group or of the documents."""
    heads, kv_heads = q.shape[1], k.shape[1]
    key = (order, visibility, comm_type, a2a_size, q.shape, k.shape[1], q.dtype)
    documents = visibility.documents
    plans = _plans.setdefault(group, {}) if documents is None else documents.plans
    if key in plans:
        return plans[key]
    ranks_per_node = _ranks_per_node(group)
    if comm_type == "auto":
        size = AttentionSize(
            order.seq_len, heads, kv_heads, q.shape[3], q.shape[0], q.itemsize,
            visibility.is_causal, visibility.window,
        )  # fmt: skip
        machine = choice.CPU if q.device.type == "cpu" else choice.GPU
        best = choice.choose(
            size, group.size(), ranks_per_node=ranks_per_node, machine=machine, order=order.order
        )
        comm_type, a2a_size = best.comm_type, best.a2a_size
        if group.rank() == 0 and key not in _logged.setdefault(group, set()):
            _logged[group].add(key)
            _LOG.info("context_attention: %s", best.reason)
    if a2a_size is None and EXCHANGES[comm_type].swap == "blocks":
        a2a_size = choice.default_a2a_size(group.size(), heads, kv_heads, ranks_per_node)
    plans[key] = ContextPlan(group, order, visibility, comm_type, a2a_size or 1)
    return plans[key]


_nodes: PerGroup[int | None] = PerGroup()


def _ranks_per_node(group: Group) -> int | None:
    """Return the number of adjacent ranks of the group that share a host; None: all do."""
    if group not in _nodes:
        hosts = cast(list[str], primitives.gather_objects(socket.gethostname(), group))
        _nodes[group] = adjacent_on_a_host(hosts) if len({*hosts}) > 1 else None
    return _nodes[group]


def _blocks(group: Group, size: int) -> tuple[Group, Group]:
    """Return this rank's block of `size` adjacent ranks, and the ranks with its index in every
    block.
    """
    ranks, index = ranks_of(group), group.rank()
    groups = tpc.groups if tpc.is_set else _own_groups(group)
    first = index - index % size
    inner = groups.of(ranks[first : first + size])
    return inner, groups.of(ranks[index % size :: size])


_subgroups: PerGroup[Groups] = PerGroup()


def _own_groups(group: Group) -> Groups:
    """Return the cache of a group's subgroups, for use when tpc is not set up."""
    if group not in _subgroups:
        _subgroups[group] = Groups(ranks_of(group)[group.rank()])
    return _subgroups[group]


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast to the dtype that torch's own attention uses under autocast."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    # as torch's autocast, which leaves float64 alone
    return tuple(x.to(dtype) if x.dtype is not torch.float64 else x for x in tensors)


def _check_dims(q: Tensor, k: Tensor, v: Tensor, document_ids: Tensor | None) -> None:
    """Refuse shapes, dtypes and document ids that do not belong to one attention."""
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 4:
        raise LayoutError(f"context_attention takes (B, H, S_local, D), not {shapes}")
    if not (
        q.shape[::2] == k.shape[::2] == v.shape[::2]
        and q.shape[3] == k.shape[3]
        and k.shape[1] == v.shape[1]
    ):
        raise LayoutError(
            f"{shapes} are not slices of one sequence: batch sizes, positions and widths of q and "
            "k must be equal, as must the heads of k and v"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise LayoutError(f"q is of {q.dtype}, k of {k.dtype} and v of {v.dtype}; use one dtype")
    if document_ids is None:
        return
    expected_shape = (q.shape[0], q.shape[2])
    if tuple(document_ids.shape) != expected_shape or document_ids.dtype.is_floating_point:
        raise LayoutError(
            f"document_ids are {document_ids.dtype} of shape {tuple(document_ids.shape)}; pass "
            f"integers of shape (B, S_local) = {expected_shape}"
        )


def _check_arguments(q: Tensor, k: Tensor, v: Tensor, gqa: bool, dropout: float) -> None:
    """Refuse head counts without `enable_gqa` or that do not divide, and a bad dropout."""
    heads, kv_heads = q.shape[1], k.shape[1]
    if heads != kv_heads and not gqa:
        raise LayoutError(
            f"{heads} heads of queries and {kv_heads} of keys; pass enable_gqa=True for grouped "
            f"queries"
        )
    if heads % kv_heads:
        raise LayoutError(
            f"{heads} heads of queries are not a multiple of {kv_heads} heads of "
            "keys and values; change one"
        )
    if not 0 <= dropout < 1:
        raise LayoutError(f"dropout_p={dropout}; use 0 or more, below 1")
