"""Linear layers split over the tensor group: by output columns, then by input rows.

x -> ColumnLinear -> (anything element-wise or by head) -> RowLinear -> y costs one collective on
each side. Without sequence parallelism x and y are whole on every rank; with it they are cut along
dim 0, the sequence. A row's bias is added once, after the sum. `ParallelMlp` is such a pair: what
stands between the products works on each hidden channel alone.
"""

from collections.abc import Callable, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchdistpackage.comm.primitives import Group, Sizes
from torchdistpackage.comm.tpc import resolve_group
from torchdistpackage.layout.layout import HeadSplit
from torchdistpackage.layout.partition import feature_problems, refuse
from torchdistpackage.parallel.tensor import layouts as cut
from torchdistpackage.parallel.tensor.column_product import column_products
from torchdistpackage.parallel.tensor.full import FullTensors
from torchdistpackage.parallel.tensor.init import NORMAL, ZEROS, Initial, make_parameters
from torchdistpackage.parallel.tensor.layouts import Layouts
from torchdistpackage.parallel.tensor.marked import Grouped, is_reduced
from torchdistpackage.parallel.tensor.product_gradients import Product
from torchdistpackage.parallel.tensor.row_product import row_product
from torchdistpackage.parallel.tensor.weight_reads import own, plain, read_whole, refuse_nested


def column_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: Group,
    sequence_parallel: bool = False,
    sizes: Sizes | None = None,
) -> Tensor:
    """Return this rank's columns of x W^T + b.

    x (S, ..., Din), or (S/n, ..., Din) under sequence parallelism; weight (Dout/n, Din);
    result (S, ..., Dout/n). The gradient of x is summed over the group.
    sizes: under sequence parallelism the length of each rank's x, where they differ.
    """
    bias = None if bias is None else plain(bias)
    return column_products(x, (plain(weight),), (bias,), group, sequence_parallel, sizes)[0]


def row_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: Group,
    sequence_parallel: bool = False,
    sizes: Sizes | None = None,
) -> Tensor:
    """Return x W^T + b from each rank's columns of x.

    x (S, ..., Din/n); weight (Dout, Din/n); bias (Dout,), whole; result (S, ..., Dout), or
    (S/n, ..., Dout) under sequence parallelism. sizes: the length of each rank's result.

    Raises:
        LayoutError: under sequence parallelism without `sizes`, S is not a multiple of the group's
            size.
    """
    y = row_product(x, plain(weight), group, sequence_parallel, sizes)
    return y if bias is None else y + bias


