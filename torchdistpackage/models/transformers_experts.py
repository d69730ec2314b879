"""Experts of transformers' models divided among ranks: each has some of a block's stacked experts.

A module takes the place of transformers' own, under its name and with its parameters' names; the
router before it stays transformers', and so do experts that are not plain gated MLPs. Where the
loss of the routers is Switch's, it is counted as transformers counts it, over the tokens of all
ranks together, so that it does not depend on how many these are.
"""

import inspect
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn

from torchdistpackage.comm import collectives, primitives
from torchdistpackage.comm.operators import is_traced
from torchdistpackage.comm.primitives import Group, ranks_of
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.ddp.param_spec import batch_group
from torchdistpackage.errors import DataError
from torchdistpackage.layout.derive import local_shape
from torchdistpackage.layout.layout import Layout
from torchdistpackage.models.lora_layout import is_of_stack, local_name
from torchdistpackage.models.transformers_stacks import adapt_as, is_adapted, without_hooks
from torchdistpackage.parallel.expert.balance import LoadCounter
from torchdistpackage.parallel.expert.dispatch import Dispatch, plan_dispatch
from torchdistpackage.parallel.expert.experts import bounds
from torchdistpackage.parallel.expert.products import gated_mlps, grouped_linear
from torchdistpackage.topology.mesh import Mesh


def experts_of(model: nn.Module) -> dict[str, Any]:
    """Return transformers' modules of stacked experts by path, of which ranks can have a part.

    Its decorator `use_experts_implementation` marks a module that is called with tokens, their
    experts and weights, and adds up what each expert makes of a token. All its parameters have one
    entry for each expert; a norm behind experts would be a module of its own. Those of Llama 4 are
    called with a row of each token for each expert.
    """
    experts: dict[str, Any] = {}
    for path, module in model.named_modules():
        if _takes_all_rows(module):
            experts[path] = module
            continue
        number = getattr(module, "num_experts", 0)
        parameters = list(module._parameters.values())
        is_marked = hasattr(module, "has_bias") and hasattr(module, "is_transposed")
        if (
            is_marked
            and len(inspect.signature(module.forward).parameters) == 3
            and not getattr(module, "has_post_expert_norm", False)
            and not any(True for child in module.children() for _ in child.parameters())
            and not any(True for _ in module.buffers())
            and all(p is not None and p.dim() > 1 and p.shape[0] == number for p in parameters)
        ):
            experts[path] = module
    return experts


def is_gated_mlp(experts: Any) -> bool:
    """Return whether each expert of a module is down (act (gate x) * (up x)), with gate and up in
    one matrix: else they are computed by the module's own code.
    """
    if _takes_all_rows(experts):
        return False
    # earlier releases of transformers 5 have neither has_gate nor is_concatenated
    has_gate = getattr(experts, "has_gate", True) and getattr(experts, "is_concatenated", True)
    gate = getattr(type(experts), "_apply_gate", None)
    return (
        set(experts._parameters) == {"gate_up_proj", "down_proj"}
        and has_gate
        and not (experts.has_bias or experts.is_transposed)
        and (gate is None or gate.__name__ == "_default_apply_gate")
    )


def _takes_all_rows(module: nn.Module) -> bool:
    """Return whether a module is called with a row of each token for each expert, zero where the
    router did not choose it.
    """
    return type(module).__name__ == "Llama4TextExperts"


