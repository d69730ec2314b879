"""Placed programs: one program, run by every rank, in which each tensor, module and operation has a
place; transfers, and their reverse in the backward, appear by themselves.

A name is loaded on first use.
"""

from torchdistpackage.lazy import homes, load

EXPORTS = homes(
    {
        "compat.placed.chain": ("PlacedPipeline",),
        "compat.placed.functor": ("DeviceFunctor",),
        "compat.placed.launcher": ("launch",),
        "compat.placed.managed": ("ManagedModule", "ManagedOperation", "ManagedTensor"),
        "compat.placed.place": ("Place",),
        "compat.placed.placement_search": ("PlaceLink",),
        "compat.placed.proposal": ("Proposal", "propose"),
        "comm.random": ("seed_all",),
    }
)
"""Public name -> module that defines it."""

__all__ = list(EXPORTS)


def __getattr__(name: str) -> object:
    return load(__name__, EXPORTS, name)
