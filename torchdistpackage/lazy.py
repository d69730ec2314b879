"""Load public names and commands on first use, so that an import brings no torch.

EXPORTS = homes({"comm.p2p": ("Post",)})
__all__ = list(EXPORTS)

def __getattr__(name: str) -> object:
    return load(__name__, EXPORTS, name)

An import is what a reader follows, so a string names a module of ours only where an import would
bring what its file does without:

Public names     of a package: importing the package imports none of them.
Commands         `tdp` imports only the command that was asked for, and a plan only what it shows.
Torch            for which commands, plans and launchers do not wait: the modules of a model
                 (models/*_spec.py), what runs in ranks, what is done once all has been checked.
Other processes  which are sent the name of what they are to call.

A test sees the first three by the files themselves, and lists others, each with its reason.
"""

import importlib
from collections.abc import Iterable, Mapping
from typing import Any

PACKAGE = __name__.partition(".")[0]


def homes(names: Mapping[str, Iterable[str]]) -> dict[str, str]:
    """Return the full name of the module of each public name; names: those of each module."""
    return {
        name: f"{PACKAGE}.{module}"
        for module, public_names in names.items()
        for name in public_names
    }


def load(module: str, exports: Mapping[str, str], name: str) -> object:
    """Return the attribute that `module` exports as `name`, from the module that `exports` lists
    for it.

    Raises:
        AttributeError: it exports no such name.
    """
    if name not in exports:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    return getattr(importlib.import_module(exports[name]), name)


def resolve(path: str) -> Any:
    """Import a module and return its attribute, both named as "module:attribute"."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


EXTENSIONS: dict[str, str] = {}
"""Names beside the core -> "module:attribute"; `compat` adds its own."""


def extension(name: str) -> Any:
    """Return the extension `name`; None if nothing has entered one."""
    return resolve(EXTENSIONS[name]) if name in EXTENSIONS else None
