"""The state of a sharded optimizer, as the optimizer that was not sharded has it, and back.

One rule: a dict of `whole_state` is what the plain optimizer's `state_dict()` would be, so it knows
nothing of ranks, and any other number of them, or the plain optimizer itself, can load it. Masters
of parameters in narrower dtypes are one more entry, MASTER.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchdistpackage.ddp.zero.param_shard import ParamPartition
from torchdistpackage.ddp.zero.requires_whole import SCALARS
from torchdistpackage.ddp.zero.state_gather import State, gather_states
from torchdistpackage.errors import CheckpointError

MASTER = "master"
"""Key of the wide copy of a parameter, beside the inner optimizer's own state."""

StateDict = dict[str, object]

_Groups = Sequence[Sequence[ParamPartition]]


def whole_state(
    inner: Optimizer, groups: _Groups, *, to: int | None = None, cpu: bool = False
) -> StateDict:
    """{"state": {i: {key: value}}, "param_groups": [...]}: all of it, in the plain format.

    Parameters are numbered in the order in which the user gave them. to: index, in each group
    that shares, of the rank that gets the state; on the others it is empty. Default: all do. cpu:
    put tensors there; else they are on the parameter's device, or on the CPU if offloaded.

    All ranks call it. Beside the result it needs memory for one batch (state_gather.py).

    Raises:
        CheckpointError: ranks hold different kinds of state for one parameter.
        CommError: `to` is no index in a group.
    """
    local = inner.state_dict()
    mine = list(_with_state(inner, local, groups))
    states = gather_states(mine, to=to, cpu=cpu)
    whole = {i: state for i, state in states.items() if state}
    unassigned = {k: v for k, v in local["state"].items() if not isinstance(k, int)}
    return {
        **local,
        "state": {**whole, **unassigned},
        "param_groups": _plain_groups(local["param_groups"], groups),
    }


def load_whole(inner: Optimizer, groups: _Groups, state_dict: Mapping[str, object]) -> None:
    """Take what is mine from a dict of `whole_state` or of a plain optimizer over the same model.

    Nothing is sent: each rank has the dict. Tensors are copied, so that it may be dropped. The
    inner optimizer's own `load_state_dict` casts as it does for plain ones.

    Raises:
        CheckpointError: the dict is of other parameters.
    """
    saved = _matched(state_dict, groups)
    local: dict[Hashable, State] = {}
    index_of = _indices(inner)
    for held, state in zip(chain.from_iterable(groups), saved, strict=True):
        _check(held, state)
        if held.mine is None:
            continue
        state = {key: _part(held, key, value) for key, value in state.items()}
        _load_master(held, state)
        if state:
            local[index_of[id(held.mine)]] = state
    _load(inner, state_dict, local)


def shard_state(inner: Optimizer, groups: _Groups) -> StateDict:
    """What this rank holds, without a message; loads where parameters are cut the same way.

    {"state": {i: ...}, "ranges": {i: (start, stop)}, "param_groups": [...]}, numbered as in
    `whole_state`. The inner optimizer's tensors are its own, not copies, as torch has it.
    """
    local = inner.state_dict()
    mine = [(i, *pair) for i, pair in enumerate(_with_state(inner, local, groups))]
    for _, _, state in mine:
        if MASTER in state:  # a view of more than that, which a file would hold whole
            state[MASTER] = _copy(state[MASTER])
    return {
        **local,
        "state": {i: state for i, _, state in mine if state},
        "ranges": {i: held.range for i, held, _ in mine if held.mine is not None},
        "param_groups": _plain_groups(local["param_groups"], groups),
    }


