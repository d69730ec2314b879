"""Buckets leave in one order, each when its gradients are complete and all before it have left.

One rule: all ranks issue the same collectives in the same order, whatever order gradients come in;
and they pack anew between two reductions only, as they have agreed.
"""

from collections.abc import Callable
from enum import Enum

from torchdistpackage.ddp.bucket_comm import wait_all
from torchdistpackage.ddp.bucket_tuning import BucketPlan, BucketTuner
from torchdistpackage.ddp.packed import GradBuckets


class ReductionPhase(Enum):
    """IDLE: no bucket has left. REDUCING: buckets may leave. SENT: all early ones have left."""

    IDLE = "idle"
    REDUCING = "reducing"
    SENT = "sent"


_REDUCING = ReductionPhase.REDUCING  # on the way of every gradient names are looked up once


class Departures:
    """How far the buckets of `packed` have come.

    next_bucket: the first that has not left. pending_counts: of each, gradients that are not
    complete; who counts that of `next_bucket` down to none calls `send_complete`. on_launch: called
    with the number of each. fit: is told what comes when, and says how to pack; None: as it is.
    """

    def __init__(
        self, packed: GradBuckets, fit: BucketTuner | None, on_launch: Callable[[int], object]
    ):
        self.packed, self.fit, self.on_launch = packed, fit, on_launch
        self._next_packing: BucketPlan | None = None
        self._reset(ReductionPhase.IDLE)

    def repack(self) -> None:
        """Go over to the packing that was agreed on last, before anything leaves in the old one."""
        packing, self._next_packing = self._next_packing, None
        if packing is not None:
            self.packed.repack(packing)
            self._reset(ReductionPhase.IDLE)

    def begin(self) -> None:
        """Buckets may leave from here on."""
        self.repack()
        if self.fit is not None:
            self.fit.begin()
        self._reset(_REDUCING)

    @property
    def has_early(self) -> bool:
        """Whether buckets are still to leave in the backward that runs."""
        return self.phase is _REDUCING and self.next_bucket < self.packed.num_early

    def send_complete(self) -> None:
        """Launch the early buckets that are complete."""
        while self.has_early and self.pending_counts[self.next_bucket] == 0:
            self._launch(self.next_bucket)
            self.next_bucket += 1

    def send_early(self) -> None:
        """Launch the early buckets, complete or not."""
        self._launch_until(self.packed.num_early)

    def finish(self) -> None:
        """Launch what is left, wait for all sums, and agree on what is next."""
        self._launch_until(len(self.packed.carriers))
        fit = self.fit
        if fit is not None:
            fit.arrived(0)
        wait_all(self.packed.carriers, self._settled)
        if fit is not None:
            late = [slot.index for slot in self.packed.slots if slot.may_repeat]
            self._next_packing = fit.decide(late)
            self.fit = None if fit.is_over else fit
        self._reset(ReductionPhase.IDLE)

    def _settled(self, b: int) -> None:
        if self.fit is not None and b < self.packed.num_early:
            self.fit.arrived(self.packed.num_bytes(b))

    def abandon(self) -> None:
        """Let what has left arrive, and start over."""
        for carrier in self.packed.carriers:
            carrier.abandon()
        self.packed.discard_staged()
        self._reset(ReductionPhase.IDLE)

    def _reset(self, phase: ReductionPhase) -> None:
        self.phase, self.next_bucket = phase, 0
        self.pending_counts = [len(bucket.members) for bucket in self.packed.buckets]

    def _launch_until(self, end: int) -> None:
        for b in range(self.next_bucket, end):
            self._launch(b)
        self.next_bucket, self.phase = end, ReductionPhase.SENT

    def _launch(self, b: int) -> None:
        self.packed.flush_staged()
        self.on_launch(b)
        self.packed.carriers[b].launch()
