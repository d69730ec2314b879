"""Ranks for your own tests: run a function on n gloo ranks of this machine (CPU).

    from torchdistpackage.testing import RankPool, run_ranks

With `transport="late"` asynchronous calls behave as on NCCL (docs/late_transport.md); `mirror` does
so in one process, and `ordered_streams` looks at streams there.

One rule: names are loaded on first use, so that importing this module costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from torchdistpackage.harness.pool import RankPool, run_ranks

    mirror: Callable[..., AbstractContextManager[None]]
    ordered_streams: Callable[[], AbstractContextManager[Any]]

__all__ = ["RankPool", "mirror", "ordered_streams", "run_ranks"]
_LATE = "torchdistpackage.harness.late"
_HOMES = {"mirror": f"{_LATE}.mirror", "ordered_streams": f"{_LATE}.streams"}
_POOL = "torchdistpackage.harness.pool"


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES.get(name, _POOL)), name)
