"""`explain`: a plan as a table, before anything is split."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchdistpackage.parallel.auto.actions import StateAction, Whole
from torchdistpackage.parallel.auto.family_plan import plan_for
from torchdistpackage.parallel.auto.layerwise import default_rules
from torchdistpackage.parallel.auto.rules import Config, add_lora_rules, find_matching_actions
from torchdistpackage.parallel.auto.shard import (
    WHOLE,
    is_parameter,
    modules_by_names,
    named_aliases,
    state_actions,
)
from torchdistpackage.parallel.auto.traffic import SENT, Traffic, size_bytes


@dataclass(frozen=True)
class ParameterRow:
    """One parameter. shapes, num_bytes: of the part of each device."""

    name: str
    shape: tuple[int, ...]
    cut: str
    shapes: tuple[tuple[int, ...], ...]
    num_bytes: tuple[int, ...]


@dataclass(frozen=True)
class PlanTable:
    """A plan for a module.

    parameters: of all. traffic: by module, what it sends in a forward; empty without an example.
    kept: layer -> why it stays whole. check: what the first forward is compared with (verify.py).
    """

    parameters: tuple[ParameterRow, ...]
    traffic: dict[str, Traffic]
    kept: dict[str, str]
    check: str = ""

    @property
    def device_bytes(self) -> tuple[int, ...]:
        """Bytes of parameters on each device."""
        return tuple(map(sum, zip(*(row.num_bytes for row in self.parameters), strict=True)))

    @property
    def forward(self) -> Traffic:
        """What one device sends in the forward of the example."""
        total = Traffic({}, {})
        for each in self.traffic.values():
            for kind, calls in each.calls.items():
                total.calls[kind] = total.calls.get(kind, 0) + calls
                num_bytes = total.num_bytes.get(kind, 0) + each.num_bytes[kind]
                total.num_bytes[kind] = num_bytes
        return total

    def __str__(self) -> str:
        rows = [("parameter", "shape", "split", "bytes a device")]
        rows += [
            (row.name, " x ".join(map(str, row.shape)), row.cut, spread(row.num_bytes))
            for row in self.parameters
        ]
        rows.append(("all", "", "", spread(self.device_bytes)))
        text = aligned(rows)
        if self.traffic:
            rows = [("module", "in a forward", "calls", "bytes")]
            named = {**self.traffic, "all": self.forward}
            for name, each in named.items():
                for kind, calls in each.calls.items():
                    rows.append((name, kind, str(calls), f"{each.num_bytes[kind]:,}"))
            text += "\n\n" + aligned(rows)
        if self.kept:
            kept = [(name or "the module", why) for name, why in self.kept.items()]
            text += "\n\n" + aligned([("whole", "why"), *kept])
        return f"{text}\n\n{self.check}" if self.check else text


def explain(
    module: nn.Module,
    num_shards: int,
    tensor_parallel_config: Config | None = None,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> PlanTable:
    """The plan by which `tensor_parallel` splits `module` over `num_shards` devices.

    args, kwargs: an example, with which the module is called once to learn what is sent; without
    one nothing is called.

    Raises:
        LayoutError: the module cannot be split so.
    """
    config, kept = tensor_parallel_config or plan_for(module, num_shards), {}
    if config is None:
        rules = default_rules(module, num_shards)
        config, kept = rules.config(), rules.kept
    config = add_lora_rules(module, config)
    actions = state_actions(module, config)
    rows = []
    for tensor, names in named_aliases(module):
        if is_parameter(tensor):
            action = actions.get(names[0], WHOLE)
            rows.append(parameter_row(names[0], tensor, action, num_shards))
    traffic = forward_traffic(module, config, args, kwargs or {}) if args or kwargs else {}
    return PlanTable(tuple(rows), traffic, kept)


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


def spread(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def aligned(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


@torch.no_grad()
def forward_traffic(
    module: nn.Module, config: Config, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Traffic]:
    """What each wrapped module would send in `module(*args, **kwargs)`.

    It is called once, in evaluation, so that it stays as it is.
    """
    found: dict[str, Traffic] = {}
    handles = []

    def watch(name: str, actions: dict[Any, Any]) -> Any:
        def hook(part: nn.Module, inputs: Any, output: Any) -> None:
            for target, action in actions.items():
                value = at(output, target)
                kind = action.split()[0] if isinstance(action, str) else ""
                if isinstance(value, Tensor) and kind in SENT:
                    found.setdefault(name, Traffic({}, {})).add(kind, size_bytes(value))

        return hook

    for part, names in modules_by_names(module).items():
        outputs: dict[Any, Any] = {}
        for name in names:
            outputs |= find_matching_actions("output", name, config.output_rules)
        if outputs:
            handles.append(part.register_forward_hook(watch(names[0], outputs)))
    modes = {part: part.training for part in module.modules()}
    try:
        module.eval()(*args, **kwargs)
    finally:
        for part, training in modes.items():
            part.training = training
        for handle in handles:
            handle.remove()
    return found


def at(output: Any, target: Any) -> Any:
    """The output that a rule speaks of."""
    if isinstance(output, Tensor):
        return output if target == 0 else None
    if isinstance(output, (list, tuple)):
        return output[target] if isinstance(target, int) and target < len(output) else None
    return output.get(target) if hasattr(output, "get") else None
