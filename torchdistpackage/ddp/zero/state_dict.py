"""The state of a sharded optimizer, saved and loaded as that of the plain one.

What is saved is what the plain optimizer's `state_dict()` would be, numbered by the user's
parameters: any number of ranks, or the plain optimizer itself, can load it. Masters of parameters
in narrower dtypes are one more entry, MASTER.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchdistpackage.ddp.sharded import ParamPartition
from torchdistpackage.ddp.zero.shard_bounds import SCALARS
from torchdistpackage.ddp.zero.state_gather import State, gather_states
from torchdistpackage.errors import CheckpointError

MASTER = "master"
"""Key of the wide copy of a parameter, next to the inner optimizer's own state."""


class StateSaver:
    """Saves and loads the state of `owner`, an optimizer around `inner`, which has settled.

    partitions: of each param group of the user's, its parameters in order. refresh_masters: sets
    masters to the parameters.
    """

    def __init__(
        self,
        owner: Optimizer,
        inner: Optimizer,
        partitions: Sequence[Sequence[ParamPartition]],
        refresh_masters: Callable[[], None],
    ):
        self._owner, self._inner, self._partitions = owner, inner, partitions
        self._refresh_masters = refresh_masters

    def state_dict(self, to: int | None, cpu: bool) -> dict:
        """All of the state, gathered; all ranks call it."""
        for before in self._owner._optimizer_state_dict_pre_hooks.values():
            before(self._owner)
        local = self._inner.state_dict()
        states = gather_states(list(self._with_state(local)), to=to, cpu=cpu)
        whole = {i: state for i, state in states.items() if state}
        unassigned = {k: v for k, v in local["state"].items() if not isinstance(k, int)}
        groups = _numbered(local["param_groups"], self._partitions)
        result = {**local, "state": {**whole, **unassigned}, "param_groups": groups}
        for after in self._owner._optimizer_state_dict_post_hooks.values():
            changed = after(self._owner, result)
            result = result if changed is None else changed
        return result

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Take my part of a whole state."""
        for before in self._owner._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self._owner, state_dict)
            state_dict = state_dict if changed is None else changed
        if not all(
            MASTER in state for partition, state in self._matched(state_dict) if partition.master
        ):
            self._refresh_masters()
        self.load_whole(state_dict)
        for after in self._owner._optimizer_load_state_dict_post_hooks.values():
            after(self._owner)

    def shard_state_dict(self) -> dict:
        """The part of the state that this rank holds."""
        local = self._inner.state_dict()
        mine = [state for _, state in self._with_state(local)]
        for state in mine:
            if MASTER in state:  # a view of more than that, which a file would hold whole
                state[MASTER] = _copy(state[MASTER])
        return {
            **local,
            "state": {i: state for i, state in enumerate(mine) if state},
            "ranges": self._ranges(),
            "param_groups": _numbered(local["param_groups"], self._partitions),
        }

    def load_shard_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Take back what this rank saved."""
        matched, here, ranges = self._matched(state_dict), self._ranges(), state_dict.get("ranges")
        if not isinstance(ranges, Mapping) or {i: tuple(r) for i, r in ranges.items()} != here:
            raise CheckpointError(
                f"this rank owns pieces of {len(here)} parameters that are not those of the shard "
                f"given; load a shard on the rank and at the size that saved it, and use "
                f"state_dict() and load_state_dict() to change sizes"
            )
        copies = [{key: _copy(value) for key, value in state.items()} for _, state in matched]
        self._load(state_dict, copies)

    def load_whole(self, state_dict: Mapping[str, object]) -> None:
        """Take what is mine from the dict of a plain optimizer."""
        mine: list[State] = []
        for partition, state in self._matched(state_dict):
            _check(partition, state)
            own = state if partition.mine is not None else {}
            mine.append({key: _part(partition, key, value) for key, value in own.items()})
        self._load(state_dict, mine)

    # -- between the user's parameters and the inner optimizer's -----------------------

    def _indices(self) -> dict[int, int]:
        """id of an inner parameter -> its number in the inner optimizer's dicts."""
        everything = chain.from_iterable(group["params"] for group in self._inner.param_groups)
        return {id(p): index for index, p in enumerate(everything)}

    def _ranges(self) -> dict[int, tuple[int, int]]:
        """Number of each parameter of which this rank owns a part -> its elements."""
        every = enumerate(chain.from_iterable(self._partitions))
        return {i: partition.range for i, partition in every if partition.mine is not None}

    def _with_state(self, local: Mapping[str, dict]) -> Iterator[tuple[ParamPartition, State]]:
        """Each parameter, and what `local`, the inner optimizer's dict, has for it."""
        index_of = self._indices()
        for partition in chain.from_iterable(self._partitions):
            state: State = {}
            if partition.mine is not None:
                state = dict(local["state"].get(index_of[id(partition.mine)], {}))
                if partition.master:
                    state[MASTER] = partition.mine.detach()
            yield partition, state

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
        here = [len(members) for members in self._partitions]
        if found != here:
            raise CheckpointError(
                f"the state is of param groups with {found} parameters, but the optimizer's have "
                f"{here}; build it over the same parameters in the same groups"
            )
        numbers = chain.from_iterable(group["params"] for group in loaded)
        every = chain.from_iterable(self._partitions)
        return [(h, dict(states.get(i, {}))) for h, i in zip(every, numbers, strict=True)]

    def _load(self, state_dict: Mapping[str, object], mine: Sequence[State]) -> None:
        """Give the inner optimizer `mine`, the state of each of the user's parameters held here,
        and what of `state_dict` belongs to no parameter."""
        local: dict[Hashable, State] = {}
        index_of = self._indices()
        for partition, state in zip(chain.from_iterable(self._partitions), mine, strict=True):
            if partition.mine is None:
                continue
            master = state.pop(MASTER, None)
            if partition.master and isinstance(master, Tensor):
                with torch.no_grad():
                    partition.mine.copy_(master)
            if state:
                local[index_of[id(partition.mine)]] = state
        saved = state_dict["param_groups"]
        numbers = {number for group in saved for number in group["params"]}
        other = {key: v for key, v in state_dict["state"].items() if key not in numbers}
        groups = _numbered(saved, [group["params"] for group in self._inner.param_groups])
        self._inner.load_state_dict({"state": {**other, **local}, "param_groups": groups})


def _numbered(groups: Sequence[dict], members: Sequence[Sequence[object]]) -> list[dict]:
    """The options of `groups`, with as many numbers as there are members, counted through."""
    result: list[dict] = []
    first = 0
    for options, some in zip(groups, members, strict=True):
        result.append({**options, "params": list(range(first, first + len(some)))})
        first += len(some)
    return result


def _check(partition: ParamPartition, state: State) -> None:
    """On every rank alike, whichever owns it."""
    shape = partition.spec.parameter.shape
    for key, value in state.items():
        if (partition.whole and key != MASTER) or not isinstance(value, Tensor):
            continue
        if value.dim() and value.shape != shape:
            raise CheckpointError(
                f"{key!r} of {partition.name} has shape {tuple(value.shape)} in the state, but the "
                f"parameter has {tuple(shape)}; load the state of the same model"
            )


def _part(partition: ParamPartition, key: Hashable, value: object) -> object:
    """My elements of one entry, in memory of their own."""
    if not isinstance(value, Tensor) or (key in SCALARS and value.dim() == 0):
        return _copy(value)
    if partition.whole or value.shape != partition.spec.parameter.shape:
        return value.clone()
    start, stop = partition.range
    return partition.flat(value)[start:stop].clone()


def _copy(value: object) -> object:
    return value.clone() if isinstance(value, Tensor) else value
