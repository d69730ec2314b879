"""Tensors of which each has one owner among the ranks of a group, and how the first gets them all.

One rule: every rank knows what every other owns, so nothing is asked, and a tensor travels alone:
no rank needs room for more than a few that are not its own.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from torchdistpackage.comm.companions import on_cpu
from torchdistpackage.comm.p2p import send, start_receive
from torchdistpackage.comm.primitives import Group, Work, ranks_of

RECEIVES_AHEAD = 4
"""Tensors for which the first rank has room while it waits for one."""


@dataclass(frozen=True, slots=True)
class Owned:
    """A tensor that global rank `owner` keeps; `device` is my own of its kind."""

    owner: int
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def empty(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


def send_all(mine: Mapping[str, Tensor], group: Group) -> None:
    """Send what I own to the group's first rank, which calls `receive_all`."""
    for x in mine.values():
        if x.numel():
            send(x, _carrier(x.device, group), ranks_of(group)[0])


def receive_all(owned: Mapping[str, Owned], group: Group) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of all that others own, on the group's first rank.

    The names of one owner in the order in which it sends them.
    """
    first = ranks_of(group)[0]
    coming = [(name, held) for name, held in owned.items() if held.owner != first]
    coming.sort(key=lambda pair: pair[1].owner)
    under_way: list[tuple[str, Work]] = []
    for name, held in coming:
        if len(under_way) == RECEIVES_AHEAD:
            arrived, pending = under_way.pop(0)
            yield arrived, pending.wait()
        room = held.empty()
        through = _carrier(room.device, group)
        pending = start_receive(room, through, held.owner) if room.numel() else Work(room)
        under_way.append((name, pending))
    for name, pending in under_way:
        yield name, pending.wait()


def _carrier(device: torch.device, group: Group) -> Group:
    """Over which a tensor of this device goes."""
    return on_cpu(group) if device.type == "cpu" else group
