"""The split layers of the wing, typed: each gradient is summed once."""

import pytest
import torch
from spmd_types import I, P, R, SpmdTypeError, V

from tests.parallel.tensor import test_types
from tests.parallel.tensor.typed import checked, give_type, typed_world, types_of
from tests.parallel.tensor.typed_steps import (
    SEQUENCE,
    activations,
    check_layer,
    check_row_layer,
    train,
)
from torchdistpackage.compat import tplib
from torchdistpackage.compat.torchdistpackage import tensor_layers
from torchdistpackage.compat.torchdistpackage.tensor_blocks import ParallelBlock
from torchdistpackage.compat.torchshard import distributed as torchshard

world = test_types.world
LAYERS = {
    "classic column": lambda cut: tensor_layers.ColParallelLinear(8, 16, sequence_parallel=cut),
    "classic block": lambda cut: ParallelBlock(8, 2, 2, cut),
}


@SEQUENCE
@pytest.mark.parametrize("name", LAYERS)
def test_each_gradient_of_a_layer_is_summed_once(world, name, sequence_parallel):
    check_layer(LAYERS[name](sequence_parallel), sequence_parallel, is_column="column" in name)


@SEQUENCE
def test_a_row_product_sums_before_its_bias(world, sequence_parallel):
    check_row_layer(tensor_layers.RowParallelLinear, sequence_parallel)


@SEQUENCE
def test_a_plain_optimizer_steps_equal_gradients(sequence_parallel):
    with typed_world(data=1):
        train(ParallelBlock(8, 2, 2, sequence_parallel), activations(sequence_parallel))


@SEQUENCE
def test_a_wrapper_that_is_told_nothing_needs_nothing(world, sequence_parallel):
    train(ParallelBlock(8, 2, 2, sequence_parallel), activations(sequence_parallel), wrap={})


CLASSIC = [
    (tensor_layers.gather_from_sequence_parallel_region, V, R),
    (lambda x: tensor_layers.gather_from_sequence_parallel_region(x, False), V, I),
    (tensor_layers.reduce_scatter_to_sequence_parallel_region, P, V),
    (tensor_layers.maybe_split_into_sequence_parallel, I, V),
    (torchshard.copy, I, R),
    (torchshard.reduce, P, I),
    (torchshard.scatter, I, V),
    (torchshard.gather, V, I),
    (tplib.tp_all_reduce, P, I),
    (tplib.tp_all_gather, V, I),
]


@pytest.mark.parametrize(("call", "src", "dst"), CLASSIC, ids=range(len(CLASSIC)))
def test_the_earlier_names_have_the_types_of_our_collectives(world, call, src, dst):
    for held in (I, R, V, P):
        x = give_type(torch.randn(4, 8, requires_grad=True), tensor=held)
        with checked():
            if held is src or (held, src) == (V, P):
                assert types_of(call(x)) == {"data": V, "tensor": dst}
            else:
                with pytest.raises(SpmdTypeError):
                    call(x)
