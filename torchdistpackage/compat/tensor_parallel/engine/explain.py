"""`explain`: a plan as a table, before anything is split."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from torchdistpackage.compat.tensor_parallel.engine.actions import StateAction, Whole
from torchdistpackage.compat.tensor_parallel.engine.family_plan import plan_for
from torchdistpackage.compat.tensor_parallel.engine.layerwise import default_rules
from torchdistpackage.compat.tensor_parallel.engine.rules import (
    Config,
    add_lora_rules,
    find_matching_actions,
)
from torchdistpackage.compat.tensor_parallel.engine.shard import (
    WHOLE,
    is_parameter,
    modules_by_names,
    named_aliases,
    state_actions,
)
from torchdistpackage.parallel.auto.plan_table import ParameterRow, PlanTable, forward_traffic
from torchdistpackage.parallel.auto.traffic import size_bytes


def explain(
    module: nn.Module,
    num_shards: int,
    tensor_parallel_config: Config | None = None,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> PlanTable:
    """Return the plan by which `tensor_parallel` splits `module` over `num_shards` devices.

    args, kwargs: an example, with which the module is called once to learn what is sent; without
    one nothing is called.

    Raises:
        LayoutError: the module cannot be split so.
    """
    table, outputs = explained_rules(module, num_shards, tensor_parallel_config)
    if not (args or kwargs):
        return table
    return replace(table, traffic=forward_traffic(module, outputs, args, kwargs or {}))


def explained_rules(
    module: nn.Module, num_shards: int, tensor_parallel_config: Config | None = None
) -> tuple[PlanTable, dict[str, dict[Any, Any]]]:
    """Return the plan as a table, and by path what shards do with the outputs of a part."""
    config, unsplit = tensor_parallel_config or plan_for(module, num_shards), {}
    if config is None:
        rules = default_rules(module, num_shards)
        config, unsplit = rules.config(), rules.kept
    config = add_lora_rules(module, config)
    actions = state_actions(module, config)
    rows = []
    for tensor, names in named_aliases(module):
        if is_parameter(tensor):
            action = actions.get(names[0], WHOLE)
            rows.append(parameter_row(names[0], tensor, action, num_shards))
    outputs: dict[str, dict[Any, Any]] = {}
    for names in modules_by_names(module).values():
        for name in names:
            if matched := find_matching_actions("output", name, config.output_rules):
                outputs.setdefault(names[0], {}).update(matched)
    return PlanTable(tuple(rows), {}, unsplit), outputs


def parameter_row(name: str, tensor: Tensor, action: StateAction, num: int) -> ParameterRow:
    outline = torch.empty_like(tensor, device="meta")
    parts = [action(outline, rank=rank) for rank in range(num)]
    shapes = tuple(tuple(part.shape) for part in parts)
    num_bytes = tuple(map(size_bytes, parts))
    cut = "whole" if isinstance(action, Whole) else kind_of_cut(action)
    return ParameterRow(name, tuple(tensor.shape), cut, shapes, num_bytes)


def kind_of_cut(action: StateAction) -> str:
    dim = getattr(action, "dim", None)
    kind = type(action).__name__
    return kind if dim is None else f"{kind} dim {dim}"
