"""Gradients of weights, computed after the backward from what the nodes of their matmuls saved.

The gradient of one factor of a matmul needs only the gradient of the result and the other factor,
so it can be computed any time later, as autograd computes it, to the bit. The other factor must
belong to this micro-batch: the memory of parameters may be gone by then (ZeRO 3). Other operations
with parameters (norms, added biases) are cheap compared with a matmul and left to autograd.
"""

from collections.abc import Callable, Container, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import SavedTensor

Formula = Callable[..., Tensor]

_TELLS = hasattr(SavedTensor, "unpack_hook")
"""True if this torch shows the hooks on tensors that a node has saved."""


class DeferredGrad:
    """A function from the gradient of a node's result to that of one of its arguments.

    The result may still have to be reduced over dims along which the argument was expanded.

    formula: called with the `saved` tensors, that gradient, and `options`. factor: of its result.
    result: number of that result among those of the node.
    """

    __slots__ = ("factor", "formula", "kept", "options", "result")

    def __init__(
        self,
        formula: Formula,
        *saved: Tensor,
        options: Sequence[Any] = (),
        factor: float = 1,
        result: int = 0,
    ):
        self.formula, self.kept, self.options = formula, saved, options
        self.factor, self.result = factor, result

    def __call__(self, grad: Tensor) -> Tensor:
        """Return the argument's gradient for this gradient of the result."""
        gradient = self.formula(*self.kept, grad, *self.options)
        return gradient if self.factor == 1 else gradient * self.factor


def deferred_gradient(node: Any, argument: int, path: Container[Any]) -> DeferredGrad | None:
    """Return how to compute the gradient of argument number `argument` of autograd's `node` later.

    Call it before a backward frees what the node saved. None: it is not a matmul of this
    micro-batch, or its saved tensors are recomputed for each backward (checkpointing). path: nodes
    of this micro-batch.
    """
    if (of_function := getattr(_function_of(node), "deferred_gradient", None)) is not None:
        if node.next_functions[0][0] not in path or _has_hook(node, node._raw_saved_tensors[0]):
            return None
        result, formula, *options = of_function(node, argument)
        saved = node.saved_tensors[0].detach()
        return DeferredGrad(formula, saved, options=options, result=result)
    of_node, factors = _OF_NODES.get(type(node).__name__, (None, ()))
    if of_node is None or not any(node.next_functions[i][0] in path for i in factors):
        return None
    return of_node(node, argument)


# -- one function a node; torch's derivatives name the arguments so -------------------------------


def _of_addmm(node: Any, argument: int) -> DeferredGrad | None:
    """Defer a gradient of self beta + (mat1 mat2) alpha."""
    if argument == 0:
        return DeferredGrad(_itself, factor=node._saved_beta)
    later = _of_product(node, ("mat1", "mat2"), argument - 1)
    if later is not None:
        later.factor = node._saved_alpha
    return later


def _of_product(node: Any, factors: tuple[str, str], index: int) -> DeferredGrad | None:
    """Defer a gradient of the matmul of two factors."""
    name, other = factors[index], _kept(node, factors[1 - index])
    if other is None:
        return None
    strides = getattr(node, f"_saved_{name}_sym_strides")
    sizes = getattr(node, f"_saved_{name}_sym_sizes")
    # like autograd, return a column-major gradient for a column-major factor (a transposed weight)
    is_by_columns = strides[0] == 1 and strides[1] == sizes[0]
    return DeferredGrad(_OF_FACTORS[index][is_by_columns], other)


def _of_bmm(node: Any, argument: int) -> DeferredGrad | None:
    """Defer a gradient of self mat2, a matmul for each index of the first dim."""
    other = _kept(node, "self" if argument else "mat2")
    if other is None:
        return None
    formula = torch.bmm if argument else lambda other, grad: grad.bmm(other)
    return DeferredGrad(formula, other.transpose(1, 2))


def _of_convolution(node: Any, argument: int) -> DeferredGrad | None:
    """Defer the gradient of the weight or bias of a convolution."""
    x, weight = _kept(node, "input"), _kept(node, "weight")
    if argument == 0 or x is None or weight is None:
        return None
    names = ("bias_sym_sizes_opt", "stride", "padding", "dilation", "transposed")
    settings = (getattr(node, f"_saved_{name}") for name in (*names, "output_padding", "groups"))
    options = (argument, weight.size(), weight.stride(), *settings)
    return DeferredGrad(_of_convolved, x, options=options)


_OF_NODES: dict[str, tuple[Callable[[Any, int], DeferredGrad | None], tuple[int, ...]]] = {
    # and one of which arguments has to be of the microbatch
    "AddmmBackward0": (_of_addmm, (1, 2)),
    "MmBackward0": (lambda node, i: _of_product(node, ("self", "mat2"), i), (0, 1)),
    "BmmBackward0": (_of_bmm, (0, 1)),
    "ConvolutionBackward0": (_of_convolution, (0,)),
}

# -- formulas ------------------------------------------------------------------------------------


_OF_FACTORS = (
    (lambda second, grad: grad.mm(second.t()), lambda second, grad: second.mm(grad.t()).t()),
    (lambda first, grad: first.t().mm(grad), lambda first, grad: grad.t().mm(first).t()),
)
"""Gradients of the first and the second factor of a matmul, by rows and by columns."""


def _of_convolved(
    x: Tensor,
    grad: Tensor,
    argument: int,
    sizes: Sequence[int],
    strides: Sequence[int],
    *settings: Any,
) -> Tensor:
    """Return the gradient of the weight or bias of a convolution."""
    mask = [False, argument == 1, argument == 2]
    weight = x.new_empty_strided(sizes, strides)  # of which only the form is asked
    return torch.ops.aten.convolution_backward(grad, x, weight, *settings, mask)[argument]


def _itself(x: Tensor) -> Tensor:
    """Return the argument."""
    return x


# -- what a node kept ----------------------------------------------------------------------------


def _kept(node: Any, name: str) -> Tensor | None:
    """Return the saved tensor if it is real, dense and without hooks, else None."""
    if _is_hooked(node, name):
        return None
    x = getattr(node, f"_saved_{name}")
    return x.detach() if x.layout is torch.strided and not x.is_complex() else None


def _function_of(node: Any) -> object:
    """Return the autograd function that created this node.

    A function that is a matmul of its first argument, which it saves first, has
    `deferred_gradient(node, argument)`. This returns the number of the result whose gradient is
    needed, a formula and its options.
    """
    return getattr(type(node), "_forward_cls", None)


def _is_hooked(node: Any, name: str) -> bool:
    """Return True if a hook would run when this saved tensor is read."""
    return _has_hook(node, getattr(node, f"_raw_saved_{name}"), name)


def _has_hook(node: Any, saved: SavedTensor, name: str = "first") -> bool:
    """Return whether reading the saved tensor would run a hook, which may rely on running once."""
    if _TELLS:
        return saved.unpack_hook is not None
    # hooks can be registered only once, so registration fails if there are some
    answers: dict[str, bool] = node.metadata
    if name not in answers:
        try:
            saved.register_hooks(_itself, _itself)
            answers[name] = False
        except RuntimeError:
            answers[name] = True
    return answers[name]
