"""Split experts of other libraries' models, whose matrices are stacked in one module, in place.

Each rank has some hidden channels of every expert. The module's own forward computes a partial
result from them; its input is copied in, so that gradients are summed, and its result is
all-reduced. A bias of the result is unsplit on all ranks, and each adds its fraction
(`share_of_bias`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from torchdistpackage.comm import collectives
from torchdistpackage.comm.nested import map_tensors
from torchdistpackage.comm.primitives import Group
from torchdistpackage.layout.layout import Layout
from torchdistpackage.parallel.tensor.row_product import share_of_bias


def split_stacked(
    module: nn.Module,
    layouts: Mapping[str, Layout],
    group: Group,
    shard: Callable[[nn.Parameter, Layout], nn.Parameter],
) -> None:
    """Split the parameters of `module` by `layouts`, which lists all of them by name, as it does
    those of its adapters.

    shard: returns this rank's shard of a parameter.
    """
    shared: list[str] = []
    for name, layout in layouts.items():
        # an adapter's factor is in a dict of the module
        path, _, last = name.rpartition(".")
        owner = module.get_submodule(path)
        weight = owner._parameters[last]
        assert weight is not None
        if layout.split_axes:
            owner.register_parameter(last, shard(weight, layout))
        elif owner is module:
            shared.append(name)
    module.register_forward_pre_hook(_ExpertsInput(group, tuple(shared)), with_kwargs=True)
    module.register_forward_hook(_ExpertsResult(group, tuple(shared)))


@dataclass(frozen=True, slots=True)
class _ExpertsInput:
    """Handles inputs of matmuls over some of the channels. shared: names of the biases on all
    ranks.
    """

    group: Group
    shared: tuple[str, ...]

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        for name in self.shared:
            # an attribute that hides the parameter, for this forward alone
            bias = module._parameters[name]
            assert bias is not None
            module.__dict__[name] = share_of_bias(bias, self.group.size())
        return map_tensors(args, self._copied), map_tensors(kwargs, self._copied)

    def _copied(self, x: Tensor) -> Tensor:
        return collectives.copy(x, self.group) if x.is_floating_point() else x


@dataclass(frozen=True, slots=True)
class _ExpertsResult:
    """Sums the ranks' partial results."""

    group: Group
    shared: tuple[str, ...]

    def __call__(self, module: nn.Module, args: object, output: Any) -> Any:
        for name in self.shared:
            del module.__dict__[name]
        return map_tensors(output, lambda x: collectives.reduce(x, self.group))
