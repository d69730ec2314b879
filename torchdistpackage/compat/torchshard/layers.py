"""torchshard.nn: layers that one argument, `dim`, splits, and converters of torch's own layers.

dim 1 or -1 splits the outputs (of an embedding: the features), 0 the inputs (the vocabulary), None
nothing.

A conversion splits torch's layers in place: a layer stays the same object with another class, and
its parameters stay the same objects with fewer elements. So hooks, ties, an optimizer's references
and `requires_grad` stay.
"""

import copy
import math
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from torchdistpackage.compat.torchshard import functional
from torchdistpackage.compat.torchshard.base import ParallelLayer
from torchdistpackage.compat.torchshard.chunks import chunk
from torchdistpackage.compat.torchshard.cuts import check_tensors, cut_of
from torchdistpackage.compat.torchshard.functional import ParallelDim, check_dim, check_sizes
from torchdistpackage.compat.torchshard.marks import LAST, refuse_strict_export, set_attribute
from torchdistpackage.compat.torchshard.state import check_module, register_ddp_parameters_to_ignore
from torchdistpackage.errors import LayoutError
from torchdistpackage.parallel.tensor.weight_reads import own, read_whole


@read_whole("weight", "bias")
class ParallelLinear(ParallelLayer):
    """`torch.nn.Linear` split over this rank's group.

    dim 1 or -1: weight (out/n, in), bias (out/n,), result (..., out/n) and marked. dim 0: weight
    (out, in/n), bias (out,) added once, result not split. `in_features` and `out_features` are the
    sizes over all ranks.

    Raises:
        ValueError: dim is not one of None, 0, 1, -1.
        LaunchError: dim is given, and there are no groups yet.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, dim: ParallelDim = None
    ):
        check_dim(dim)
        check_sizes("ParallelLinear", 0, in_features=in_features, out_features=out_features)
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.dim = dim
        self.join()
        self.register_parameter("weight", None)
        self.register_parameter("bias", None)
        self._has_bias = bool(bias)
        self.reset_params()

    def split_over(self) -> dict[str, int]:
        if self.dim is None:
            return {}
        return {"weight": 0, "bias": 0} if self.dim in LAST else {"weight": 1}

    def whole_shapes(self) -> dict[str, tuple[int, ...]]:
        weight = {"weight": (self.out_features, self.in_features)}
        return {**weight, "bias": (self.out_features,)} if self._has_bias else weight

    def reset_params(self) -> None:
        """Draw the parameters anew, as torch.nn.Linear does."""
        root = math.sqrt(self.in_features) or 1.0
        gain = nn.init.calculate_gain("leaky_relu", math.sqrt(5))
        bounds = {"weight": math.sqrt(3) * (gain / root), "bias": 1 / root}  # fan-in over all ranks
        for name in self.whole_shapes():
            bound = bounds[name]
            self._put(name, self.drawn(name, lambda x, b=bound: x.uniform_(-b, b)))
        self.mark()
        self.equalise()

    def slice_params(self) -> None:
        """Cut full parameters to this rank's slice; those that are cut already stay."""
        for name, shape in self.whole_shapes().items():
            parameter = getattr(self, name)
            if tuple(parameter.shape) == shape:
                parameter.data = self.part(parameter.data, name)
        self.mark()

    def _put(self, name: str, value: Tensor) -> None:
        parameter = self._parameters[name]
        if parameter is None or parameter.shape != value.shape:
            self.register_parameter(name, nn.Parameter(value))
        else:
            parameter.data.copy_(value)

    def forward(self, input: Tensor) -> Tensor:
        refuse_strict_export(self)
        if self.dim is not None and torch.compiler.is_dynamo_compiling():
            return _without_graph(self, input)
        return self._product(input)

    def _product(self, input: Tensor) -> Tensor:
        is_full = self.dim == 0 and cut_of(input) is None
        if is_full and input.shape[-1:] != (self.in_features,):
            raise LayoutError(  # all ranks see this here; slices may differ in length
                f"a layer with {self.in_features} inputs got an input of shape "
                f"{tuple(input.shape)}; its last dim must be {self.in_features}"
            )
        return functional.parallel_linear(
            input,
            own(self, "weight"),
            own(self, "bias"),
            self.dim,
            out_features=self.out_features,
        )

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, dim={self.dim}"
        )

    @classmethod
    def convert_parallel_linear(cls, module: nn.Module, dim: ParallelDim = None) -> nn.Module:
        """Split every torch.nn.Linear of `module`, and embeddings tied to one, in place.

        Values, names, hooks, ties and frozen parameters stay. If `module` is itself a Linear, it
        stays as it is and a new layer is returned. The names of split parameters are noted for
        torch's DistributedDataParallel.

        Raises:
            ValueError: dim is not one of None, 0, 1, -1.
            LayoutError: a weight is tied to a layer that cannot be split the same way.
        """
        return _convert(module, dim, nn.Linear)


