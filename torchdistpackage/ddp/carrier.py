"""What becomes of one bucket: it is launched when its gradients are complete, and settled.

The reducer says when; a carrier says how. `AllReduced` leaves the mean in every rank's bucket.

Used or not. A parameter without gradient contributes zeros and an unset mark at the bucket's
end. After the sum the mark tells whether any rank used it; if none did, `.grad` stays
None, as in one process. Marks are read only for parameters this rank did not use, so the usual
step has no device synchronisation.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from torchdistpackage.comm import primitives
from torchdistpackage.comm.primitives import Group, Pending
from torchdistpackage.ddp.buckets import Bucket
from torchdistpackage.ddp.gradients import Gradients
from torchdistpackage.ddp.shared import Shared

Start = Callable[..., Pending]
"""(flat, group, op) -> Pending: begins to reduce `flat` in place, a communication hook."""


class Carrier(Protocol):
    """One bucket under way. All ranks of its group launch the same ones in the same order."""

    gradients: Gradients

    @property
    def launched(self) -> bool:
        """Whether it has left and not been settled."""
        ...

    def launch(self) -> None:
        """Begin the sum; the gradients are as complete as they will be."""
        ...

    def settle(self) -> None:
        """Wait for the sum and leave it where it belongs."""
        ...

    def abandon(self) -> None:
        """The backward failed: let what has left arrive, and forget it."""
        ...


Carry = Callable[[Bucket, Sequence[Shared]], Carrier]


class AllReduced:
    """Each rank gets the whole sum, in the bucket itself."""

    def __init__(
        self,
        bucket: Bucket,
        members: Sequence[Shared],
        start: Start = primitives.start_all_reduce,
    ):
        self.gradients = Gradients(members, bucket.offsets, bucket.num_elements)
        self._group: Group = members[0].group
        self._divide, self._start = members[0].divide, start
        self._sums, self._marks = self.gradients.flat.tensor_split([bucket.marks])
        self._without: list[int] = []
        self._pending: Pending | None = None
        # NCCL takes the mean on the way; elsewhere a pass over the bucket does
        self._averages = self._divide == self._group.size() > 1 and primitives.is_nccl(self._group)

    @property
    def launched(self) -> bool:
        return self._pending is not None

    def launch(self) -> None:
        if self._group.size() > 1:
            self._marks.fill_(1)
            self._without = self.gradients.complete()
            for place in self._without:
                self._marks[place] = 0
        op = primitives.AVG if self._averages else primitives.SUM
        self._pending = self._start(self.gradients.flat, self._group, op)

    def settle(self) -> None:
        assert self._pending is not None
        self._pending.wait()
        self._pending = None
        if self._group.size() == 1:
            return
        if self._divide > 1 and not self._averages:
            self._sums.div_(self._divide)
        for place in self._without:
            if self._marks[place].item() != 0:
                self.gradients.members[place].parameter.grad = self.gradients.views[place]

    def abandon(self) -> None:
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
