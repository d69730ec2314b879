"""Devices as callers name them."""

from collections.abc import Sequence

import torch

from torchdistpackage.errors import LayoutError

DeviceLike = torch.device | str | int


def canonicalize_device(device: DeviceLike) -> torch.device:
    """Return the device with an index where there are several: "cuda" is cuda:0."""
    canonical = torch.device(device)
    if canonical.type == "cuda" and canonical.index is None:
        return torch.device("cuda", 0)
    return canonical


def check_device_ids(device_ids: Sequence[DeviceLike] | None) -> tuple[torch.device, ...]:
    """Return the devices to use: by default all GPUs, and none on a host without GPUs.

    Raises:
        LayoutError: it is not a list of devices.
    """
    if isinstance(device_ids, (str, int, torch.device)):
        raise LayoutError(
            f"device_ids={device_ids!r} is not a list of devices; pass one for each shard, such as "
            f'["cuda:0", "cuda:1"] or ["cpu"] * 2'
        )
    if device_ids is None:
        device_ids = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    return tuple(map(canonicalize_device, device_ids))


def output_index(
    devices: Sequence[torch.device], device: DeviceLike | None, index: int | None
) -> int:
    """Return the position of the output device.

    Raises:
        AssertionError: it was named twice, or is not among the devices.
    """
    if device is not None and index is not None:
        raise AssertionError(
            f"output_device={device} and output_device_index={index} were given; pass one of them"
        )
    if index is not None and not -len(devices) <= index < len(devices):
        raise AssertionError(
            f"output_device_index={index} is out of range for the {len(devices)} devices "
            f"{list(map(str, devices))}; pass 0 to {len(devices) - 1}"
        )
    if device is None:
        return 0 if index is None else index
    target = canonicalize_device(device)
    if target not in devices:
        raise AssertionError(
            f"output device {target} is not in {list(map(str, devices))}; pass one of these"
        )
    return devices.index(target)
