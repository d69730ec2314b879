"""Base of modules that record on their parameters how these are split.

A mark belongs to the Parameter object. So whatever replaces the object marks the new one:
registration (also by `load_state_dict(assign=True)`), `_apply` (`to`, `half`, `to_empty`), copies
and pickles. Children do so first and outer modules after them, because outer modules override inner
ones.
"""

import copy
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Self

from torch import Tensor, nn

from torchdistpackage.comm import collectives
from torchdistpackage.comm.primitives import Group, ranks_of
from torchdistpackage.comm.tpc import group_again, resolve_group
from torchdistpackage.errors import CommError, LaunchError, LayoutError
from torchdistpackage.layout.mark import Layouts, mark_of, mark_parameter
from torchdistpackage.optim.torch_calls import watch
from torchdistpackage.parallel.tensor.full import FullTensors
from torchdistpackage.parallel.tensor.sharing import copy_to_sharing

_TORCH_UTILS = "torch/nn/utils/"


class Marked(FullTensors, nn.Module):
    """A module with `layouts()`, which it marks its parameters with, over its `group`.

    A subclass sets `group`, None where nothing is cut, and calls `mark()` at the end of its
    `__init__`. A deep copy of a module (an average of weights, a reference model) talks over the
    same group, which is not a value to copy; a pickle keeps the group's ranks.
    """

    _group: Group | None = None
    _is_marked = False

    # no attribute that `__getattr__` finds: nn.Module asks that for every parameter and child
    @property
    def group(self) -> Any:
        if "_ranks" in self.__dict__:
            self._group = self._find(self.__dict__.pop("_ranks"))
        return self._group

    @group.setter
    def group(self, group: Group | None) -> None:
        self._group = group

    def layouts(self) -> Layouts:
        """Return how its parameters are split, by name; those of children may be included."""
        return {}

    def mark(self) -> None:
        """Record on each parameter how it is split."""
        if not self._is_marked:
            self._is_marked = True
            # once its children have theirs, which `assign=True` replaces
            self.register_load_state_dict_post_hook(_mark_loaded)
        if layouts := self.layouts():
            group = self._group
            if group is not None and group.size() > 1:
                watch()
            for name, parameter in self.named_parameters(remove_duplicate=False):
                if name in layouts:
                    mark_parameter(parameter, layouts[name], group, name.count("."))

    def summed(self, parameter: nn.Parameter | None) -> Tensor | None:
        """Return `parameter` for a forward that sees only this rank's rows or heads, so that its
        gradient here is a partial sum.

        The backward sums it over the group, or over the ranks that share the heads, unless a
        reducer does so.
        """
        if parameter is None or is_reduced(parameter):
            return parameter
        assert self.group is not None
        if (mark := mark_of(parameter)) is not None and mark.layout.is_shared:
            return copy_to_sharing(parameter, mark.layout, self.group)
        return collectives.copy(parameter, self.group)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        base_name, _, suffix = name.rpartition("_")
        if suffix == "orig" or (suffix in ("g", "v") and base_name not in self._parameters):
            self._refuse_parametrization(base_name)
        super().register_parameter(name, param)
        if self._is_marked:
            self.mark()

    def __delattr__(self, name: str) -> None:
        if name in self._parameters and _TORCH_UTILS in sys._getframe(1).f_code.co_filename:
            self._refuse_parametrization(name)
        super().__delattr__(name)

    def __prepare_scriptable__(self) -> Self:
        """Raise LayoutError, because TorchScript has no collectives; torch.jit.script calls it."""
        raise LayoutError(
            f"torch.jit.script of a {type(self).__name__}, whose forward communicates, which "
            f"TorchScript cannot; script the whole model in one process, or use torch.compile"
        )

    def _refuse_parametrization(self, name: str) -> None:
        """Raise LayoutError if `name` is split: its norm, or mask, would be that of the full
        tensor.
        """
        layout = self.layouts().get(name) if self._is_marked else None
        if layout is None or not layout.split_axes or self._group is None:
            return
        if self._group.size() > 1:
            raise LayoutError(
                f"weight_norm, spectral_norm, a parametrization or pruning computes {name} of a "
                f"{type(self).__name__} from others, but this rank has a part of "
                f"{layout.shape}; leave this layer unsplit, or build the model again and split it "
                f"without them"
            )

    def _apply(self, fn: Callable[..., Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self.mark()
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        if (group := self._group) is not None:
            memo[id(group)] = group
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        twin.mark()
        return twin

    def __getstate__(self) -> dict[str, object]:
        state = dict(self.__dict__)
        if (group := state.pop("_group", None)) is not None:
            state["_ranks"] = ranks_of(group)
        return state

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)
        with suppress(CommError, LaunchError):  # raised again at its first use
            _ = self.group
        self.mark()

    def _find(self, ranks: tuple[int, ...]) -> Group:
        try:
            return group_again(ranks)
        except (CommError, LaunchError):
            self._ranks = ranks
            raise


def is_reduced(parameter: nn.Parameter) -> bool:
    """Return True if a reducer sums its gradient, so the backward must leave this rank's own."""
    return (mark := mark_of(parameter)) is not None and mark.num_reducers > 0


def _mark_loaded(module: Marked, incompatible: object) -> None:
    module.mark()


class Grouped(Marked):
    """A module with a `group`, passed once at construction, and the mesh `axis` of the group.

    group: None means the group of `tpc` along `axis`, or all ranks where `tpc` is not set up.
    """

    def __init__(self, group: Group | None = None, axis: str = "tensor"):
        super().__init__()
        self.group = resolve_group(group, axis)
        self.axis = axis
