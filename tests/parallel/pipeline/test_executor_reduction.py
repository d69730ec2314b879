"""Data parallel over a pipeline: every schedule, every way to reduce, against one process."""

import pytest
import torch
from torch import Tensor, nn

from torchdistpackage.comm.flight_recorder import recorder
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.ddp.naive_ddp import NaiveDDP
from torchdistpackage.ddp.zero.optimizer import ZeroOptimizer
from torchdistpackage.parallel.pipeline.executor import Executor
from torchdistpackage.schedule.actions import Schedule, flatten
from torchdistpackage.schedule.generators import GENERATORS, build

DIM, PER_RANK, MICROBATCHES, STEPS = 6, 2, 4, 3
CPU = torch.device("cpu")
TINY_MIB = 0.0004
"""Buckets of a parameter or two."""


class Piece(nn.Module):
    """One stage: a norm, a weight used twice, one that nobody uses, one that others have too, and
    a convolution."""

    def __init__(self, everywhere: nn.Linear):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.twice = nn.Linear(DIM, DIM)
        self.spare = nn.Linear(DIM, DIM)
        self.out = nn.Linear(DIM, DIM, bias=False)
        self.conv = nn.Conv1d(1, 1, 3, padding=1)
        self.everywhere = everywhere

    def forward(self, x: Tensor) -> Tensor:
        h = self.twice(torch.tanh(self.twice(self.norm(x))))
        h = self.conv(self.out(h)[:, None])[:, 0]
        return x + self.everywhere(torch.tanh(h))


class Pieces(nn.Module):
    """Those of one rank, which is how wrappers of the whole see each forward."""

    def __init__(self, pieces: dict[int, Piece]):
        super().__init__()
        self.pieces = nn.ModuleDict({str(stage): piece for stage, piece in pieces.items()})

    def forward(self, stage: int, x: Tensor) -> Tensor:
        return self.pieces[str(stage)](x)


def pieces(schedule: Schedule) -> dict[int, Piece]:
    """All stages; those of one pipe index share a layer."""
    torch.manual_seed(1)
    shared = [nn.Linear(DIM, DIM) for _ in schedule.programs]
    return {s: Piece(shared[place]).double() for s, place in enumerate(schedule.placement)}


def batch(step: int, num_data: int) -> tuple[Tensor, Tensor]:
    """(microbatch, data index, sample, DIM): inputs and targets."""
    draw = torch.Generator().manual_seed(step)
    shape = (2, MICROBATCHES, num_data, PER_RANK, DIM)
    return torch.randn(shape, generator=draw, dtype=torch.float64).unbind()


def truth_of(schedule: Schedule, num_data: int) -> list[dict[str, Tensor | None]]:
    """Weights and gradients of one process after each step."""
    whole = pieces(schedule)
    named = {f"{s}.{n}": p for s, piece in whole.items() for n, p in piece.named_parameters()}
    parameters = list({id(p): p for p in named.values()}.values())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    history = []
    for step in range(STEPS):
        optimizer.zero_grad()
        x, target = (t.flatten(0, 2) for t in batch(step, num_data))
        for piece in whole.values():
            x = piece(x)
        (x - target).square().mean().backward()
        grads = {n: None if p.grad is None else p.grad.clone() for n, p in named.items()}
        optimizer.step()
        history.append((grads, {n: p.detach().clone() for n, p in named.items()}))
    return history


class Stages:
    """My stages, and a step over the pipe group."""

    def __init__(self, schedule: Schedule):
        self.pipe, self.data = tpc.get_group("pipe"), tpc.get_group("data")
        self.executor = Executor(schedule, self.pipe, device=CPU)
        whole = pieces(schedule)
        self.module = Pieces({s: whole[s] for s in self.executor.stages})
        self.named = {
            f"{s}.{n}": p for s in self.executor.stages for n, p in whole[s].named_parameters()
        }
        self.parameters = {s: list(whole[s].parameters()) for s in self.executor.stages}

    def run(self, step: int, module: nn.Module, **options: object) -> None:
        x, target = (t[:, self.data.rank()] for t in batch(step, self.data.size()))

        def forward(stage: int, m: int, received: object) -> Tensor:
            given = x[m] if self.executor.is_first_stage(stage) else received
            y = module(stage, given)
            if not self.executor.is_last_stage(stage):
                return y
            return (y - target[m]).square().mean() / MICROBATCHES

        self.executor.run(forward, **{"parameters": self.parameters, **options})


