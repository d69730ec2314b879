"""Averaging of expert gradients, during the backward, over the ranks that hold the same experts.

Experts sit deep in a model that another wrapper wraps, so this module sees no outputs and nothing
says which backward is the last. `CountReady` takes a gradient as final when its parameter got as
many as in the first iteration. In the first iteration no bucket leaves early. `moe_dp_iter_step`
ends every iteration: it sends the rest, also for experts that got no token, and waits.

A bucket that leaves early leaves when this rank is ready, so each set of experts has its own group:
on a shared group, other calls would come before it on one rank and after it on another. Where calls
are queued, as over NCCL, a separate group does not help: a device may run the queues of all groups
one after another, so all ranks must fill them in one order. There no bucket leaves early.

Only its parameters keep an `ExpertReducer` alive, so that dropping a model frees its hooks. But
`moe_dp_iter_step` is a collective of the reducers that are left, and each rank collects garbage at
its own time. So all ranks look for dropped reducers in the same call.
"""

import gc
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from functools import partial
from weakref import ref

import torch
from torch import Tensor, nn

from torchdistpackage.comm import primitives
from torchdistpackage.comm.groups import Groups
from torchdistpackage.comm.objects import broadcast_tensors
from torchdistpackage.comm.primitives import Group
from torchdistpackage.ddp.bucket_comm import AllReduceBucket, GradSlot, ReducerParts
from torchdistpackage.ddp.bucket_plan import MIB
from torchdistpackage.ddp.options import reduce_op_problems, refuse
from torchdistpackage.ddp.param_spec import ParamSpec
from torchdistpackage.ddp.ready import ReadyPolicy
from torchdistpackage.ddp.reducer import Reducer
from torchdistpackage.errors import CommError

BUCKET_BYTES = 25 * MIB

LOOK_EVERY = 1000
"""Iterations between looks for dropped models; each look runs the garbage collector."""

Named = Mapping[str, nn.Parameter] | Iterable[tuple[str, nn.Parameter]]


def create_moe_dp_hooks(
    params: Named,
    moe_dp_group: Group,
    moe_dp_rank0: int | None,
    overlap_comm: bool = True,
    reduce_op: str = "avg",
    sync: bool = False,
    num_grad_acc_iter: int = 1,
    *,
    fp32_grads: bool = False,
) -> "ExpertReducer":
    """Broadcast these parameters over `moe_dp_group` now, and average their gradients from now on.

    All ranks of the group call it, with the same names in the same order, best once for all experts
    of a model. End each iteration with `moe_dp_iter_step()` or the returned object's
    `reduce_gradients()`. A wrapper around the model must leave these parameters alone
    (`_ddp_params_and_buffers_to_ignore`). A dropped model is freed after the 1st and every 1000th
    iteration, or at once by `remove()`.

    params: name -> parameter, or pairs of them.
    moe_dp_group: ranks that hold the same experts, `tpc.get_group("moe_dp")`.
    moe_dp_rank0: global rank whose values all ranks start from; None: the group's first.
    overlap_comm: send gradients while the backward runs, except over NCCL. sync: send all at the
        end; needed if several reentrant checkpoints share a weight that not all of them use in the
        first iteration.
    reduce_op: "avg", or "sum" (then zero gradients every iteration).
    num_grad_acc_iter: backwards in one iteration.
    fp32_grads: keep gradients of bf16 and fp16 parameters in fp32, in which they are summed; by
        default they are cast to the parameters' dtype.

    Raises:
        CommError: `moe_dp_rank0` is not in the group.
        ValueError: `reduce_op` is neither "avg" nor "sum".
    """
    reducer = ExpertReducer(
        dict(params),
        moe_dp_group,
        moe_dp_rank0,
        overlap=overlap_comm and not sync,
        reduce_op=reduce_op,
        num_backwards=num_grad_acc_iter,
        fp32_grads=fp32_grads,
    )
    _reducers.append(reducer)
    return reducer


def moe_dp_iter_step() -> None:
    """End an iteration of all that `create_moe_dp_hooks` returned: finish reducing gradients.

    All ranks call it once in every iteration, after the last backward and before the optimizer.
    """
    _reducers[:] = [reducer for reducer in _reducers if reducer.is_there]
    for i in range(len(_reducers)):  # a loop variable would keep the last reducer alive
        _reducers[i].reduce_gradients()
    if due := {id(reducer) for reducer in _reducers if reducer.num_iterations % LOOK_EVERY == 1}:
        _drop_unused(due)


