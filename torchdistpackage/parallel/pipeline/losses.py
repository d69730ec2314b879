"""The loss of a step: of its microbatches, over the replicas, and on its way to the pipe ranks.

One rule: it does not depend on the number of microbatches, be it a mean over samples or (sum,
count). A mean is weighted by the samples of its microbatch. Sums are divided by all counts
together, those of the other replicas too; these are known only after the last forward, so gradients
are of the sum until then, and `Addition` divides what the step has added to them.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from torchdistpackage.comm import primitives
from torchdistpackage.comm.companions import on_cpu
from torchdistpackage.comm.flight_recorder import recorder
from torchdistpackage.comm.p2p import P2PChannel
from torchdistpackage.comm.primitives import Group, ranks_of
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.comm.work import Work
from torchdistpackage.ddp.reducer import Reducer
from torchdistpackage.errors import CommError
from torchdistpackage.layout.derive import BATCH_AXES
from torchdistpackage.optim.clip import scale_gradients
from torchdistpackage.parallel.pipeline.microbatches import Mean, is_scalar, tensors_in
from torchdistpackage.parallel.pipeline.stage_runner import Weight

IGNORED = -100
"""What torch's losses leave out of a mean by default."""
TAG = 0x7E0
"""Of `LossBroadcast`: apart from messages of a pass, their headers, and those of the debug mode."""


class Losses:
    """Those of one step, in any order.

    sizes: samples of each microbatch. scale: factor of the gradient. counted: whether they are
    (sum, count), None before the first step. reads: whether a number may be read where it is.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        scale: Weight = 1.0,
        counted: bool | None = None,
        *,
        reads: bool = False,
    ):
        self._sizes, self._scale, self._reads = sizes, scale, reads
        self.counted, self._mean, self._num = counted, Mean(sizes), 0
        self.totals: Tensor | None = None
        self.dtype = torch.float32
        self.weights: list[Weight] = [1.0] * len(sizes)
        """Of each microbatch's loss in the sum whose gradient is wanted, once it has come."""

    @property
    def num_samples(self) -> int:
        return sum(self._sizes)

    @property
    def is_whole(self) -> bool:
        return self._num == len(self._sizes)

    def put(self, m: int, value: object, targets: object = None, loss: object = None) -> Tensor:
        """That of microbatch `m`; returns the number to differentiate, of the weight above.

        targets, loss: of which an error may tell more.

        Raises:
            CommError: it is neither, not what the first one was, or a mean over no targets.
        """
        counted = is_counted(value)
        if self.counted not in (None, counted):
            kinds = ("one number", "(sum, count)")
            raise CommError(
                f"the loss of microbatch {m} is {kinds[counted]}, but was {kinds[not counted]} "
                f"before; return the same always"
            )
        if not counted and not (isinstance(value, Tensor) and value.dim() == 0):
            raise CommError(
                f"the loss of microbatch {m} is {_form(value)}, not one number; return the mean "
                f"over its samples, or (sum, count)"
            )
        self.counted = counted
        self._num += 1
        if counted:
            total, count = value  # type: ignore[misc]
            self._count(m, total, count)
            self.weights[m] = self._scale / sum(self._sizes)
            return total
        assert isinstance(value, Tensor)
        self.dtype = value.dtype
        if self._reads and value.device.type == "cpu" and value.is_floating_point():
            _refuse_nothing(m, value, targets, loss)
        self._mean.put(m, value)
        self.weights[m] = self._sizes[m] / sum(self._sizes) * self._scale
        return value

    def value(self) -> Tensor:
        """When all have come: the mean, or [sum, count] in float64."""
        if self.counted:
            assert self.totals is not None
            return self.totals
        return self._mean.value().reshape(())

    def mean(self) -> Tensor:
        """When all have come, of this replica or, if `totals` were made so, of all."""
        return mean_of(self.value()).to(self.dtype) if self.counted else self.value()

    def _count(self, m: int, total: Tensor, count: Tensor | float) -> None:
        if isinstance(count, Tensor) and count.requires_grad:
            raise CommError(
                f"the count of microbatch {m} requires a gradient; a loss is one number, or a sum "
                f"and how many were summed"
            )
        if self.totals is None:
            self.totals = torch.zeros(2, dtype=torch.float64, device=total.device)
            self.dtype = torch.promote_types(total.dtype, torch.float32)
        self.totals[0].add_(total.detach())
        self.totals[1].add_(count)


