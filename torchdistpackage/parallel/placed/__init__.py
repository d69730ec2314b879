"""Placed programs: one program, run by every rank, in which each tensor, module and operation has a
place; transfers, and their reverse in the backward, appear by themselves.

A name is loaded on first use.
"""

from torchdistpackage.lazy import homes, load

EXPORTS = homes(
    {
        "parallel.placed.chain": ("PlacedPipeline",),
        "parallel.placed.functor": ("DeviceFunctor",),
        "parallel.placed.launcher": ("launch",),
        "parallel.placed.managed": ("ManagedModule", "ManagedOperation", "ManagedTensor"),
        "parallel.placed.place": ("Place",),
        "parallel.placed.placement_search": ("PlaceLink",),
        "parallel.placed.proposal": ("Proposal", "propose"),
        "comm.random": ("seed_all",),
    }
)
"""Public name -> module that defines it."""

__all__ = list(EXPORTS)


def __getattr__(name: str) -> object:
    return load(__name__, EXPORTS, name)
