"""A hook on a module that keeps no object alive and is not copied with the module."""

from collections.abc import Callable
from types import MethodType
from weakref import WeakMethod


class WeakHook:
    """A hook that calls `function`; a bound method only as long as its object is alive.

    On a copied or unpickled module the hook does nothing.
    """

    def __init__(self, function: Callable[..., object]):
        weak = isinstance(function, MethodType)
        self._get = WeakMethod(function) if weak else lambda: function

    def __call__(self, *args):
        function = self._get()
        return None if function is None else function(*args)

    def __deepcopy__(self, memo):
        return noop

    def __reduce__(self):
        return _get_noop, ()


def _get_noop() -> Callable[..., None]:
    """Return `noop`, when unpickling a `WeakHook`."""
    return noop


def noop(*args) -> None:
    """Do nothing, in place of a `WeakHook` on a copied module."""