@torch._disable_dynamo
def _without_graph(layer: ParallelLinear, input: Tensor) -> Tensor:
    """Break torch.compile's graph: the mark of a tensor is an attribute, which graphs lose."""
    return layer._product(input)


@read_whole("weight")
class ParallelEmbedding(ParallelLayer):
    """`torch.nn.Embedding` split over this rank's group; every rank gets the full result.

    dim 0: weight (V/n, D); dim 1 or -1: weight (V, D/n).

    Raises:
        ValueError: dim is not one of None, 0, 1, -1, or padding_idx is outside the vocabulary.
        LaunchError: dim is given, and there are no groups yet.
    """

    weight: nn.Parameter
    order_type = 1

    def __init__(
        self, num_embeddings: int, embedding_dim: int, padding_idx: int | None = None,
        max_norm: float | None = None, norm_type: float = 2.0, scale_grad_by_freq: bool = False,
        sparse: bool = False, _weight: Tensor | None = None, dim: ParallelDim = None,
    ):  # fmt: skip
        check_dim(dim)
        sizes = {"num_embeddings": num_embeddings, "embedding_dim": embedding_dim}
        check_sizes("ParallelEmbedding", 0, **sizes)
        super().__init__()
        if padding_idx is not None:
            valid_ids = range(-num_embeddings, num_embeddings)
            if type(padding_idx) is not int or padding_idx not in valid_ids:
                raise ValueError(
                    f"padding_idx {padding_idx!r} is outside the vocabulary of {num_embeddings}; "
                    f"use None, or an id of the vocabulary"
                )
            padding_idx %= num_embeddings
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.dim = dim
        self.padding_idx = padding_idx
        self.max_norm = max_norm
        self.norm_type = norm_type
        self.scale_grad_by_freq = scale_grad_by_freq
        self.sparse = sparse
        self.join()
        self.register_parameter("weight", None)
        if _weight is None:
            self.reset_parameters()
        else:
            check_tensors("ParallelEmbedding", _weight=_weight)
            if tuple(_weight.shape) != (num_embeddings, embedding_dim):
                raise ValueError(
                    f"_weight has shape {tuple(_weight.shape)}, the table is "
                    f"{(num_embeddings, embedding_dim)}; pass a weight of that shape"
                )
            self.weight = nn.Parameter(self.part(_weight.detach(), "weight"))
            self.mark()

    def split_over(self) -> dict[str, int]:
        return {} if self.dim is None else {"weight": 1 if self.dim in LAST else 0}

    def whole_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"weight": (self.num_embeddings, self.embedding_dim)}

    def reset_parameters(self) -> None:
        """Draw the table anew, N(0, 1), with zeros at padding_idx, as torch.nn.Embedding does."""
        value = self.drawn("weight", lambda x: x.normal_())
        if self._parameters["weight"] is None:
            self.weight = nn.Parameter(value)
        else:
            self.weight.data.copy_(value)
        self.mark()
        if self.padding_idx is not None:
            row = self.padding_idx
            if self.dim == 0:
                assert self.group is not None
                row -= chunk(self.num_embeddings, self.group.size(), self.group.rank())[0]
            if 0 <= row < self.weight.shape[0]:
                self.weight.data[row] = 0

    def slice_parameters(self) -> None:
        """Cut a full table to this rank's slice; one that is cut already stays."""
        if tuple(self.weight.shape) == self.whole_shapes()["weight"]:
            self.weight.data = self.part(self.weight.data, "weight")
        self.mark()

    def forward(self, input: Tensor) -> Tensor:
        refuse_strict_export(self)
        return functional.parallel_embedding(
            input,
            own(self, "weight"),
            self.padding_idx,
            self.max_norm,
            self.norm_type,
            self.scale_grad_by_freq,
            self.sparse,
            self.num_embeddings,
            self.dim,
            self.embedding_dim,
        )

    def extra_repr(self) -> str:
        shown = nn.Embedding.extra_repr(cast(nn.Embedding, self))
        return shown if self.dim is None else f"{shown}, dim={self.dim}"

    @classmethod
    def convert_parallel_embedding(cls, module: nn.Module, dim: ParallelDim = None) -> nn.Module:
        """Split every torch.nn.Embedding of `module`, and linear layers tied to one, in place.

        See `ParallelLinear.convert_parallel_linear`.
        """
        return _convert(module, dim, nn.Embedding)


Embedding = ParallelEmbedding
"""A name on torchshard's page."""


class RegisterParallelDim(nn.Module):
    """Marks the tensor, or each tensor of a list or tuple, that passes through it."""

    def __init__(self, dim: ParallelDim = None):
        super().__init__()
        self.dim = dim

    def forward(self, x: Any) -> Any:
        for each in x if isinstance(x, list | tuple) else [x]:
            if not isinstance(each, Tensor):
                raise ValueError(
                    f"needs a tensor or a list of tensors, got a {type(each).__name__}"
                )
            set_attribute(each, self.dim)
        return x

    def extra_repr(self) -> str:
        return f"dim={self.dim}"


# -- converters -------------------------------------------------------------------------------

