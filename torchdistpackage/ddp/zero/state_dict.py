"""An optimizer around another that holds pieces: to schedulers, hooks and savers, the user's own.

One rule: param groups, options and state are the inner optimizer's own objects, asked for each
time, so that a learning rate changes for both. What is saved is what the plain optimizer's
`state_dict()` would be, numbered by the user's parameters: it knows nothing of ranks, and any other
number of them, or the plain optimizer itself, can load it. Masters of parameters in narrower dtypes
are one more entry, MASTER.
"""

import gc
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchdistpackage.ddp.zero.param_shard import ParamPartition
from torchdistpackage.ddp.zero.requires_whole import SCALARS
from torchdistpackage.ddp.zero.state_gather import State, gather_states
from torchdistpackage.errors import CheckpointError, LayoutError

MASTER = "master"
"""Key of the wide copy of a parameter, beside the inner optimizer's own state."""


class ShardedOptimizerBase(Optimizer):
    """Takes the user's parameters out of `inner` and puts what is held here in their place.

    inner: as the user built it; state that it has by then is kept. held: for each of its
    param groups, its parameters in their order.

    Subclasses say how to `step`, and override `_settle` and `refresh_masters`.
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
            self._load_whole(before)

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
            LayoutError: always; what each rank owns is settled at the start.
        """
        raise LayoutError(
            f"{type(self).__name__} cannot take a param group later: its {len(self.param_groups)} "
            f"groups are cut and laid out over the ranks; give all groups to the optimizer before "
            f"it is wrapped, or take its state_dict(), remove() it, wrap a new one and load that"
        )

    def refresh_masters(self) -> None:
        """Set masters to the parameters, after these were written to."""

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
        local = self.inner.state_dict()
        states = gather_states(list(self._with_state(local)), to=to, cpu=cpu)
        whole = {i: state for i, state in states.items() if state}
        unassigned = {k: v for k, v in local["state"].items() if not isinstance(k, int)}
        groups = _numbered(local["param_groups"], self.held)
        result = {**local, "state": {**whole, **unassigned}, "param_groups": groups}
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, result)
            result = result if changed is None else changed
        return result

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Take my part of a dict of `state_dict`, of any size and stage, or of a plain optimizer.

        Every rank gives the whole dict; nothing is sent. Without masters in it they are set to the
        parameters, so load the model first. Tensors are copied, so that the dict may be dropped,
        and cast as the inner optimizer's own `load_state_dict` does.

        Raises:
            CheckpointError: it is of other parameters.
        """
        self._settle()
        state_dict = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        if not all(MASTER in state for held, state in self._matched(state_dict) if held.master):
            self.refresh_masters()
        self._load_whole(state_dict)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def shard_state_dict(self) -> dict:
        """What this rank holds, without a message; loads at the same size and stage alone.

        {"state": {i: ...}, "ranges": {i: (start, stop)}, "param_groups": [...]}, numbered as in
        `state_dict`. The inner optimizer's tensors are its own, not copies, as torch has it.
        """
        self._settle()
        local = self.inner.state_dict()
        mine = [state for _, state in self._with_state(local)]
        for state in mine:
            if MASTER in state:  # a view of more than that, which a file would hold whole
                state[MASTER] = _copy(state[MASTER])
        return {
            **local,
            "state": {i: state for i, state in enumerate(mine) if state},
            "ranges": self._ranges(),
            "param_groups": _numbered(local["param_groups"], self.held),
        }

    def load_shard_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Take back this rank's own `shard_state_dict`.

        Raises:
            CheckpointError: parameters are cut otherwise here.
        """
        self._settle()
        matched, here, ranges = self._matched(state_dict), self._ranges(), state_dict.get("ranges")
        if not isinstance(ranges, Mapping) or {i: tuple(r) for i, r in ranges.items()} != here:
            raise CheckpointError(
                f"this rank owns pieces of {len(here)} parameters that are not those of the shard "
                f"given; load a shard on the rank and at the size that saved it, and use "
                f"state_dict() and load_state_dict() to change sizes"
            )
        copies = [{key: _copy(value) for key, value in state.items()} for _, state in matched]
        self._load(state_dict, copies)

    def forget(self) -> None:
        """From here on it owns no parameter."""
        _all.discard(self)

    def __getstate__(self) -> dict:
        raise CheckpointError(
            f"{type(self).__name__} is tied to its ranks and cannot be copied or pickled; save its "
            f"state_dict(), build it again and load that"
        )

    # -- between the user's parameters and the inner optimizer's -----------------------

    def _indices(self) -> dict[int, int]:
        """id of an inner parameter -> its number in the inner optimizer's dicts."""
        everything = chain.from_iterable(group["params"] for group in self.inner.param_groups)
        return {id(p): index for index, p in enumerate(everything)}

    def _ranges(self) -> dict[int, tuple[int, int]]:
        """Number of each parameter of which this rank owns a part -> its elements."""
        every = enumerate(chain.from_iterable(self.held))
        return {i: held.range for i, held in every if held.mine is not None}

    def _with_state(self, local: Mapping[str, dict]) -> Iterator[tuple[ParamPartition, State]]:
        """Each parameter, and what `local`, the inner optimizer's dict, has for it."""
        index_of = self._indices()
        for held in chain.from_iterable(self.held):
            state: State = {}
            if held.mine is not None:
                state = dict(local["state"].get(index_of[id(held.mine)], {}))
                if held.master:
                    state[MASTER] = held.mine.detach()
            yield held, state

    def _matched(self, state_dict: Mapping[str, object]) -> list[tuple[ParamPartition, State]]:
        """Each parameter, and what a plain dict has for it.

        Raises:
            CheckpointError: the dict is of other parameters.
        """
        states, loaded = state_dict.get("state"), state_dict.get("param_groups")
        if not isinstance(states, Mapping) or not isinstance(loaded, Sequence):
            raise CheckpointError(
                f"an optimizer's state has 'state' and 'param_groups', but this has "
                f"{sorted(map(str, state_dict))}; give what state_dict() returned"
            )
        found = [len(group["params"]) for group in loaded]
        here = [len(members) for members in self.held]
        if found != here:
            raise CheckpointError(
                f"the state is of param groups with {found} parameters, but the optimizer's have "
                f"{here}; build it over the same parameters in the same groups"
            )
        numbers = chain.from_iterable(group["params"] for group in loaded)
        every = chain.from_iterable(self.held)
        return [(h, dict(states.get(i, {}))) for h, i in zip(every, numbers, strict=True)]

    def _load_whole(self, state_dict: Mapping[str, object]) -> None:
        """Take what is mine from the dict of a plain optimizer."""
        mine: list[State] = []
        for held, state in self._matched(state_dict):
            _check(held, state)
            own = state if held.mine is not None else {}
            mine.append({key: _part(held, key, value) for key, value in own.items()})
        self._load(state_dict, mine)

    def _load(self, state_dict: Mapping[str, object], mine: Sequence[State]) -> None:
        """Give the inner optimizer `mine`, the state of each of the user's parameters held here,
        and what of `state_dict` belongs to no parameter."""
        local: dict[Hashable, State] = {}
        index_of = self._indices()
        for held, state in zip(chain.from_iterable(self.held), mine, strict=True):
            if held.mine is None:
                continue
            master = state.pop(MASTER, None)
            if held.master and isinstance(master, Tensor):
                with torch.no_grad():
                    held.mine.copy_(master)
            if state:
                local[index_of[id(held.mine)]] = state
        saved = state_dict["param_groups"]
        numbers = {number for group in saved for number in group["params"]}
        other = {key: v for key, v in state_dict["state"].items() if key not in numbers}
        groups = _numbered(saved, [group["params"] for group in self.inner.param_groups])
        self.inner.load_state_dict({"state": {**other, **local}, "param_groups": groups})


