"""Our layers, typed: each gradient is summed once, or there is an error before any rank runs.

The planted errors at the end show that the types can fail.
"""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from spmd_types import I, SpmdTypeError, V

from tests.parallel.tensor.split_block import SplitBlock
from tests.parallel.tensor.typed import (
    DUAL,
    MAPS,
    Sums,
    backward,
    checked,
    give_type,
    type_parameters,
    typed_world,
    types_of,
)
from tests.parallel.tensor.typed_steps import (
    SEQUENCE,
    activations,
    check_layer,
    check_row_layer,
    train,
)
from tests.tells import facts_pattern
from torchdistpackage.comm import autograd, collectives
from torchdistpackage.ddp.naive_ddp import NaiveDDP
from torchdistpackage.layout.mark import collect
from torchdistpackage.models.gpt import GPT
from torchdistpackage.models.gpt_layout import GPTShape
from torchdistpackage.parallel.tensor import column_product
from torchdistpackage.parallel.tensor.embedding import VocabParallelEmbedding
from torchdistpackage.parallel.tensor.linear import ColumnLinear, ParallelMlp, RowLinear
from torchdistpackage.parallel.tensor.norm import LayerNorm, RMSNorm


@pytest.fixture
def world():
    with typed_world():
        yield


LAYERS = {
    "column": lambda cut: ColumnLinear(8, 16, sequence_parallel=cut),
    "layer norm": lambda cut: LayerNorm(8, sequence_parallel=cut),
    "rms norm": lambda cut: RMSNorm(8, sequence_parallel=cut),
    "block": SplitBlock,
}


@SEQUENCE
@pytest.mark.parametrize("name", LAYERS)
def test_each_gradient_of_a_layer_is_summed_once(world, name, sequence_parallel):
    check_layer(LAYERS[name](sequence_parallel), sequence_parallel, is_column=name == "column")


@SEQUENCE
def test_a_row_product_sums_before_its_bias(world, sequence_parallel):
    check_row_layer(RowLinear, sequence_parallel)


@SEQUENCE
def test_an_embedding_sums_the_rows_of_all(world, sequence_parallel):
    module = VocabParallelEmbedding(10, 8, sequence_parallel=sequence_parallel)
    out = train(
        module, give_type(torch.zeros(4, 2, dtype=torch.int64)), wrap={"layouts": collect(module)}
    )
    assert types_of(out) == {"data": V, "tensor": V if sequence_parallel else I}


class WithLoss(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.gpt = GPT(GPTShape(layers=1, dim=8, heads=2, vocab=10, seq_len=4, **options))

    def forward(self, ids, targets):
        return self.gpt.loss(self.gpt(ids), targets)[0]


@SEQUENCE
@pytest.mark.parametrize("options", [{}, {"position": "learned", "tied": False}], ids=["", "own"])
def test_a_gpt_from_ids_to_its_loss(world, options, sequence_parallel):
    module = WithLoss(sequence_parallel=sequence_parallel, **options)
    ids = give_type(torch.zeros(2, 4, dtype=torch.int64))
    targets = give_type(torch.ones(2, 4, dtype=torch.int64))
    loss = train(module, ids, targets, wrap={"layouts": collect(module)})
    assert types_of(loss) == {"data": V, "tensor": I}, "all tensor ranks have one loss"


UNWRAPPED = {
    "block": SplitBlock,
    "rms norm": lambda cut: RMSNorm(8, sequence_parallel=cut),
    "gpt": lambda cut: WithLoss(sequence_parallel=cut, position="learned"),
}


@SEQUENCE
@pytest.mark.parametrize("name", UNWRAPPED)
def test_a_plain_optimizer_steps_equal_gradients(name, sequence_parallel):
    """One data rank and no wrapper: what is partial is summed in the layer itself."""
    with typed_world(data=1):
        train(UNWRAPPED[name](sequence_parallel), *inputs_of(name, sequence_parallel))


def inputs_of(name: str, sequence_parallel: bool) -> list[torch.Tensor]:
    if name == "gpt":
        return [give_type(torch.ones(2, 4, dtype=torch.int64)) for _ in range(2)]
    return [activations(sequence_parallel)]


@SEQUENCE
@pytest.mark.parametrize("name", UNWRAPPED)
def test_a_wrapper_that_is_told_nothing_needs_nothing(world, name, sequence_parallel):
    """Partial gradients are summed by it, so not by the layer as well."""
    train(UNWRAPPED[name](sequence_parallel), *inputs_of(name, sequence_parallel), wrap={})


def test_every_map_and_its_transpose_have_dual_types():
    group = object()
    made = {kind: kind(group, *([0] * len(kind.__dataclass_fields__))[1:]) for kind in MAPS}
    for kind, linear_map in made.items():
        src, dst = MAPS[kind]
        assert MAPS[type(linear_map.transposed())] == (DUAL[dst], DUAL[src]), kind


# -- planted errors ------------------------------------------------------------------------


class Forgotten(RowLinear):
    """No sum at all."""

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


class BiasFirst(RowLinear):
    """A bias that is added once a rank."""

    def forward(self, x):
        return collectives.reduce(F.linear(x, self.weight, self.bias), self.group)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "residual"])
