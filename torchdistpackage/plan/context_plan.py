"""The bytes that a run sends along context, for each exchange of a sequence. No torch."""

from typing import Any

from torchdistpackage.layout.exchanges import EXCHANGES, AttentionSize
from torchdistpackage.parallel.context.choice import choose, default_a2a_size, traffic
from torchdistpackage.plan.run_plan import Plan
from torchdistpackage.predict.workload import ContextExchange
from torchdistpackage.text import size_text
from torchdistpackage.topology.mesh import crossings


def context_text(plan: Plan, ranks_per_node: int | None) -> str | None:
    """Return lines for `tdp plan`: bytes of a step for each exchange, and the chosen one; None
    without context.

    Bytes are those that the busiest rank sends, of all attentions of the model.
    """
    size, model = plan.topology.dense.axis_size("context"), plan.model
    if size == 1 or model is None:
        return None
    batch, layers = _attention(plan), _heads(model.shape)[3]
    near = _near(plan, ranks_per_node)
    requested = plan.cp_comm_type
    choice = choose(batch, size, ranks_per_node=near)
    comm_type = choice.comm_type if requested == "auto" else requested
    per_step = layers * plan.rounds * plan.schedule.num_microbatches
    lines = [
        f"context            {comm_type}{' (auto)' if requested == 'auto' else ''}, {size} ranks"
    ]
    lines.append("                   sent by the busiest rank, forward + backward, in a step:")
    inner = default_a2a_size(size, batch.heads, batch.kv_heads, near)
    for name, spec in EXCHANGES.items():
        ranks = spec.swap_size(size, inner)
        if spec.swap == "blocks" and not 1 < ranks < size:
            continue
        if spec.heads_problem(batch.heads, batch.kv_heads, size if spec.swap == "none" else ranks):
            lines.append(f"  {name:<16} heads cannot be shared")
        else:
            sent = traffic(batch, size, name, a2a_size=ranks)
            forward, back = (size_text(per_step * x) for x in (sent.forward, sent.backward))
            lines.append(f"  {name:<16} {forward} + {back}")
    if ranks_per_node is not None:
        across = next(
            x for x in crossings(plan.topology.dense, ranks_per_node) if x.axis == "context"
        )
        lines.append(
            f"                   {across.num_crossing} of {across.num_groups} groups cross nodes"
        )
    return "\n".join(lines)


def attention_of_rank(plan: Plan) -> tuple[str, AttentionSize, int]:
    """Return (way, one attention of a rank, number of ranks that exchange heads)."""
    size, batch = plan.topology.dense.axis_size("context"), _attention(plan)
    comm_type = plan.cp_comm_type
    inner = default_a2a_size(size, batch.heads, batch.kv_heads, None)
    if comm_type == "auto":
        choice = choose(batch, size)
        comm_type, inner = choice.comm_type, choice.a2a_size
    return comm_type, batch, EXCHANGES[comm_type].swap_size(size, inner)


def context_exchange(plan: Plan, context: int, tensor: int, samples: int) -> ContextExchange:
    """Return what ranks of a sequence exchange with these degrees and samples of a micro-batch;
    blocks of ranks that exchange both count as a ring."""
    way = plan.cp_comm_type if context > 1 else "ring"
    if way == "auto":
        way = choose(_attention_of(plan, tensor, samples), context).comm_type
    return "heads" if way in EXCHANGES and EXCHANGES[way].swap == "all" else "ring"


def _attention(plan: Plan) -> AttentionSize:
    tensor = plan.topology.dense.axis_size("tensor")
    return _attention_of(plan, tensor, plan.samples_per_microbatch)


def _attention_of(plan: Plan, tensor: int, samples: int) -> AttentionSize:
    assert plan.model is not None
    heads, kv_heads, head_dim, _ = _heads(plan.model.shape)
    return AttentionSize(
        seq_len=plan.model.shape.seq_len,
        heads=max(heads // tensor, 1),
        kv_heads=max(kv_heads // tensor, 1),
        head_dim=head_dim,
        batch=samples,
        itemsize=plan.numbers.activations.num_bytes,
    )


def _heads(shape: Any) -> tuple[int, int, int, int]:
    """Return the numbers of query heads and key-value heads, the head width and the number of
    layers, for either kind of shape.
    """
    sizes = getattr(shape, "sizes", shape)
    kv_heads = getattr(sizes, "num_kv_heads", None) or sizes.kv_heads
    return sizes.heads, kv_heads, sizes.head_dim, sizes.layers


def _near(plan: Plan, ranks_per_node: int | None) -> int | None:
    """Return how many neighbouring ranks of a context group share a node; None: all of them."""
    if ranks_per_node is None:
        return None
    ranks = next(iter(plan.topology.dense.groups(("context",))))
    return max(sum(rank // ranks_per_node == ranks[0] // ranks_per_node for rank in ranks), 1)
