"""Printing on one rank of many."""

import builtins
from collections.abc import Callable
from typing import Any

_builtin_print = builtins.print


def disable_non_master_print(is_master: bool) -> Callable[[], None]:
    """Make `print` print on the master alone; `print(..., force=True)` prints on every rank.

    A second call replaces the first. Returns a function that restores Python's own `print`.
    """

    def master_print(*args: Any, force: bool = False, **kwargs: Any) -> None:
        if is_master or force:
            _builtin_print(*args, **kwargs)

    builtins.print = master_print
    return _restore


def _restore() -> None:
    """Restore Python's own `print`."""
    builtins.print = _builtin_print


def emit(text: str) -> None:
    """Print `text` with the current `print`, which may be silent on this rank."""
    builtins.print(text)  # noqa: T201  # what the caller asked for