def expect(mine: dict[str, Tensor | None], truth: dict[str, Tensor | None]) -> None:
    for name, value in mine.items():
        torch.testing.assert_close(value, truth[name], rtol=0, atol=1e-11, msg=name)


def as_one_process(name: str, kinds: list[str]) -> None:
    tpc.setup_process_groups([("data", 2), ("pipe", 2)])
    schedule = build(name, 2, MICROBATCHES)
    truth = truth_of(schedule, 2)
    for kind in kinds:
        stages = Stages(schedule)
        if kind.startswith("zero"):
            whole = stages.module.pieces if kind.endswith("list") else stages.module
            optimizer = ZeroOptimizer(
                torch.optim.SGD(whole.parameters(), lr=0.1),
                whole,
                stage=int(kind.split()[1]),
                group=stages.data,
                bucket_cap_mb=TINY_MIB,
            )
            module, reducer = stages.module, optimizer.reducer
        else:
            options = {"sync": True} if kind == "at the end" else {}
            module = NaiveDDP(
                stages.module, process_group=stages.data, bucket_cap_mb=TINY_MIB, **options
            )
            optimizer, reducer = torch.optim.SGD(module.parameters(), lr=0.1), module.reducer
        for step, (grads, weights) in enumerate(truth):
            optimizer.zero_grad()
            given = {} if kind == "not told" else {"parameters": stages.parameters}
            stages.run(step, module, **{"parameters": None, **given}, reducer=reducer)
            reducer.finish()
            if not kind.startswith("zero"):
                expect({n: p.grad for n, p in stages.named.items()}, grads)
            optimizer.step()
            if kind.startswith("zero 3"):
                optimizer.finish()
            expect({n: p.detach() for n, p in stages.named.items()}, weights)


KINDS = ["ddp", "zero 1", "zero 2", "zero 3", "zero 3 list"]
"""A list of stages has no forward of its own: each of them is called."""


def schedules():
    """Every schedule with every reducer; in the small set with one each."""
    names = [name for name in GENERATORS if name != "forward"]
    small = [(name, [KINDS[at % len(KINDS)]]) for at, name in enumerate(names)]
    return [*small, *(pytest.param(name, KINDS, marks=pytest.mark.full) for name in names)]


@pytest.mark.few(2)
@pytest.mark.parametrize(("name", "kinds"), schedules())
def test_every_schedule_trains_as_one_process_with_every_reducer(ranks, name, kinds):
    ranks(4).run(as_one_process, name, kinds, timeout_s=60)


def leaves_in_the_last_backwards(name: str) -> None:
    tpc.setup_process_groups([("data", 2), ("pipe", 2)])
    schedule = build(name, 2, MICROBATCHES)
    stages = Stages(schedule)
    ddp = NaiveDDP(stages.module, process_group=stages.data, bucket_cap_mb=TINY_MIB)
    reducer, events = ddp.reducer, []
    program = list(flatten(schedule.programs[stages.pipe.rank()]))
    last = {a.stage: i for i, a in enumerate(program) if a.kind.gives_gradient}
    owners = {
        id(p): [s for s, held in stages.parameters.items() if any(p is q for q in held)]
        for p in reducer.parameters
    }
    reducer.on_launch = lambda b: events.append((program.index(recorder.action), b))
    for parameter in reducer.parameters:
        parameter.register_post_accumulate_grad_hook(
            lambda _: events.append((program.index(recorder.action), None))
        )
    for step in range(3):
        ddp.zero_grad()
        events.clear()
        stages.run(step, ddp, reducer=reducer)
        launched = [b for _, b in events if b is not None]
        assert launched == list(range(reducer.num_buckets)), "each once, in the one order"
        reducer.finish()
        order = [b is not None for _, b in events]
        if step == 0:
            assert order.index(True) == sum(not leaves for leaves in order), "learning"
            continue
        for at, b in events:
            if b is None:
                continue
            for i in reducer.grad_buckets.buckets[b].members:
                for stage in owners[id(reducer.parameters[i])]:
                    assert at >= last[stage], (step, b, stage, program[at])
        gradients_after = order[order.index(True) :].count(False)
        assert gradients_after, "the rest of the run goes on meanwhile"
        if len(stages.executor.stages) > 1:
            assert events[order.index(True)][0] < max(at for at, _ in events)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h1", "zb-v"])
def test_buckets_leave_in_the_last_backward_of_their_parameters(ranks, name):
    ranks(4).run(leaves_in_the_last_backwards, name, timeout_s=60)
