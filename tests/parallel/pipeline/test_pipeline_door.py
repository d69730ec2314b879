"""The pipeline in a loop of one's own is the model in one process, whatever the schedule."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.parallel.pipeline.whole_model import batch, chain, same, same_gradients, squares
from torchdistpackage import Pipeline
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.ddp.naive_ddp import NaiveDDP
from torchdistpackage.ddp.zero.optimizer import ZeroOptimizer
from torchdistpackage.schedule.generators import build
from torchdistpackage.schedule.resolve import to_csv

ONE_CHUNK = ["gpipe", "1f1b", "zb-h1"]
CHUNKS = ["interleaved", "zb-v", "dualpipe-v", "interleaved-zb", "looped-bfs"]


def my_stages(schedule, whole: nn.Sequential) -> dict[int, nn.Module]:
    return {s: whole[s] for s in schedule.stages_of(tpc.get_pp_rank())}


def a_step_of_each_schedule(names: list[str], num_samples: int, number: int) -> None:
    """Batches that do not divide too: the mean is over samples."""
    p = dist.get_world_size()
    tpc.setup_process_groups([("pipe", p)])
    x, y = batch(num_samples)
    for name in names:
        order = build(name, p, number)
        truth, mine = chain(order.num_stages), my_stages(order, chain(order.num_stages))
        expected = squares(truth(x), y)
        expected.backward()
        stages = list(mine.values())
        pipe = Pipeline(stages, loss=squares, schedule=name, num_microbatches=number)
        for _ in range(2):  # the second step sends no descriptions
            for stage in stages:
                stage.zero_grad()
            same(pipe.step(x, targets=y), expected.detach())
            same_gradients(mine, truth)


@pytest.mark.parametrize("names", [ONE_CHUNK, CHUNKS], ids=["one-chunk", "chunks"])
def test_a_step_is_that_of_one_process(ranks, names):
    ranks(2).run(a_step_of_each_schedule, names, 7, 4)


@pytest.mark.full
@pytest.mark.parametrize("num_ranks", [1, 3, 4])
@pytest.mark.parametrize("number", [1, 2, 6])
def test_a_step_is_that_of_one_process_at_any_depth(ranks, num_ranks, number):
    ranks(num_ranks).run(a_step_of_each_schedule, ONE_CHUNK + CHUNKS, 9, number, timeout_s=120)


def values_files_and_mappings(folder: str) -> None:
    tpc.setup_process_groups([("pipe", 2)])
    order = build("interleaved", 2, 4)
    x, y = batch(8)
    truth = chain(4)
    squares(truth(x), y).backward()
    text = to_csv(order)
    path = f"{folder}/{dist.get_rank()}.csv"
    with open(path, "w") as file:  # noqa: PTH123
        file.write(text)
    for given in (order, text, path):
        mine = my_stages(order, chain(4))
        Pipeline(mine, loss=squares, schedule=given).step(x, targets=y)
        same_gradients(mine, truth)


def test_a_schedule_may_be_a_value_a_table_or_a_file_of_one(ranks, tmp_path):
    ranks(2).run(values_files_and_mappings, str(tmp_path))


class Forgetful(nn.Module):
    """With a random state, a mode and a buffer that evaluation could change."""

    def __init__(self, inside: nn.Module):
        super().__init__()
        self.inside = inside
        self.norm = nn.BatchNorm1d(4, dtype=torch.float64)

    def forward(self, x):
        return nn.functional.dropout(self.norm(self.inside(x)), 0.3, self.training)


def trained(evaluate: bool, schedule: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    order = build(schedule, 2, 4)
    mine = {s: Forgetful(x) for s, x in my_stages(order, chain(order.num_stages)).items()}
    modules = nn.ModuleList(mine.values())
    modules[0].norm.eval()  # a part that the user holds in this mode
    pipe = Pipeline(list(modules), loss=squares, schedule=schedule, num_microbatches=4)
    optimizer = torch.optim.Adam(modules.parameters(), lr=0.01)
    torch.manual_seed(tpc.rank)
    for step in range(3):
        if evaluate:
            held_out = batch(5 - step, seed=9)
            loss = pipe.eval_step(held_out[0], targets=held_out[1], num_microbatches=3 - step)
            seen = [torch.zeros_like(loss) for _ in range(2)]
            dist.all_gather(seen, loss)
            assert torch.equal(*seen), "the same on every rank"
            assert not loss.requires_grad
        optimizer.zero_grad()
        x, y = batch(8, seed=step)
        pipe.step(x, targets=y)
        optimizer.step()
    assert modules.training and not modules[0].norm.training
    return [x.clone() for x in modules.state_dict().values()]


def evaluation_changes_nothing(schedule: str) -> None:
    tpc.setup_process_groups([("pipe", 2)])
    plain = trained(False, schedule)
    assert all(map(torch.equal, plain, trained(True, schedule)))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_evaluation_before_and_between_steps_leaves_training_bitwise(ranks, schedule):
    ranks(2).run(evaluation_changes_nothing, schedule)


def evaluation_is_one_process() -> None:
    tpc.setup_process_groups([("pipe", 2)])
    order = build("zb-v", 2, 4)
    truth = chain(4).eval()
    pipe = Pipeline(my_stages(order, chain(4)), loss=squares, schedule="zb-v", num_microbatches=4)
    for num_samples, number in ((9, 4), (3, None), (2, 1)):
        x, y = batch(num_samples, seed=num_samples)
        same(pipe.eval_step(x, targets=y, num_microbatches=number), squares(truth(x), y).detach())
        output = pipe.predict(x)
        assert (output is not None) == (3 in pipe.stages)
        if output is not None:
            same(output, truth(x).detach())


def test_eval_step_is_the_loss_of_one_process_at_any_size(ranks):
    ranks(2).run(evaluation_is_one_process)


def outputs_on_request() -> None:
    tpc.setup_process_groups([("pipe", 2)])
    x, y = batch(6)
    stage = chain(2)[tpc.get_pp_rank()]
    pipe = Pipeline(stage, loss=squares, num_microbatches=3)
    pipe.step(x, targets=y)
    assert pipe.outputs is None
    pipe.step(x, targets=y, keep_outputs=True)
    if tpc.get_pp_rank() == 1:
        same(pipe.outputs, chain(2)(x).detach())
    else:
        assert pipe.outputs is None


def test_outputs_are_kept_only_when_asked_for(ranks):
    ranks(2).run(outputs_on_request)


def replicas(schedule: str, kind: str, accumulate: int) -> None:
    """data 2 x pipe 2 against one process, over steps that accumulate."""
    tpc.setup_process_groups([("data", 2), ("pipe", 2)])
    order = build(schedule, 2, 4)
    whole = chain(order.num_stages)
    reference = torch.optim.Adam(whole.parameters(), lr=0.1)
    mine = my_stages(order, chain(order.num_stages))
    modules = nn.ModuleList(mine.values())
    optimizer = torch.optim.Adam(modules.parameters(), lr=0.1)
    if kind == "zero":
        reducer = optimizer = ZeroOptimizer(optimizer, modules)
    elif kind == "ddp":
        reducer = NaiveDDP(modules, bucket_cap_mb=0.0001)
    else:
        reducer, mine = None, {s: NaiveDDP(x) for s, x in mine.items()}
    pipe = Pipeline(mine, loss=squares, schedule=schedule, num_microbatches=4, reducer=reducer)
    for step in range(3):
        optimizer.zero_grad()
        reference.zero_grad()
        for part in range(accumulate):
            x, y = batch(8, seed=10 * step + part)
            (squares(whole(x), y) / accumulate).backward()
            x, y = x.chunk(2)[tpc.get_dp_rank()], y.chunk(2)[tpc.get_dp_rank()]
            with pipe.no_sync() if part < accumulate - 1 else nullcontext():
                pipe.step(x, targets=y, loss_scale=1 / accumulate)
        reference.step()
        optimizer.step()
    for number, stage in mine.items():
        for a, b in zip(stage.parameters(), whole[number].parameters(), strict=True):
            same(a.detach(), b.detach())


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("schedule", "kind", "accumulate"),
    [
        ("1f1b", "wrapped", 2),
        ("zb-h1", "ddp", 1),
        ("zb-v", "zero", 2),
        pytest.param("zb-h1", "zero", 1, marks=pytest.mark.full),
        pytest.param("interleaved", "ddp", 2, marks=pytest.mark.full),
        pytest.param("dualpipe-v", "wrapped", 2, marks=pytest.mark.full),
        pytest.param("gpipe", "zero", 1, marks=pytest.mark.full),
    ],
)
def test_replicas_and_accumulation_train_as_one_process(ranks, schedule, kind, accumulate):
    ranks(4).run(replicas, schedule, kind, accumulate)
