"""Attention over a sequence whose parts the ranks of a group hold.

`context_attention` is `F.scaled_dot_product_attention` of the whole sequence, for this rank's
queries. A `ContextPlan` is what can be known before the numbers: who holds what, what is seen, and
how it travels. Before an exchange of keys and values, heads may be exchanged for sequence
(Jacobs et al., DeepSpeed Ulysses, arXiv:2309.14509): then each rank, or each block of ranks next to
each other, has all of the sequence for some of the heads.
"""

import logging
import math
import socket
from itertools import groupby
from typing import Any, get_args
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
from torchdistpackage.parallel.context import choice, kernels
from torchdistpackage.parallel.context.agreement import agree
from torchdistpackage.parallel.context.choice import AttentionSize, CommType
from torchdistpackage.parallel.context.exchange import Alone, GatheredKeys, KeyExchange, Ring
from torchdistpackage.parallel.context.merge import Backward, Merged, Scoring
from torchdistpackage.parallel.context.order import (
    OrderName,
    SequenceOrder,
    joined,
    order_of,
)
from torchdistpackage.parallel.context.parts import ascending, by_position, in_ranks, reordered
from torchdistpackage.parallel.context.visibility import Documents, Visibility

_LOG = logging.getLogger(__name__)


class ContextPlan:
    """How this rank attends over a sequence in `order`; all ranks of `group` make the same one.

    comm_type: none but `auto`. a2a_size: of a2a+p2p, the ranks next to each other that exchange
    heads.
    """

    def __init__(
        self,
        group: Group,
        order: SequenceOrder,
        visibility: Visibility,
        comm_type: CommType,
        a2a_size: int = 1,
    ):
        self.comm_type, self.visibility = comm_type, visibility
        self._swap = None
        parts, mine = order.parts, group.rank()
        if comm_type in ("a2a", "a2a+p2p"):
            size = group.size() if comm_type == "a2a" else a2a_size
            choice.check_a2a_size(group.size(), size)
            block, group = _blocks(group, size)
            self._swap = ref(block)
            first = mine - mine % size
            self._lengths = order.lengths[first : first + size]
            self._group_parts = parts[first : first + size]
            parts = tuple(
                joined(each for part in parts[i : i + size] for each in part)
                for i in range(0, len(parts), size)
            )
            mine //= size
        self._exchange: KeyExchange
        if len(parts) == 1:
            self._exchange = Alone(parts[0], visibility)
        elif comm_type == "all_gather":
            self._exchange = GatheredKeys(group, parts, visibility)
        else:
            self._exchange = Ring(group, parts, visibility)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, dropout: float = 0.0
    ) -> Tensor:
        """q (B, H, S_local, D), k and v (B, h, S_local, D) -> (B, H, S_local, D).

        Raises:
            LayoutError: heads that cannot be exchanged, or no kernel can do it.
        """
        q, k, v = _autocast(q, k, v)
        kernel = kernels.choose(q, v, masked=self.visibility.has_masks, dropout=dropout)
        scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        scoring = Scoring(kernel, self.visibility, scale, dropout)
        if self._swap is None:
            return _ContextAttention.apply(q, k, v, self._exchange, scoring)
        size = len(self._lengths)
        if problem := choice.a2a_problem(q.shape[1], k.shape[1], size):
            raise LayoutError(problem)
        times = math.lcm(k.shape[1], size) // k.shape[1]
        if times > 1:
            k, v = (x.repeat_interleave(times, 1) for x in (k, v))
        q = self._to_heads(q)
        if k.shape == v.shape:
            k, v = self._to_heads(torch.stack((k, v))).unbind(0)
        else:
            k, v = self._to_heads(k), self._to_heads(v)
        return self._to_sequence(_ContextAttention.apply(q, k, v, self._exchange, scoring))

    def _to_heads(self, x: Tensor) -> Tensor:
        """(..., H, S_local, D) -> (..., H / ranks, S_block, D), positions ascending."""
        x = collectives.all_to_all(x, -3, -2, self._swap(), join_sizes=self._lengths)
        came = in_ranks(self._group_parts)
        return reordered(x, x.dim() - 2, came, ascending(came))

    def _to_sequence(self, x: Tensor) -> Tensor:
        came = in_ranks(self._group_parts)
        x = reordered(x, 2, ascending(came), came)
        return collectives.all_to_all(x, -2, -3, self._swap(), split_sizes=self._lengths)


class _ContextAttention(torch.autograd.Function):
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
        return back.take(), dk.to(k.dtype), dv.to(v.dtype), None, None