Plain = type[nn.Linear] | type[nn.Embedding]
SPLIT: dict[Plain, type] = {nn.Linear: ParallelLinear, nn.Embedding: ParallelEmbedding}


def _convert(module: nn.Module, dim: ParallelDim, kind: Plain) -> nn.Module:
    """Split all layers of `kind` along `dim`, and layers of the other kind that are tied to one.

    Raises:
        ValueError: dim is not one of None, 0, 1, -1.
        LayoutError: a weight is tied to a layer that cannot be split the same way, or no layer is
            left to split and some are split along another dim.
    """
    check_dim(dim)
    check_module(module)
    if _is_plain(module, kind):
        twin = copy.copy(module)
        twin.__dict__ = {
            name: copy.copy(value) if isinstance(value, dict) else value
            for name, value in module.__dict__.items()
        }
        for name, parameter in module._parameters.items():
            if parameter is not None:
                new = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
                twin._parameters[name] = new
        module = twin
    chosen = _chosen(module, dim, kind)
    if not chosen:
        _check_split_alike(module, dim, kind)
    with torch.no_grad():
        for layer, its_dim in chosen:
            _become(layer, its_dim)
    register_ddp_parameters_to_ignore(module)
    return module


def _check_split_alike(module: nn.Module, dim: ParallelDim, kind: Plain) -> None:
    """Refuse a conversion that would do nothing because layers are split along another dim."""
    split = SPLIT[kind]
    same_dims = LAST if dim in LAST else (dim,)
    other = [
        f"{path or 'the layer'} has dim {layer.dim}"
        for path, layer in module.named_modules()
        if isinstance(layer, split) and layer.dim not in same_dims
    ]
    if other:
        raise LayoutError(
            f"no {kind.__name__} is left to split along dim {dim}, and {'; '.join(other)}; a "
            "layer can be converted only once: build the model again and convert it along the "
            "dim you want"
        )


def _is_plain(module: nn.Module, kind: Plain) -> bool:
    """Return whether `module` runs the forward of torch's own layer."""
    return isinstance(module, kind) and type(module).forward is kind.forward


def _chosen(root: nn.Module, dim: ParallelDim, kind: Plain) -> list[tuple[nn.Module, ParallelDim]]:
    holders: dict[int, list[tuple[str, nn.Module]]] = {}
    chosen: dict[int, tuple[nn.Module, ParallelDim]] = {}
    inside_attention = {
        id(part)
        for outer in root.modules()
        if isinstance(outer, nn.MultiheadAttention)
        for part in outer.modules()  # MultiheadAttention reads their weights without their forward
    }
    for path, layer in root.named_modules():
        for parameter in layer._parameters.values():
            if parameter is not None:
                holders.setdefault(id(parameter), []).append((path, layer))
        if _is_plain(layer, kind) and id(layer) not in inside_attention:
            if any(map(nn.parameter.is_lazy, layer._parameters.values())):
                raise LayoutError(
                    f"{path or 'the layer'} has no shapes yet; run a forward once, then convert"
                )
            if parametrize.is_parametrized(layer):
                raise LayoutError(
                    f"{path or 'the layer'} has a parametrization, which computes its weight from "
                    f"others; remove it (torch.nn.utils.parametrize.remove_parametrizations) first"
                )
            chosen[id(layer)] = (layer, dim)
    if dim is None:
        return list(chosen.values())
    for layer, _ in list(chosen.values()):
        for parameter in layer._parameters.values():
            for path, other in holders.get(id(parameter), ()):
                if id(other) not in chosen:
                    chosen[id(other)] = (other, _tied_dim(path, other, dim, kind))
    return list(chosen.values())


def _tied_dim(path: str, other: nn.Module, dim: ParallelDim, kind: Plain) -> ParallelDim:
    """Return the dim that splits a tied layer of the other kind into the same slices."""
    partner = nn.Embedding if kind is nn.Linear else nn.Linear
    tied: ParallelDim = 0 if dim in LAST else 1
    if _is_plain(other, partner):
        return tied
    other_dim = other.dim if isinstance(other, SPLIT[partner]) else None
    if other_dim is not None and (other_dim in LAST) == (tied in LAST):
        return other_dim
    raise LayoutError(
        f"{path}, a {type(other).__name__}, shares its weight with a layer that is to be split "
        f"along dim {dim}, but cannot be split the same way; untie the two first"
    )


def _become(layer: nn.Module, dim: ParallelDim) -> None:
    if isinstance(layer, ParallelLayer):
        return
    layer.__class__ = SPLIT[nn.Linear if isinstance(layer, nn.Linear) else nn.Embedding]
    assert isinstance(layer, ParallelLayer)
    layer.dim = dim
    if isinstance(layer, ParallelLinear):
        layer._has_bias = layer.bias is not None
    layer.join()
    for name, shape in layer.whole_shapes().items():
        parameter = layer._parameters[name]
        assert parameter is not None
        if tuple(parameter.shape) == shape:  # else a tied layer has cut it already
            parameter.data = layer.part(parameter.data, name)
    layer.mark()
