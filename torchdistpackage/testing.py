"""Ranks for your own tests: run a function on n gloo ranks of this machine (CPU).

    from torchdistpackage.testing import RankPool, run_ranks

With `transport="late"` asynchronous calls behave as on NCCL (docs/late_transport.md); `mirror` does
so in one process, and `ordered_streams` looks at streams there.

Names are loaded on first use, so that importing this module costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchdistpackage.lazy import homes, load

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from torchdistpackage.harness.pool import RankPool, run_ranks

    mirror: Callable[..., AbstractContextManager[None]]
    ordered_streams: Callable[[], AbstractContextManager[Any]]

EXPORTS = homes(
    {
        "harness.late.group": ("mirror",),
        "harness.late.streams": ("ordered_streams",),
        "harness.pool": ("RankPool", "run_ranks"),
    }
)
"""Public name -> module that defines it."""

__all__ = ["RankPool", "mirror", "ordered_streams", "run_ranks"]


def __getattr__(name: str) -> object:
    return load(__name__, EXPORTS, name)
