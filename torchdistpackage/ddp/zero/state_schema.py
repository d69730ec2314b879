"""What the owners of a parameter have as its state, told to every rank before anything travels.

One rule: a rank that owns none of a parameter learns from those who do which entries there are, of
which shapes and dtypes; numbers come with the telling and need no message of their own.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from torchdistpackage.comm.primitives import Group, gather_objects, ranks_of
from torchdistpackage.ddp.zero.param_shard import ParamPartition
from torchdistpackage.ddp.zero.state_gather import GatherItem
from torchdistpackage.errors import CheckpointError

_PLAIN = (bool, int, float, complex, str, type(None))
"""Values that can be keys of a dict, so that equal forms become one."""

State = dict[Hashable, object]
"""Of one parameter: key -> tensor, number, or whatever the optimizer keeps."""


@dataclass(frozen=True)
class StateEntry:
    """One entry of a parameter's state: what every rank must know to make it.

    shape: of a tensor that its owner has in one; None where it is the parameter's, cut or not.
    value: itself, if no tensor travels: numbers and all that is not a tensor. on_cpu: whatever the
    parameter's device.
    """

    key: Hashable
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] | None = None
    on_cpu: bool = False
    value: object = None


StateEntries = tuple[StateEntry, ...]


def exchange_schema(
    group: Group, mine: Mapping[int, tuple[ParamPartition, State]]
) -> dict[int, StateEntries]:
    """What the owners of each parameter have for it."""
    known: dict[StateEntries, StateEntries] = {}  # equal ones travel once
    forms: list[StateEntries | None] = []
    for held, state in mine.values():
        own = tuple(entry_of(held, key, value) for key, value in state.items())
        if all(isinstance(form.value, _PLAIN) for form in own):
            own = known.setdefault(own, own)
        forms.append(None if held.mine is None else own)
    of_ranks = gather_objects(forms, group)
    result: dict[int, StateEntries] = {}
    for i, of_one in zip(mine, zip(*of_ranks, strict=True), strict=True):
        owned = [one for one in of_one if one is not None]
        layouts = {tuple((f.key, f.dtype, f.shape) for f in one) for one in owned}
        if len(layouts) > 1:
            raise CheckpointError(
                f"ranks {ranks_of(group)} have different state for {mine[i][0].name}: "
                f"{' and '.join(sorted(map(str, layouts)))}; step them together, or let one rank "
                f"own whole parameters (whole=True)"
            )
        result[i] = owned[0]
    return result


def entry_of(held: ParamPartition, key: Hashable, value: object) -> StateEntry:
    if not isinstance(value, Tensor):
        return StateEntry(key, value=value)
    on_cpu = value.device.type == "cpu"
    if value.dim() == 0 and not (held.whole and held.shared.parameter.dim() == 0):
        return StateEntry(key, value.dtype, (), on_cpu, value.item())
    if held.mine is not None and value.shape == held.mine.shape:
        return StateEntry(key, value.dtype, None, on_cpu)
    return StateEntry(key, value.dtype, tuple(value.shape), on_cpu)


def item_of(held: ParamPartition, form: StateEntry, state: State) -> GatherItem:
    assert form.dtype is not None
    shared = held.shared
    value = state.get(form.key)
    mine = value if isinstance(value, Tensor) else None
    bounds = held.bounds
    if form.shape is not None:  # from the first owner, in one
        owner = next(r for r in range(shared.group.size()) if bounds[r] < bounds[r + 1])
        size = torch.Size(form.shape).numel()
        bounds = tuple(0 if r <= owner else size for r in range(len(bounds)))
        mine = mine.reshape(-1) if mine is not None and shared.group.rank() == owner else None
    elif held.whole and mine is not None:
        mine = held.flat(mine)
    return GatherItem(bounds, form.dtype, shared.parameter.device, mine)


def made_of(form: StateEntry, held: ParamPartition) -> object:
    """A value that did not travel as a tensor."""
    if form.dtype is None or form.value is None:
        return form.value
    device = torch.device("cpu") if form.on_cpu else held.shared.parameter.device
    return torch.tensor(form.value, dtype=form.dtype, device=device)
