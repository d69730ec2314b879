"""The order linter; its public names are loaded on first use, so the pure half needs no torch."""

from importlib import import_module

_HOME = {"lint": "linter", "LintReport": "report", "Finding": "report"}

__all__ = ["Finding", "LintReport", "lint"]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
