"""Groups beside another one, of the same ranks: for what is in host memory, and for the way back.

All members make one together when they ask for it first; it ends with its group.
"""

from collections.abc import Iterable, MutableMapping

import torch
import torch.distributed as dist

from torchdistpackage.comm.backends import is_queued, transport_of
from torchdistpackage.comm.creation import PerGroup, create, end
from torchdistpackage.comm.flight_recorder import recorder
from torchdistpackage.comm.gloo_threads import deprioritize
from torchdistpackage.errors import CommError

Group = dist.ProcessGroup

_on_cpu: PerGroup[Group] = PerGroup()
"""Group of GPUs -> the gloo group of the same ranks."""
_reverse_groups: PerGroup[Group] = PerGroup()
"""Gloo group -> another of the same ranks, over connections of its own."""


def companions() -> tuple[Group, ...]:
    """All that were made here and have not ended."""
    return (*_on_cpu.values(), *_reverse_groups.values())


def on_cpu(group: Group) -> Group:
    """A group of the same ranks that moves what is in host memory: `group` itself unless NCCL.

    Made when all of its ranks ask for the first time, and ended with `group` or by `leave_cpu`.
    """
    if not is_queued(group):
        return group
    return _companion(group, _on_cpu, "cpu", None)


def make_duplex_groups(groups: Iterable[Group]) -> None:
    """For each gloo group of several ranks another one of the same ranks, over other connections.

    All members call it, for whichever groups they are in. A twin ends with its group.

    Raises:
        CommError: a member did not come within the time limit of its group.
    """
    by_ranks = {_ranks_of(group): group for group in groups}
    for ranks in sorted(by_ranks):  # one order on all ranks (layout/groups.py)
        group = by_ranks[ranks]
        if len(ranks) > 1 and recorder.line(group).direct:
            limit = group._get_backend(torch.device("cpu")).options._timeout
            _companion(group, _reverse_groups, "twin", limit.total_seconds())
            deprioritize()  # it is in no record, where others come by


def reverse_group(group: Group) -> Group | None:
    """What `make_duplex_groups` made for `group`."""
    return _reverse_groups.get(group)


def leave_cpu(group: Group) -> None:
    """End what `on_cpu` made for `group`, if it made one, and that one's twin."""
    if group in _on_cpu:
        leave_reverse_group(_on_cpu[group])
    _leave(group, _on_cpu)


def leave_reverse_group(group: Group) -> None:
    """End the twin of `group`, if it has one."""
    _leave(group, _reverse_groups)


def _companion(
    group: Group, among: MutableMapping[Group, Group], use: str, limit_s: float | None
) -> Group:
    if group not in among:
        ranks = _ranks_of(group)
        try:
            beside = transport_of(group).beside
            among[group] = create(ranks, use, limit_s=limit_s, backend=beside)
        except RuntimeError as error:
            raise CommError(f"ranks {ranks} could not make a second group: {error}") from error
    return among[group]


def _leave(group: Group, among: MutableMapping[Group, Group]) -> None:
    if (made := among.pop(group, None)) is not None:
        end(made)


def _ranks_of(group: Group) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))
