"""The base of modules that say how their parameters are cut, on the parameters themselves.

A mark goes with the Parameter object. So whatever puts another object in its place marks it:
registration (also by `load_state_dict(assign=True)`), `_apply` (`to`, `half`, `to_empty`), copies
and pickles. Children do so first and outer modules after them, as outer ones speak for inner ones.
"""

import copy
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Self

from torch import Tensor, nn

from torchdistpackage.comm import collectives
from torchdistpackage.comm.primitives import Group, ranks_of
from torchdistpackage.comm.tpc import group_again
from torchdistpackage.errors import CommError, LaunchError
from torchdistpackage.layout.mark import Layouts, mark_of, mark_parameter


class Marked(nn.Module):
    """A module with `layouts()`, which it marks its parameters with, over its `group`.

    A subclass sets `group`, None where nothing is cut, and calls `mark()` at the end of its
    `__init__`. A deep copy of a module (an average of weights, a reference model) talks over the
    same group, which is no value to copy; a pickle keeps the group's ranks.
    """

    group: Group | None
    _is_marked = False

    def layouts(self) -> Layouts:
        """How its parameters are cut, by name; those of children may be among them."""
        return {}

    def mark(self) -> None:
        """Note on each parameter how it is cut."""
        if not self._is_marked:
            self._is_marked = True
            # once its children have theirs, which `assign=True` replaces
            self.register_load_state_dict_post_hook(_mark_loaded)
        if layouts := self.layouts():
            group = self.__dict__.get("group")
            for name, parameter in self.named_parameters(remove_duplicate=False):
                if name in layouts:
                    mark_parameter(parameter, layouts[name], group, name.count("."))

    def summed(self, parameter: nn.Parameter | None) -> Tensor | None:
        """`parameter` for a forward that sees this rank's rows alone, so that its gradient here is
        a partial sum: the backward sums it over the group, unless a reducer has taken that on.
        """
        if parameter is None or ((mark := mark_of(parameter)) is not None and mark.num_reducers):
            return parameter
        assert self.group is not None
        return collectives.copy(parameter, self.group)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        if self._is_marked:
            self.mark()

    def _apply(self, fn: Callable[..., Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self.mark()
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        if (group := self.__dict__.get("group")) is not None:
            memo[id(group)] = group
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        twin.mark()
        return twin

    def __getstate__(self) -> dict[str, object]:
        state = dict(self.__dict__)
        if (group := state.pop("group", None)) is not None:
            state["_ranks"] = ranks_of(group)
        return state

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)
        with suppress(CommError, LaunchError):  # said to whoever uses it
            _ = self.group
        self.mark()

    def __getattr__(self, name: str) -> Any:
        if name == "group":
            ranks = self.__dict__.pop("_ranks", None)
            self.group = None if ranks is None else self._find(ranks)
            return self.group
        return super().__getattr__(name)

    def _find(self, ranks: tuple[int, ...]) -> Group:
        try:
            return group_again(ranks)
        except (CommError, LaunchError):
            self._ranks = ranks
            raise


def _mark_loaded(module: Marked, incompatible: object) -> None:
    module.mark()
