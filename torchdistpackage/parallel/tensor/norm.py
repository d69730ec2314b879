"""Norms over the last dim, unsplit on every tensor rank.

Under sequence parallelism each rank normalises its own rows, so the gradients of scale and shift
are partial sums, as the layouts say. They are summed over the group in the backward, or by a
reducer.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchdistpackage.comm import collectives
from torchdistpackage.comm.primitives import Group
from torchdistpackage.comm.tpc import resolve_group
from torchdistpackage.parallel.tensor import layouts as cut
from torchdistpackage.parallel.tensor.init import ONES, ZEROS, Initial
from torchdistpackage.parallel.tensor.layouts import Layouts
from torchdistpackage.parallel.tensor.marked import Marked, is_reduced


class _Norm(Marked):
    """Common base of both norms: the group under sequence parallelism, and the layouts."""

    def _join(self, sequence_parallel: bool, group: Group | None, axis: str) -> None:
        self.sequence_parallel, self.axis = sequence_parallel, axis
        self.group = resolve_group(group, axis) if sequence_parallel else None
        self.mark()

    def layouts(self) -> Layouts:
        (dim,) = self.normalized_shape
        has_bias = getattr(self, "bias", None) is not None
        return cut.norm(dim, has_bias, self.axis, self.sequence_parallel)

    def initials(self) -> dict[str, Initial]:
        return {"weight": ONES, "bias": ZEROS}


class LayerNorm(_Norm, nn.LayerNorm):
    """`torch.nn.LayerNorm` over the last dim, with layouts.

    group: needed only under sequence parallelism; default as in `Grouped`.
    """

    def __init__(
        self,
        dim: int,
        *,
        eps: float = 1e-5,
        bias: bool = True,
        sequence_parallel: bool = False,
        group: Group | None = None,
        axis: str = "tensor",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__(dim, eps=eps, bias=bias, dtype=dtype, device=device)
        self._join(sequence_parallel, group, axis)

    def forward(self, x: Tensor) -> Tensor:
        if not self.sequence_parallel:
            return super().forward(x)
        weight, bias = self._summed_pair(self.weight, self.bias)
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)

    def _summed_pair(
        self, weight: nn.Parameter | None, bias: nn.Parameter | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return `summed` of both, with one message if the layer sums both."""
        is_own = weight is not None and bias is not None and weight.dtype == bias.dtype
        if not is_own or is_reduced(weight) or is_reduced(bias):
            return self.summed(weight), self.summed(bias)
        both = collectives.copy(torch.stack([weight, bias]), self.group)
        # not both[0], both[1]: their gradients would each be written into zeros and then added
        first, second = both.unbind()
        return first, second


class RMSNorm(_Norm, nn.RMSNorm):
    """`torch.nn.RMSNorm` over the last dim, with layouts; `group` as in `LayerNorm`."""

    def __init__(
        self,
        dim: int,
        *,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        group: Group | None = None,
        axis: str = "tensor",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__(dim, eps=eps, dtype=dtype, device=device)
        self._join(sequence_parallel, group, axis)

    def forward(self, x: Tensor) -> Tensor:
        if not self.sequence_parallel:
            return super().forward(x)
        return F.rms_norm(x, self.normalized_shape, self.summed(self.weight), self.eps)
