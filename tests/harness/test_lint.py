"""Steps run with threads as ranks: right ones pass with the right numbers, wrong ones are named."""

import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

from tests.harness import lint_steps as steps
from tests.tells import tells
from torchdistpackage.comm.flight_recorder import recorder
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.errors import CommError, LaunchError, TopologyError
from torchdistpackage.harness.lint.linter import lint
from torchdistpackage.harness.lint.report import LintReport


@pytest.mark.parametrize("step", [steps.collectives, steps.messages])
def test_the_transport_delivers(step):
    lint(step, 3).check()


def test_every_rank_has_tpc_groups_and_random_numbers_of_its_own():
    def step(rank: int) -> tuple[int, int, float]:
        dist.all_reduce(x := torch.tensor([float(rank)]), group=tpc.get_group("pipe"))
        return tpc.get_dp_rank(), tpc.rank, x.item()

    report = lint(step, {"data": 2, "pipe": 2}).check()
    assert report.results == ((0, 0, 1.0), (0, 1, 1.0), (1, 2, 5.0), (1, 3, 5.0))
    assert [(k.name, k.num_groups, k.num_calls) for k in report.kinds] == [("pipe", 2, 2)]
    drawn = lint(steps.own_numbers, 3).check().results
    assert len(set(drawn)) == 1 and len(set(drawn[0])) == 4


WRONG = [
    (steps.swapped, 2, "disagreement", "call 1 of group data .ranks 0, 1. is"),
    (steps.shapes, 2, "disagreement", "they differ in shape"),
    (steps.dtypes, 2, "disagreement", "they differ in dtype"),
    (steps.roots, 2, "disagreement", "they differ in root"),
    (steps.sizes, 2, "disagreement", r"rank 1 gives rank 0 \(2,\), but that has room for \(1,\)"),
    (steps.lengths, 2, "disagreement", r"send \(elements 3 .* but rank 1 \(data 1\) receive"),
    (steps.missing, 3, "missing", r"which rank 1 \(data 1\) has not entered, and it has returned"),
    (steps.not_received, 2, "missing", r"has issued send \(elements 3 dtype float32\) to rank 1"),
    (steps.sends_first, 2, "cycle", r"rank 0 \(data 0\) waits in send .* to rank 1 \(data 1\)"),
    (steps.batch_before_collective, 2, "cycle",
     r"waits in call 1 of group data .* which rank 1 \(data 1\) can only make after a call"),
    (steps.message_against_collective, {"data": 2, "tensor": 2}, "cycle",
     r"rank 0 \(data 0 tensor 0\) waits in call 1 of group data \(ranks 0, 2\), all_reduce"),
    (steps.groups_in_a_circle, 3, "group creation", "new_group"),
    (steps.two_under_way, {"data": 2, "tensor": 2}, "launch order",
     r"rank 0 .data 0 tensor 0. .* call 1 of group data \(ranks 0, 2\), all_reduce"),
    (steps.prefetch, 2, "launch order",
     r"has issued receive .elements 3 dtype float32. from rank 0"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("step", "axes", "kind", "text"), WRONG, ids=lambda x: getattr(x, "__name__", "")
)
def test_what_is_wrong_is_named_with_the_stacks_of_both(step, axes, kind, text):
    report = lint(step, axes)
    assert report.finding.kind == kind
    with pytest.raises(CommError, match=text):
        report.check()
    stacks = str(report).count("stack of rank")
    assert stacks == (1 if kind == "missing" else len(report.finding.ranks))
    assert str(report).count("lint_steps.py") >= stacks
    assert "harness/lint/" not in str(report)
    assert "thread_ranks/" not in str(report)


def test_calls_on_two_groups_in_one_order_or_waited_for_pass():
    lint(steps.one_order, {"data": 2, "tensor": 2}).check()


def test_torch_ddp_runs_as_a_step():
    """Its reducer takes the future of each bucket's work; gradients are the mean."""
    report = lint(steps.torch_ddp, 2).check()
    (mean, alone), (same, other) = report.results
    assert torch.equal(mean, same) and torch.allclose(mean, (alone + other) / 2, atol=1e-12)
    assert not torch.allclose(alone, other)
    assert report.kinds[0].num_calls >= 4


def test_a_future_outside_of_a_backward_is_done_at_once():
    lint(steps.futures, 3).check()


def test_the_rank_that_raised_comes_first_and_the_others_end():
    report = lint(steps.raising, 3)
    assert report.finding.kind == "exception" and report.finding.ranks == (1,)
    assert tells(str(report), "rank 1", "data 1", "KeyError", "'the one that failed'")
    assert "lint_steps.py" in str(report) and "the others just end" not in str(report)
    assert not [t for t in threading.enumerate() if t.name.startswith("rank ")]


def test_a_rank_that_computes_for_ever_is_named_after_the_limit():
    began = time.monotonic()
    report = lint(steps.for_ever, 3, limit_s=0.5)
    assert time.monotonic() - began < 5
    assert report.finding.kind == "time" and report.finding.ranks == (1,)
    assert "in for_ever" in str(report)
    assert tells(str(report), "rank 2", "data 2", "call 1", "ranks 0, 1, 2")
    assert not [t for t in threading.enumerate() if t.name.startswith("rank ")]


def test_one_lint_at_a_time_and_axes_that_are_none():
    def inside(rank: int) -> None:
        with pytest.raises(CommError, match="ranks already run as threads of this process"):
            lint(steps.missing, 1)

    lint(inside, 1).check()
    with pytest.raises(TopologyError):
        lint(steps.missing, [("data", 0)])


def state() -> tuple:
    return (
        dist.distributed_c10d._world, dist.distributed_c10d._hash_ranks_to_str, sys.excepthook,
        dist.is_initialized(), tpc.is_set, dict(vars(recorder)), torch.initial_seed(),
        torch.get_rng_state().sum().item(), torch.get_default_dtype(), torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark,
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.get_float32_matmul_precision(),
    )  # fmt: skip


@pytest.mark.parametrize(
    "step", [steps.collectives, steps.sends_first, steps.raising, steps.settings]
)
def test_nothing_is_left_behind(step):
    before = state()
    lint(step, 2 if step is steps.sends_first else 3)
    assert state() == before
    with pytest.raises(LaunchError):
        tpc.get_dp_rank()


def beside_gloo() -> None:
    """A process that is a rank of a real world lints, and its world is as it was."""
    tpc.setup_process_groups([("data", 2)])
    x = torch.ones(2)
    dist.all_reduce(x)
    before = state()
    lint(steps.collectives, [("data", 2), ("tensor", 2)]).check()
    seen: list = []

    def elsewhere(rank: int) -> None:
        """A thread that is no rank sees the process' own world meanwhile."""
        other = threading.Thread(target=lambda: seen.append((dist.get_world_size(), tpc.rank)))
        other.start()
        other.join()

    lint(elsewhere, 1).check()
    assert seen == [(2, dist.get_rank())]
    assert lint(steps.swapped, 2).finding is not None
    assert state() == before
    dist.all_reduce(x, group=tpc.get_group("data"))
    assert x[0] == 4 and tpc.get_dp_rank() == dist.get_rank()


def test_real_groups_of_the_process_go_on(ranks):
    ranks(2).run(beside_gloo)


def test_a_report_prints_what_agreed():
    report = lint(lambda rank: dist.barrier(), 2)
    assert isinstance(report, LintReport)
    assert str(report).startswith("data  1 group of 2  1 collective, 0 messages")
    assert str(report).endswith("orders agree")