def _drop_unused(due: set[int]) -> None:
    """Free the reducers with these ids that only `_reducers` keeps alive; all ranks do it at once.

    All ranks must keep the same reducers, as `moe_dp_iter_step` is a collective of each of them.
    """
    entries = [(ref(x), None if id(x) in due else x, x._groups) for x in _reducers]
    _reducers.clear()
    # a model and its hooks may refer to each other, so only the collector frees them
    gc.collect()
    for weak, _, groups in entries:
        if (reducer := weak()) is not None:
            _reducers.append(reducer)
        else:
            groups.destroy()


_HOLDER = "_expert_gradients"
"""Attribute of a parameter that keeps its reducer alive."""


class _KeepAlive:
    """Keeps `reducer` alive while the parameter with this attribute lives; a copy keeps nothing."""

    def __init__(self, reducer: "ExpertReducer"):
        self.reducer = reducer

    def __reduce__(self):
        return OrderedDict, ()


class CountReady(ReadyPolicy):
    """Takes a gradient as final when it has come as often as in the first iteration.

    num_backwards: backwards of one iteration; further ones count as a full iteration.
    """

    def __init__(self, reducer: Reducer, num_backwards: int):
        self._reducer = reducer
        self._num_backwards = num_backwards
        self._expected: list[int] = []
        self._times = [0] * len(reducer.specs)
        for slot in reducer.grad_buckets.slots:
            reducer.mark_repeating(slot)

    def is_last(self, slot: GradSlot, parameter: Tensor) -> bool:
        i = slot.index
        self._times[i] += 1
        if not self._reducer.leaves_early:
            return False
        if self._times[i] == self._expected[i] + 1:
            self._expected[i] += self._num_backwards
            self._reducer.hold_back(slot)
        return self._times[i] == self._expected[i]

    def late(self, slot: GradSlot) -> CommError:
        return CommError(
            f"expert parameter {slot.spec.name} got gradient {self._times[slot.index] + 1} of "
            f"this iteration after its bucket had left: call moe_dp_iter_step() after every "
            f"{self._num_backwards} backwards (num_grad_acc_iter), or give sync=True"
        )

    def end_iteration(self) -> None:
        """Expect as many gradients in the next iteration as arrived in the first."""
        if not self._expected:
            n = self._num_backwards
            # some backwards may have had no token, so round up to full iterations
            self._expected = [n * max(1, -(-times // n)) for times in self._times]
        self._times = [0] * len(self._times)


class ExpertReducer:
    """Reduces the gradients of some experts; see the module's text and `create_moe_dp_hooks`."""

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        group: Group,
        source: int | None = None,
        *,
        overlap: bool = True,
        reduce_op: str = "avg",
        num_backwards: int = 1,
        fp32_grads: bool = False,
    ):
        refuse(reduce_op_problems(reduce_op))
        once = {id(p): (name, p) for name, p in reversed(params.items())}
        named = list(reversed(once.values()))
        with torch.no_grad():
            broadcast_tensors([p for _, p in named], group, source)
        ranks = primitives.ranks_of(group)
        overlap = overlap and not primitives.is_queued(group)
        self._groups = Groups(ranks[group.rank()])
        if overlap and len(ranks) > 1:
            group = self._groups.of(ranks, use="experts")
        divide = len(ranks) if reduce_op.lower() == "avg" else 1
        self._reducer = Reducer(
            [ParamSpec(name, p, group, divide) for name, p in named if p.requires_grad],
            cap_bytes=BUCKET_BYTES,
            overlap=overlap,
            parts=ReducerParts(partial(AllReduceBucket, keep_wide=fp32_grads)),
        )
        self._ready = CountReady(self._reducer, num_backwards)
        self._queue = self._reducer.follow(self._ready)
        self._reducer.begin()
        self.num_iterations = 0
        self._parameters = self._reducer.parameters
        for parameter in self._parameters:
            setattr(parameter, _HOLDER, _KeepAlive(self))

    @property
    def is_there(self) -> bool:
        """True until it is removed or its process groups end."""
        return bool(self._parameters) and self._groups.are_there

    def reduce_gradients(self) -> None:
        """Send the remaining buckets, wait, and begin the next iteration. All ranks call it."""
        self._reducer.finish()
        self._ready.end_iteration()
        self.num_iterations += 1
        self._reducer.begin()

    def remove(self) -> None:
        """Remove the hooks and end the group; gradients stay. All ranks call it."""
        self._reducer.remove()
        for parameter in self._parameters:
            if getattr(vars(parameter).get(_HOLDER), "reducer", None) is self:
                delattr(parameter, _HOLDER)
        self._parameters = ()
        self._groups.destroy()


MoEDP = ExpertReducer
"""The earlier package's name for the class that `create_moe_dp_hooks` returns."""

_reducers: list[ExpertReducer] = []
"""All reducers in the order of their creation, which is the same on all ranks. The next iteration
drops those whose process groups have ended."""
