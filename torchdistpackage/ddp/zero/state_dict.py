"""Saving and loading of a sharded optimizer's state in the plain optimizer's form.

The saved state equals the plain optimizer's `state_dict()`, numbered by the user's parameters. Any
number of ranks, or the plain optimizer itself, can load it. Masters of parameters in narrower
dtypes are one more entry, MASTER.
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
"""Key of a parameter's master, beside the inner optimizer's own state."""


class StateSaver:
    """A saver of the state of `owner`, an optimizer around `inner` with nothing in flight.

    partitions: the parameters of each of the user's param groups, in order.
    refresh_masters: sets masters to the parameters.
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
        """Gather and return the full state; all ranks call it."""
        for pre_hook in self._owner._optimizer_state_dict_pre_hooks.values():
            pre_hook(self._owner)
        local = self._inner.state_dict()
        states = gather_states(list(self._with_state(local)), to=to, cpu=cpu)
        nonempty = {i: state for i, state in states.items() if state}
        unassigned = {k: v for k, v in local["state"].items() if not isinstance(k, int)}
        groups = _numbered(local["param_groups"], self._partitions)
        result = {**local, "state": {**nonempty, **unassigned}, "param_groups": groups}
        for post_hook in self._owner._optimizer_state_dict_post_hooks.values():
            changed = post_hook(self._owner, result)
            result = result if changed is None else changed
        return result

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Load this rank's part of a full state."""
        for pre_hook in self._owner._optimizer_load_state_dict_pre_hooks.values():
            changed = pre_hook(self._owner, state_dict)
            state_dict = state_dict if changed is None else changed
        if not all(
            MASTER in state for partition, state in self._matched(state_dict) if partition.master
        ):
            self._refresh_masters()
        self.load_whole(state_dict)
        for post_hook in self._owner._optimizer_load_state_dict_post_hooks.values():
            post_hook(self._owner)

    def shard_state_dict(self) -> dict:
        """Return the part of the state that this rank holds."""
        local = self._inner.state_dict()
        states = [state for _, state in self._with_state(local)]
        for state in states:
            if MASTER in state:  # a view, whose full storage torch.save would write
                state[MASTER] = _copy(state[MASTER])
        return {
            **local,
            "state": {i: state for i, state in enumerate(states) if state},
            "ranges": self._ranges(),
            "param_groups": _numbered(local["param_groups"], self._partitions),
        }

    def load_shard_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Load the state that this rank saved."""
        matched = self._matched(state_dict)
        own_ranges, ranges = self._ranges(), state_dict.get("ranges")
        if (
            not isinstance(ranges, Mapping)
            or {i: tuple(r) for i, r in ranges.items()} != own_ranges
        ):
            raise CheckpointError(
                f"this rank owns pieces of {len(own_ranges)} parameters that are not those of "
                f"the shard "
                f"given; load a shard on the rank and at the size that saved it, and use "
                f"state_dict() and load_state_dict() to change sizes"
            )
        copies = [{key: _copy(value) for key, value in state.items()} for _, state in matched]
        self._load(state_dict, copies)

    def load_whole(self, state_dict: Mapping[str, object]) -> None:
        """Load this rank's part of a plain optimizer's state dict."""
        states: list[State] = []
        for partition, state in self._matched(state_dict):
            _check(partition, state)
            relevant = state if partition.own_tensor is not None else {}
            states.append({key: _part(partition, key, value) for key, value in relevant.items()})
        self._load(state_dict, states)

    # -- the user's parameters and the inner optimizer's -------------------------------

    def _indices(self) -> dict[int, int]:
        """Return id -> number in the inner optimizer's dicts, for each inner parameter."""
        everything = chain.from_iterable(group["params"] for group in self._inner.param_groups)
        return {id(p): index for index, p in enumerate(everything)}

    def _ranges(self) -> dict[int, tuple[int, int]]:
        """Return number -> owned elements, for each parameter that this rank owns a part of."""
        every = enumerate(chain.from_iterable(self._partitions))
        return {i: partition.range for i, partition in every if partition.own_tensor is not None}

    def _with_state(self, local: Mapping[str, dict]) -> Iterator[tuple[ParamPartition, State]]:
        """Yield each parameter with its state in `local`, the inner optimizer's dict."""
        index_of = self._indices()
        for partition in chain.from_iterable(self._partitions):
            state: State = {}
            if partition.own_tensor is not None:
                state = dict(local["state"].get(index_of[id(partition.own_tensor)], {}))
                if partition.master:
                    state[MASTER] = partition.own_tensor.detach()
            yield partition, state

    def _matched(self, state_dict: Mapping[str, object]) -> list[tuple[ParamPartition, State]]:
        """Return each parameter with its state in a plain optimizer's dict.

        Raises:
            CheckpointError: the dict belongs to other parameters.
        """
        states, loaded = state_dict.get("state"), state_dict.get("param_groups")
        if not isinstance(states, Mapping) or not isinstance(loaded, Sequence):
            raise CheckpointError(
                f"an optimizer's state has 'state' and 'param_groups', but this has "
                f"{sorted(map(str, state_dict))}; give what state_dict() returned"
            )
        saved_counts = [len(group["params"]) for group in loaded]
        own_counts = [len(members) for members in self._partitions]
        if saved_counts != own_counts:
            raise CheckpointError(
                f"the state is of param groups with {saved_counts} parameters, but the "
                f"optimizer's have "
                f"{own_counts}; build it over the same parameters in the same groups"
            )
        numbers = chain.from_iterable(group["params"] for group in loaded)
        every = chain.from_iterable(self._partitions)
        return [(h, dict(states.get(i, {}))) for h, i in zip(every, numbers, strict=True)]

    def _load(self, state_dict: Mapping[str, object], states: Sequence[State]) -> None:
        """Load the inner optimizer with this rank's state of each parameter.

        It also loads the entries of `state_dict` that belong to no parameter.
        """
        local: dict[Hashable, State] = {}
        index_of = self._indices()
        for partition, state in zip(chain.from_iterable(self._partitions), states, strict=True):
            if partition.own_tensor is None:
                continue
            master = state.pop(MASTER, None)
            if partition.master and isinstance(master, Tensor):
                with torch.no_grad():
                    partition.own_tensor.copy_(master)
            if state:
                local[index_of[id(partition.own_tensor)]] = state
        saved = state_dict["param_groups"]
        numbers = {number for group in saved for number in group["params"]}
        other = {key: v for key, v in state_dict["state"].items() if key not in numbers}
        groups = _numbered(saved, [group["params"] for group in self._inner.param_groups])
        self._inner.load_state_dict({"state": {**other, **local}, "param_groups": groups})


def _numbered(groups: Sequence[dict], members: Sequence[Sequence[object]]) -> list[dict]:
    """Return the options of `groups`, with their members numbered consecutively."""
    result: list[dict] = []
    first = 0
    for options, group_members in zip(groups, members, strict=True):
        result.append({**options, "params": list(range(first, first + len(group_members)))})
        first += len(group_members)
    return result


def _check(partition: ParamPartition, state: State) -> None:
    """Refuse state of another shape, on every rank alike, whichever rank owns it."""
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
    """Return a copy of this rank's elements of one state entry."""
    if not isinstance(value, Tensor) or (key in SCALARS and value.dim() == 0):
        return _copy(value)
    if partition.whole or value.shape != partition.spec.parameter.shape:
        return value.clone()
    start, stop = partition.range
    return partition.flat(value)[start:stop].clone()


def _copy(value: object) -> object:
    """Return a clone of a tensor; other values unchanged."""
    return value.clone() if isinstance(value, Tensor) else value
