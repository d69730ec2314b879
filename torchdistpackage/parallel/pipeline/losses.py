"""The loss of a step: over its micro-batches, over replicas, and its broadcast to the pipe ranks.

The loss does not depend on the number of micro-batches, whether it is a mean over samples or (sum,
count). A mean is weighted by the samples of its micro-batch. A sum is divided by the counts of all
micro-batches and replicas. These are known only after the last forward, so gradients are first
those of the sum, and `LossDivision` divides what the step has added to them. Both kinds are kept
as [sum, count] in float64, a mean with the count 1.

`tdp train` uses `Losses` alone: its one all-reduce (train/step_stats.py) carries the loss to all
ranks, and its update (train/update.py) divides. `LossDivision` and `LossBroadcast` do both for
`Pipeline`.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor

from torchdistpackage.comm import primitives
from torchdistpackage.comm.flight_recorder import recorder
from torchdistpackage.comm.groups import on_cpu
from torchdistpackage.comm.p2p import P2PChannel
from torchdistpackage.comm.primitives import Group, ranks_of
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.comm.work import Work
from torchdistpackage.ddp.reducer import Reducer
from torchdistpackage.errors import CommError
from torchdistpackage.layout.derive import BATCH_AXES
from torchdistpackage.optim.clip import scale_gradients
from torchdistpackage.parallel.pipeline.grad_sync import reducing
from torchdistpackage.parallel.pipeline.microbatches import form_of, is_scalar, tensors_in
from torchdistpackage.parallel.pipeline.stage_runner import Weight

IGNORED = -100
"""The target that torch's losses ignore by default."""
TAG = 0x7E0
"""The tag of `LossBroadcast`, different from those of a pass, its headers and the debug mode."""


class Losses:
    """The losses of one step's micro-batches, added in any order.

    sizes: samples of each micro-batch. scale: factor of the gradient.
    counted: whether losses are (sum, count); None before the first step.
    reads: whether a number in host memory may be read.
    totals: [sum, count] of earlier passes, in float64, to add to.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        scale: Weight = 1.0,
        counted: bool | None = None,
        *,
        reads: bool = False,
        totals: Tensor | None = None,
    ):
        self._sizes, self._scale, self._reads = sizes, scale, reads
        self.counted, self._num = counted, 0
        self.totals = totals
        """[sum, count], or [mean, 1] for means. It is one tensor from the first micro-batch on,
        because small tensors allocated among the large ones of each would fragment memory."""
        self.dtype = torch.float32
        self.weights: list[Weight] = [1.0] * len(sizes)
        """The weight of each loss in the sum to differentiate, once the loss is known."""

    @property
    def is_complete(self) -> bool:
        """True if the losses of all micro-batches are added."""
        return self._num == len(self._sizes)

    def put(self, m: int, value: object, targets: object = None, loss: object = None) -> Tensor:
        """Add the loss of micro-batch `m`; return the number to differentiate, with its weight
        above.

        targets, loss: for error messages.

        Raises:
            CommError: it is neither a number nor (sum, count), not what the first one was, or a
            mean
                over no targets.
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
                f"the loss of microbatch {m} is {form_of(value)}, not one number; return the mean "
                f"over its samples, or (sum, count)"
            )
        self.counted = counted
        self._num += 1
        total, count = cast("tuple[Tensor, Tensor | float]", value if counted else (value, 1))
        if isinstance(count, Tensor) and count.requires_grad:
            raise CommError(
                f"the count of microbatch {m} requires a gradient; a loss is one number, or a "
                f"sum and how many were summed"
            )
        if not counted and self._reads and total.device.type == "cpu":
            _refuse_nothing(m, total, targets, loss)
        if self.totals is None:
            self.totals = totals_on(total.device)
            if not counted:
                self.totals[1].fill_(1)
        if self._num == 1:
            self._sum, self._count = self.totals.unbind()
        if total.dtype is not self.dtype:
            self.dtype = torch.promote_types(total.dtype, self.dtype)
        share = (1 if counted else self._sizes[m]) / sum(self._sizes)
        self._sum.add_(total.detach(), alpha=1 if counted else share)
        if counted:
            self._count.add_(count)
        self.weights[m] = share * self._scale
        return total


def totals_on(device: torch.device, number: int = 2) -> Tensor:
    """Return zeros for sums such as [loss sum, count], in float64.

    In float32 a count would stop growing at 2**24 tokens.
    """
    return torch.zeros(number, dtype=torch.float64, device=device)


def is_counted(value: object) -> bool:
    """Return whether a loss is (sum, count)."""
    if not (isinstance(value, tuple | list) and len(value) == 2):
        return False
    total, count = value
    is_number = isinstance(count, int | float) or (isinstance(count, Tensor) and count.dim() == 0)
    return is_scalar(total) and is_number


def mean_of(totals: Tensor, dtype: torch.dtype | None, counted: bool | None) -> Tensor:
    """Return the mean of [sum, count] in `dtype`, 0 if nothing was counted.

    counted: the totals are a sum and a count; False: they are a mean and 1.
    """
    mean = totals.new_empty((), dtype=dtype)
    if not counted:
        return mean.copy_(totals[0])
    return torch.div(totals[0], _divisor(totals), out=mean)


