"""The costs of a plan's mixtures of experts: parameters, bytes that travel, load. No torch."""

import math
from dataclasses import dataclass

from torchdistpackage.layout.partition import even_sizes
from torchdistpackage.models.gpt_layout import GPTShape
from torchdistpackage.models.transformers_layout import TransformersShape
from torchdistpackage.plan.run_plan import Plan, num_parameters


@dataclass(frozen=True)
class ExpertPlan:
    """The mixtures of experts of a plan.

    active_parameters: of the full model, those that one token meets. on_rank: experts of each rank.
    mean_bytes, most_bytes: what leaves a rank for others, each way, of a block's microbatch: where
    all experts are chosen alike, and where none is chosen that the rank itself has. mean_rows,
    most_rows: tokens that a rank's experts then get from all ranks of its group.
    """

    active_parameters: int
    num_blocks: int
    on_rank: tuple[int, ...]
    mean_bytes: float
    most_bytes: int
    mean_rows: float
    most_rows: int

    def crossing_bytes(self, plan: Plan, ranks_per_node: int) -> float:
        """Return the bytes of `mean_bytes` that cross to another node, for the rank where they are
        most.
        """
        topology, largest_share = plan.topology, 0.0
        for rank in range(topology.world_size):
            group = topology.group(rank, "expert")
            pairs = zip(group, self.on_rank, strict=True)
            crossing = sum(n for r, n in pairs if r // ranks_per_node != rank // ranks_per_node)
            largest_share = max(largest_share, crossing / sum(self.on_rank))
        return self._sent * largest_share

    @property
    def _sent(self) -> float:
        """Bytes that a rank sends, including those to itself."""
        return self.mean_bytes / max(1 - 1 / len(self.on_rank), 1e-9)


def expert_plan(plan: Plan) -> ExpertPlan | None:
    """Return the costs of the experts of our GPT, or of a transformers model whose experts ranks
    can share; None: it has none.
    """
    if (sizes := _sizes(plan)) is None:
        return None
    (num_experts, top_k), shape, ranks = sizes, plan.shape, plan.config.parallel.expert
    assert shape is not None
    expert_layouts = {name: x for name, x in plan.layouts.items() if "expert" in x.split_axes}
    idle = sum(
        math.prod(x.shape) // num_experts * (num_experts - top_k) for x in expert_layouts.values()
    )
    tokens = plan.samples_per_microbatch * shape.seq_len // plan.config.parallel.context
    on_rank, sent_rows = even_sizes(num_experts, ranks), tokens * top_k
    mean_rows = sent_rows * ranks * on_rank[0] / num_experts
    most_rows = tokens * ranks * min(top_k, on_rank[0])
    mean_share = 1 - 1 / ranks
    most_share: float = ranks > 1
    if (padded_rows := _padded_rows(plan)) is not None:
        sent_rows = num_experts * padded_rows
        mean_rows = most_rows = ranks * on_rank[0] * padded_rows
        most_share = 1 - min(on_rank) / num_experts
    sent_bytes = sent_rows * shape.dim * plan.numbers.activations.num_bytes
    return ExpertPlan(
        num_parameters(plan) - idle,
        len({name.partition(".experts.")[0] for name in expert_layouts}),
        tuple(on_rank),
        sent_bytes * mean_share,
        round(sent_bytes * most_share),
        mean_rows,
        most_rows,
    )


def _padded_rows(plan: Plan) -> int | None:
    """Return the rows sent to each expert for a rank's micro-batch, if they do not depend on the
    router.
    """
    shape = plan.shape
    if not isinstance(shape, GPTShape) or shape.moe is None:
        return None
    return shape.moe.padded_rows(shape.seq_len, plan.samples_per_microbatch)


def _sizes(plan: Plan) -> tuple[int, int] | None:
    """Return (experts of a block, experts that a token goes to), or None."""
    shape = plan.shape
    if isinstance(shape, GPTShape) and shape.moe is not None:
        return shape.moe.num_experts, shape.moe.top_k
    if isinstance(shape, TransformersShape) and shape.kind.shared_experts:
        return shape.kind.shared_experts, shape.kind.top_k
    return None