def _numbered(groups: Sequence[dict], members: Sequence[Sequence[object]]) -> list[dict]:
    """The options of `groups`, with as many numbers as there are members, counted through."""
    result: list[dict] = []
    first = 0
    for options, some in zip(groups, members, strict=True):
        result.append({**options, "params": list(range(first, first + len(some)))})
        first += len(some)
    return result


def _check(held: ParamPartition, state: State) -> None:
    """On every rank alike, whichever owns it."""
    shape = held.shared.parameter.shape
    for key, value in state.items():
        if (held.whole and key != MASTER) or not isinstance(value, Tensor):
            continue
        if value.dim() and value.shape != shape:
            raise CheckpointError(
                f"{key!r} of {held.name} has shape {tuple(value.shape)} in the state, but the "
                f"parameter has {tuple(shape)}; load the state of the same model"
            )


def _part(held: ParamPartition, key: Hashable, value: object) -> object:
    """My elements of one entry, in memory of their own."""
    if not isinstance(value, Tensor) or (key in SCALARS and value.dim() == 0):
        return _copy(value)
    if held.whole or value.shape != held.shared.parameter.shape:
        return value.clone()
    start, stop = held.range
    return held.flat(value)[start:stop].clone()


def _copy(value: object) -> object:
    return value.clone() if isinstance(value, Tensor) else value


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