class LossDivision:
    """The reduction of one step's gradients over replicas, and their division for (sum, count)
    losses.

    If losses are known to be (sum, count), the reduction waits for the division, because earlier
    steps may have left gradients that are not reduced yet.

    counted: None before the first step. reducers: reducers of the parameters.
    holders: tensors that hold the gradients of a step that may need the division.
    reduces: whether this step reduces.
    """

    def __init__(
        self,
        counted: bool | None,
        reducers: Sequence[Reducer],
        holders: Iterable[Tensor],
        reduces: bool = True,
    ):
        self._reducers = reducers
        self._early = reducers if reduces and not counted else ()
        self._late = reducers if reduces and counted else ()
        self._holders = list({id(x): x for x in holders}.values())
        self._before = {
            i: x.grad.clone() for i, x in enumerate(self._holders) if x.grad is not None
        }

    @contextmanager
    def run(self) -> Iterator[Sequence[Reducer]]:
        """Surround forwards and backwards, and yield the reducers that may reduce in them."""
        with reducing(self._reducers, bool(self._early)) as early:
            yield early
        for reducer in self._early:
            reducer.finish()

    def divide(self, totals: Tensor, num_samples: int) -> Tensor:
        """Divide the gradients after a run with (sum, count) losses; return all replicas' totals.

        The divisor is the mean count of the replicas, and `Losses` has already divided by the
        samples. So the mean over replicas, taken before or after, is the total sum by the total
        count.
        """
        group, num_replicas = _replicas(self._reducers), 1
        if group is not None and group.size() > 1:
            totals, num_replicas = primitives.all_reduce(totals.clone(), group), group.size()
        factor = num_samples * num_replicas / _divisor(totals)
        alone = [x for i, x in enumerate(self._holders) if i not in self._before]
        scale_gradients(alone, factor)  # type: ignore[arg-type]
        for i, divided in self._before.items():
            gradient = self._holders[i].grad
            if gradient is not None:
                gradient.sub_(divided).mul_(factor.to(divided.device)).add_(divided)
        for reducer in self._late:
            with reducer.scheduled():
                pass
            reducer.finish()
        return totals


def _replicas(reducers: Sequence[Reducer]) -> Group | None:
    """Return this rank's counterparts in the other replicas; None if they are not known."""
    if tpc.is_set:
        return tpc.groups.along(tpc.topology.dense, BATCH_AXES)
    return next((spec.group for reducer in reducers for spec in reducer.specs), None)


class LossBroadcast:
    """The broadcast of a step's loss from the rank that has it to all of `group`.

    On gloo it is a message over its own connection, sent after the last forward while backwards
    still run. A device queue runs in one order on all ranks, so there it is a broadcast after
    everything else.

    All losses are means, or all are (sum, count) (`counted`, None before the first step). The
    result has the dtype of the first step's loss, or float32 if that is wider.

    source: global rank with the loss. device: device of the loss. timeout_s: limit on gloo.
    """

    def __init__(self, group: Group, source: int, device: torch.device, timeout_s: float | None):
        self._group, self._source, self._device = group, source, device
        self._channel = P2PChannel(group, timeout_s, tag=TAG)
        ranks = ranks_of(group)
        self._is_source = ranks[group.rank()] == source
        self._others = [rank for rank in ranks if rank != source]
        self.counted: bool | None = None
        self.dtype: torch.dtype | None = None
        self._mine: tuple[bool | None, torch.dtype] | None = None
        self._value: Tensor | None = None
        self._works: list[Work] = []

    def begin(self) -> None:
        """Begin a step: on ranks without the loss, start to receive it."""
        self._value = None
        self._works.clear()
        if not self._is_source and self._goes_alone():
            self._value = self._buffer()
            self._works.append(self._channel.receive([self._value], self._source))

    def publish(self, losses: Losses) -> None:
        """Send the loss of this step, on the source."""
        self._mine, self._value = (losses.counted, losses.dtype), losses.totals
        if self._goes_alone():
            self._works += [self._channel.send([self._value], rank) for rank in self._others]

    def result(self) -> Tensor:
        """Wait for [sum, count] of this step, on every rank."""
        if self._goes_alone():
            for work in self._works:
                # the sums are read next, on every rank
                work.wait()
        else:
            group, source = self._group, self._source
            if self.dtype is None:
                agreed = primitives.broadcast_object(self._mine, on_cpu(group), source)
                assert isinstance(agreed, tuple)
                self.counted, self.dtype = agreed
            buffer = self._buffer()
            value = buffer if self._value is None else self._value.to(buffer)
            self._value = primitives.broadcast(value, group, source)
        value, self._value = self._value, None
        self._works.clear()
        assert value is not None
        return value

    def _goes_alone(self) -> bool:
        """Return whether the loss is a message of its own, not a broadcast at the end."""
        return self.dtype is not None and self._channel.is_direct and not recorder.checks

    def _buffer(self) -> Tensor:
        return totals_on(self._device)


def _divisor(totals: Tensor) -> Tensor:
    return torch.where(totals[1] == 0, torch.ones_like(totals[1]), totals[1])


def _refuse_nothing(m: int, value: Tensor, targets: object, loss: object) -> None:
    """Raise CommError if the loss is NaN because all targets are ignored ones."""
    if not value.isnan():
        return
    ignored = getattr(loss, "ignore_index", IGNORED)
    ids = [x for x in tensors_in(targets) if not x.is_floating_point() and x.numel()]
    if any(bool((x == ignored).all()) for x in ids):
        raise CommError(
            f"the loss of microbatch {m} is a mean over no targets: all are {ignored}; return "
            f"(sum, count), which does not depend on how a batch is cut"
        )
