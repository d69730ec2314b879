"""A step of a split layer, typed: what each layer of the package and of the wing must show."""

import pytest
import torch
from spmd_types import I, V

from tests.parallel.tensor.typed import (
    Sums,
    backward,
    checked,
    give_type,
    type_parameters,
    types_of,
)
from torchdistpackage.ddp.naive_ddp import NaiveDDP
from torchdistpackage.layout.mark import collect

SEQUENCE = pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sequence"])


def activations(sequence_parallel: bool, **types) -> torch.Tensor:
    x = torch.randn(4, 2, 8, requires_grad=True)
    return give_type(x, tensor=V if sequence_parallel else I, **types)


def train(module, *inputs, wrap=None):
    """A step of `module`, in a NaiveDDP with these options, or without one; its output."""
    sums = Sums()
    wrapped = module if wrap is None else NaiveDDP(module, comm_hook=sums, **wrap)
    type_parameters(wrapped, collect(module))
    with checked():
        out = wrapped(*inputs)
        backward(out if out.dim() == 0 else out.square().sum())
    if wrap is not None:
        wrapped.reduce_gradients()
        sums.check(module)
    return out


def check_layer(module, sequence_parallel: bool, *, is_column: bool) -> None:
    """Check that each gradient is summed once, and the type of what the layer gives."""
    out = train(module, activations(sequence_parallel), wrap={"layouts": collect(module)})
    stays = V if sequence_parallel else I
    assert types_of(out) == {"data": V, "tensor": V if is_column else stays}


def check_row_layer(kind: type, sequence_parallel: bool) -> None:
    """Check that a row product sums before it adds its bias."""
    module = kind(16, 8, sequence_parallel=sequence_parallel)
    x = give_type(torch.randn(4, 2, 8, requires_grad=True), tensor=V)
    out = train(module, x, wrap={"layouts": collect(module)})
    assert types_of(out) == {"data": V, "tensor": V if sequence_parallel else I}
