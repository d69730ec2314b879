"""An optimizer around another that holds pieces: to schedulers, hooks and savers, the user's own.

One rule: param groups, options and state are the inner optimizer's own objects, asked for each
time, so that whoever changes a learning rate changes it for both; and what is saved is numbered
by the user's parameters, not by the pieces.
"""

import gc
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchdistpackage.ddp.zero import state_dict as state
from torchdistpackage.ddp.zero.param_shard import ParamPartition
from torchdistpackage.errors import CheckpointError, LayoutError


class ShardedOptimizerBase(Optimizer):
    """Takes the user's parameters out of `inner` and puts what is held here in their place.

    inner: as the user built it; state that it has by then is kept. held: for each of its
    param groups, its parameters in their order.

    Those who make one from it say how to `step`, and override `_settle` and `refresh_masters`.
    """

    def __init__(self, inner: Optimizer, held: Sequence[Sequence[ParamPartition]]):
        before = inner.state_dict()
        self.inner, self.held = inner, [list(members) for members in held]
        _all.add(self)
        # Optimizer.__init__ would make groups of its own; this gives us its hooks
        self.__setstate__({})
        for group, members in zip(inner.param_groups, self.held, strict=True):
            group["params"][:] = [h.mine for h in members if h.mine is not None]
        if before["state"]:
            # Adagrad has some from the start, and others may have been loaded before
            inner.state.clear()
            state.load_whole(inner, self.held, before)

    @property
    def param_groups(self) -> list[dict]:
        return self.inner.param_groups

    @property
    def state(self) -> dict:
        """Of the pieces held here, by piece."""
        return self.inner.state

    @property
    def defaults(self) -> dict:
        return self.inner.defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of parameters and pieces, or set them to zero."""
        with torch.no_grad():
            for held in chain.from_iterable(self.held):
                for holder in (held.shared.parameter, held.mine):
                    if holder is None or holder.grad is None:
                        continue
                    if set_to_none:
                        holder.grad = None
                        continue
                    if holder.grad.grad_fn is not None:
                        holder.grad = holder.grad.detach()
                    holder.grad.zero_()

    def add_param_group(self, param_group: dict) -> None:
        """Refused.

        Raises:
            LayoutError: always; who owns what is settled at the start.
        """
        raise LayoutError(
            f"{type(self).__name__} cannot take a param group later: its {len(self.param_groups)} "
            f"groups are cut and laid out over the ranks; give all groups to the optimizer before "
            f"it is wrapped, or take its state_dict(), remove() it, wrap a new one and load that"
        )

    def refresh_masters(self) -> None:
        """Set masters to the parameters, after somebody wrote to these."""

    def _settle(self) -> None:
        """Wait for everything in flight, so that parameters and state are whole and current."""

    # -- saving and loading ------------------------------------------------------------

    def state_dict(self, *, to: int | None = None, cpu: bool = False) -> dict:
        """All of the state, as the plain optimizer has it, and a "master" where one is kept.

        All ranks call it. to: index, in the group that shares, of the rank that gets the
        state; on the others it stays empty. Default: all do. cpu: tensors go there.

        Raises:
            CheckpointError: ranks hold different kinds of state for one parameter.
            CommError: `to` is no index in a group.
        """
        self._settle()
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        result = state.whole_state(self.inner, self.held, to=to, cpu=cpu)
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, result)
            result = result if changed is None else changed
        return result

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Take my part of a dict of `state_dict`, of any size and stage, or of a plain optimizer.

        Every rank gives the whole dict; nothing is sent. Without masters in it they are set to the
        parameters, so load the model first.

        Raises:
            CheckpointError: it is of other parameters.
        """
        self._settle()
        state_dict = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        if not state.has_masters(state_dict, self.held):
            self.refresh_masters()
        state.load_whole(self.inner, self.held, state_dict)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def shard_state_dict(self) -> dict:
        """What this rank holds, without a message; loads at the same size and stage alone."""
        self._settle()
        return state.shard_state(self.inner, self.held)

    def load_shard_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Take back this rank's own `shard_state_dict`.

        Raises:
            CheckpointError: parameters are cut otherwise here.
        """
        self._settle()
        state.load_shard(self.inner, self.held, state_dict)

    def forget(self) -> None:
        """From here on it owns no parameter."""
        _all.discard(self)

    def __getstate__(self) -> dict:
        raise CheckpointError(
            f"{type(self).__name__} is tied to its ranks and cannot be copied or pickled; save its "
            f"state_dict(), build it again and load that"
        )


_all: WeakSet[ShardedOptimizerBase] = WeakSet()
"""Those that own parameters."""


def owners_of(parameters: Iterable[Tensor]) -> list[ShardedOptimizerBase]:
    """Optimizers in use to which some of these parameters belong, in their order."""
    given = list(parameters) if _all else []
    found = _owners(given)
    if found and any(p.grad is not None for p in given):
        del found
        gc.collect()  # one that was dropped may only wait for this
        found = _owners(given)
    return found


def _owners(parameters: Sequence[Tensor]) -> list[ShardedOptimizerBase]:
    of = {id(h.shared.parameter): x for x in _all for members in x.held for h in members}
    found = {id(x): x for p in parameters if p.requires_grad and (x := of.get(id(p))) is not None}
    return list(found.values())
