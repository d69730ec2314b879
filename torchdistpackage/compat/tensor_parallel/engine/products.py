"""Inputs of column layers that these sum the gradients of, in place of a copy before them.

A plan says of a module which of its column layers read an input, and nothing else does
(`Config.entrances`). Where they are plain products, and shards are ranks, they become one product;
the "copy" of that input is then only needed in forwards without a shared product (entrance.py).
"""

from collections.abc import Mapping, Sequence

from torch import nn

from torchdistpackage.compat.tensor_parallel.engine.entrance import SharedEntrance, can_share
from torchdistpackage.compat.tensor_parallel.engine.ops import RankMap
from torchdistpackage.compat.tensor_parallel.engine.rules import Target
from torchdistpackage.compat.tensor_parallel.engine.wrapper import TensorParallelWrapper


def share_products(
    wrapper: TensorParallelWrapper, entrances: Mapping[Target, Sequence[str]]
) -> None:
    """Give `wrapper` an `SharedEntrance` for each input of which the layers can share a product.

    entrances: input -> names, below the module, of the column layers that read it.
    """
    for target, names in entrances.items():
        action = wrapper.input_actions.get(target)
        if not isinstance(action, RankMap) or action.kind != "copy":
            continue
        if layers := _layers(wrapper.tp_wrapped_module, names):
            wrapper.entrances[target] = SharedEntrance(layers, action.group)


def _layers(module: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """Return the layers that this module has; none if they are not plain linear layers, as with
    adapters around them.
    """
    modules = dict(module.named_modules())
    layers = [modules[name] for name in names if name in modules]
    return layers if layers and can_share(layers) else []