class StackedExperts(nn.Module):
    """This rank's experts, in place of `whole`, transformers' module with all experts of a block.

    layouts: of its parameters, by their names there. name: of the module, in errors.
    """

    balance_state = None
    """None: these routers have at most a loss, and no state that follows the counts."""

    def __init__(
        self,
        experts: Any,
        group: Group,
        layouts: Mapping[str, Layout],
        name: str,
        tensor: Group | None = None,
    ):
        super().__init__()
        self.num_experts, self.act_fn = experts.num_experts, getattr(experts, "act_fn", None)
        self.name, self._group, self._tensor = name, group, tensor
        self._bounds = bounds(self.num_experts, group.size())
        self.counter = LoadCounter(self.num_experts)
        shapes = {key: self._local_shape(layout) for key, layout in layouts.items()}
        for key in experts._parameters:
            shape, weight = shapes[key], getattr(experts, key)
            empty = torch.empty(shape, dtype=weight.dtype, device=weight.device)
            self.register_parameter(key, nn.Parameter(empty, weight.requires_grad))
        self._is_adapted = is_adapted(experts)
        if self._is_adapted:
            adapt_as(self, experts, shapes)
        own_experts = copy(experts)
        own_experts.num_experts = self._bounds[group.rank() + 1] - self._bounds[group.rank()]
        own_experts._parameters = self._parameters
        without_hooks(own_experts)
        self._own = [own_experts]  # in a list, or its parameters would be listed twice
        self._is_gated_mlp = is_gated_mlp(experts)

    def _local_shape(self, layout: Layout) -> tuple[int, ...]:
        axes = [x for x in layout.split_axes if x != "expert"]
        axis = axes[0] if axes else "tensor"
        return local_shape(layout, *_mesh_index(self._group, self._tensor, axis))

    @property
    def weight(self) -> Tensor:
        """Return the matrix whose device `routers_in` asks for."""
        return self.down_proj

    def _by_own_code(self, rows: Tensor, plan: Dispatch) -> Tensor:
        """Return what transformers' code makes of each row (n, D), which has one expert."""
        rows, num = plan.by_expert(rows), len(plan.counts)
        experts = torch.arange(num, device=rows.device)
        # an empty row for each expert, so that all parameters have a gradient on every rank
        rows = torch.cat([rows, rows.new_zeros(num, rows.shape[1])])
        index = torch.cat([experts.repeat_interleave(plan.counts), experts]).unsqueeze(1)
        if self._is_adapted:  # with their adapters, which are in place of the parameters
            self._own[0]._parameters = {key: getattr(self, key) for key in self._parameters}
        outputs = self._own[0](rows, index, rows.new_ones(len(rows), 1))
        return plan.by_rank(outputs[: len(rows) - num])

    def _as_one_graph(self, *given: Tensor) -> Tensor:
        """Return what all experts, which are here, make of the tokens, without a number that the
        host would have to read.
        """
        from transformers.integrations.moe import grouped_mm_experts_forward

        return grouped_mm_experts_forward(self._own[0], *given)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Compute the experts of each token: hidden_states (N, D), their experts (N, k) int64 and
        weights (N, k) give (N, D).

        Raises:
            DataError: weights are NaN, here or on another rank of the group.
        """
        self.counter.add(top_k_index.unsqueeze(1), is_training=self.training)
        if self._tensor is not None:
            hidden_states = collectives.copy(hidden_states, self._tensor)
            top_k_weights = collectives.copy(top_k_weights, self._tensor)
        if is_traced() and self._group.size() == 1:
            y = self._as_one_graph(hidden_states, top_k_index, top_k_weights)
            return y if self._tensor is None else collectives.reduce(y, self._tensor)
        bad = top_k_weights.detach().isnan().any()
        plan, bad_ranks = plan_dispatch(top_k_index, None, bad, self._bounds, self._group)
        if bad_ranks:
            ranks = ", ".join(str(ranks_of(self._group)[r]) for r in bad_ranks)
            raise DataError(
                f"{self.name}: the router's scores are NaN on rank {ranks}; look for what "
                f"overflowed before it, or lower the learning rate"
            )
        # nothing else is there to compute until the rows of other ranks have come
        rows = plan.start(plan.rows_of(hidden_states)).wait()
        if self._is_gated_mlp:
            rows = gated_mlps(rows, plan, self.gate_up_proj, self.down_proj, self.act_fn)
        else:
            rows = self._by_own_code(rows, plan)
        y = plan.combine(plan.send_back(rows), top_k_weights)
        return y if self._tensor is None else collectives.reduce(y, self._tensor)


class RowExperts(StackedExperts):
    """Experts that are called with a row of each token for each of them. ¶ A row that its router
    did not choose is zero; a gated MLP makes zero of it and hands no gradient on, so only chosen
    rows are sent and computed.
    """

    def _by_own_code(self, rows: Tensor, plan: Dispatch) -> Tensor:
        rows, counts = plan.by_expert(rows), plan.counts
        gate, up = grouped_linear(rows, self.gate_up_proj.transpose(1, 2), counts).chunk(2, -1)
        hidden = up * self.act_fn(gate)
        return plan.by_rank(grouped_linear(hidden, self.down_proj.transpose(1, 2), counts))

    def forward(self, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        """Compute each row by its expert: (E * N, D), sorted by expert, to the same.

        Raises:
            DataError: rows are NaN, here or on another rank of the group.
        """
        rows = hidden_states.view(self.num_experts, -1, hidden_states.shape[-1])
        is_chosen = (rows.detach() != 0).any(-1)
        if is_traced() and self._group.size() == 1:
            self.counter.add_counts(is_chosen.sum(1), is_training=self.training)
            return self._own[0](hidden_states)
        experts, tokens = is_chosen.nonzero(as_tuple=True)
        chosen = rows[experts, tokens]
        # a weight of NaN is how a rank tells the others, which would wait for it
        weights = torch.where(chosen.detach().isnan().any(-1, keepdim=True), torch.nan, 1.0)
        made = super().forward(chosen, experts.unsqueeze(1), weights.to(chosen))
        return made.new_zeros(rows.shape).index_put((experts, tokens), made).view_as(hidden_states)


def expert_group() -> Group | None:
    """Return the ranks that share the experts; None: this process has all of them."""
    return tpc.get_group("expert") if tpc.is_set else None


def mesh_index_of(tensor: Group | None, axis: str) -> tuple[Mesh, int]:
    """Return the mesh that splits parameters, and this rank's index in it."""
    return _mesh_index(expert_group(), tensor, axis)


