"""Every layout of the parity matrix makes its calls in one order, with threads as ranks."""

import math
from dataclasses import replace

import pytest
import torch

from tests.train import parity
from tests.train.test_parity import cases, overrides
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.ddp.param_spec import ParamSpec
from torchdistpackage.harness.lint.linter import lint
from torchdistpackage.harness.lint.report import LintReport
from torchdistpackage.plan.run_plan import Plan, make_plan
from torchdistpackage.schedule.actions import Action, ActionKind
from torchdistpackage.train import build as builder
from torchdistpackage.train.dry_run import STEPS, trial

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


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[] if c in THREADS else pytest.mark.full) for c in CASES]
)
def test_all_ranks_agree(case):
    expect_agreement(plan_of(case))


@pytest.mark.few(2)
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[] if c in SHARDED else pytest.mark.full) for c in CASES]
)
def test_under_zero_too(case, zero):
    """In two rounds where data ranks share gradients, of which from stage 2 on each has its
    sums."""
    rounds = 1 + (CASES[case][0]["data"] > 1)
    more = [f"train.accumulate={rounds}", f"pipeline.microbatches={2 // rounds}"]
    expect_agreement(plan_of(case, *more, f"parallel.zero={zero}"))


def expect_agreement(plan: Plan) -> None:
    """Every rank of two real steps calls, and what it calls meets."""
    report = trial(plan).check()
    assert all(report.calls) and report.kinds


@pytest.mark.few(1)
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


def test_a_schedule_that_gets_stuck_is_found():
    report = trial_of(unfused(plan_of("pipe3")))
    assert report.finding.kind == "cycle"
    assert "send (" in str(report) and "to rank" in str(report)


def test_a_schedule_with_two_messages_swapped_is_found():
    plan = plan_of("pipe2")
    first, second = plan.schedule.programs
    order = [str(step) for step in second]
    swapped = list(second)
    i, j = order.index("1RECV_F0"), next(k for k, t in enumerate(order) if "1SEND_B0" in t)
    swapped[i], swapped[j] = swapped[j], swapped[i]
    assert trial_of(with_programs(plan, (first, tuple(swapped)))).finding is not None


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
    made = ParamSpec.from_layout

    def early(*args, **options) -> ParamSpec:
        return replace(made(*args, **options), deferred=False)

    monkeypatch.setattr(ParamSpec, "from_layout", early)
    report = trial_of(plan_of(case))
    assert report.finding.kind == kind
    assert "all_reduce" in str(report) and "waits in receive" in str(report)


def test_replicas_that_reduce_a_tied_weight_in_two_orders_are_found():
    """One sums over data first, the other over all that hold the tied weight."""
    plan = plan_of("data2xpipe2-tied")

    def step(rank: int) -> None:
        trainer = builder.build(plan, rank, torch.device("cpu"))
        if tpc.rank == 2:
            launch, last = trainer.reducer._launch, trainer.reducer.num_buckets - 1
            trainer.reducer._launch = lambda b: launch(last - b)
        trainer.train_step(1)

    assert lint(step, plan.topology).finding is not None


def test_a_users_own_model_is_run_or_its_groups_are_made():
    own = ["model.name=null", "model.target=tests.train.sources:build", "model.args={width: 4}",
           "model.loss=tests.train.sources:squared_error", "data.target=tests.train.sources:Line",
           "data.args={}", "data.global_batch=8", "pipeline.microbatches=2"]  # fmt: skip
    plan = make_plan(parity.config([*own, "parallel.pipe=2", "parallel.data=2"]), 4)
    report = trial(plan, 0).check()
    assert report.unknown and not report.kinds
    report = trial(plan).check()
    assert report.unknown == () and sum(kind.num_messages for kind in report.kinds) > 0
