"""Tensor-parallel linear layers and sequence regions under the names of the earlier package.

New code uses parallel/tensor/linear.py. Weights are (fin, fout), and sequence parallelism cuts
dim 0 of any input. Layers look up their group when they are made, functions when they are called:
the one that `set_tp_group` chose, else tpc's tensor group, else all ranks.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchdistpackage.comm import collectives
from torchdistpackage.comm.primitives import Group
from torchdistpackage.comm.random import differ
from torchdistpackage.comm.tpc import resolve_group
from torchdistpackage.layout.derive import local_shape
from torchdistpackage.parallel.tensor import layouts as cut
from torchdistpackage.parallel.tensor.full import copy_part
from torchdistpackage.parallel.tensor.init import ZEROS, Initial, fill
from torchdistpackage.parallel.tensor.layouts import Layouts, prefixed, transposed
from torchdistpackage.parallel.tensor.linear import column_linear, row_linear
from torchdistpackage.parallel.tensor.marked import Grouped, Marked
from torchdistpackage.parallel.tensor.weight_reads import own, read_whole
from torchdistpackage.topology.mesh import Mesh

_chosen: Group | None = None


def set_tp_group(group: Group | None) -> None:
    """Choose the group of layers made from now on; None restores the default."""
    global _chosen
    _chosen = group


def get_tp_group() -> Group:
    """Return the chosen group, else tpc's tensor group, else the default group.

    Raises:
        LaunchError: none is chosen and torch.distributed is not initialised.
    """
    return resolve_group(_chosen, "tensor")


def get_tensor_model_parallel_world_size() -> int:
    """Return the number of ranks in `get_tp_group()`."""
    return get_tp_group().size()


def set_sequence_parallel_attr(x: Tensor, value: bool = True) -> Tensor:
    """Note on `x` whether it is cut along dim 0, and return it. Operations drop the note."""
    x.sequence_parallel = value
    return x


def is_squence_parallel_tensor(x: Tensor) -> bool:
    """Return whether `x` itself, not a tensor it was computed from, is noted as cut."""
    return getattr(x, "sequence_parallel", False) is True


def gather_from_sequence_parallel_region(
    x: Tensor, tensor_parallel_output_grad: bool = True, *, group: Group | None = None
) -> Tensor:
    """Gather the group's slices along dim 0.

    tensor_parallel_output_grad: True if ranks continue with different work, so the backward sums
        gradients; False if all continue with the same work, so it takes this rank's slice.
    """
    gather = collectives.all_gather if tensor_parallel_output_grad else collectives.gather
    return _noted(gather(x, 0, group or get_tp_group()), x, False)


def reduce_scatter_to_sequence_parallel_region(x: Tensor, *, group: Group | None = None) -> Tensor:
    """Return this rank's slice along dim 0 of the sum over the group; gradients are gathered."""
    return _noted(collectives.reduce_scatter(x, 0, group or get_tp_group()), x, True)


def maybe_gather_from_sequence_parallel(x: Tensor, *, group: Group | None = None) -> Tensor:
    """Gather `x` if it is noted as cut."""
    if is_squence_parallel_tensor(x):
        return gather_from_sequence_parallel_region(x, group=group)
    return x


def maybe_split_into_sequence_parallel(x: Tensor, *, group: Group | None = None) -> Tensor:
    """Return this rank's slice along dim 0, unless `x` is noted as cut; gradients are gathered."""
    if is_squence_parallel_tensor(x):
        return x
    return _noted(collectives.scatter(x, 0, group or get_tp_group()), x, True)


def _noted(y: Tensor, x: Tensor, value: bool) -> Tensor:
    # a group of one returns its input, and a note on that would change the caller's tensor
    return set_sequence_parallel_attr(y.view_as(y) if y is x else y, value)


@read_whole("weight", "bias")
class TpLinear(Marked):
    """A linear layer x W + b on one rank: weight (fin, fout), uniform within 1 / sqrt(fin).

    The bias starts at zero. cut: layouts of the parameters, if the layer has slices of them.
    """

    cut: Layouts | None = None

    def __init__(self, fin: int, fout: int, bias: bool = True):
        super().__init__()
        self.group = None
        self.weight = nn.Parameter(fill(torch.empty(fin, fout), uniform(fin)))
        self.bias = nn.Parameter(torch.zeros(fout)) if bias else None

    def layouts(self) -> Layouts:
        return self.cut or {}

    def initials(self) -> dict[str, Initial]:
        return {"weight": uniform(self.weight.shape[0]), "bias": ZEROS}

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, own(self, "weight").t(), own(self, "bias"))


