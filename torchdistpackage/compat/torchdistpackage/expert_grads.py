"""Gradients of experts, averaged over the ranks that hold the same ones while a backward runs.

Experts sit deep in a model with a wrapper of its own, so no outputs are seen here and nothing says
which backward is the last: `CountReady` takes a gradient for final when its parameter has got one
as often as it did in the first iteration. In that one nothing leaves early, and `moe_dp_iter_step`
ends every iteration: it sends the rest, also of experts that no token came to, and waits.

What leaves early leaves when this rank is ready, so each set of experts has a group of its own:
on a shared one, calls of others would come before it here and after it there. Where calls are
queued, as over NCCL, a group of its own does not help: a device may run the queues of all groups
one after another, and must be given them in one order on all ranks. There nothing leaves early.

Only its parameters keep an `ExpertReducer`, so that a model goes with its hooks. But
`moe_dp_iter_step` is a collective of those that are left, and ranks collect garbage each at its own
time: so what was dropped is found in the same call on all of them.
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
"""Iterations after which a model that was dropped is found: garbage is collected for that."""

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
    """Equalise these parameters over `moe_dp_group` now, and their gradients in every iteration.

    All ranks of the group call it, with the same names in the same order, best once for all experts
    of a model. End each iteration by `moe_dp_iter_step()` or the returned object's
    `reduce_gradients()`. A wrapper around the model must leave these parameters alone
    (`_ddp_params_and_buffers_to_ignore`). A model that is dropped is freed after the 1st and every
    1000th iteration, or at once by `remove()`.

    params: name -> parameter, or pairs of them.
    moe_dp_group: ranks that hold the same experts, `tpc.get_group("moe_dp")`.
    moe_dp_rank0: global rank in it whose values all start from; None is the group's first.
    overlap_comm: send gradients while the backward runs, but over NCCL; `sync` sends all at the
        end, as is needed where several reentrant checkpoints share a weight that not all of them
        use in the first iteration.
    reduce_op: "avg", or "sum" (then zero gradients every iteration).
    num_grad_acc_iter: backwards in one iteration.
    fp32_grads: the gradients of bf16 and fp16 parameters, which are added up in fp32, stay so;
        by default they end in the parameters' dtype.

    Raises:
        CommError: `moe_dp_rank0` is not in the group.
        ValueError: `reduce_op` is neither "avg" nor "sum".
    """
    made = ExpertReducer(
        dict(params),
        moe_dp_group,
        moe_dp_rank0,
        overlap=overlap_comm and not sync,
        reduce_op=reduce_op,
        num_backwards=num_grad_acc_iter,
        fp32_grads=fp32_grads,
    )
    _made.append(made)
    return made


def moe_dp_iter_step() -> None:
    """End an iteration of everything `create_moe_dp_hooks` made: gradients are reduced after it.

    All ranks call it once in every iteration, after the last backward and before the optimizer.
    """
    _made[:] = [made for made in _made if made.is_there]
    for i in range(len(_made)):  # a name would keep the last one
        _made[i].reduce_gradients()
    if due := {id(made) for made in _made if made.num_iterations % LOOK_EVERY == 1}:
        _drop_unheld(due)


def _drop_unheld(due: set[int]) -> None:
    """Free those of `_made` with these ids that only it holds: the same on all ranks."""
    kept = [(ref(made), None if id(made) in due else made, made._groups) for made in _made]
    _made.clear()
    gc.collect()
    for weak, _, groups in kept:
        if (made := weak()) is not None:
            _made.append(made)
        else:
            groups.destroy()


_HOLDER = "_expert_gradients"
"""The attribute of a parameter."""


class _KeepAlive:
    """Keeps `reducer` as long as the parameter whose attribute this is; a copy keeps nothing."""

    def __init__(self, reducer: "ExpertReducer"):
        self.reducer = reducer

    def __reduce__(self):
        return OrderedDict, ()


class CountReady(ReadyPolicy):
    """A gradient is final when it has come as often as in the first iteration.

    num_backwards: in one iteration; a further one is counted in full.
    """

    def __init__(self, reducer: Reducer, num_backwards: int):
        self._reducer, self._num_backwards = reducer, num_backwards
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
        """Expect as many gradients in the next one as came in the first."""
        if not self._expected:
            n = self._num_backwards
            # no token may have come in some of the backwards: full ones are counted
            self._expected = [n * max(1, -(-times // n)) for times in self._times]
        self._times = [0] * len(self._times)


class ExpertReducer:
    """Owns the gradients of some experts; see the module's text and `create_moe_dp_hooks`."""

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
        """Whether it was not removed and its ranks still are."""
        return bool(self._parameters) and self._groups.are_there

    def reduce_gradients(self) -> None:
        """Send what has not left, wait, and begin the next iteration. All ranks call it."""
        self._reducer.finish()
        self._ready.end_iteration()
        self.num_iterations += 1
        self._reducer.begin()

    def remove(self) -> None:
        """Take the hooks off and end the group; gradients stay. All ranks call it."""
        self._reducer.remove()
        for parameter in self._parameters:
            if getattr(vars(parameter).get(_HOLDER), "reducer", None) is self:
                delattr(parameter, _HOLDER)
        self._parameters = ()
        self._groups.destroy()


MoEDP = ExpertReducer
"""The earlier package's name of what `create_moe_dp_hooks` returns."""

_made: list[ExpertReducer] = []
"""In the order in which they were made, which is the same on all ranks; those whose ranks are no
longer there are dropped when next seen."""
