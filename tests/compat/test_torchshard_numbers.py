"""No number of a part flows on as if it were one of the whole, and no write loses the mark."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import torchdistpackage.compat.torchshard as ts
from tests.compat.sharded import close, start
from torchdistpackage.errors import LayoutError

NUMBERS: dict[str, Callable[[Tensor], Any]] = {
    "mean": lambda y: y.square().mean(),
    "std": lambda y: y / y.detach().std(),
    "max": lambda y: y.max(),
    "argmax": lambda y: y.argmax(),
    "norm": lambda y: y.norm(),
    "quantile": lambda y: y.quantile(0.5),
    "softmax": lambda y: y.softmax(-1),
    "cumsum": lambda y: y.cumsum(1),
    "tolist": lambda y: y.tolist(),
    "numpy": lambda y: y.detach().numpy(),
    "item": lambda y: ts.distributed.scatter(torch.ones(1, 2)).item(),
    "float": lambda y: float(ts.distributed.scatter(torch.ones(1, 2))),
    "bool": lambda y: bool(ts.distributed.scatter(torch.ones(1, 2))),
    "stack": lambda y: torch.stack([y, torch.zeros(y.shape)]),
}


def whole_mark(x: Tensor, dim: int = -1) -> Tensor:
    assert ts.get_parallel_dim(x) == -1
    return ts.distributed.gather(x, dim)


def copied(y: Tensor) -> Tensor:
    buffer = torch.empty(y.shape)
    buffer.copy_(y)
    return whole_mark(buffer)


def put_in(y: Tensor) -> Tensor:
    buffer = torch.zeros(2, *y.shape)
    buffer[1] = y
    return whole_mark(buffer)[1]


def copied_into_view(y: Tensor) -> Tensor:
    buffer = torch.zeros(3, *y.shape)
    buffer[1].copy_(y)
    return whole_mark(buffer)[1]


def added_into_column(y: Tensor) -> Tensor:
    buffer = torch.zeros(y.shape[0], 3, y.shape[1])
    buffer[:, 2] += y
    return whole_mark(buffer)[:, 2]


def put_by_hand(y: Tensor) -> Tensor:
    """A part in its place of a whole tensor, which the program sums."""
    buffer, width, rank = torch.zeros(len(y), 8), y.shape[1], ts.distributed.get_rank()
    buffer[:, rank * width : (rank + 1) * width] = y
    assert ts.get_parallel_dim(buffer) is None
    return ts.distributed.reduce(buffer)


def numbers() -> None:
    start(2)
    plain, x = nn.Linear(6, 8), torch.randn(4, 6)
    layer = ts.nn.ParallelLinear.convert_parallel_linear(plain, dim=1)
    for has_grad in (False, True):
        with torch.set_grad_enabled(has_grad):
            for name, number in NUMBERS.items():
                if name == "max" and not has_grad:  # the whole's, below
                    continue
                with pytest.raises(LayoutError, match="split along dim"):
                    pytest.fail(f"{name} gave {number(layer(x))}")
    with torch.inference_mode(), pytest.raises(LayoutError, match="mean of a tensor"):
        layer(x).mean()
    with torch.no_grad():
        expected = plain(x)
        for write in (copied, put_in, copied_into_view, added_into_column, put_by_hand):
            close(write(layer(x)), expected)
        part = layer(x)
        close(ts.distributed.gather(part.sum(0)), expected.sum(0))
        assert (part.max(), torch.amin(part)) == (expected.max(), expected.min())
        one = ts.nn.ParallelLinear(6, 1, dim=1)(x)  # of which the second rank holds nothing
        assert one.max() == ts.distributed.gather(one, -1).max()
        mine = ts.distributed.get_rank() == 1
        flags = ts.distributed.scatter(torch.arange(8) == 5)  # true on the second rank alone
        assert flags.any() and not flags.all() and not torch.equal(part, part + mine)
        assert torch.allclose(part, part.clone()) and not torch.allclose(part, part + mine)
        with pytest.raises(LayoutError, match="index_copy"):
            torch.zeros(4, 4).index_copy_(0, torch.arange(4), part)
        ts.register_parallel_dim(part, None)  # this rank's part is meant
        close(part.mean(), expected.chunk(2, 1)[ts.distributed.get_rank()].mean())
    parametrized()


def parametrized() -> None:
    norms: list[Callable[[nn.Module], object]] = [
        parametrizations.weight_norm,
        parametrizations.spectral_norm,
        parametrizations.orthogonal,
        nn.utils.spectral_norm,
        lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    ]
    for norm in norms:
        for dim in (0, 1):
            layer = ts.nn.ParallelLinear(6, 8, dim=dim)
            with pytest.raises(LayoutError, match="this rank has a part of"):
                norm(layer)
            layer(torch.randn(4, 6))  # as it was
    parametrizations.weight_norm(ts.nn.ParallelLinear(6, 8))(torch.randn(4, 6))
    with warnings.catch_warnings(), pytest.raises(LayoutError, match=r"torch\.jit\.script"):
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit itself
        torch.jit.script(ts.nn.ParallelLinear(6, 8, dim=1))


def test_numbers_of_a_part_are_refused_and_writes_keep_the_mark(ranks):
    ranks(2).run(numbers)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = ts.nn.ParallelEmbedding(6, 8, dim=0)
        self.up, self.down = ts.nn.ParallelLinear(8, 8, dim=1), ts.nn.ParallelLinear(8, 8, dim=0)
        self.head, self.loss = ts.nn.ParallelLinear(8, 6, dim=1), ts.nn.ParallelCrossEntropyLoss()

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        return self.loss(self.head(self.down(self.up(self.table(ids)).relu())), targets)


def compiled() -> None:
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")  # which dynamo reads
    start(2)
    model, inputs = Classifier(), (torch.tensor([1, 2]), torch.tensor([3, 4]))
    graph = torch.compile(model, backend="aot_eager")
    results = []
    for call in (model, graph):
        model.zero_grad()
        loss = call(*inputs)
        loss.backward()
        results.append([loss, *(p.grad for p in model.parameters())])
    for ours, expected in zip(*results, strict=True):
        close(ours, expected)


@pytest.mark.full
@pytest.mark.own_transport("a graph calls torch's collectives of its own groups")
def test_layers_compile(ranks):
    ranks(2).run(compiled)


def exported() -> list[str]:
    """Check the numbers of an exported graph; what is said of a model that cannot be followed."""
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")
    start(2)
    model, inputs = Classifier(), (torch.tensor([1, 2]), torch.tensor([3, 4]))
    graph = torch.export.export(model, inputs).module()
    for call in (inputs, (inputs[1], inputs[0])):
        close(graph(*call), model(*call))
    rows, x = ts.nn.ParallelLinear(9, 5, dim=0), torch.randn(3, 9)
    close(torch.export.export(rows, (x,)).module()(x), rows(x))
    said: list[str] = []
    mixes = nn.Sequential(ts.nn.ParallelLinear(9, 5, dim=1), nn.Softmax(-1))
    for strict, layers in ((False, mixes), (True, rows)):
        with pytest.raises(Exception, match=r"softmax of a tensor|exception") as met:
            torch.export.export(layers, (x,), strict=strict)
        said.append(f"{met.value} {met.value.__cause__}")
    return said


@pytest.mark.full
@pytest.mark.own_transport("a graph calls torch's collectives of its own groups")
def test_layers_are_exported(ranks):
    for mixes, strict in ranks(2).run(exported):
        assert "split along dim 1 (this rank holds" in mixes
        assert "ParallelLinear has split; leave strict out" in strict
