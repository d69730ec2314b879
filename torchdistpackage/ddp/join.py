"""Uneven numbers of batches: ranks that have run out shadow the collectives of the others.

Before each collective of a wrapper, ranks with data announce it to all, and ranks without data take
part in it, until no rank announces one. A shadowing rank first sends gradients that it has not
reduced yet, and then zeros. At the end all ranks copy the state of a rank that continued longest.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchdistpackage.comm import primitives
from torchdistpackage.comm.groups import for_each_group, on_cpu
from torchdistpackage.comm.nested import map_tensors
from torchdistpackage.comm.objects import broadcast_tensor_dict, broadcast_tensors
from torchdistpackage.comm.primitives import Group
from torchdistpackage.ddp.naive_ddp import NaiveDDP
from torchdistpackage.errors import CommError


class _JoinState(IntEnum):
    """The call that a rank announces. BUFFERS: a forward after a broadcast of buffers."""

    DONE = 0
    FORWARD = 1
    BUFFERS = 2
    REDUCTION = 3


@contextmanager
def join(
    ddp: NaiveDDP,
    *optimizers: Optimizer,
    divide_by_initial_world_size: bool = True,
    enable: bool = True,
    throw_on_early_termination: bool = False,
) -> Iterator[None]:
    """Run the loop over this rank's batches in the block; leaving it waits for ranks with more.

    It costs a small exchange on the host for each forward and each reduction. Zero the gradients in
    every step. Only forwards of `ddp` itself and its reductions are shadowed. Other collectives of
    the loop, such as clipping by the norm over all ranks, need all ranks to call them.

    optimizers: those whose state must be equal on all ranks afterwards too; parameters and buffers
        always are. Each rank calls step and its scheduler only for its own batches.
    divide_by_initial_world_size: the mean counts ranks without data as zeros. Otherwise it is the
        mean over ranks that still have data, as if each batch's loss were scaled.
    enable: False if all ranks have the same number of batches, to exchange nothing.
    throw_on_early_termination: raise on all ranks as soon as one has no data left.

    Raises:
        CommError: a rank has no data left and `throw_on_early_termination` is set, ranks announce
            different things, the groups are not the wrapper's, or the module has a SyncBatchNorm,
            whose forward cannot be shadowed.
    """
    if not enable or ddp.group.size() == 1:
        yield
        return
    has_sync = any(isinstance(m, nn.SyncBatchNorm) for m in ddp.modules())
    if has_sync and not throw_on_early_termination:
        raise CommError(
            "join: the module has a SyncBatchNorm, whose forward needs every rank; use "
            "throw_on_early_termination=True, or as many batches on all ranks"
        )
    _check_groups(ddp, optimizers)
    if sharded := [o for o in optimizers if hasattr(o, "shards")]:
        raise CommError(
            f"join: {type(sharded[0]).__name__} needs every rank in each step, which cannot be "
            f"shadowed; use as many batches on all ranks"
        )
    joined = _JoinContext(ddp, divide_by_initial_world_size, throw_on_early_termination)
    with joined.announcing():
        yield
    joined.shadow()
    joined.follow(optimizers)


def _check_groups(ddp: NaiveDDP, optimizers: Sequence[Optimizer]) -> None:
    """Refuse parameters whose group is not the wrapper's, where ranks could not follow."""
    wrapper_ranks = set(primitives.ranks_of(ddp.group))
    for name, _, group in ddp.replicas():
        ranks = primitives.ranks_of(group)
        if not wrapper_ranks.issuperset(ranks) or (optimizers and len(ranks) < len(wrapper_ranks)):
            raise CommError(
                f"join: parameter {name} is shared by ranks {ranks}, but the wrapper's group has "
                f"{len(wrapper_ranks)}; pass no optimizers if the groups differ, and give the "
                "same number of batches to ranks outside the wrapper's group"
            )


