"""Products cut over the tensor group: by output columns, then by input rows.

x -> ColumnLinear -> (anything element-wise or by head) -> RowLinear -> y costs one
collective on each side. Without sequence parallelism x and y are whole on every rank; with it
they are cut along dim 0, the sequence. A row's bias is added once, after the sum.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from torchdistpackage.comm import collectives
from torchdistpackage.comm.primitives import Group
from torchdistpackage.parallel.tensor import layouts as cut
from torchdistpackage.parallel.tensor.grouped import Grouped
from torchdistpackage.parallel.tensor.init import NORMAL, ZEROS, Initial, make_parameters
from torchdistpackage.parallel.tensor.layouts import Layouts


def column_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: Group, sequence_parallel: bool = False
) -> Tensor:
    """My columns of x W^T + b.

    x (S, ..., Din), or (S/n, ..., Din) under sequence parallelism; weight (Dout/n, Din);
    result (S, ..., Dout/n). The gradient of x is summed over the group.
    """
    whole = collectives.all_gather(x, 0, group) if sequence_parallel else collectives.copy(x, group)
    return F.linear(whole, weight, bias)


def row_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: Group, sequence_parallel: bool = False
) -> Tensor:
    """x W^T + b from each rank's columns of x.

    x (S, ..., Din/n); weight (Dout, Din/n); bias (Dout,), whole; result (S, ..., Dout), or
    (S/n, ..., Dout) under sequence parallelism.

    Raises:
        LayoutError: under sequence parallelism, S is not a multiple of the group's size.
    """
    partial = F.linear(x, weight)
    if sequence_parallel:
        y = collectives.reduce_scatter(partial, 0, group)
    else:
        y = collectives.reduce(partial, group)
    return y if bias is None else y + bias


class _Linear(Grouped):
    """What both cuts share: sizes, parameters made from their layouts."""

    def __init__(
        self,
        din: int,
        dout: int,
        *,
        bias: bool = True,
        parts: tuple[int, ...] = (),
        sequence_parallel: bool = False,
        initial: Initial = NORMAL,
        group: Group | None = None,
        axis: str = "tensor",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__(group, axis)
        self.din, self.dout, self.parts = din, dout, parts
        self.has_bias, self.sequence_parallel, self.initial = bias, sequence_parallel, initial
        make_parameters(self, dtype, device)

    def initials(self) -> dict[str, Initial]:
        return {"weight": self.initial, "bias": ZEROS}

    def extra_repr(self) -> str:
        return f"{self.din}, {self.dout}, over {self.group.size()} {self.axis} ranks"


class ColumnLinear(_Linear):
    """`column_linear` with its parameters: each rank holds, and returns, its columns.

    parts: sizes of fused outputs (q, k, v), each of which is cut by itself.

    Raises:
        LayoutError: the group cannot share dout, or a part of it, evenly.
    """

    def layouts(self) -> Layouts:
        return cut.column(self.dout, self.din, self.has_bias, self.axis, self.parts)

    def forward(self, x: Tensor) -> Tensor:
        return column_linear(x, self.weight, self.bias, self.group, self.sequence_parallel)


class RowLinear(_Linear):
    """`row_linear` with its parameters: each rank holds the rows for its part of the input.

    Raises:
        LayoutError: the group cannot share din evenly.
    """

    def layouts(self) -> Layouts:
        return cut.row(self.dout, self.din, self.has_bias, self.axis, self.sequence_parallel)

    def forward(self, x: Tensor) -> Tensor:
        bias = self.summed(self.bias) if self.sequence_parallel else self.bias
        return row_linear(x, self.weight, bias, self.group, self.sequence_parallel)