@pytest.mark.parametrize("row", [Forgotten, BiasFirst])
def test_a_row_product_that_does_not_sum_first_is_an_error(world, monkeypatch, row, bias):
    monkeypatch.setattr("torchdistpackage.parallel.tensor.linear.RowLinear", row)
    mlp = ParallelMlp(8, 16, bias=bias)
    residual = nn_of(lambda x: x + mlp(x), mlp)
    if row is BiasFirst and not bias:
        train(
            residual, activations(False), wrap={"layouts": collect(residual)}
        )  # which is no error
        return
    with pytest.raises(SpmdTypeError, match="Invariant type"):
        train(residual, activations(False), wrap={"layouts": collect(residual)})


def nn_of(forward, *parts) -> torch.nn.Module:
    module = torch.nn.Module()
    module.parts = torch.nn.ModuleList(parts)
    module.forward = forward
    return module


def test_a_gather_whose_backward_does_not_sum_is_an_error(world, monkeypatch):
    column = ColumnLinear(8, 16, sequence_parallel=True)
    with monkeypatch.context() as patch, pytest.raises(SpmdTypeError, match="Invariant"):
        patch.setattr(column_product, "AllGather", autograd.Gather)
        train(column, activations(True), wrap={"layouts": collect(column)})
    with monkeypatch.context() as patch, pytest.raises(SpmdTypeError, match="its backward"):
        patch.setattr(autograd.AllGather, "transposed", autograd.Gather.transposed)
        train(column, activations(True), wrap={"layouts": collect(column)})


def test_an_input_that_is_not_copied_is_an_error(world, monkeypatch):
    column = ColumnLinear(8, 16)
    alone = SimpleNamespace(group=SimpleNamespace(size=lambda: 1))
    monkeypatch.setattr(column_product, "IdentityForward", lambda group: alone)
    with pytest.raises(SpmdTypeError, match="Invariant"):
        train(column, activations(False), wrap={"layouts": collect(column)})


@pytest.mark.parametrize("wrapped", [True, False], ids=["wrapped", "plain optimizer"])
def test_norms_whose_partial_gradients_nobody_sums_are_an_error(wrapped):
    with typed_world(data=2 if wrapped else 1):
        block = SplitBlock(True)
        block.ln_1 = LayerNorm(8)  # believes that it sees all rows
        wrap = {"layouts": collect(block)} if wrapped else None
        with pytest.raises(SpmdTypeError, match="layer_norm"):
            train(block, activations(True), wrap=wrap)


def test_a_sum_of_what_is_no_partial_gradient_is_an_error(world):
    norm = LayerNorm(8, sequence_parallel=True)
    with pytest.raises(SpmdTypeError, match="Invariant"):
        train(norm, activations(False), wrap={"layouts": collect(norm)})


def test_replicas_without_a_wrapper_are_an_error(world):
    with pytest.raises(SpmdTypeError, match="Invariant"):
        train(SplitBlock(), activations(False))


def test_a_backward_whose_gradients_nobody_sends_is_an_error(world):
    column, sums = ColumnLinear(8, 16), Sums()
    wrapped = NaiveDDP(column, layouts=collect(column), comm_hook=sums)
    type_parameters(wrapped, collect(column))
    with checked(), wrapped.no_sync():
        backward(wrapped(activations(False)).square().sum())
    with pytest.raises(SpmdTypeError, match=facts_pattern("weight.grad", "summed 0x")):
        sums.check(column)
