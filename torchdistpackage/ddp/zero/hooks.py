"""A hook on a module that does nothing on copies of it.

One rule: a module that is copied or pickled is a plain one afterwards, for whoever averages or
saves it; its hooks belong to the optimizer of the original.
"""

from collections.abc import Callable


class Hook:
    """Calls `function` with what the module calls it with."""

    def __init__(self, function: Callable[..., object]):
        self._function = function

    def __call__(self, *args):
        return self._function(*args)

    def __deepcopy__(self, memo):
        return nothing

    def __reduce__(self):
        return _get_nothing, ()


def _get_nothing() -> Callable[..., None]:
    return nothing


def nothing(*args) -> None:
    """What such a hook is on a copy."""
