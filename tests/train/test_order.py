"""Every layout of the parity matrix makes its calls in one order, on paper and with threads."""

import math
from dataclasses import replace

import pytest
import torch

from tests.train import parity
from tests.train.test_parity import cases, overrides
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.ddp.naive_ddp import NaiveDDP
from torchdistpackage.harness.lint import lint
from torchdistpackage.harness.lint.programs import CallProgram, Collective, Messages, check
from torchdistpackage.harness.lint.report import LintReport
from torchdistpackage.layout.layout import Layout
from torchdistpackage.parallel.pipeline.functional import forward_backward
from torchdistpackage.schedule.actions import Action, ActionKind
from torchdistpackage.train import build as builder
from torchdistpackage.train.calls import HEADER, StepPrograms, static_report
from torchdistpackage.train.dry_run import STEPS, trial
from torchdistpackage.train.plan import Plan, make_plan

CASES = {param.id: param.values[0] for param in cases()}
THREADS = (
    *("data2", "pipe2-tied", "tensor2-sp-tied", "data2xpipe2-tied", "pipe2xtensor2"),
    *("pipe3xtensor2-sp-tied", "data2xpipe2xtensor2-sp-tied"),
)
SHARDED = ("data2", "data2xpipe2-tied", "data2xtensor2-sp-tied")
"""With threads in the small set."""


def plan_of(case: str, *more: str) -> Plan:
    degrees, sequence_parallel, tied = CASES[case]
    axes = [f"parallel.{axis}={size}" for axis, size in degrees.items()]
    axes.append(f"parallel.sequence_parallel={str(sequence_parallel).lower()}")
    config = parity.config([*overrides(degrees, tied), *axes, *more])
    return make_plan(config, math.prod(degrees.values()))


@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("case", CASES)
def test_on_paper_all_ranks_agree(case, zero):
    plan = plan_of(case, f"parallel.zero={zero}")
    for first in (True, False):
        assert static_report(plan, first=first).check().kinds


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[] if c in THREADS else pytest.mark.full) for c in CASES]
)
def test_the_real_step_makes_the_calls_of_the_paper(case):
    """Call by call on every group and towards every peer: operation, shape, dtype, operator."""
    expect_calls_of_the_paper(plan_of(case))


@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[] if c in SHARDED else pytest.mark.full) for c in CASES]
)
def test_under_zero_too(case, zero):
    """In two rounds, of which from stage 2 on each has its sums.

    In one where tensor ranks alone share gradients: from the second sum on buckets leave between
    the calls of the layers, and the paper does not say when.
    """
    rounds = 1 + (CASES[case][0]["data"] > 1)
    more = [f"train.accumulate={rounds}", f"pipeline.microbatches={2 // rounds}"]
    expect_calls_of_the_paper(plan_of(case, *more, f"parallel.zero={zero}"))


def expect_calls_of_the_paper(plan: Plan) -> None:
    report, begins = first_step(plan)
    programs = StepPrograms(plan)
    for rank, begin in enumerate(begins):
        on_paper = by_group(written(programs.of(rank)))
        assert on_paper == by_group(report.calls[rank][begin:])
        assert sum(map(len, on_paper.values())) > 1


def first_step(plan: Plan) -> tuple[LintReport, list[int]]:
    """(report, for each rank how many calls it had made when its step began)."""
    begins = [0] * plan.world_size

    def step(rank: int) -> None:
        trainer = builder.build(plan, rank, torch.device("cpu"))
        begins[rank] = len(tpc.groups.of([rank])._wire.calls[rank])
        trainer.train_step(1)  # what is read later is summed in host memory

    return lint(step, plan.topology).check(), begins


def written(program: CallProgram):
    """(ranks, call, peer) of everything in a program."""
    for op in program.ops:
        if isinstance(op, Collective):
            yield from ((tuple(program.groups[op.group][0]), call, None) for call in op.calls)
        elif isinstance(op, Messages):
            ranks = tuple(program.groups[op.group][0])
            yield from ((ranks, part.call, ranks[part.peer]) for part in op.parts)


def by_group(made) -> dict:
    found: dict = {}
    for ranks, call, peer in made:
        # headers have roads of their own
        road = peer is not None and (call.operation, call.facts == HEADER)
        found.setdefault((ranks, peer, road), []).append(call)
    return found