def uniform(fin: int) -> Initial:
    """Return the initial distribution of a weight with `fin` inputs: within 1 / sqrt(fin)."""
    return Initial("uniform", (3 * fin) ** -0.5)


class _EitherLinear(Grouped):
    """The base of both split layers: `linear` is a TpLinear of this rank's slice."""

    def __init__(
        self,
        fin: int,
        fout: int,
        bias: bool = True,
        sequence_parallel: bool = False,
        *,
        tp_group: Group | None = None,
    ):
        super().__init__(tp_group or get_tp_group())
        self.fin = fin
        self.fout = fout
        self.has_bias = bias
        self.sequence_parallel = sequence_parallel
        shape = local_shape(self.layouts()["linear.weight"], self._mesh(), self.group.rank())
        self.linear = TpLinear(*shape, bias)
        with differ(self.group.rank(), self.linear.weight.device):
            fill(self.linear.weight, uniform(fin))
        cut = ((n.removeprefix("linear."), x) for n, x in self.layouts().items())
        self.linear.group = self.group
        self.linear.cut = {n: x.named(n) for n, x in cut}
        self.linear.mark()
        self.mark()

    def initials(self) -> dict[str, Initial]:
        return {"linear.weight": uniform(self.fin), "linear.bias": ZEROS}

    def init_weight_from_full(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Copy this rank's slice of a full weight (fin, fout), and of a full bias (fout,)."""
        self._take(self.layouts(), weight, bias)

    def _take(self, layouts: Layouts, weight: Tensor, bias: Tensor | None) -> None:
        mesh = self._mesh()
        rank = self.group.rank()
        for name, full in (("weight", weight), ("bias", bias)):
            if full is not None:
                copy_part(getattr(self.linear, name), full, layouts[f"linear.{name}"], mesh, rank)

    def _mesh(self) -> Mesh:
        return Mesh(((self.axis, self.group.size()),))


class ColParallelLinear(_EitherLinear):
    """A linear layer split by columns: every rank has x (..., fin) and gets its columns of x W + b.

    sequence_parallel: x is cut along dim 0, and the layer gathers it. A caller that gathers x
        leaves it False and gathers with tensor_parallel_output_grad=False, as this layer's backward
        already sums over the group. parts: sizes of fused outputs, each split separately.
    """

    def __init__(
        self,
        fin: int,
        fout: int,
        bias: bool = True,
        sequence_parallel: bool = False,
        *,
        parts: tuple[int, ...] = (),
        tp_group: Group | None = None,
    ):
        self.parts = parts
        super().__init__(fin, fout, bias, sequence_parallel, tp_group=tp_group)

    def layouts(self) -> Layouts:
        return self._cut(self.parts)

    def init_weight_from_full_attn(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Copy this rank's heads of a fused weight (fin, 3 * dim): slices of q, k and v."""
        self._take(self._cut((self.fout // 3,) * 3), weight, bias)

    def forward(self, x: Tensor) -> Tensor:
        weight = own(self.linear, "weight").t()
        bias = own(self.linear, "bias")
        return column_linear(x, weight, bias, self.group, self.sequence_parallel)

    def _cut(self, parts: tuple[int, ...]) -> Layouts:
        column = cut.column(self.fout, self.fin, self.has_bias, self.axis, parts)
        return prefixed("linear", transposed(column))


class RowParallelLinear(_EitherLinear):
    """A linear layer split by rows: takes this rank's columns of x and returns x W + b.

    With sequence_parallel the result is cut along dim 0. The bias is added once.
    """

    def layouts(self) -> Layouts:
        row = cut.row(self.fout, self.fin, self.has_bias, self.axis, self.sequence_parallel)
        return prefixed("linear", transposed(row))

    def forward(self, x: Tensor) -> Tensor:
        weight = own(self.linear, "weight").t()
        bias = own(self.linear, "bias")
        bias = self.summed(bias) if self.sequence_parallel else bias
        return row_linear(x, weight, bias, self.group, self.sequence_parallel)
