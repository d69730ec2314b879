"""Gradients of matrices, from what the nodes of their products kept, and without these nodes.

One rule: a product's matrix needs the gradient of the result and the other factor, nothing of what
comes before or after it. So it can be computed any time later, as autograd computes it, to the bit.
The other factor is of this microbatch: the memory of parameters may be gone by then (ZeRO 3).
What else has parameters (norms, added biases) is cheap beside a product and left to autograd.
"""

from collections.abc import Callable, Container, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import SavedTensor

Formula = Callable[..., Tensor]

_TELLS = hasattr(SavedTensor, "unpack_hook")
"""Whether this torch tells of hooks on what a node has kept."""


class DeferredGrad:
    """Gradient of a node's result -> that of one of its arguments, up to an expansion.

    formula: called with what was `kept`, that gradient, and `options`. factor: of what comes out.
    """

    __slots__ = ("factor", "formula", "kept", "options")

    def __init__(
        self, formula: Formula, *kept: Tensor, options: Sequence[Any] = (), factor: float = 1
    ):
        self.formula, self.kept, self.options, self.factor = formula, kept, options, factor

    def __call__(self, grad: Tensor) -> Tensor:
        gradient = self.formula(*self.kept, grad, *self.options)
        return gradient if self.factor == 1 else gradient * self.factor


def deferred_gradient(node: Any, argument: int, path: Container[Any]) -> DeferredGrad | None:
    """How the gradient of argument number `argument` of autograd's `node` can be had later.

    Asked before a backward frees what the node kept; holds of that what it needs. path: nodes of
    what is of this microbatch. None if not: it is no product of such, or what it kept is computed
    anew for each backward (checkpointing), or elsewhere.
    """
    found = _OF_NODES.get(type(node).__name__)
    if found is None:
        return None
    of_node, factors = found
    if not any(node.next_functions[i][0] in path for i in factors):
        return None
    return of_node(node, argument)


# -- one function a node; torch's derivatives name the arguments so -------------------------------


def _of_addmm(node: Any, argument: int) -> DeferredGrad | None:
    """self beta + (mat1 mat2) alpha."""
    if argument == 0:
        return DeferredGrad(_itself, factor=node._saved_beta)
    if argument == 1:
        strides, sizes = node._saved_mat1_sym_strides, node._saved_mat1_sym_sizes
        later = _of_first(_kept(node, "mat2"), strides, sizes)
    else:
        strides, sizes = node._saved_mat2_sym_strides, node._saved_mat2_sym_sizes
        later = _of_second(_kept(node, "mat1"), strides, sizes)
    if later is not None:
        later.factor = node._saved_alpha
    return later


def _of_mm(node: Any, argument: int) -> DeferredGrad | None:
    """self mat2."""
    if argument == 0:
        strides, sizes = node._saved_self_sym_strides, node._saved_self_sym_sizes
        return _of_first(_kept(node, "mat2"), strides, sizes)
    strides, sizes = node._saved_mat2_sym_strides, node._saved_mat2_sym_sizes
    return _of_second(_kept(node, "self"), strides, sizes)


def _of_bmm(node: Any, argument: int) -> DeferredGrad | None:
    """self mat2, a product for each index of the first dim."""
    other = _kept(node, "self" if argument else "mat2")
    if other is None:
        return None
    return DeferredGrad(torch.bmm if argument else _bmm_by, other.transpose(1, 2))


def _of_convolution(node: Any, argument: int) -> DeferredGrad | None:
    """input weight + bias."""
    x, weight = _kept(node, "input"), _kept(node, "weight")
    if argument == 0 or x is None or weight is None:
        return None
    options = (
        argument,
        weight.size(),
        weight.stride(),
        node._saved_bias_sym_sizes_opt,
        node._saved_stride,
        node._saved_padding,
        node._saved_dilation,
        node._saved_transposed,
        node._saved_output_padding,
        node._saved_groups,
    )
    return DeferredGrad(_of_convolved, x, options=options)


_OF_NODES: dict[str, tuple[Callable[[Any, int], DeferredGrad | None], tuple[int, ...]]] = {
    # and one of which arguments has to be of the microbatch
    "AddmmBackward0": (_of_addmm, (1, 2)),
    "MmBackward0": (_of_mm, (0, 1)),
    "BmmBackward0": (_of_bmm, (0, 1)),
    "ConvolutionBackward0": (_of_convolution, (0,)),
}

# -- formulas ------------------------------------------------------------------------------------


def _of_first(
    mat2: Tensor | None, strides: Sequence[int], sizes: Sequence[int]
) -> DeferredGrad | None:
    if mat2 is None:
        return None
    return DeferredGrad(_first_by_columns if _is_by_columns(strides, sizes) else _first, mat2)


def _of_second(
    mat1: Tensor | None, strides: Sequence[int], sizes: Sequence[int]
) -> DeferredGrad | None:
    if mat1 is None:
        return None
    return DeferredGrad(_second_by_columns if _is_by_columns(strides, sizes) else _second, mat1)


def _is_by_columns(strides: Sequence[int], sizes: Sequence[int]) -> bool:
    """Then autograd gives a gradient that is so too: a weight that came transposed wants it."""
    return strides[0] == 1 and strides[1] == sizes[0]


def _first(mat2: Tensor, grad: Tensor) -> Tensor:
    return grad.mm(mat2.t())


def _first_by_columns(mat2: Tensor, grad: Tensor) -> Tensor:
    return mat2.mm(grad.t()).t()


def _second(mat1: Tensor, grad: Tensor) -> Tensor:
    return mat1.t().mm(grad)


def _second_by_columns(mat1: Tensor, grad: Tensor) -> Tensor:
    return grad.t().mm(mat1).t()


def _bmm_by(other: Tensor, grad: Tensor) -> Tensor:
    return grad.bmm(other)


def _of_convolved(
    x: Tensor,
    grad: Tensor,
    argument: int,
    sizes: Sequence[int],
    strides: Sequence[int],
    *how: Any,
) -> Tensor:
    mask = [False, argument == 1, argument == 2]
    weight = x.new_empty_strided(sizes, strides)  # of which only the form is asked
    return torch.ops.aten.convolution_backward(grad, x, weight, *how, mask)[argument]


def _itself(x: Tensor) -> Tensor:
    return x


# -- what a node kept ----------------------------------------------------------------------------


def _kept(node: Any, name: str) -> Tensor | None:
    """The tensor, if it is there as it is: real, dense, and under nobody's hook."""
    if _is_hooked(node, name):
        return None
    x = getattr(node, f"_saved_{name}")
    # of the graph behind it nothing is needed
    return x.detach() if x.layout is torch.strided and not x.is_complex() else None


def _is_hooked(node: Any, name: str) -> bool:
    """Whether reading it would run somebody's code, who may count on being asked once."""
    saved = getattr(node, f"_raw_saved_{name}")
    if _TELLS:
        return saved.unpack_hook is not None
    # lets nobody hook it twice, us neither
    known: dict[str, bool] = node.metadata
    if name not in known:
        try:
            saved.register_hooks(_itself, _itself)
            known[name] = False
        except RuntimeError:
            known[name] = True
    return known[name]
