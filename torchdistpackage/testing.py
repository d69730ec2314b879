"""Ranks for your own tests: run a function on n gloo ranks of this machine (CPU).

    from torchdistpackage.testing import RankPool, run_ranks

`prove` compares a model of yours on several layouts with one process (docs/prove.md); its earlier
name is `compare_layouts`.
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

    from torchdistpackage.harness.parity.layouts import ParityReport
    from torchdistpackage.harness.pool import RankPool, run_ranks

    prove: Callable[..., ParityReport]
    compare_layouts: Callable[..., ParityReport]
    ParityModel: type[Any]
    mirror: Callable[..., AbstractContextManager[None]]
    ordered_streams: Callable[[], AbstractContextManager[Any]]

EXPORTS = homes(
    {
        "harness.parity.api": ("compare_layouts", "prove"),
        "harness.parity.layout_ranks": ("ParityModel",),
        "harness.late.group": ("mirror",),
        "harness.late.streams": ("ordered_streams",),
        "harness.pool": ("RankPool", "run_ranks"),
    }
)
"""Public name -> module that defines it."""

__all__ = [
    "ParityModel",
    "RankPool",
    "compare_layouts",
    "mirror",
    "ordered_streams",
    "prove",
    "run_ranks",
]


def __getattr__(name: str) -> object:
    return load(__name__, EXPORTS, name)
