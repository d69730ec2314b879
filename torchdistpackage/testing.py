"""Ranks for your own tests: run a function on n gloo ranks of this machine (CPU, no ports).

    from torchdistpackage.testing import RankPool, run_ranks

One rule: names are loaded on first use, so that importing this module costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchdistpackage.harness.pool import RankPool, run_ranks

__all__ = ["RankPool", "run_ranks"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("torchdistpackage.harness.pool"), name)
