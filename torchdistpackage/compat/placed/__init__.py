"""Placed programs: every rank runs one program, and each tensor, module and operation has a place.

Transfers, and their reverse in the backward, happen automatically. A module is loaded when one of
its names is first used.
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