@read_whole("weight", "bias")
class Linear(Grouped):
    """The base of both splits: sizes, and parameters made from their layouts.

    tp_comm_overlap: under sequence parallelism gather and scatter in chunks, between which the
        product computes (Megatron-LM's word, torch's async tensor parallel).
    transposed: the weight is stored as (Din, Dout), as that of transformers' Conv1D.
    batch_first: x (B, S, D) has its sequence in dim 1, as in transformers' models; rows (N, D) of
        flattened samples stay what they are.
    local: this rank's product alone; somebody else gathers, sums, and adds a row layer's bias.
    product: what multiplies, by default torch (see float8.py).
    """

    product: Product = staticmethod(F.linear)

    def __init__(
        self,
        din: int,
        dout: int,
        *,
        bias: bool = True,
        parts: tuple[int, ...] = (),
        heads: HeadSplit | None = None,
        sequence_parallel: bool = False,
        tp_comm_overlap: bool = False,
        transposed: bool = False,
        batch_first: bool = False,
        local: bool = False,
        initial: Initial = NORMAL,
        group: Group | None = None,
        axis: str = "tensor",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__(group, axis)
        self.transposed = transposed
        self.batch_first, self.local = batch_first, local
        self.tp_comm_overlap = tp_comm_overlap and sequence_parallel
        self.din, self.dout, self.parts, self.heads = din, dout, parts, heads
        if heads is None:
            refuse(type(self).__name__, self.problems())
        self.has_bias, self.sequence_parallel, self.initial = bias, sequence_parallel, initial
        make_parameters(self, dtype, device)

    def problems(self) -> list[str]:
        """Return why the group cannot share the features that this layer splits."""
        return []

    def initials(self) -> dict[str, Initial]:
        return {"weight": self.initial, "bias": ZEROS}

    def layouts(self) -> Layouts:
        layouts = self._layouts()
        return cut.transposed(layouts) if self.transposed else layouts

    def _layouts(self) -> Layouts:
        """Return the layouts with the weight as (Dout, Din)."""
        raise NotImplementedError

    def oriented(self, weight: Tensor) -> Tensor:
        """Return a weight (Din, Dout) in the order of a matmul; a 4-bit one already has it."""
        return weight.t() if weight.is_floating_point() else weight

    def extra_repr(self) -> str:
        return f"{self.din}, {self.dout}, over {self.group.size()} {self.axis} ranks"


class ColumnLinear(Linear):
    """`column_linear` with its parameters: each rank holds, and returns, its columns.

    Where dout does not divide, the first ranks hold one feature more.
    parts: sizes of fused outputs (gate, up), each of which is cut by itself.
    heads: dout, or each part, is heads, which stay whole.

    Raises:
        LayoutError: a rank would have no part of dout, or of a part of it.
    """

    def problems(self) -> list[str]:
        extents = self.parts or (self.dout,)
        size = self.group.size()
        return [p for n in extents for p in feature_problems("weight: dim 0", n, size)]

    def _layouts(self) -> Layouts:
        return cut.column(self.dout, self.din, self.has_bias, self.axis, self.parts, self.heads)

    def forward(self, x: Tensor, sizes: Sizes | None = None) -> Tensor:
        refuse_nested(x, "ColumnLinear")
        weight, bias = self.parameters_here()
        if self.local:
            return self.product(x, weight, bias)
        is_turned = self.batch_first and self.sequence_parallel and x.dim() > 2
        (y,) = column_products(
            x.transpose(0, 1) if is_turned else x,
            (weight,),
            (bias,),
            self.group,
            self.sequence_parallel,
            sizes,
            self.tp_comm_overlap,
            self.product,
        )
        return y.transpose(0, 1) if is_turned else y

    @staticmethod
    def side_by_side(
        x: Tensor, layers: "Sequence[ColumnLinear]", sizes: Sizes | None = None
    ) -> Sequence[Tensor]:
        """Return the results of several such layers for one x.

        x is gathered once, and its gradient summed once.
        """
        first = layers[0]
        parameters = [layer.parameters_here() for layer in layers]
        weights, biases = zip(*parameters, strict=True)
        return column_products(
            x,
            weights,
            biases,
            first.group,
            first.sequence_parallel,
            sizes,
            first.tp_comm_overlap,
            first.product,
        )

    def parameters_here(self) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias in the form that a forward uses."""
        weight, bias = own(self, "weight"), own(self, "bias")
        if self.heads is not None and self.heads.shared:
            weight, bias = cast(Tensor, self.summed(weight)), self.summed(bias)
        return self.oriented(weight) if self.transposed else weight, bias


class RowLinear(Linear):
    """`row_linear` with its parameters: each rank holds the rows for its part of the input.

    Where din does not divide, the first ranks hold one feature more.
    heads: din is heads, which stay whole.

    Raises:
        LayoutError: a rank would have no part of din.
    """

    def problems(self) -> list[str]:
        return feature_problems("weight: dim 1", self.din, self.group.size())

    def _layouts(self) -> Layouts:
        return cut.row(
            self.dout, self.din, self.has_bias, self.axis, self.sequence_parallel, self.heads
        )

    def forward(self, x: Tensor, sizes: Sizes | None = None) -> Tensor:
        refuse_nested(x, "RowLinear")
        weight, bias = own(self, "weight"), own(self, "bias")
        weight = self.oriented(weight) if self.transposed else weight
        if self.local:
            return self.product(x, weight)
        is_turned = self.batch_first and self.sequence_parallel and x.dim() > 2
        x = x.transpose(0, 1) if is_turned else x
        is_added_here = bias is not None and self.sequence_parallel and is_reduced(bias)
        y = row_product(
            x,
            weight,
            self.group,
            self.sequence_parallel,
            sizes,
            self.tp_comm_overlap,
            None if is_added_here else bias,
            self.product,
        )
        if is_added_here:
            y = y + bias
        return y.transpose(0, 1) if is_turned else y


class ParallelMlp(FullTensors, nn.Module):
    """down(activation(up(x))): x (S, B, D) to (S, B, D); both S/n when sequence-parallel.

    gated: down(activation(gate(x)) * up(x)), gate and up one product (`gate_up`): SwiGLU with
        activation=F.silu (Shazeer, arXiv:2002.05202).
    activation: works on each element alone.
    down_initial: initial weights of the second product, where they differ from `initial`.

    Raises:
        LayoutError: a rank would have no part of `hidden`.
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        *,
        gated: bool = False,
        activation: Callable[[Tensor], Tensor] = F.gelu,
        bias: bool = True,
        sequence_parallel: bool = False,
        tp_comm_overlap: bool = False,
        initial: Initial = NORMAL,
        down_initial: Initial | None = None,
        group: Group | None = None,
        axis: str = "tensor",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        group = resolve_group(group, axis)
        refuse("ParallelMlp", feature_problems("hidden", hidden, group.size()))
        common = {
            "bias": bias,
            "sequence_parallel": sequence_parallel,
            "tp_comm_overlap": tp_comm_overlap,
            "group": group,
            "axis": axis,
            "dtype": dtype,
            "device": device,
        }
        self.activation, self.gated = activation, gated
        if gated:
            parts = (hidden, hidden)
            self.gate_up = ColumnLinear(dim, 2 * hidden, parts=parts, initial=initial, **common)
        else:
            self.up = ColumnLinear(dim, hidden, initial=initial, **common)
        self.down = RowLinear(hidden, dim, initial=down_initial or initial, **common)

    def forward(self, x: Tensor, sizes: Sizes | None = None) -> Tensor:
        """Return the MLP of x. sizes: under sequence parallelism the length of each rank's x, where
        they differ.
        """
        options = {} if sizes is None else {"sizes": sizes}
        if not self.gated:
            return self.down(self.activation(self.up(x, **options)), **options)
        gate, up = self.gate_up(x, **options).chunk(2, -1)
        return self.down(self.activation(gate) * up, **options)
