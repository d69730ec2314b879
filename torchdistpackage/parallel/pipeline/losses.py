"""The loss of a step: of its microbatches, over the replicas, and on its way to the pipe ranks.

It does not depend on the number of microbatches, be it a mean over samples or (sum, count). A mean
is weighted by the samples of its microbatch. Sums are divided by the counts of all microbatches and
replicas; these are known only after the last forward, so gradients are of the sum until then, and
`LossDivision` divides what the step has added to them. Both are kept as [sum, count] in float64, a
mean with the count 1.
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
"""The target that torch's losses leave out of a mean by default."""
TAG = 0x7E0
"""The tag of `LossBroadcast`, apart from those of a pass, its headers and the debug mode."""


class Losses:
    """The losses of one step, which come in any order.

    sizes: samples of each microbatch. scale: factor of the gradient. counted: whether they are
    (sum, count), None before the first step. reads: whether a number in host memory may be read.
    totals: [sum, count] of passes before, in float64, to which these are added.
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
        """[sum, count]; of means [their mean, 1]. In one tensor from the first microbatch on: a
        number allocated among the large tensors of each would break up the memory they leave."""
        self.dtype = torch.float32
        self.weights: list[Weight] = [1.0] * len(sizes)
        """The weight of each loss in the sum whose gradient is wanted, once the loss has come."""

    @property
    def is_complete(self) -> bool:
        """Whether those of all microbatches have come."""
        return self._num == len(self._sizes)

    def put(self, m: int, value: object, targets: object = None, loss: object = None) -> Tensor:
        """Add that of microbatch `m`; returns the number to differentiate, with the weight above.

        targets, loss: for the text of an error. Raises CommError: it is neither, not what the first
        one was, or a mean over no targets.
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
    """Room for sums, as (loss sum, count): 2**24 tokens and one more are one number in float32."""
    return torch.zeros(number, dtype=torch.float64, device=device)


def is_counted(value: object) -> bool:
    """Whether this is (sum, count)."""
    if not (isinstance(value, tuple | list) and len(value) == 2):
        return False
    total, count = value
    is_number = isinstance(count, int | float) or (isinstance(count, Tensor) and count.dim() == 0)
    return is_scalar(total) and is_number


def mean_of(totals: Tensor, dtype: torch.dtype | None, counted: bool | None) -> Tensor:
    """The mean in `dtype` of [sum, count], 0 where nothing was counted.

    counted: of (sum, count), and not a mean already, whose count is 1.
    """
    mean = totals.new_empty((), dtype=dtype)
    if not counted:
        return mean.copy_(totals[0])
    return torch.div(totals[0], _divisor(totals), out=mean)


class LossDivision:
    """Reduces the gradients of one step over replicas, and divides them if losses are (sum, count).

    Where losses are known to count, reduction waits for the division, as steps before may have left
    gradients that are not reduced yet.

    counted: None before the first step. reducers: of the parameters. holders: where gradients are,
    of a step that may count. reduces: whether this step is to.
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
        """The forwards and backwards stand inside; gives the reducers that may reduce in them."""
        with reducing(self._reducers, bool(self._early)) as early:
            yield early
        for reducer in self._early:
            reducer.finish()

    def divide(self, totals: Tensor, num_samples: int) -> Tensor:
        """Divide the gradients after a run of losses that count; returns everybody's [sum, count].

        The divisor is the mean count of the replicas; `Losses` has divided by the samples already.
        The mean over replicas is the sum of all by all counts then, whenever it is taken.
        """
        group, num_replicas = _replicas(self._reducers), 1
        if group is not None and group.size() > 1:
            totals, num_replicas = primitives.all_reduce(totals.clone(), group), group.size()
        factor = num_samples * num_replicas / _divisor(totals)
        alone = [x for i, x in enumerate(self._holders) if i not in self._before]
        scale_gradients(alone, factor)  # type: ignore[arg-type]
        for i, before in self._before.items():
            gradient = self._holders[i].grad
            if gradient is not None:
                gradient.sub_(before).mul_(factor.to(before.device)).add_(before)
        for reducer in self._late:
            with reducer.scheduled():
                pass
            reducer.finish()
        return totals


def _replicas(reducers: Sequence[Reducer]) -> Group | None:
    """Ranks that are at this one's place in other replicas; None where that is not known."""
    if tpc.is_set:
        return tpc.groups.along(tpc.topology.dense, BATCH_AXES)
    return next((spec.group for reducer in reducers for spec in reducer.specs), None)


class LossBroadcast:
    """The loss of a step on its way from the rank that has it to all of `group`.

    On gloo it is a message over a connection of its own, sent after the last forward, while
    backwards still run; a device queue runs in one order on all ranks, so there it is a broadcast
    after everything else.

    It is of means always or of (sum, count) always (`counted`, None before the first step), and has
    the dtype of the first step's, or float32 if wider.

    source: its global rank. device: where the loss is. timeout_s: how long it may take (gloo).
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
        """A step begins."""
        self._value = None
        self._works.clear()
        if not self._is_source and self._goes_alone():
            self._value = self._buffer()
            self._works.append(self._channel.receive([self._value], self._source))

    def publish(self, losses: Losses) -> None:
        """On the source, send the loss of this step."""
        self._mine, self._value = (losses.counted, losses.dtype), losses.totals
        if self._goes_alone():
            self._works += [self._channel.send([self._value], rank) for rank in self._others]

    def result(self) -> Tensor:
        """Wait for [sum, count] of this step, on every rank."""
        if self._goes_alone():
            for work in self._works:
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
        return self.dtype is not None and self._channel.is_direct and not recorder.checks

    def _buffer(self) -> Tensor:
        return totals_on(self._device)


def _divisor(totals: Tensor) -> Tensor:
    return torch.where(totals[1] == 0, torch.ones_like(totals[1]), totals[1])


def _refuse_nothing(m: int, value: Tensor, targets: object, loss: object) -> None:
    """Raises CommError: the loss is nan, and all targets are those that losses leave out."""
    if not value.isnan():
        return
    ignored = getattr(loss, "ignore_index", IGNORED)
    ids = [x for x in tensors_in(targets) if not x.is_floating_point() and x.numel()]
    if any(bool((x == ignored).all()) for x in ids):
        raise CommError(
            f"the loss of microbatch {m} is a mean over no targets: all are {ignored}; return "
            f"(sum, count), which does not depend on how a batch is cut"
        )
