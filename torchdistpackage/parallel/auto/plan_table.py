"""A table of the split of a module: parameters by device, and what a forward sends."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchdistpackage.parallel.auto.traffic import SENT, Traffic, size_bytes


@dataclass(frozen=True)
class ParameterRow:
    """One parameter. shapes, num_bytes: of each device's slice."""

    name: str
    shape: tuple[int, ...]
    cut: str
    shapes: tuple[tuple[int, ...], ...]
    num_bytes: tuple[int, ...]


@dataclass(frozen=True)
class PlanTable:
    """A plan for a module.

    parameters: of all devices. traffic: bytes that each module sends in a forward; empty without an
    example. kept: layer -> why it stays unsplit. check: what the first forward is compared with
    (verify.py).
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
        """Return the bytes that one device sends in the example's forward."""
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
            unsplit = [(name or "the module", why) for name, why in self.kept.items()]
            text += "\n\n" + aligned([("whole", "why"), *unsplit])
        return f"{text}\n\n{self.check}" if self.check else text


def spread(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def aligned(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


@torch.no_grad()
def forward_traffic(
    module: nn.Module,
    outputs: Mapping[str, Mapping[Any, Any]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> dict[str, Traffic]:
    """Return the bytes that submodules of `module` would send in `module(*args, **kwargs)`.

    outputs: path of a submodule -> action on its outputs, such as {0: "sum"}.

    It is called once, in eval mode, so that the module stays unchanged.
    """
    by_module: dict[str, Traffic] = {}
    handles = []

    def watch(name: str, actions: Mapping[Any, Any]) -> Any:
        def hook(part: nn.Module, inputs: Any, output: Any) -> None:
            for target, action in actions.items():
                value = at(output, target)
                kind = action.split()[0] if isinstance(action, str) else ""
                if isinstance(value, Tensor) and kind in SENT:
                    by_module.setdefault(name, Traffic({}, {})).add(kind, size_bytes(value))

        return hook

    for name, actions in outputs.items():
        handles.append(module.get_submodule(name).register_forward_hook(watch(name, actions)))
    modes = {part: part.training for part in module.modules()}
    try:
        module.eval()(*args, **kwargs)
    finally:
        for part, training in modes.items():
            part.training = training
        for handle in handles:
            handle.remove()
    return by_module


def at(output: Any, target: Any) -> Any:
    """Return the output that a rule names."""
    if isinstance(output, Tensor):
        return output if target == 0 else None
    if isinstance(output, (list, tuple)):
        return output[target] if isinstance(target, int) and target < len(output) else None
    return output.get(target) if hasattr(output, "get") else None