def is_counted(value: object) -> bool:
    """Whether this is (sum, count)."""
    if not (isinstance(value, tuple | list) and len(value) == 2):
        return False
    total, count = value
    is_number = isinstance(count, int | float) or (isinstance(count, Tensor) and count.dim() == 0)
    return is_scalar(total) and is_number


def mean_of(totals: Tensor) -> Tensor:
    """Of [sum, count]; 0 where nothing was counted."""
    return totals[0] / _divisor(totals)


def over_replicas(totals: Tensor, group: Group | None) -> tuple[Tensor, int]:
    """([sum, count] of all replicas, how many these are)."""
    if group is None or group.size() == 1:
        return totals, 1
    return primitives.all_reduce(totals.clone(), group), group.size()


def replicas(reducer: Reducer | None) -> Group | None:
    """Ranks that are at this one's place in other replicas; None where nobody says."""
    if tpc.is_set:
        return tpc.groups.along(tpc.topology.dense, BATCH_AXES)
    shared = () if reducer is None else reducer.shared
    return shared[0].group if shared else None


class Addition:
    """What a step adds to the gradients of `holders`, made before it."""

    def __init__(self, holders: Iterable[Tensor]):
        self._holders = list({id(x): x for x in holders}.values())
        self._before = {
            i: x.grad.clone() for i, x in enumerate(self._holders) if x.grad is not None
        }

    def divide(self, totals: Tensor, num_samples: int, num_replicas: int) -> None:
        """By the mean count of the replicas; `Losses` has divided by the samples already.

        The mean over replicas is the sum of all by all counts then, whoever takes it, and when.
        """
        factor = num_samples * num_replicas / _divisor(totals)
        alone = [x for i, x in enumerate(self._holders) if i not in self._before]
        scale_gradients(alone, factor)  # type: ignore[arg-type]
        for i, before in self._before.items():
            gradient = self._holders[i].grad
            if gradient is not None:
                gradient.sub_(before).mul_(factor.to(before.device)).add_(before)


class LossBroadcast:
    """A loss that one rank of `group` has and all get, once a step; all make the same calls.

    It comes while backwards still run. On gloo it is a message over a connection of its own, sent
    when the last forward has ended; a device queue runs in one order on all ranks, so there it is a
    broadcast after everything else.

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
        self._flights: list[Work] = []

    def begin(self) -> None:
        """A step begins. Its loss has the dtype of the first step's, or float32 if wider."""
        self._value = None
        self._flights.clear()
        if not self._is_source and self._goes_alone():
            self._value = self._room()
            self._flights.append(self._wire.receive([self._value], self._source))

    def publish(self, value: Tensor, dtype: torch.dtype) -> None:
        """On the source: this step's, a number or [sum, count]. dtype: of the number they make."""
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
        group, source, value = self._group, self._source, self._value
        if self.dtype is None:
            agreed = primitives.broadcast_object(self._mine, on_cpu(group), source)
            assert isinstance(agreed, tuple)
            self.counted, self.dtype = agreed
        room = self._room()
        self._value = primitives.broadcast(room if value is None else value.to(room), group, source)

    def _room(self) -> Tensor:
        if self.counted:
            return torch.zeros(2, dtype=torch.float64, device=self._device)
        return torch.zeros((), dtype=self.dtype, device=self._device)


def _divisor(totals: Tensor) -> Tensor:
    return torch.where(totals[1] == 0, torch.ones_like(totals[1]), totals[1])


def _refuse_nothing(m: int, value: Tensor, targets: object, loss: object) -> None:
    """A mean over no targets is known where it can be read at once.

    Raises:
        CommError: it is not a number, and all targets are those that losses leave out.
    """
    if not value.isnan():
        return
    ignored = getattr(loss, "ignore_index", IGNORED)
    ids = [x for x in tensors_in(targets) if not x.is_floating_point() and x.numel()]
    if any(bool((x == ignored).all()) for x in ids):
        raise CommError(
            f"the loss of microbatch {m} is a mean over no targets: all are {ignored}; return "
            f"(sum, count), which does not depend on how a batch is cut"
        )


def _form(value: object) -> str:
    if isinstance(value, Tensor):
        return str(list(value.shape))
    if isinstance(value, tuple | list):
        return f"({', '.join(_form(x) for x in value)})"
    return type(value).__name__
