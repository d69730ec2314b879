"""What a stage may take and return, held against the same stages called in one process."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.parallel.pipeline.whole_model import DIM, batch, same
from torchdistpackage import Pipeline
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.schedule.generators import build

One = Callable[[list[nn.Module], Tensor, Tensor], Tensor]
"""Mean loss of a microbatch in one process."""


class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM, DIM, dtype=torch.float64))


def made(*kinds: type[nn.Module]) -> list[nn.Module]:
    torch.manual_seed(0)
    return [kind() for kind in kinds]


def compare(kinds: tuple[type[nn.Module], ...], one: One, schedule: str, **options) -> None:
    """Loss and gradients of two steps, batch of 7 in 3 microbatches."""
    p = dist.get_world_size()
    tpc.setup_process_groups([("pipe", p)])
    x, y = batch(7)
    truth = made(*kinds)
    sizes = [3, 2, 2]
    parts = zip(x.split(sizes), y.split(sizes), sizes, strict=True)
    expected = torch.stack([one(truth, a, b) * n / 7 for a, b, n in parts]).sum()
    expected.backward()
    order = build(schedule, p, 3)
    mine = {
        s: stage for s, stage in enumerate(made(*kinds)) if s in order.stages_of(dist.get_rank())
    }
    pipe = Pipeline(mine, schedule=schedule, num_microbatches=3, timeout_s=60, **options)
    for _ in range(2):
        for stage in mine.values():
            stage.zero_grad()
        same(pipe.step(x, targets=y), expected.detach())
        for s, stage in mine.items():
            same(stage.weight.grad, truth[s].weight.grad)


# -- a dict of everything, whole or by name ---------------------------------------------------


class Rich(Linear):
    def forward(self, x):
        h = x @ self.weight
        ids = torch.arange(x.shape[0])
        return {
            "h": h, "twice": h * 2, "ids": ids, "mask": ids > 0, "none": None,
            "plain": h.detach(), "empty": x[:0],
        }  # fmt: skip


class Whole(Linear):
    def forward(self, members):
        assert members["none"] is None and not members["plain"].requires_grad
        h = torch.tanh(members["h"] @ self.weight) * members["mask"][:, None]
        return members | {"h": h}


class ByName(Linear):
    def forward(self, h, twice, ids, mask, none, plain, empty):
        assert mask.dtype == torch.bool and empty.shape == (0, DIM)
        return h @ self.weight + twice + plain * ids[:, None]


def rich(stages, x, y):
    a, b, c = stages
    return squares_of(c(**b(a(x))), y)


def squares_of(output, targets):
    return (output - targets).square().mean()


def dicts(schedule):
    compare((Rich, Whole, ByName), rich, schedule, loss=squares_of)


def test_a_dict_with_none_integer_bool_and_no_grad_members(ranks):
    ranks(3).run(dicts, "1f1b")


# -- tuples -----------------------------------------------------------------------------------


class Pair(Linear):
    def forward(self, x):
        return x @ self.weight, torch.arange(x.shape[0]), None


class Spread(Linear):
    def forward(self, h, ids, nothing=0):
        assert nothing is None
        return torch.tanh(h @ self.weight), ids


class OfOne(Linear):
    def forward(self, both):
        h, ids = both
        return h @ self.weight + ids[:, None]


def tuples(schedule):
    one = lambda s, x, y: squares_of(s[2](s[1](*s[0](x))), y)  # noqa: E731
    compare((Pair, Spread, OfOne), one, schedule, loss=squares_of)


def test_a_tuple_is_spread_where_the_forward_takes_so_many_arguments(ranks):
    ranks(3).run(tuples, "gpipe")


# -- a skip over two stages, taken twice -------------------------------------------------------


class Encoder(Linear):
    def forward(self, x):
        h = torch.tanh(x @ self.weight)
        return {"h": h, "memory": h * 2, "keep": torch.arange(len(x))}


class Between(Linear):
    def forward(self, h):
        return torch.tanh(h @ self.weight)


class Taker(Linear):
    def forward(self, h, memory):
        return h @ self.weight + memory.square()


class Last(Linear):
    def forward(self, h, keep, memory):
        return h @ self.weight * memory + keep[:, None]


def skipping(stages, x, y):
    a, b, c, d = stages
    first = a(x)
    h = c(b(first["h"]), first["memory"])
    return squares_of(d(h, first["keep"], first["memory"]), y)


def skips(schedule):
    kinds = (Encoder, Between, Taker, Last)
    compare(kinds, skipping, schedule, loss=squares_of, skips=("memory", "keep"))


def test_a_skip_passes_stages_that_do_not_name_it(ranks):
    ranks(4).run(skips, "1f1b")


@pytest.mark.parametrize("schedule", ["zb-v", "interleaved-zb"])
def test_a_skip_passes_chunks_and_split_backwards(ranks, schedule):
    ranks(2).run(skips, schedule)


# -- keyword inputs ----------------------------------------------------------------------------


class Scaled(Linear):
    def forward(self, h, *, scale, shift=None):
        return torch.tanh(h @ self.weight * scale[:, None])


class Shifted(Linear):
    def forward(self, h, *, shift, table):
        return h @ self.weight + shift["by"][:, None] + table.sum()


def keywords() -> None:
    p = dist.get_world_size()
    tpc.setup_process_groups([("pipe", p)])
    x, y = batch(7)
    scale, shift = torch.rand(7).double(), {"by": torch.rand(7).double(), "unused": None}
    table = torch.rand(3).double()
    kinds = (Scaled, Scaled, Shifted)
    a, b, c = truth = made(*kinds)
    h = b(a(x, scale=scale), scale=scale)
    expected = squares_of(c(h, shift=shift, table=table), y)
    expected.backward()
    stage = made(*kinds)[dist.get_rank()]
    pipe = Pipeline(stage, loss=squares_of, num_microbatches=3, whole=["table"], timeout_s=60)
    named = {"scale": scale, "shift": shift, "table": table}
    same(pipe.step(x, targets=y, **named), expected.detach())
    same(stage.weight.grad, truth[dist.get_rank()].weight.grad)
    same(pipe.eval_step(x, targets=y, num_microbatches=2, **named), expected.detach())


def test_keyword_inputs_are_cut_for_every_stage_that_names_them(ranks):
    ranks(3).run(keywords)


# -- no gradient in some microbatches ------------------------------------------------------------


class Moody(Linear):
    """Uses its input only where the first sample says so."""

    def forward(self, h, side):
        used = h.detach()[0, 0] > 0
        return (h if used else torch.ones_like(h)) @ self.weight, side


class Source(Linear):
    def forward(self, x):
        return x @ self.weight, x @ self.weight


class End(Linear):
    def forward(self, h, side):
        return h @ self.weight + (side if side.detach()[0, 0] > 0.5 else 0)


def moody(schedule):
    one = lambda s, x, y: squares_of(s[2](*s[1](*s[0](x))), y)  # noqa: E731
    compare((Source, Moody, End), one, schedule, loss=squares_of)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_an_input_without_gradient_in_some_microbatches(ranks, schedule):
    ranks(3).run(moody, schedule)


# -- shapes that change ----------------------------------------------------------------------------


class Text(Linear):
    def forward(self, x):
        length = 1 + int(x.detach().abs().sum()) % 3  # another one in every microbatch
        return (
            (x @ self.weight)[:, None]
            .expand(-1, length, -1)
            .to(torch.float32 if length == 2 else x.dtype)
        )


class Mean(Linear):
    def forward(self, h):
        return h.double().mean(1) @ self.weight


def changing(num_steps: int) -> None:
    tpc.setup_process_groups([("pipe", 2)])
    stage = made(Text, Mean)[dist.get_rank()]
    pipe = Pipeline(stage, loss=squares_of, num_microbatches=3, dynamic_shapes=True, timeout_s=60)
    truth = made(Text, Mean)
    for step in range(num_steps):
        num = 7 + 2 * step
        x, y = batch(num, seed=step)
        whole = sum(n * squares_of(truth[1](truth[0](a)), b) / num for a, b, n in cut_in(3, x, y))
        whole.backward()
        same(pipe.step(x, targets=y), whole.detach())
        torch.testing.assert_close(
            stage.weight.grad, truth[dist.get_rank()].weight.grad, rtol=0, atol=1e-12
        )


def frozen_and_thawed(schedule: str, dynamic: bool) -> None:
    """The first stage's weight has a gradient in some steps; each step is that of one process."""
    tpc.setup_process_groups([("pipe", 2)])
    rank, truth = dist.get_rank(), made(Linear, Linear)
    for stages in (truth, mine := made(Linear, Linear)):
        for stage in stages:
            stage.forward = lambda x, weight=stage.weight: (x @ weight).tanh()
    stage, options = mine[rank], {"dynamic_shapes": dynamic, "schedule": schedule}
    pipe = Pipeline(stage, loss=squares_of, num_microbatches=3, timeout_s=60, **options)
    for step, trains in enumerate([dynamic is False, False, True, False]):
        for stages in (truth, mine):
            stages[0].weight.requires_grad_(trains)
            for one in stages:
                one.weight.grad = None
        x, y = batch(6, seed=step)
        whole = squares_of(truth[1](truth[0](x)), y)
        whole.backward()
        same(pipe.step(x, targets=y), whole.detach())
        assert (truth[0].weight.grad is None) != trains
        if truth[rank].weight.grad is None:
            assert stage.weight.grad is None
        else:
            same(stage.weight.grad, truth[rank].weight.grad)


@pytest.mark.parametrize("dynamic", [False, True], ids=["known", "dynamic"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_stage_may_be_frozen_and_thawed_between_steps(ranks, schedule, dynamic):
    ranks(2).run(frozen_and_thawed, schedule, dynamic)


def cut_in(number, x, y):
    return [
        (a, b, len(a)) for a, b in zip(x.tensor_split(number), y.tensor_split(number), strict=True)
    ]


def test_shapes_and_dtypes_may_change_with_every_microbatch_and_step(ranks):
    ranks(2).run(changing, 3)
