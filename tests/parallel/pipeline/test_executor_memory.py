"""What a rank holds at once does not grow with the number of microbatches."""

import copy
import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

from torchdistpackage.parallel.pipeline.executor import Executor, autograd
from torchdistpackage.parallel.pipeline.pipeline import Pipeline
from torchdistpackage.schedule.generators import build, evaluation

DIM, ROWS = 256, 128


def most_bytes(name: str, m: int) -> int:
    """Of all tensors alive in some forward of the last of three runs; storages counted once."""
    torch.manual_seed(0)
    stage = nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(4)))
    x, most = torch.randn(ROWS, DIM), 0
    executor = Executor(build(name, 2, m), dist.group.WORLD, device=torch.device("cpu"))

    def forward(s, i, received):
        nonlocal most
        y = stage(received if s else x)
        tensors = [o for o in gc.get_objects() if type(o) is torch.Tensor]
        storages = [t.untyped_storage() for t in tensors]
        most = max(most, sum({s.data_ptr(): s.nbytes() for s in storages}.values()))
        return y.square().mean() if s else y

    for _ in range(3):
        most = 0
        executor.run(forward)
    return most


def both(name: str) -> tuple[int, int]:
    return most_bytes(name, 8), most_bytes(name, 24)


@pytest.mark.few(1)
@pytest.mark.own_transport("measures memory, of which the late transport holds copies")
@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_live_tensors_do_not_grow_with_microbatches(ranks, name):
    for few, many in ranks(2).run(both, name):
        assert many <= few + ROWS * DIM * 4 // 2, (few, many)


def most_storages(m: int) -> int:
    """Alive in the loss of a microbatch, of the last of three steps, on the rank of the last stage.

    Where each microbatch leaves one, however small, the large ones of the next do not fit in
    between, and the process grows.
    """
    stage, most = nn.Linear(DIM, DIM), 0

    def loss(output, targets):
        nonlocal most
        tensors = [o for o in gc.get_objects() if type(o) is torch.Tensor]
        most = max(most, len({t.untyped_storage().data_ptr() for t in tensors}))
        return (output - targets).square().mean()

    pipe = Pipeline(stage, loss=loss, num_microbatches=m, group=dist.group.WORLD)
    x = torch.randn(4 * ROWS * m, DIM)  # room for small ones would be made early, for all
    for _ in range(3):
        most = 0
        pipe.step(x, targets=x)
    return most


def few_and_many_storages() -> tuple[int, int]:
    return most_storages(6), most_storages(24)


@pytest.mark.late_in_full
def test_a_microbatch_leaves_nothing_behind(ranks):
    few, many = ranks(2).run(few_and_many_storages)[-1]
    assert 0 < many <= few


class Doubled(torch.autograd.Function):
    """A node that does not keep alive what is behind it."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def most_outputs(name: str, chunks: int, own_backward: bool) -> int:
    """Of this rank's outputs that went to other ranks, most that are alive at a forward."""
    p, m = dist.get_world_size(), 12
    schedule = build(name, p, m, chunks)
    last = schedule.num_stages - 1
    executor = Executor(schedule, dist.group.WORLD, device=torch.device("cpu"))
    torch.manual_seed(0)
    x = torch.randn(m, 8, dtype=torch.float64)
    layers = [nn.Linear(8, 8, dtype=torch.float64) for _ in range(last + 1)]
    sent: list[weakref.ref] = []
    most = 0

    def forward(s, i, received):
        nonlocal most
        most = max(most, sum(ref() is not None for ref in sent))
        y = Doubled.apply(layers[s](received if s else x[i : i + 1]))
        if s == last:
            return y.square().sum()
        if schedule.placement[s] != schedule.placement[s + 1]:
            sent.append(weakref.ref(y))
        return y

    def backward(s, i, output, gradients):
        autograd(s, i, output, gradients)

    for _ in range(2):
        sent.clear()
        executor.run(forward, backward if own_backward else None)
    y = x
    copies = [copy.deepcopy(layer) for layer in layers]
    for layer in copies:
        layer.zero_grad()
        y = Doubled.apply(layer(y))
    y.square().sum().backward()
    for s in executor.stages:
        torch.testing.assert_close(layers[s].weight.grad, 2 * copies[s].weight.grad)
    return most


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("zb-h1", 1), ("interleaved", 2)])
def test_outputs_are_let_go_of_once_they_are_sent(ranks, name, chunks):
    """All but the last two: those may be on their way."""
    assert max(ranks(4).run(most_outputs, name, chunks, False)) <= 2
    first = ranks(4).run(most_outputs, name, chunks, True)[0]
    assert first >= 3, "a backward of the caller's own is given what the forward gave"


def outputs_left_in_evaluation(name: str) -> int:
    """Most outputs whose user has run that are alive at a forward, in one that no backward follows.

    A message that was sent may be on its way, so only what stays on its rank is counted.
    """
    p, m = dist.get_world_size(), 6
    schedule = evaluation(build(name, p, m), m)
    place, last = schedule.placement, schedule.num_stages - 1
    executor = Executor(schedule, dist.group.WORLD, device=torch.device("cpu"))
    given: dict[tuple[int, int], weakref.ref] = {}
    most = 0

    def forward(s, i, received):
        nonlocal most
        used = [(a, b) for a, b in given if a == last or (a + 1, b) in given]
        most = max(most, sum(given[at]() is not None for at in used))
        out = received * 2 if s else torch.ones(4)
        if s == last or place[s] == place[s + 1]:
            given[s, i] = weakref.ref(out)
        return out

    executor.run(forward)
    return most


@pytest.mark.parametrize(("name", "num_ranks"), [("interleaved", 1), ("zb-v", 2)])
def test_an_evaluation_holds_no_output_after_its_user(ranks, name, num_ranks):
    assert max(ranks(num_ranks).run(outputs_left_in_evaluation, name)) == 0