@pytest.mark.parametrize("layout", ["data2xpipe2", "pipe2xtensor2-sp"])
def test_a_trial_is_two_steps_of_the_run_on_less(layout):
    """Its losses are those of one rank: the transport delivers what gloo would."""
    report = trial(plan_of(layout, "data.global_batch=16")).check()
    degrees, _, tied = CASES[layout]
    assert set(map(tuple, report.results)) == {tuple(report.results[0])}
    one = parity.config([*overrides(degrees | {"data": 1}, tied), "data.global_batch=4"])
    alone = trial(make_plan(replace_batch(one, degrees["data"]), 1)).check().results[0]
    assert report.results[0] == pytest.approx(alone, rel=1e-12)


def replace_batch(config, data: int):
    """As many samples in one rank's microbatches as `data` ranks have in theirs."""
    pipeline = config.pipeline.model_copy(update={"microbatches": 2 * data})
    section = config.data.model_copy(update={"global_batch": 2 * data})
    return config.model_copy(update={"pipeline": pipeline, "data": section})


# -- shown able to fail ---------------------------------------------------------------


def unfused(plan: Plan) -> Plan:
    """1F1B as neighbours would get stuck in it: each first sends what it has."""
    last = len(plan.schedule.programs) - 1

    def around(action: Action) -> tuple[Action, ...]:
        s, m, forward = action.stage, action.microbatch, action.kind is ActionKind.F
        source, target = (s - 1, s + 1) if forward else (s + 1, s - 1)
        receive, send = (
            (ActionKind.RECV_F, ActionKind.SEND_F)
            if forward
            else (ActionKind.RECV_B, ActionKind.SEND_B)
        )
        before = (Action(s, receive, m),) if 0 <= source <= last else ()
        after = (Action(s, send, m),) if 0 <= target <= last else ()
        return (*before, action, *after)

    return with_programs(
        plan,
        tuple(
            tuple(a for step in program if isinstance(step, Action) and not step.kind.is_message
                  for a in around(step))
            for program in plan.schedule.programs
        ),
    )  # fmt: skip


def with_programs(plan: Plan, programs: tuple) -> Plan:
    schedule = replace(plan.schedule, programs=programs)
    return replace(plan, pipeline=replace(plan.pipeline, schedule=schedule))


def test_a_schedule_that_gets_stuck_is_found_on_paper_and_with_threads():
    plan = unfused(plan_of("pipe3"))
    for report in (static_report(plan, first=False), trial_of(plan)):
        assert report.finding.kind == "cycle"
        assert "send (" in str(report) and "to rank" in str(report)
    assert "at 1SEND_F1" in str(static_report(plan, first=False))


def test_a_schedule_with_two_messages_swapped_is_found():
    plan = plan_of("pipe2")
    first, second = plan.schedule.programs
    order = [str(step) for step in second]
    swapped = list(second)
    i, j = order.index("1RECV_F0"), next(k for k, t in enumerate(order) if "1SEND_B0" in t)
    swapped[i], swapped[j] = swapped[j], swapped[i]
    assert static_report(with_programs(plan, (first, tuple(swapped)))).finding is not None


def trial_of(plan: Plan) -> LintReport:
    """Its steps as a trial has them: the first places messages along an order of its own, and lets
    no gradient leave early; the second is as all later ones."""

    def steps(rank: int) -> None:
        trainer = builder.build(plan, rank, torch.device("cpu"))
        for number in range(1, STEPS + 1):
            trainer.train_step(number)

    return lint(steps, plan.topology)


@pytest.mark.parametrize(
    ("case", "kind"), [("pipe2-tied", "cycle"), ("data2xpipe2-tied", "launch order")]
)
def test_a_tied_gradient_that_does_not_leave_last_is_found(case, kind, monkeypatch):
    """It leaves on the last stage before the message that the first one waits for: with one
    replica on the group of the messages, with more on one that may share the device with it."""
    plan = plan_of(case)
    programs = [StepPrograms(plan).of(rank) for rank in range(plan.world_size)]
    assert check(programs, plan.topology).ok
    made = builder.ParamSpec
    monkeypatch.setattr(builder, "ParamSpec", lambda *args, deferred: made(*args))
    for report in (trial_of(plan), check(list(map(not_last, programs)), plan.topology)):
        assert report.finding.kind == kind
        assert "all_reduce" in str(report) and "waits in receive" in str(report)


