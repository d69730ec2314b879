"""Stages 1, 2 and 3 against the plain optimizer in one process, whatever the graph does."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.ddp.one_process import Net, loss_of
from tests.ddp.zero.beside_one_process import (
    DIM,
    PER_RANK,
    TINY,
    adamw,
    batches,
    compare,
    expect_equal,
)
from tests.each import each
from torchdistpackage.comm.creation import world
from torchdistpackage.ddp.zero.optimizer import ZeroOptimizer
from torchdistpackage.errors import CommError

STAGES = [{"stage": 1}, {"stage": 2}, {"stage": 3}, {"stage": 3, "reshard_after_forward": True}]
STAGE_NAMES = ["1", "2", "3", "3-resharded"]
stages = pytest.mark.parametrize("options", STAGES, ids=STAGE_NAMES)
some_stages = pytest.mark.parametrize(
    "options",
    [x if x in STAGES[1::2] else pytest.param(x, marks=pytest.mark.full) for x in STAGES],
    ids=STAGE_NAMES,
)


def net(mode: str = "plain") -> Net:
    torch.manual_seed(3)
    return Net(mode).double()


def every_graph(options: dict, modes: list[str]) -> None:
    for mode in modes:
        run = lambda model, x, i: loss_of(model(x))  # noqa: E731
        compare(lambda mode=mode: net(mode), world(), run=run, steps=3, **options)


@pytest.mark.few(1)
@stages
def test_whatever_the_graph_training_is_that_of_one_process(ranks, options):
    modes = ["plain", "reentrant", "non-reentrant", "nested", "two outputs"]
    ranks(2).run(every_graph, options, modes)


def under_checkpoint(options: dict) -> None:
    def run(model: nn.Module, x: Tensor, i: int) -> Tensor:
        x = x.clone().requires_grad_()
        return loss_of(checkpoint(model, x, use_reentrant=options["use_reentrant"]))

    rest = {k: v for k, v in options.items() if k != "use_reentrant"}
    compare(net, world(), run=run, **rest)


@pytest.mark.few(2)
@stages
@pytest.mark.parametrize("reentrant", [pytest.param(True, marks=pytest.mark.full), False])
def test_the_whole_module_may_be_recomputed(ranks, options, reentrant):
    ranks(2).run(under_checkpoint, {**options, "use_reentrant": reentrant})


def long_run(options: dict, steps: int = 20) -> None:
    compare(net, world(), run=lambda m, x, i: loss_of(m(x)), steps=steps, **options)


@pytest.mark.few(1)
@pytest.mark.parametrize("size", [3, *(pytest.param(n, marks=pytest.mark.full) for n in (1, 4))])
@some_stages
def test_twenty_steps_at_any_size_with_one_bucket_or_many(ranks, size, options):
    ranks(size).run(each, long_run, [(options,), ({**options, "bucket_cap_mb": 25}, 4)])


def accumulating(options: dict) -> None:
    compare(net, world(), run=lambda m, x, i: loss_of(m(x)), microbatches=3, **options)
    zero_kept(options)


def zero_kept(options: dict) -> None:
    """Two reductions before a step add up; with no_sync one does for both."""
    for synced in (True, False):
        plain, mine = net(), net()
        truth, zero = adamw(plain), ZeroOptimizer(adamw(mine), mine, bucket_cap_mb=TINY, **options)
        size, index = world().size(), world().rank()
        for x in batches(3, 2 * size):
            truth.zero_grad()
            zero.zero_grad()
            first, second = x.chunk(2)
            loss_of(plain(x)).mul(2).backward()
            if synced:
                loss_of(mine(first.chunk(size)[index])).backward()
            else:
                with zero.reducer.no_sync():
                    loss_of(mine(first.chunk(size)[index])).backward()
            loss_of(mine(second.chunk(size)[index])).backward()
            truth.step()
            zero.step()
            expect_equal(zero, mine, plain)


@pytest.mark.few(1)
@stages
def test_gradients_of_several_backwards_add_up(ranks, options):
    ranks(2).run(accumulating, options)


class Chosen(nn.Module):
    """Each rank may take another way through it; `never` is taken by nobody."""

    def __init__(self):
        super().__init__()
        self.ways = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4))
        self.never = nn.Linear(DIM, DIM)
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, ways: list[int]) -> Tensor:
        for way in ways:
            x = torch.tanh(self.ways[way](x))
        return self.out(x)


def chosen() -> Chosen:
    torch.manual_seed(1)
    return Chosen().double()


def choosing(options: dict) -> None:
    ways = [[0, 1], [3], [1, 0]]
    if options.get("reshard_after_forward"):
        ways = [[3, 0]] * 3

    def run(model: nn.Module, x: Tensor, index: int) -> Tensor:
        return model(x, ways[index]).square().mean()

    zero = compare(chosen, world(), run=run, **options)
    untouched = {id(p) for p in zero._module.never.parameters()}
    for held in (held for members in zero.partitions for held in members):
        if held.own_tensor is not None and id(held.spec.parameter) in untouched:
            assert held.own_tensor not in zero.state, "nobody used it, so it has no state"


@pytest.mark.few(1)
@stages
@pytest.mark.parametrize("set_to_none", [True, pytest.param(False, marks=pytest.mark.full)])
def test_parameters_that_some_ranks_or_all_leave_unused(ranks, options, set_to_none):
    ranks(3).run(choosing, {**options, "set_to_none": set_to_none})


class Tied(nn.Module):
    """The embedding is used again, by hand, where no module of its own runs."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, DIM)
        self.body = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        ids = (x[:, :3].abs() * 10).long() % 11
        return functional.linear(torch.tanh(self.body(self.embed(ids))), self.embed.weight)


