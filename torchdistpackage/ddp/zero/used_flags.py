"""Which parameters any rank used in a backward; the others are left alone, as in one process.

One rule: ranks ask each other in every reduction, in one small sum begun after the last bucket of
a group, but read the answer only where they left something unused themselves, once for all of it:
the usual step does not wait for it.
"""

from collections.abc import Iterable

import torch

from torchdistpackage.comm.primitives import Group, Work, start_all_reduce


class UsedFlags:
    """The marks of all buckets over one group; `replicas` as in the module's buckets."""

    def __init__(self, group: Group, replicas: Group | None, device: torch.device):
        self._groups = [group] if replicas is None else [group, replicas]
        self._device = device
        self._num_marks = self._num_buckets = self._num_left = 0
        self._without: list[int] = []  # of the buckets that have left
        self._flags: torch.Tensor | None = None
        self._pending: Work | None = None
        self._num_sums = 0
        self._read: list[int] | None = None  # the sum, once somebody asked

    def add(self, num_members: int) -> int:
        """Another bucket; returns the place of its first mark."""
        first = self._num_marks
        self._num_marks += num_members
        self._num_buckets += 1
        self._num_left = self._num_buckets
        return first

    def leave(self, first: int, without: Iterable[int]) -> None:
        """A bucket leaves, `without` gradients at these places; the last of all begins the sum."""
        self._without += [first + place for place in without]
        self._num_left -= 1
        if self._num_left == 0:
            self._num_left, self._num_sums, self._read = self._num_buckets, 1, None
            self._pending = start_all_reduce(self._mine(), self._groups[0])

    def land(self) -> None:
        """If marks go on to replicas, let them; every rank calls it before it settles."""
        if len(self._groups) > 1 and self._num_sums == 1 and self._pending is not None:
            self._num_sums = 2
            self._pending = start_all_reduce(self._pending.wait(), self._groups[1])

    def used(self, mark: int) -> bool:
        """Whether some rank had a gradient; the first to ask waits for the device, for all."""
        assert self._pending is not None
        if self._read is None:
            self._read = self._pending.wait().tolist()
        return self._read[mark] != 0

    def forget(self) -> None:
        """The backward failed: let what has left arrive, and begin anew."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        self._without.clear()
        self._num_left = self._num_buckets

    def _mine(self) -> torch.Tensor:
        """My marks, on the device without a wait of the host."""
        if self._pending is not None:
            self._pending.wait()  # last step's, in the same memory
        if self._flags is None:
            self._flags = torch.empty(self._num_marks, dtype=torch.int32, device=self._device)
        self._flags.fill_(1)
        if self._without:
            is_far = self._device.type != "cpu"
            places = torch.tensor(self._without, pin_memory=is_far)
            self._flags.index_fill_(0, places.to(self._device, non_blocking=True), 0)
            self._without.clear()
        return self._flags
