"""Buckets leave in one order, each when its gradients are complete and all before it have left.

One rule: all ranks issue the same collectives in the same order, whatever order gradients come in;
and they pack anew between two reductions only, as they have agreed.
"""

from collections.abc import Callable
from enum import Enum

from torchdistpackage.ddp.carrier import settle_all
from torchdistpackage.ddp.fit import Fit
from torchdistpackage.ddp.order import Packing
from torchdistpackage.ddp.packed import Packed


class Phase(Enum):
    """IDLE: no bucket has left. REDUCING: buckets may leave. SENT: all early ones have left."""

    IDLE = "idle"
    REDUCING = "reducing"
    SENT = "sent"


_REDUCING = Phase.REDUCING  # on the way of every gradient names are looked up once


class Departures:
    """How far the buckets of `packed` have come.

    next: the first that has not left. missing: of each, gradients that are not complete; who
    counts that of `next` down to none calls `send_complete`. on_launch: called with the number of
    each. fit: is told what comes when, and says how to pack; None: as it is.
    """

    def __init__(self, packed: Packed, fit: Fit | None, on_launch: Callable[[int], object]):
        self.packed, self.fit, self.on_launch = packed, fit, on_launch
        self._next_packing: Packing | None = None
        self._reset(Phase.IDLE)

    def repack(self) -> None:
        """Go over to the packing that was agreed on last, before anything leaves in the old one."""
        packing, self._next_packing = self._next_packing, None
        if packing is not None:
            self.packed.repack(packing)
            self._reset(Phase.IDLE)

    def begin(self) -> None:
        """Buckets may leave from here on."""
        self.repack()
        if self.fit is not None:
            self.fit.begin()
        self._reset(_REDUCING)

    @property
    def has_early(self) -> bool:
        """Whether buckets are still to leave in the backward that runs."""
        return self.phase is _REDUCING and self.next < self.packed.num_early

    def send_complete(self) -> None:
        """Launch the early buckets that are complete."""
        while self.has_early and self.missing[self.next] == 0:
            self._launch(self.next)
            self.next += 1

    def send_early(self) -> None:
        """Launch the early buckets, complete or not."""
        self._launch_until(self.packed.num_early)

    def finish(self) -> None:
        """Launch what is left, wait for all sums, and agree on what is next."""
        self._launch_until(len(self.packed.carriers))
        fit = self.fit
        if fit is not None:
            fit.arrived(0)
        settle_all(self.packed.carriers, self._settled)
        if fit is not None:
            late = [slot.index for slot in self.packed.slots if slot.late]
            self._next_packing = fit.decide(late)
            self.fit = None if fit.is_over else fit
        self._reset(Phase.IDLE)

    def _settled(self, b: int) -> None:
        if self.fit is not None and b < self.packed.num_early:
            self.fit.arrived(self.packed.num_bytes(b))

    def abandon(self) -> None:
        """Let what has left arrive, and start over."""
        for carrier in self.packed.carriers:
            carrier.abandon()
        self.packed.forget_fresh()
        self._reset(Phase.IDLE)

    def _reset(self, phase: Phase) -> None:
        self.phase, self.next = phase, 0
        self.missing = [len(bucket.members) for bucket in self.packed.buckets]

    def _launch_until(self, end: int) -> None:
        for b in range(self.next, end):
            self._launch(b)
        self.next, self.phase = end, Phase.SENT

    def _launch(self, b: int) -> None:
        self.packed.bring_in()
        self.on_launch(b)
        self.packed.carriers[b].launch()