class _JoinContext:
    """The announcements and the shadowing of one rank."""

    def __init__(self, ddp: NaiveDDP, divide_by_all: bool, throw: bool):
        self._ddp, self._divide_by_all, self._throw = ddp, divide_by_all, throw
        self._source, self._on_launch = ddp.source, ddp.reducer.on_launch
        self._through = on_cpu(ddp.group)
        self._ranks = primitives.ranks_of(ddp.group)
        self._active = self._ranks
        self._num_announced = dict.fromkeys(self._ranks, 0)

    @contextmanager
    def announcing(self) -> Iterator[None]:
        """Announce each forward and each reduction inside the block."""
        ddp = self._ddp
        handles = [ddp.register_forward_pre_hook(self._forwarding)]
        if not self._divide_by_all:
            handles.append(ddp.register_forward_hook(self._scaled))
        ddp.reducer.on_launch = self._launching
        try:
            yield
        except BaseException:
            ddp.source = self._source
            raise
        finally:
            ddp.reducer.on_launch = self._on_launch
            for handle in handles:
                handle.remove()

    def shadow(self) -> None:
        """Take part in the others' collectives until no rank has data."""
        ddp = self._ddp
        try:
            while (state := self._announce(_JoinState.DONE)) is not _JoinState.DONE:
                if state is _JoinState.BUFFERS:
                    ddp.follow_buffers()
                elif state is _JoinState.REDUCTION:
                    self._shadow_reduction()
        finally:
            ddp.source = self._source

    def follow(self, optimizers: Sequence[Optimizer]) -> None:
        """Copy parameters, buffers and optimizers from the rank of each group with the
        most data.
        """
        for group, members in for_each_group(self._ddp.replicas(), min_size=2):
            broadcast_tensors([replica.tensor for replica in members], group, self._last(group))
        group = self._ddp.group
        for optimizer in optimizers:
            is_last = primitives.ranks_of(group)[group.rank()] == self._last(group)
            state = optimizer.state_dict() if is_last else None
            theirs = broadcast_tensor_dict(state, group, self._last(group))
            if not is_last:
                optimizer.load_state_dict(theirs)

    def _last(self, group: Group) -> int:
        """Return the rank of the group that announced most often."""
        return max(primitives.ranks_of(group), key=self._num_announced.__getitem__)

    def _announce(self, state: _JoinState) -> _JoinState:
        """Announce a state to all ranks; return that of ranks with data, or DONE if none has."""
        states = primitives.all_gather(torch.tensor([int(state)]), self._through).tolist()
        self._active = tuple(r for r, s in zip(self._ranks, states, strict=True) if s)
        for rank in self._active:
            self._num_announced[rank] += 1
        active_states = {_JoinState(s) for s in states if s}
        if len(active_states) > 1:
            doing = ", ".join(
                f"{r}: {_JoinState(s).name}" for r, s in zip(self._ranks, states, strict=True)
            )
            raise CommError(
                f"join: ranks with data do not do the same next ({doing}); run the same loop on "
                f"all ranks, only for as many batches as each has"
            )
        if self._throw and 0 < len(self._active) < len(self._ranks):
            gone = [r for r in self._ranks if r not in self._active]
            raise CommError(
                f"join: ranks {gone} of {self._ranks} have no data left and "
                f"throw_on_early_termination is set, so all stop here; leave it out to "
                f"train on the rest"
            )
        if self._active:
            self._ddp.source = self._active[0]
        return active_states.pop() if active_states else _JoinState.DONE

    def _forwarding(self, *_: object) -> None:
        """Announce a forward, before it runs."""
        ddp = self._ddp
        follows = ddp.broadcast_buffers and ddp.training and not ddp.reducer.only_accumulates
        self._announce(_JoinState.BUFFERS if follows else _JoinState.FORWARD)

    def _launching(self, bucket: int) -> None:
        """Announce a reduction, before its first bucket is launched."""
        if bucket == 0:
            self._announce(_JoinState.REDUCTION)
        self._on_launch(bucket)

    def _scaled(self, module: nn.Module, inputs: object, outputs: object) -> object:
        """Scale gradients so that the mean counts only ranks with data."""
        if not torch.is_grad_enabled():
            return outputs
        return map_tensors(outputs, partial(_scaled, len(self._ranks) / len(self._active)))

    def _shadow_reduction(self) -> None:
        """Take part in one reduction, with gradients not yet reduced or with zeros."""
        reducer = self._ddp.reducer
        if not reducer.open:
            for parameter in reducer.parameters:
                parameter.grad = None
        with torch.enable_grad():
            reducer.watch(())
        reducer.finish()


def _scaled(by: float, output: Tensor) -> Tensor:
    """Return a view that scales gradients arriving from outside the module.

    Gradients from another output of the module are scaled there.
    """
    if output.requires_grad:
        output = output.view_as(output)
        output.register_hook(partial(torch.mul, other=by))
    return output