def load_shard(inner: Optimizer, groups: _Groups, state_dict: Mapping[str, object]) -> None:
    """Take back a dict of `shard_state` of the same rank.

    Raises:
        CheckpointError: parameters are cut otherwise than where it was saved.
    """
    saved = _matched(state_dict, groups)
    ranges = state_dict.get("ranges")
    here = {
        i: held.range for i, held in enumerate(chain.from_iterable(groups)) if held.mine is not None
    }
    if not isinstance(ranges, Mapping) or {i: tuple(r) for i, r in ranges.items()} != here:
        raise CheckpointError(
            f"this rank owns pieces of {len(here)} parameters that are not those of the shard "
            f"given; load a shard on the rank and at the size that saved it, and use state_dict() "
            f"and load_state_dict() to change sizes"
        )
    local: dict[Hashable, State] = {}
    index_of = _indices(inner)
    for held, state in zip(chain.from_iterable(groups), saved, strict=True):
        if held.mine is not None and state:
            state = {key: _copy(value) for key, value in state.items()}
            _load_master(held, state)
            local[index_of[id(held.mine)]] = state
    _load(inner, state_dict, local)


def has_masters(state_dict: Mapping[str, object], groups: _Groups) -> bool:
    """Whether the dict has one for each parameter that has one here.

    Raises:
        CheckpointError: the dict is of other parameters.
    """
    saved = _matched(state_dict, groups)
    pairs = zip(chain.from_iterable(groups), saved, strict=True)
    return all(MASTER in state for held, state in pairs if held.master)


# -- mine ----------------------------------------------------------------------------------


def _indices(inner: Optimizer) -> dict[int, int]:
    """id of an inner parameter -> its number in the inner optimizer's dicts."""
    everything = chain.from_iterable(group["params"] for group in inner.param_groups)
    return {id(p): index for index, p in enumerate(everything)}


def _with_state(
    inner: Optimizer, local: Mapping[str, dict], groups: _Groups
) -> Iterator[tuple[ParamPartition, State]]:
    index_of = _indices(inner)
    for held in chain.from_iterable(groups):
        state: State = {}
        if held.mine is not None:
            state = dict(local["state"].get(index_of[id(held.mine)], {}))
            if held.master:
                state[MASTER] = held.mine.detach()
        yield held, state


def _plain_groups(local: Sequence[dict], groups: _Groups) -> list[dict]:
    """The options of the inner groups, with the numbers of the user's parameters."""
    result: list[dict] = []
    first = 0
    for options, members in zip(local, groups, strict=True):
        result.append({**options, "params": list(range(first, first + len(members)))})
        first += len(members)
    return result


# -- from the whole to pieces --------------------------------------------------------------


def _matched(state_dict: Mapping[str, object], groups: _Groups) -> list[State]:
    """The state of each parameter, in order."""
    states, loaded = state_dict.get("state"), state_dict.get("param_groups")
    if not isinstance(states, Mapping) or not isinstance(loaded, Sequence):
        raise CheckpointError(
            f"an optimizer's state has 'state' and 'param_groups', but this has "
            f"{sorted(map(str, state_dict))}; give what state_dict() returned"
        )
    found, here = [len(group["params"]) for group in loaded], [len(group) for group in groups]
    if found != here:
        raise CheckpointError(
            f"the state is of param groups with {found} parameters, but the optimizer's have "
            f"{here}; build it over the same parameters in the same groups"
        )
    numbers = chain.from_iterable(group["params"] for group in loaded)
    return [dict(states.get(number, {})) for number in numbers]


def _check(held: ParamPartition, state: State) -> None:
    """On every rank alike, whoever owns it."""
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


def _load_master(held: ParamPartition, state: State) -> None:
    master = state.pop(MASTER, None)
    if held.master and isinstance(master, Tensor):
        assert isinstance(held.mine, nn.Parameter)
        with torch.no_grad():
            held.mine.copy_(master)


def _load(inner: Optimizer, state_dict: Mapping[str, object], local: dict[Hashable, State]) -> None:
    """Numbered as in the inner optimizer; what belongs to no parameter goes along."""
    numbers = {number for group in state_dict["param_groups"] for number in group["params"]}
    other = {key: v for key, v in state_dict["state"].items() if key not in numbers}
    first, param_groups = 0, []
    for options, group in zip(state_dict["param_groups"], inner.param_groups, strict=True):
        length = len(group["params"])
        param_groups.append({**options, "params": list(range(first, first + length))})
        first += length
    inner.load_state_dict({"state": {**other, **local}, "param_groups": param_groups})
