"""What carries a group's calls, and where its tensors live."""

import torch
import torch.distributed as dist


def backend_of(group: dist.ProcessGroup) -> str:
    """gloo, nccl, ...; of a group with one for each kind of device, that of the device in use."""
    name = dist.get_backend(group)
    if name != "undefined" and ":" not in name:
        return name
    return "nccl" if torch.cuda.is_available() else "gloo"


def is_nccl(group: dist.ProcessGroup) -> bool:
    return backend_of(group) == "nccl"


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Where tensors for this group live: my GPU under NCCL, else the CPU."""
    if is_nccl(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
