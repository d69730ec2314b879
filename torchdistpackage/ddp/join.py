"""Ranks with fewer batches than others: they stay and shadow what the others send.

Before each collective of a wrapper the ranks with data announce it to all, and those without any
take part in it, until no rank announces one. A shadow sends its gradients not yet reduced, then
zeros. At the end all follow a rank that went on longest.
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
    """Announcement of a rank; BUFFERS: a forward before which buffers follow."""

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
    """Run the loop over this rank's batches inside; leaving waits for the ranks that have more.

    optimizers: those whose state, too, is to be the same on all ranks afterwards. Parameters
        and buffers always are. Each rank steps and schedules only for its own batches.
    divide_by_initial_world_size: the mean counts ranks without data as zeros; else it is that of
        the ranks which still have data, as if each batch's loss were scaled.
    enable: False if all ranks have the same number of batches: then nothing is exchanged.
    throw_on_early_termination: as soon as one rank has no data left, raise on all.

    Costs a small exchange on the host for each forward and each reduction. Zero gradients
    every step. Only forwards of `ddp` itself and its reductions are shadowed: other collectives
    of the loop, in a clipping by the norm over all ranks for example, need all ranks to be there.

    Raises:
        CommError: a rank has no data left and `throw_on_early_termination`; ranks do
            different things; groups are not the wrapper's; or the module has a SyncBatchNorm, whose
            forward cannot be shadowed.
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
    whole = set(primitives.ranks_of(ddp.group))
    for name, _, group in ddp.replicas():
        ranks = primitives.ranks_of(group)
        if not whole.issuperset(ranks) or (optimizers and len(ranks) < len(whole)):
            raise CommError(
                f"join: parameter {name} is shared by ranks {ranks}, the wrapper's group has "
                f"{len(whole)}; give no optimizers where groups differ, and equally many batches "
                f"to ranks of which some are outside the wrapper's group"
            )


class _JoinContext:
    """One rank's part in it."""

    def __init__(self, ddp: NaiveDDP, divide_by_all: bool, throw: bool):
        self._ddp, self._divide_by_all, self._throw = ddp, divide_by_all, throw
        self._source, self._on_launch = ddp.source, ddp.reducer.on_launch
        self._through = on_cpu(ddp.group)
        self._ranks = primitives.ranks_of(ddp.group)
        self._active = self._ranks
        self._num_said = dict.fromkeys(self._ranks, 0)

    @contextmanager
    def announcing(self) -> Iterator[None]:
        """Inside, each forward and each reduction is announced."""
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
        """Take part until no rank has data."""
        ddp = self._ddp
        try:
            while (word := self._say(_JoinState.DONE)) is not _JoinState.DONE:
                if word is _JoinState.BUFFERS:
                    ddp.follow_buffers()
                elif word is _JoinState.REDUCTION:
                    self._shadow_reduction()
        finally:
            ddp.source = self._source

    def follow(self, optimizers: Sequence[Optimizer]) -> None:
        """All as on a rank of each group that had data for longest."""
        for group, members in for_each_group(self._ddp.replicas(), min_size=2):
            broadcast_tensors([replica.tensor for replica in members], group, self._last(group))
        group = self._ddp.group
        for optimizer in optimizers:
            mine = primitives.ranks_of(group)[group.rank()] == self._last(group)
            state = optimizer.state_dict() if mine else None
            theirs = broadcast_tensor_dict(state, group, self._last(group))
            if not mine:
                optimizer.load_state_dict(theirs)

    def _last(self, group: Group) -> int:
        return max(primitives.ranks_of(group), key=self._num_said.__getitem__)

    def _say(self, word: _JoinState) -> _JoinState:
        """Announce it to all; returns what ranks with data do next, DONE if there are none."""
        said = primitives.all_gather(torch.tensor([int(word)]), self._through).tolist()
        self._active = tuple(r for r, w in zip(self._ranks, said, strict=True) if w)
        for rank in self._active:
            self._num_said[rank] += 1
        words = {_JoinState(w) for w in said if w}
        if len(words) > 1:
            doing = ", ".join(
                f"{r}: {_JoinState(w).name}" for r, w in zip(self._ranks, said, strict=True)
            )
            raise CommError(
                f"join: ranks with data do not do the same next ({doing}); run the same loop on "
                f"all ranks, only for as many batches as each has"
            )
        if self._throw and 0 < len(self._active) < len(self._ranks):
            gone = [r for r in self._ranks if r not in self._active]
            raise CommError(
                f"join: ranks {gone} of {self._ranks} have no data left and "
                f"throw_on_early_termination is set, so all stop here"
            )
        if self._active:
            self._ddp.source = self._active[0]
        return words.pop() if words else _JoinState.DONE

    def _forwarding(self, *_: object) -> None:
        ddp = self._ddp
        follows = ddp.broadcast_buffers and ddp.training and not ddp.reducer.only_accumulates
        self._say(_JoinState.BUFFERS if follows else _JoinState.FORWARD)

    def _launching(self, bucket: int) -> None:
        if bucket == 0:
            self._say(_JoinState.REDUCTION)
        self._on_launch(bucket)

    def _scaled(self, module: nn.Module, inputs: object, outputs: object) -> object:
        if not torch.is_grad_enabled():
            return outputs
        return map_tensors(outputs, partial(_scaled, len(self._ranks) / len(self._active)))

    def _shadow_reduction(self) -> None:
        reducer = self._ddp.reducer
        if not reducer.open:
            for parameter in reducer.parameters:
                parameter.grad = None
        with torch.enable_grad():
            reducer.watch(())
        reducer.finish()


def _scaled(by: float, output: Tensor) -> Tensor:
    """A view whose gradients from outside are scaled; those from another output have been."""
    if output.requires_grad:
        output = output.view_as(output)
        output.register_hook(partial(torch.mul, other=by))
    return output
