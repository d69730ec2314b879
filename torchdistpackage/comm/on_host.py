"""Values on their way from a device to the host."""

from typing import Any

import torch
from torch import Tensor


class OnHost:
    """A copy in host memory, begun when this is made; nobody waits before it is read.

    Whatever is issued on the stream later is not waited for: copy what a later step will ask for
    as soon as it is computed, before that step is issued.
    """

    def __init__(self, values: Tensor):
        self._values = values.to("cpu", non_blocking=True)
        self._copied = torch.cuda.Event() if values.is_cuda else None
        if self._copied is not None:
            self._copied.record()

    def is_there(self) -> bool:
        return self._copied is None or self._copied.query()

    def read(self) -> Any:
        """Numbers, in lists as deep as the tensor; the host waits for the copy if it must."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._values.tolist()
