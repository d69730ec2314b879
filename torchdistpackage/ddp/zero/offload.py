"""Masters, sums of gradients and optimizer state in host memory, and the copies both ways.

One rule: the device never waits for the host and the host waits once a bucket, for the gradients
that its step is about to read. Copies run on a stream of their own, from and to pinned memory.
State follows by itself: an optimizer makes it where its parameters are.
"""

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchdistpackage.errors import LayoutError


class Offload:
    """Host memory for what belongs to tensors of one device; on the CPU, plain copies.

    bytes: kept so far. The optimizer's state comes on top, AdamW's is two more for each master.
    """

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._arrived: torch.cuda.Event | None = None
        self.bytes = 0

    def keep(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """An empty tensor in host memory, of the shape of `like` on the device."""
        self.bytes += like.numel() * dtype.itemsize
        return torch.empty(like.shape, dtype=dtype, pin_memory=self._stream is not None)

    def to_host(self, host: Tensor, device: Tensor) -> None:
        """Begin to copy; `host` may be read after `wait()`, `device` be dropped at once."""
        if self._stream is None:
            host.copy_(device)
            return
        # a stream runs in order, so it has also read what it sent from `host` before
        self._stream.wait_stream(torch.cuda.current_stream(device.device))
        with torch.cuda.stream(self._stream):
            host.copy_(device, non_blocking=True)
        device.record_stream(self._stream)
        self._arrived = self._stream.record_event()

    def wait(self) -> None:
        """Until everything begun by `to_host` is there: the host waits, the device goes on."""
        if self._arrived is not None:
            self._arrived.synchronize()
            self._arrived = None

    def to_device(self, host: Tensor, device: Tensor) -> None:
        """Copy, cast to the dtype of `device`; the current stream waits and the host does not.

        `host` must stay as it is until a later `wait()`.
        """
        if self._stream is None:
            device.copy_(host)
            return
        if host.dtype != device.dtype:
            # cast here: a copy that casts goes through memory that is not pinned, and waits
            host = torch.empty(host.shape, dtype=device.dtype, pin_memory=True).copy_(host)
        current = torch.cuda.current_stream(device.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            device.copy_(host, non_blocking=True)
        device.record_stream(self._stream)
        current.wait_stream(self._stream)


def check_offload(optimizer: Optimizer) -> None:
    """See that a step on the CPU is possible.

    Raises:
        LayoutError: a param group asks for a step in a CUDA graph.
    """
    for number, group in enumerate(optimizer.param_groups):
        if group.get("capturable"):
            raise LayoutError(
                f"param group {number} of {type(optimizer).__name__} is capturable, but with "
                f"offload its step runs on the CPU; set capturable=False, or offload=False"
            )
