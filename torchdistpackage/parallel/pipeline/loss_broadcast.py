"""The loss of the last stage on its way to the other ranks, while backwards still run.

One rule: whoever waits for the loss at the end of a step finds it there. On gloo it is a message
on a road of its own, sent when the last forward has ended; a device queue runs in one order on
all ranks, so there it is a broadcast behind everything else.
"""

import torch
from torch import Tensor

from torchdistpackage.comm import primitives
from torchdistpackage.comm.companions import on_cpu
from torchdistpackage.comm.flight_recorder import recorder
from torchdistpackage.comm.p2p import P2PChannel, P2PWork
from torchdistpackage.comm.primitives import Group, ranks_of

TAG = 0x7E0
"""Apart from messages of a pass, their headers, and what the debug mode says."""


class LossBroadcast:
    """A loss that one rank of `group` has and all get, once a step; all make the same calls.

    It is a number, or (sum, count), always the one or the other (`counted`, None before the first).
    source: its global rank. device: where the loss is. timeout_s: how long it may take (gloo).
    """

    def __init__(self, group: Group, source: int, device: torch.device, timeout_s: float | None):
        self._group, self._source, self._device = group, source, device
        self._wire = P2PChannel(group, timeout_s, tag=TAG)
        ranks = ranks_of(group)
        self._is_source = ranks[group.rank()] == source
        self._others = [rank for rank in ranks if rank != source]
        self.counted: bool | None = None
        self.dtype: torch.dtype | None = None
        self._mine: tuple[bool, torch.dtype] | None = None
        self._value: Tensor | None = None
        self._flights: list[P2PWork] = []

    def begin(self) -> None:
        """A step begins. Its loss has the dtype of the first step's, or float32 if wider."""
        self._value = None
        self._flights.clear()
        if not self._is_source and self._goes_alone():
            self._value = self._room()
            self._flights.append(self._wire.receive([self._value], self._source))

    def publish(self, value: Tensor, dtype: torch.dtype) -> None:
        """On the teller: this step's, a number or [sum, count]. dtype: of the number they make."""
        self._value = value
        if self.dtype is None:
            self._mine = value.dim() == 1, torch.promote_types(dtype, torch.float32)
        elif not self.counted:
            self._value = value.to(self.dtype)
        if self._goes_alone():
            self._flights += [self._wire.send([self._value], rank) for rank in self._others]

    def result(self) -> Tensor:
        """This step's, on every rank."""
        if self._goes_alone():
            for flight in self._flights:
                flight.wait()
        else:
            self._broadcast()
        value, self._value = self._value, None
        self._flights.clear()
        assert value is not None
        return value

    def _goes_alone(self) -> bool:
        return self.dtype is not None and self._wire.is_direct and not recorder.checks

    def _broadcast(self) -> None:
        group, teller, value = self._group, self._source, self._value
        if self.dtype is None:
            agreed = primitives.broadcast_object(self._mine, on_cpu(group), teller)
            assert isinstance(agreed, tuple)
            self.counted, self.dtype = agreed
        room = self._room()
        self._value = primitives.broadcast(room if value is None else value.to(room), group, teller)

    def _room(self) -> Tensor:
        if self.counted:
            return torch.zeros(2, dtype=torch.float64, device=self._device)
        return torch.zeros((), dtype=self.dtype, device=self._device)
