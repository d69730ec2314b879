"""The order in which blocks run the layers that tensor ranks share: seen on a small copy.

From the order follows which gradients are needed of what is frozen or computed again, and so what
ranks send (transformers_traffic.py).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from torchdistpackage.families.table import BlockOrder
from torchdistpackage.layout.table import SplitTable


@dataclass
class _WatchedCalls:
    """What the layers read, by path in the order of their calls; see `_watched`."""

    read: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    made: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    again: bool = False
    into_norm: set[str] = field(default_factory=set[str])


@torch.no_grad()
def order_of(model: Any, ids: Tensor, blocks: str, table: SplitTable) -> BlockOrder:
    """Return the order of the layers that `table` lists in the blocks of `model`, a small copy.

    blocks: path of the list of blocks.
    """
    unknown = BlockOrder(is_listed=False)
    parts: dict[str, list[str]] = {}
    for path, cut in table.layers.items():
        block = _block(blocks, path)
        if not block:
            continue
        if cut.kind not in ("column", "row"):
            return unknown
        parts.setdefault(block, []).append(path)
    if not parts or any(_block(blocks, path) for path in table.experts):
        return unknown
    plain = _seen(model, ids, table)
    called = [path for path in plain.read if _block(blocks, path)]
    if plain.again or called != [path for paths in parts.values() for path in paths]:
        return unknown
    follows: set[bool] = set()
    for paths in parts.values():
        rows = [path for path in paths if table.layers[path].kind == "row"]
        for row in rows[:-1]:
            moved = _seen(model, ids, table, row)
            behind = paths[paths.index(row) + 1 :]
            columns = [path for path in behind if table.layers[path].kind == "column"]
            follows |= {not torch.equal(moved.read[x], plain.read[x]) for x in columns}
    last = {paths[-1] for paths in parts.values()}
    ends = {path in plain.into_norm for path in last}
    if len(follows) > 1 or len(ends) > 1:
        return unknown
    return BlockOrder(is_parallel=follows == {False}, ends_in_norm=ends == {True})


def _block(blocks: str, path: str) -> str:
    """Return the number of the block that has a module; "" if none has."""
    inner = path.removeprefix(f"{blocks}.")
    return inner.partition(".")[0] if blocks and inner != path else ""


def _seen(model: Any, ids: Tensor, table: SplitTable, moved: str = "") -> _WatchedCalls:
    """Return the calls of one forward. moved: path of a layer whose result is changed."""
    calls = _WatchedCalls()
    layers = {path: model.get_submodule(path) for path in table.layers}
    with _watched(model, layers, calls, moved):
        model(input_ids=ids, use_cache=False, return_dict=True)
    return calls


@contextmanager
def _watched(
    model: nn.Module, layers: Mapping[str, nn.Module], calls: _WatchedCalls, moved: str
) -> Iterator[None]:
    """Note what the layers read and make, and which results another module with weights reads."""
    hooks: list[Any] = []

    def before(module: nn.Module, args: tuple[Any, ...]) -> None:
        # a norm gets the very values that the layer made, and no sum of them
        tensors = [x for x in args if isinstance(x, Tensor)]
        for path, value in calls.made.items():
            if any(x.data_ptr() == value.data_ptr() and x.shape == value.shape for x in tensors):
                calls.into_norm.add(path)

    def note(path: str) -> Any:
        def behind(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
            calls.again |= path in calls.read
            calls.read[path] = args[0].clone()
            calls.made[path] = output + 1.0 if path == moved else output
            return calls.made[path]

        return behind

    listed = {id(layer) for layer in layers.values()}
    for module in model.modules():
        if module._parameters and id(module) not in listed:
            hooks.append(module.register_forward_pre_hook(before))
    hooks += [layer.register_forward_hook(note(path)) for path, layer in layers.items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