def _mesh_index(experts: Group | None, tensor: Group | None, axis: str) -> tuple[Mesh, int]:
    groups = experts, tensor
    sizes = [1 if x is None else x.size() for x in groups]
    expert, index = (0 if x is None else x.rank() for x in groups)
    return Mesh((("expert", sizes[0]), (axis, sizes[1]))), expert * sizes[1] + index


def share_experts(
    decoder: nn.Module, layouts: Mapping[str, Layout], group: Group, tensor: Group | None = None
) -> None:
    """Replace every module of experts in `decoder`.

    layouts: of all parameters of the model, by name; those split over `expert` identify these
    modules. tensor: ranks that share each expert.
    """
    by_module: dict[str, dict[str, Layout]] = {}
    for name, layout in layouts.items():
        if "expert" in layout.split_axes:
            path, _, last = name.rpartition(".")
            if is_of_stack(layout):
                path, last = path.rpartition(".")[0], local_name(name)
            by_module.setdefault(path, {})[last] = layout
    modules = dict(decoder.named_modules())
    for path, of_module in by_module.items():
        if path in modules:  # and not on another stage
            parent, _, last = path.rpartition(".")
            kind = RowExperts if _takes_all_rows(modules[path]) else StackedExperts
            setattr(modules[parent], last, kind(modules[path], group, of_module, path, tensor))


def router_load(router_logits: Sequence[Tensor], top_k: int) -> Tensor:
    """Return (2, E): how often each expert was chosen in all blocks, and the sum of its
    probabilities.

    router_logits: (N, E) of each block. Float32, or float64 of float64 logits.
    """
    total: Tensor | None = None
    for logits in router_logits:
        # probabilities of many tokens are added up, which bf16 would round away
        scores = logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1)
        chosen = scores.topk(top_k, -1).indices.flatten()
        counts = scores.new_zeros(scores.shape[-1])
        counts.scatter_add_(0, chosen, torch.ones_like(chosen, dtype=scores.dtype))
        load = torch.stack([counts, scores.sum(0)])
        total = load if total is None else total + load
    assert total is not None
    return total


def router_loss_sum(load: Tensor, num_tokens: Tensor, top_k: int) -> Tensor:
    """Return this rank's term of (number of counted tokens) x (transformers' router loss). ¶ Both
    factors are over the micro-batch of all ranks that see different tokens; all these ranks call
    it.

    Switch's loss (arXiv:2101.03961, equation 4) over the tokens of all blocks together: experts x
    sum of (choices / tokens) x (mean probability). load: of `router_load`; num_tokens: int64.
    """
    counts, sums = load.detach()[0], load[1]
    joined = torch.cat([counts, num_tokens.to(counts).reshape(1)])
    if tpc.is_set:
        joined = primitives.all_reduce(joined, batch_group())
    counts, num_tokens = joined[:-1], joined[-1]
    return num_tokens * switch_loss(torch.stack([counts, sums]), top_k)


def switch_loss(load: Tensor, top_k: int) -> Tensor:
    """Return Switch's loss from what `router_load` counted."""
    counts, sums = load
    rows = counts.sum() / top_k
    return len(counts) * (counts / rows * sums / rows).sum()