def not_last(program: CallProgram) -> CallProgram:
    """The same where the gradients leave as soon as they are there."""
    gradients = [op for op in program.ops if getattr(op, "label", "") == "gradients"]
    rest = [op for op in program.ops if op not in gradients]
    at = max(i for i, op in enumerate(rest) if isinstance(op, Messages))
    at += rest[at].parts[0].call.operation == "receive"
    return replace(program, ops=(*rest[:at], *gradients, *rest[at:]))


def test_replicas_that_reduce_a_tied_weight_in_two_orders_are_found():
    """One sums over data first, the other over all that hold the tied weight."""
    plan = plan_of("data2xpipe2-tied")

    def step(rank: int) -> None:
        trainer = builder.build(plan, rank, torch.device("cpu"))
        if tpc.rank == 2:
            launch, last = trainer.reducer.departures._launch, trainer.reducer.num_buckets - 1
            trainer.reducer.departures._launch = lambda b: launch(last - b)
        trainer.train_step(1)

    assert lint(step, plan.topology).finding is not None


def test_naive_ddp_and_forward_backward_pass():
    """The seed's own loop: 1F1B over the pipe group, gradients averaged over data."""

    def step(rank: int) -> float:
        torch.manual_seed(3)
        stage = NaiveDDP(torch.nn.Linear(4, 4), num_grad_acc_iter=4)
        torch.manual_seed(tpc.get_dp_rank())
        inputs = torch.randn(8, 4) if tpc.is_first_in_pipeline_group() else None

        def forward(x):
            y = stage(x)
            return y.square().mean() if tpc.is_last_in_pipeline_group() else y

        for _ in range(2):
            stage.zero_grad()
            forward_backward(None, forward, None, inputs, num_microbatches=4)
            stage.reduce_gradients()
        return sum(p.grad.sum().item() for p in stage.parameters())

    report = lint(step, [("data", 2), ("pipe", 2)]).check()
    assert report.results[0] == report.results[2] and report.results[1] == report.results[3]
    assert {kind.name for kind in report.kinds} >= {"data", "pipe"}


def test_a_tied_weight_in_naive_ddp_does_not_hold_up_the_messages():
    """Its bucket leaves the last stage before the message that the first one waits for."""

    def step(rank: int) -> None:
        stage = torch.nn.Linear(4, 4, bias=False)
        ddp = NaiveDDP(stage, layouts={"weight": Layout("tied", (4, 4), stages=(0, 1))})

        def forward(x):
            y = ddp.module(x)
            return y.square().mean() if tpc.is_last_in_pipeline_group() else y

        inputs = torch.ones(4, 4) if tpc.is_first_in_pipeline_group() else None
        for _ in range(2):
            forward_backward(None, forward, None, inputs, 2, reducer=ddp.reducer)

    for axes in ({"pipe": 2}, {"data": 2, "pipe": 2}):
        lint(step, axes).check()


def test_of_a_users_own_model_it_says_what_is_not_known():
    own = ["model.name=null", "model.target=tests.train.sources:build", "model.args={width: 4}",
           "model.loss=tests.train.sources:squared_error", "data.target=tests.train.sources:Line",
           "data.args={}", "data.global_batch=8", "pipeline.microbatches=2"]  # fmt: skip
    plan = make_plan(parity.config([*own, "parallel.pipe=2", "parallel.data=2"]), 4)
    report = static_report(plan).check()
    assert "not known: calls inside tests.train.sources:build" in str(report)
    assert sum(kind.num_messages for kind in report.kinds) > 0
    assert trial(plan).check().unknown == ()


def test_thousands_of_ranks_are_checked_on_paper():
    big = ["parallel.tensor=8", "parallel.pipe=8", "parallel.data=16", "pipeline.microbatches=8",
           "data.global_batch=512", "model.layers=24", "model.heads=16", "model.dim=1024",
           "model.vocab=50257", "data.seq_len=1024"]  # fmt: skip
    plan = make_plan(parity.config(big), 1024)
    kinds = {kind.name: kind for kind in static_report(plan).check().kinds}
    assert kinds["pipe"].num_messages == 128 * 7 * 8 * 3  # headers, outputs, gradients
    assert kinds["global"].num_ranks == 1024 and kinds["tensor"].num_groups == 128
