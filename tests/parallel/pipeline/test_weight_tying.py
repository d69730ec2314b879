"""A tied embedding and head on the first and the last stage are one weight."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from tests.parallel.pipeline.whole_model import same
from torchdistpackage import NaiveDDP, Pipeline, ZeroOptimizer, clip_grad_norm_
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.errors import ScheduleError
from torchdistpackage.parallel.pipeline.weight_tying import tie

VOCAB, DIM = 11, 6


class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM, dtype=torch.float64)

    def forward(self, ids):
        return self.embedding(ids)


class Last(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(DIM, VOCAB, bias=False, dtype=torch.float64)

    def forward(self, h):
        return self.head(h.tanh())


def stages() -> list[nn.Module]:
    torch.manual_seed(0)
    return [First(), nn.Linear(DIM, DIM, dtype=torch.float64), Last()]


def loss(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


def one_process(num_steps: int) -> nn.Sequential:
    whole = nn.Sequential(*stages())
    whole[2].head.weight = whole[0].embedding.weight
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.05, weight_decay=0.1)
    for ids in draws(num_steps):
        optimizer.zero_grad()
        loss(whole(ids), ids).backward()
        torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
        optimizer.step()
    return whole


def draws(num_steps: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randint(VOCAB, (6, 3), generator=draw) for _ in range(num_steps)]


def train(num_steps: int, data: int, zero: bool, schedule: str) -> None:
    tpc.setup_process_groups([("data", data), ("pipe", 3)])
    index = tpc.get_pp_rank()
    torch.manual_seed(index)  # unlike starts are made alike, to the first holder's
    stage = stages()[index]
    names = {0: {"words": "embedding.weight"}, 2: {"words": "head.weight"}}.get(index, {})
    layouts = tie(stage, **names)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=0.05, weight_decay=0.1)
    if zero:
        reducer = optimizer = ZeroOptimizer(optimizer, stage, layouts=layouts)
    else:
        reducer = NaiveDDP(stage, layouts=layouts)
    pipe = Pipeline(stage, loss=loss, schedule=schedule, num_microbatches=3, reducer=reducer)
    for ids in draws(num_steps):
        mine = ids.chunk(data)[tpc.get_dp_rank()]
        optimizer.zero_grad()
        pipe.step(mine, targets=mine)
        if zero:
            clip_grad_norm_(optimizer, 0.5)
        else:
            clip_grad_norm_(stage.parameters(), 0.5, layouts=list(layouts.values()))
        optimizer.step()
    if zero:
        optimizer.finish()
    truth = one_process(num_steps)[index]
    for a, b in zip(stage.parameters(), truth.parameters(), strict=True):
        same(a.detach(), b.detach())
    copies = [torch.zeros(VOCAB, DIM, dtype=torch.float64) for _ in range(dist.get_world_size())]
    mine = next(stage.parameters()).detach().clone() if index != 1 else copies[0].clone()
    dist.all_gather(copies, mine)
    holders = [copy for rank, copy in enumerate(copies) if rank % 3 != 1]
    assert all(torch.equal(copy, holders[0]) for copy in holders)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("num_steps", "data", "zero", "schedule"),
    [
        (20, 1, False, "1f1b"),
        (10, 2, True, "zb-h1"),
        pytest.param(100, 2, False, "zb-h1", marks=pytest.mark.full),
        pytest.param(100, 2, True, "1f1b", marks=pytest.mark.full),
    ],
)
def test_a_tied_weight_is_bitwise_one_and_that_of_one_process(
    ranks, num_steps, data, zero, schedule
):
    ranks(3 * data).run(train, num_steps, data, zero, schedule, timeout_s=60)


def wrong_ties() -> None:
    tpc.setup_process_groups([("pipe", 2)])
    rank = dist.get_rank()
    stage = nn.Linear(2, 2 + rank)
    for names, text in [
        (
            {"words": "weight"},
            r"tied weight words: its shapes by pipe rank are \{0: \(2, 2\), 1: \(3",
        ),
        ({} if rank else {"words": "weight"}, r"by pipe rank are \{0: \(2, 2\)\}; name it on two"),
        ({"words": "weigth"} if rank else {}, "pipe rank 1: Linear has no parameter weigth"),
    ]:
        with pytest.raises(ScheduleError, match=text):
            tie(stage, **names)


def test_ties_that_cannot_be_are_refused_on_every_rank(ranks):
    ranks(2).run(wrong_ties)