def tied() -> Tied:
    torch.manual_seed(2)
    return Tied().double()


def tie(options: dict) -> None:
    compare(tied, world(), **options)


@pytest.mark.few(2)
@stages
def test_a_parameter_may_be_used_outside_the_forward_of_its_module(ranks, options):
    ranks(2).run(tie, options)


def interrupted(options: dict) -> None:
    """Evaluation, a failed backward and a forward without backward between steps."""
    failing = False

    def run(model: nn.Module, x: Tensor, index: int) -> Tensor:
        nonlocal failing
        if index == world().rank() and model.training:
            model.eval()
            with torch.no_grad():
                model(x)
            model(x)
            model.train()
            y = model(x)
            if failing:
                y.register_hook(fail)
                with pytest.raises(ArithmeticError):
                    y.square().mean().backward()
            failing = not failing
        return model(x).square().mean()

    plain = lambda model, parts: model(torch.cat(list(parts))).square().mean()  # noqa: E731
    compare(simple, world(), run=run, one=plain, steps=5, **options)


def fail(grad: Tensor) -> None:
    raise ArithmeticError


def simple() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(DIM, 9), nn.Tanh(), nn.Linear(9, 5), nn.Linear(5, 3)).double()


@pytest.mark.few(2)
@stages
def test_what_happens_between_steps_leaves_no_trace(ranks, options):
    ranks(2).run(interrupted, options)


def two_forwards(options: dict) -> None:
    """The graph of the first forward is still alive when that of the second is used up."""

    def run(model: nn.Module, x: Tensor, index: int) -> Tensor:
        first, second = x.chunk(2)
        early, late = model(first).square().mean(), model(second).square().mean()
        if index == world().rank() and model is not plain_of[0]:
            (late / 2).backward()
            return early / 2
        return (early + late) / 2

    plain_of = [None]

    def build() -> nn.Module:
        model = simple()
        plain_of[0] = plain_of[0] or model
        return model

    compare(build, world(), run=run, **options)


@pytest.mark.few(2)
@stages
def test_a_second_forward_before_the_first_backward(ranks, options):
    ranks(2).run(two_forwards, options)


def reading(options: dict) -> None:
    plain, mine = simple(), simple()
    truth, zero = adamw(plain), ZeroOptimizer(adamw(mine), mine, bucket_cap_mb=TINY, **options)
    size, index = world().size(), world().rank()
    for number, x in enumerate(batches(6, size)):
        truth.zero_grad()
        plain(x).square().mean().backward()
        truth.step()
        zero.zero_grad()
        mine(x[index * PER_RANK :][:PER_RANK]).square().mean().backward()
        zero.step()
        if zero.stage == 3 and number != 3:
            with pytest.raises(CommError, match=r"finish\(\) on all of these"):
                mine[3].weight.sum()
            zero.finish()
        if number == 0:
            assert [torch.equal(p, p) for p in mine.parameters()]
            torch.testing.assert_close(mine[0].weight, plain[0].weight, rtol=0, atol=1e-12)
        elif number == 1:
            theirs = copy.deepcopy(mine)
            theirs(x).sum().backward()
            assert not any(hasattr(hook, "_function") for hook in theirs._forward_hooks.values())
        elif number == 2:
            theirs = pickle.loads(pickle.dumps(mine))  # noqa: S301
        else:
            theirs = simple()
            theirs.load_state_dict(mine.state_dict())
        if number:
            assert all(type(p) is nn.Parameter for p in theirs.parameters())
            for a, b in zip(theirs.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
        if number == 4:
            mine.load_state_dict(plain.state_dict())


@pytest.mark.few(2)
@stages
def test_who_reads_or_copies_the_module_after_a_step_gets_the_new_numbers(ranks, options):
    ranks(2).run(reading, options)


def side_by_side(options: dict) -> None:
    """Two models, one loss, two optimizers."""
    size, index = world().size(), world().rank()
    plain, mine = [simple(), tied()], [simple(), tied()]
    truth = [adamw(m) for m in plain]
    zero = [ZeroOptimizer(adamw(m), m, bucket_cap_mb=TINY, **options) for m in mine]
    for x in batches(3, size):
        for models, optimizers, rows in (
            (plain, truth, x),
            (mine, zero, x.chunk(size)[index]),
        ):
            sum(m(rows).square().mean() for m in models).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for z, m, p in zip(zero, mine, plain, strict=True):
            expect_equal(z, m, p)


@pytest.mark.few(2)
@stages
def test_two_models_in_one_process(ranks, options):
    ranks(2).run(side_by_side, options)
