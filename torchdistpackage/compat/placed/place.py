"""Places of a placed program: ranks, and their devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from torchdistpackage.errors import PlacementError

Devices = Sequence[str | torch.device | Sequence[str | torch.device]]
"""One device for each rank, or for each rank the list of its devices."""


@dataclass(frozen=True)
class Place:
    """A device of one rank, or devices of several ranks that compute the same.

    Each of `ranks` holds everything on the place and runs all its operations. Tensor-parallel ranks
    are an example.

    device: this rank's device; on ranks outside, that of the first rank. devices: of each of
    `ranks`, default `device`. `device` differs between ranks, so comparisons leave it out.
    """

    device: torch.device = field(compare=False)
    ranks: tuple[int, ...]
    devices: tuple[torch.device, ...] = ()

    def __post_init__(self) -> None:
        if not self.devices:
            object.__setattr__(self, "devices", (self.device,) * len(self.ranks))

    @property
    def rank(self) -> int:
        """The first rank of the place."""
        return self.ranks[0]

    def __str__(self) -> str:
        ranks = f"rank {self.rank}" if len(self.ranks) == 1 else f"ranks {list(self.ranks)}"
        return f"{', '.join(dict.fromkeys(map(str, self.devices)))} of {ranks}"


def problem_of(device: str | torch.device, *, is_here: bool = True) -> str:
    """Return the problem of a device, or "". is_here: check that this host has it."""
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError):
        return f"{device!r} is not a device; write 'cpu', 'cuda:0', ..."
    if parsed.type not in ("cpu", "cuda"):
        return f"{device!r}: only 'cpu' and 'cuda' devices are known here"
    if is_here and parsed.type == "cuda":
        num = torch.cuda.device_count()
        if (parsed.index or 0) >= num:
            return f"'{device}' is not there: this host shows {num} CUDA devices"
    return ""


def devices_by_rank(devices: Devices, num_ranks: int) -> list[list[torch.device]]:
    """Return the devices of each rank.

    A flat list with k times as many devices as ranks gives each rank k of them, in order.

    Raises:
        PlacementError: the ranks cannot share them, or some are not devices; it names all of these.
    """
    listed = isinstance(devices, Sequence) and not isinstance(devices, str)
    if not listed or not devices:
        raise PlacementError(f"devices must be a list with at least one device, not {devices!r}")
    nested = [list(d) if isinstance(d, list | tuple) else [d] for d in devices]
    problems = [
        p for rank_devices in nested for d in rank_devices if (p := problem_of(d, is_here=False))
    ]
    if problems:
        raise PlacementError("; ".join(dict.fromkeys(problems)))
    flat = all(isinstance(d, str | torch.device) for d in devices)
    if flat and len(nested) % num_ranks == 0:
        per_rank = len(nested) // num_ranks
        nested = [
            [d for rank_devices in nested[i : i + per_rank] for d in rank_devices]
            for i in range(0, len(nested), per_rank)
        ]
    if len(nested) != num_ranks:
        raise PlacementError(
            f"{len(nested)} devices are listed for {num_ranks} ranks; list one for each rank, the "
            f"same number for each, or a list of devices for each"
        )
    if empty := [rank for rank, rank_devices in enumerate(nested) if not rank_devices]:
        raise PlacementError(f"ranks {empty} have no device; list at least one for each rank")
    return [[torch.device(d) for d in rank_devices] for rank_devices in nested]
