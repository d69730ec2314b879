"""A hook on a module that does nothing on copies of it.

One rule: a module that is copied or pickled is a plain one afterwards, for whoever averages or
saves it; its hooks belong to the optimizer of the original, and do nothing once that is dropped.
"""

from collections.abc import Callable
from types import MethodType
from weakref import WeakMethod

from torch import nn
from torch.utils.hooks import RemovableHandle


class WeakHook:
    """Calls `function` with what the module calls it with; if a method, as long as its object
    lives."""

    def __init__(self, function: Callable[..., object]):
        weak = isinstance(function, MethodType)
        self._get = WeakMethod(function) if weak else lambda: function

    def __call__(self, *args):
        function = self._get()
        return None if function is None else function(*args)

    def __deepcopy__(self, memo):
        return noop

    def __reduce__(self):
        return _get_nothing, ()


def hooked(
    module: nn.Module, forward: Callable, before_state: Callable, loaded: Callable
) -> list[RemovableHandle]:
    """Calls `forward` after a forward, `before_state` when its state_dict is about to be made or
    loaded, and `loaded` after that."""
    before = WeakHook(before_state)
    return [
        module.register_forward_hook(WeakHook(forward)),
        module.register_state_dict_pre_hook(before),
        module.register_load_state_dict_pre_hook(before),
        module.register_load_state_dict_post_hook(WeakHook(loaded)),
    ]


def _get_nothing() -> Callable[..., None]:
    return noop


def noop(*args) -> None:
    """What such a hook is on a copy."""
