"""What is loaded on first use: public names, so that an import brings no torch, and extensions.

EXPORTS = homes({"comm.p2p": ("Post",)})
__all__ = list(EXPORTS)

def __getattr__(name: str) -> object:
    return load(__name__, EXPORTS, name)

A core file, such as ddp/naive_ddp.py, states as a protocol what it must be given. `SERVED_BY` names
who makes it, in a file that imports core and extensions; that file loads when the first object of
the class is made.
"""

import importlib
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

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


SERVED_BY = {
    "NaiveDDP": "torchdistpackage.ddp.options:ResolvedOptions",
    "ZeroOptimizer": "torchdistpackage.ddp.zero.options:ResolvedZeroOptions",
    "ShardedOptimizerBase": "torchdistpackage.ddp.zero.state_dict:StateSaver",
    "Reducer": "torchdistpackage.ddp.scheduled_ready:LastBackwardPolicy",
}
"""Core class -> "module:attribute"."""


def resolve(path: str) -> Any:
    """What "module:attribute" names; the module is imported first."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


@cache  # a look-up takes 5 us, and a step of a pipeline makes one
def extensions_of(core: str) -> Any:
    """What `SERVED_BY` names for the class `core`."""
    return resolve(SERVED_BY[core])
