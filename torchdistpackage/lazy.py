"""Public names that are loaded on first use, so that importing a package imports no torch.

EXPORTS = homes({"comm.p2p": ("Post",)})
__all__ = list(EXPORTS)

def __getattr__(name: str) -> object:
    return load(__name__, EXPORTS, name)
"""

import importlib
from collections.abc import Iterable, Mapping

PACKAGE = __name__.partition(".")[0]


def homes(names: Mapping[str, Iterable[str]]) -> dict[str, str]:
    """Public name -> full name of its module. names: module below the package -> its names."""
    return {name: f"{PACKAGE}.{module}" for module, held in names.items() for name in held}


def load(module: str, exports: Mapping[str, str], name: str) -> object:
    """What `module` exports as `name`, from the module that `exports` says.

    Raises:
        AttributeError: it exports no such name.
    """
    if name not in exports:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    return getattr(importlib.import_module(exports[name]), name)
