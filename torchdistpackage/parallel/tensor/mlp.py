"""The two products of a transformer's MLP, with the hidden dim cut over the tensor group.

One rule: what stands between a column and a row product works on each hidden channel alone,
so it needs no communication.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchdistpackage.comm.primitives import Group
from torchdistpackage.parallel.tensor.init import NORMAL, Initial
from torchdistpackage.parallel.tensor.linear import ColumnLinear, RowLinear


class ParallelMlp(nn.Module):
    """down(activation(up(x))): x (S, B, D) to (S, B, D); both S/n when sequence-parallel.

    activation: works on each element alone.
    down_initial: initial weights of the second product, where they differ from `initial`.

    Raises:
        LayoutError: the group cannot share `hidden` evenly.
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        *,
        activation: Callable[[Tensor], Tensor] = F.gelu,
        bias: bool = True,
        sequence_parallel: bool = False,
        initial: Initial = NORMAL,
        down_initial: Initial | None = None,
        group: Group | None = None,
        axis: str = "tensor",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        common = {
            "bias": bias,
            "sequence_parallel": sequence_parallel,
            "group": group,
            "axis": axis,
            "dtype": dtype,
            "device": device,
        }
        self.activation = activation
        self.up = ColumnLinear(dim, hidden, initial=initial, **common)
        self.down = RowLinear(hidden, dim, initial=down_initial or initial, **common)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))
