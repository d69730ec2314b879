"""Blocks that torch.compile has made: each step's new numbers, and no graph made twice."""

import warnings
from collections.abc import Callable

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

from tests.ddp.zero.beside_one_process import DIM, compare
from tests.ddp.zero.test_stages import some_stages, stages
from torchdistpackage.comm.creation import world
from torchdistpackage.errors import LayoutError


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 9), nn.Linear(9, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def in_place(model: nn.Sequential, backend: Callable | str) -> None:
    for block in model:
        block.compile(backend=backend)


def wrapped(model: nn.Sequential, backend: Callable | str) -> None:
    for place, block in enumerate(model):
        model[place] = torch.compile(block, backend=backend)


def train_compiled(
    options: dict, how: Callable, late: bool = False, backend: str = "aot_eager"
) -> None:
    """late: after the second forward."""
    made: list[nn.Module] = []
    graphs: list[torch.fx.GraphModule] = []

    def counting(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable:
        graphs.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    def build() -> nn.Module:
        torch.manual_seed(7)
        model = nn.Sequential(Block(), Block(), Block()).double()
        made.append(model)
        if len(made) == 2 and not late:
            how(model, counting)
        return model

    num_forwards = 0

    def run(model: nn.Module, x: Tensor, index: int) -> Tensor:
        nonlocal num_forwards
        num_forwards += model is made[-1]
        if late and num_forwards == 2 and model is made[-1]:
            how(model, counting)
        return model(x).square().mean()

    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.compile on its own parts
        compare(build, world(), run=run, steps=5, **options)
    # the first block's input wants no gradient
    assert len(graphs) == 2


@pytest.mark.full
@pytest.mark.late_in_full
@some_stages
def test_compiled_blocks_train_as_one_process(ranks, options):
    ranks(2).run(train_compiled, options, in_place)


@stages
@pytest.mark.full
@pytest.mark.parametrize("how", [in_place, wrapped])
def test_compiled_blocks_train_as_one_process_by_inductor(ranks, options, how):
    ranks(2).run(train_compiled, options, how, False, "inductor", timeout_s=300)


@pytest.mark.full
@pytest.mark.late_in_full
@pytest.mark.parametrize(
    "options",
    [{"stage": 1}, *(pytest.param({"stage": n}, marks=pytest.mark.full) for n in (2, 3))],
    ids=str,
)
def test_blocks_may_be_compiled_between_steps(ranks, options):
    ranks(2).run(train_compiled, options, in_place, True)


@pytest.mark.few(1)
@pytest.mark.late_in_full
@some_stages
def test_blocks_that_torch_compile_returned(ranks, options):
    ranks(2).run(train_compiled, options, wrapped)


def too_late() -> None:
    with pytest.raises(LayoutError, match="a Block was compiled after"):
        train_compiled({"stage": 3, "reshard_after_forward": True}, in_place, late=True)


def test_where_submodules_have_hooks_blocks_are_compiled_before(ranks):
    ranks(1).run(too_late)
