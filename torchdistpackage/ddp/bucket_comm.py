"""What becomes of one bucket: it is launched when its gradients are complete, and settled.

The reducer says when; a carrier says how. `AllReduceBucket` leaves the mean in every rank's bucket.

Narrow or wide. Gradients of bf16 and fp16 parameters are summed in fp32; with `keep_wide` their
`.grad` stays so, else it becomes a copy in the parameter's dtype as its bucket arrives.

Used or not. A parameter without gradient contributes zeros and an unset mark at the bucket's
end. After the sum the mark tells whether any rank used it; if none did, `.grad` stays
None, as in one process. Marks are read only for parameters this rank did not use, those of all
buckets at once: the usual step has no device synchronisation, and any other has one.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from torchdistpackage.comm import primitives
from torchdistpackage.comm.primitives import Group
from torchdistpackage.ddp.bucket_plan import Bucket
from torchdistpackage.ddp.comm_hooks import BucketMember, CommHook, CommWork, bind
from torchdistpackage.ddp.grad_bucket import GradBucket
from torchdistpackage.ddp.param_spec import ParamSpec


class BucketComm(Protocol):
    """One bucket under way. All ranks of its group launch the same ones in the same order."""

    gradients: GradBucket

    @property
    def launched(self) -> bool:
        """Whether it has left and not been settled."""
        ...

    def launch(self) -> None:
        """Begin the sum; the gradients are as complete as they will be."""
        ...

    def wait(self) -> None:
        """Wait for the sum and leave it where it belongs."""
        ...

    def abandon(self) -> None:
        """The backward failed: let what has left arrive, and forget it."""
        ...


MakeBucketComm = Callable[[Bucket, Sequence[ParamSpec]], BucketComm]


class AllReduceBucket:
    """Each rank gets the whole sum, in the bucket itself.

    hook: begins the reduction (comm_hooks.py).
    """

    def __init__(
        self,
        bucket: Bucket,
        members: Sequence[ParamSpec],
        *,
        hook: CommHook = primitives.start_all_reduce,
        keep_wide: bool = False,
    ):
        self._group: Group = members[0].group
        divide = members[0].divide
        # NCCL takes the mean on the way
        averages = primitives.transport_of(self._group).averages
        self._averages = divide == self._group.size() > 1 and averages
        self.gradients = GradBucket(
            members, bucket.offsets, bucket.num_elements, divide=1 if self._averages else divide
        )
        self._start = bind(hook, _facts(bucket, self.gradients), bucket.num_elements)
        self._narrows = self.gradients.is_wider and not keep_wide
        self._marks = self.gradients.flat[bucket.used_flags :]
        self._without: list[int] = []
        self._pending: CommWork | None = None

    @property
    def launched(self) -> bool:
        return self._pending is not None

    def launch(self) -> None:
        without = self.gradients.complete()
        if self._group.size() > 1:
            self._without = without
            self._marks.fill_(1)
            if without:
                is_pinned = self._marks.is_cuda  # so that the host does not wait for the copy
                places = torch.tensor(without, pin_memory=is_pinned)
                self._marks.index_fill_(0, places.to(self._marks.device, non_blocking=True), 0)
        op = primitives.AVG if self._averages else primitives.SUM
        self._pending = self._start(self.gradients.flat, self._group, op)

    def wait(self) -> None:
        assert self._pending is not None
        self._pending.wait()
        self._pending = None
        if self._narrows and not self._without:
            self.gradients.cast_grads()

    @property
    def unread(self) -> Tensor | None:
        """The marks, once settled, if some of them must be read for `learn`."""
        return self._marks if self._without else None

    def learn(self, marks: Sequence[complex]) -> None:
        """Whom any rank used; the others are left without gradient."""
        for place in self._without:
            if marks[place] != 0:
                self.gradients.members[place].parameter.grad = self.gradients.views[place]
        self._without = []
        if self._narrows:
            self.gradients.cast_grads()

    def abandon(self) -> None:
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        self.gradients.undivide()


def wait_all(
    carriers: Sequence[BucketComm], settled: Callable[[int], object] | None = None
) -> None:
    """Settle them in order, then read all marks that must be: the host waits at most once.

    settled: called with the number of each.
    """
    for b, carrier in enumerate(carriers):
        carrier.wait()
        if settled is not None:
            settled(b)
    unread: dict[torch.device, list[tuple[AllReduceBucket, Tensor]]] = {}
    for carrier in carriers:
        if isinstance(carrier, AllReduceBucket) and (marks := carrier.unread) is not None:
            unread.setdefault(marks.device, []).append((carrier, marks))
    for on_device in unread.values():
        read = torch.cat([marks for _, marks in on_device]).tolist()
        for carrier, marks in on_device:
            carrier.learn(read[: len(marks)])
            del read[: len(marks)]


def _facts(bucket: Bucket, gradients: GradBucket) -> list[BucketMember]:
    return [
        BucketMember(shared.name, view.shape, view.stride(), offset, shared.parameter)
        for shared, view, offset in zip(
            gradients.members, gradients.views, bucket.offsets, strict=True
        )
    ]