def _dense(x: Tensor) -> Tensor:
    """`x` with the channels of a head next to each other, without which the kernels read past it.

    torch's own attention looks at that before it calls them. A gradient may be one number expanded,
    and what one sample was joined of may have any strides.
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
    comm_type: CommType = "p2p",
    order: OrderName = "zigzag",
    a2a_size: int | None = None,
    seq_len: int | None = None,
    group: Group | None = None,
) -> Tensor:
    """Attention of my queries over the whole sequence, as `F.scaled_dot_product_attention` has it.

    q (B, H, S_local, D), k and v (B, h, S_local, D), the parts of this rank as `shard_sequence`
    cuts them -> (B, H, S_local, D). All ranks of the group call it together, in the backward too.

    scale: of the scores; None: 1 / sqrt(D). enable_gqa: h < H, each for H / h heads next to each
        other. dropout_p: part of the weights dropped, with draws of each rank's own.
    document_ids: (B, S_local) integers; positions of different documents do not see each other.
    window: a query sees keys less than `window` positions away.
    comm_type: p2p (ring), all_gather, a2a (heads for sequence), a2a+p2p (a2a among `a2a_size` ranks
        next to each other, a ring of these blocks), or auto, which logs what it takes.
    seq_len: of the whole sequence. None: the ranks ask each other, once a call, which also finds
        what they disagree on.
    group: default tpc's `context`.

    Raises:
        LayoutError: the ranks' parts are of no sequence, their arguments differ, heads that cannot
            be shared, or arguments that are no attention; the same on all ranks without `seq_len`.
    """
    group = resolve_group(group, "context")
    if comm_type not in get_args(CommType):
        raise LayoutError(f"comm_type={comm_type!r}; use one of {', '.join(get_args(CommType))}")
    _check_dims(q, k, v, document_ids)
    if seq_len is None:
        facts = {
            "positions of q": q.shape[2], "batch size": q.shape[0], "heads of q": q.shape[1],
            "heads of k": k.shape[1], "head dim": q.shape[3], "bytes of a number": q.itemsize,
            "is_causal": is_causal, "window": window or 0, "documents": document_ids is not None,
            "comm_type": get_args(CommType).index(comm_type),
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
_said: PerGroup[set[object]] = PerGroup()


def plan_attention(
    group: Group,
    order: SequenceOrder,
    visibility: Visibility,
    comm_type: CommType,
    a2a_size: int | None,
    q: Tensor,
    k: Tensor,
) -> ContextPlan:
    """The plan for queries and keys of these shapes; kept where it does not depend on documents."""
    heads, kv_heads = q.shape[1], k.shape[1]
    asked = (order, visibility, comm_type, a2a_size, q.shape, k.shape[1], q.dtype)
    documents = visibility.documents
    known = _plans.setdefault(group, {}) if documents is None else documents.plans
    if asked in known:
        return known[asked]
    near = _ranks_per_node(group)
    if comm_type == "auto":
        size = AttentionSize(
            order.seq_len, heads, kv_heads, q.shape[3], q.shape[0], q.itemsize,
            visibility.is_causal, visibility.window,
        )  # fmt: skip
        machine = choice.CPU if q.device.type == "cpu" else choice.GPU
        found = choice.choose(
            size, group.size(), ranks_per_node=near, machine=machine, order=order.order
        )
        comm_type, a2a_size = found.comm_type, found.a2a_size
        if group.rank() == 0 and asked not in _said.setdefault(group, set()):
            _said[group].add(asked)
            _LOG.info("context_attention: %s", found.reason)
    if a2a_size is None and comm_type == "a2a+p2p":
        a2a_size = choice.default_a2a_size(group.size(), heads, kv_heads, near)
    known[asked] = ContextPlan(group, order, visibility, comm_type, a2a_size or 1)
    return known[asked]


_nodes: PerGroup[int | None] = PerGroup()


def _ranks_per_node(group: Group) -> int | None:
    """Ranks next to each other in the group that share a host; None: all do."""
    if group not in _nodes:
        hosts = primitives.gather_objects(socket.gethostname(), group)
        runs = [len(list(same)) for _, same in groupby(hosts)]
        _nodes[group] = math.gcd(*runs) if len(runs) > 1 else None
    return _nodes[group]


def _blocks(group: Group, size: int) -> tuple[Group, Group]:
    """My block of `size` ranks next to each other, and the ranks at my place in every block."""
    ranks, mine = ranks_of(group), group.rank()
    groups = tpc.groups if tpc.is_set else _own_groups(group)
    first = mine - mine % size
    inner = groups.of(ranks[first : first + size])
    return inner, groups.of(ranks[mine % size :: size])


_made: PerGroup[Groups] = PerGroup()


def _own_groups(group: Group) -> Groups:
    """Where tpc is not set up, parts of a group are kept with it."""
    if group not in _made:
        _made[group] = Groups(ranks_of(group)[group.rank()])
    return _made[group]


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Of the dtype in which torch's own attention would be computed."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) if x.dtype is not torch.float64 else x for x in tensors)


def _check_dims(q: Tensor, k: Tensor, v: Tensor, document_ids: Tensor | None) -> None:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 4:
        raise LayoutError(f"context_attention takes (B, H, S_local, D), not {shapes}")
    if not (
        q.shape[::2] == k.shape[::2] == v.shape[::2]
        and q.shape[3] == k.shape[3]
        and k.shape[1] == v.shape[1]
    ):
        raise LayoutError(
            f"{shapes} are not parts of one sequence: batch sizes, positions and widths of q and k "
            f"must be equal, as must the heads of k and v"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise LayoutError(f"q is of {q.dtype}, k of {k.dtype} and v of {v.dtype}; use one dtype")
    if document_ids is None:
        return
    wanted = (q.shape[0], q.shape[2])
    if tuple(document_ids.shape) != wanted or document_ids.dtype.is_floating_point:
        raise LayoutError(
            f"document_ids are {document_ids.dtype} of shape {tuple(document_ids.shape)}; pass "
            f"integers of shape (B, S_local) = {wanted}"
        )


def _check_arguments(q: Tensor, k: Tensor, v: Tensor, gqa: bool, dropout: float) -> None:
    heads, kv_heads = q.shape[1], k.shape[1]
    if heads != kv_heads and not gqa:
        raise LayoutError(
            f"{heads} heads of queries and {kv_heads} of keys; pass enable_gqa=True for grouped "
            f"queries"
        )
    if heads % kv_heads:
        raise LayoutError(
            f"{heads} heads of queries are no multiple of {kv_heads} heads of keys and values"
        )
    if not 0 <= dropout < 1:
        raise LayoutError(f"dropout_p={dropout}; use 0 or more, below 1")
