"""Norms over the last dim, whole on every tensor rank.

One rule: under sequence parallelism each rank normalises its own rows, so the gradients of
scale and shift are partial sums, which the layouts say.
"""

import torch
from torch import nn

from torchdistpackage.parallel.tensor import layouts as cut
from torchdistpackage.parallel.tensor.init import ONES, ZEROS, Initial
from torchdistpackage.parallel.tensor.layouts import Layouts


class LayerNorm(nn.LayerNorm):
    """`torch.nn.LayerNorm` over the last dim, with layouts."""

    def __init__(
        self,
        dim: int,
        *,
        eps: float = 1e-5,
        bias: bool = True,
        sequence_parallel: bool = False,
        axis: str = "tensor",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__(dim, eps=eps, bias=bias, dtype=dtype, device=device)
        self.sequence_parallel, self.axis = sequence_parallel, axis

    def layouts(self) -> Layouts:
        (dim,) = self.normalized_shape
        return cut.norm(dim, self.bias is not None, self.axis, self.sequence_parallel)

    def initials(self) -> dict[str, Initial]:
        return {"weight": ONES, "bias": ZEROS}


class RMSNorm(nn.RMSNorm):
    """`torch.nn.RMSNorm` over the last dim, with layouts."""

    def __init__(
        self,
        dim: int,
        *,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        axis: str = "tensor",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__(dim, eps=eps, dtype=dtype, device=device)
        self.sequence_parallel, self.axis = sequence_parallel, axis

    def layouts(self) -> Layouts:
        (dim,) = self.normalized_shape
        return cut.norm(dim, False, self.axis, self.sequence_parallel)

    def initials(self) -> dict[str, Initial]:
        return {"weight": ONES}
