"""What stops hosts for ever, planted in the package's own code: the order linter names it."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.harness.planting import planted
from tests.tells import tells
from torchdistpackage.comm import creation, groups
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.config.load import load
from torchdistpackage.harness.lint.linter import lint
from torchdistpackage.harness.lint.report import LintReport
from torchdistpackage.layout import derive as order
from torchdistpackage.parallel.pipeline.pipeline import Pipeline
from torchdistpackage.plan.run_plan import Plan, make_plan

GRID = {"data": 2, "pipe": 2, "tensor": 2}


def step(rank: int) -> None:
    """Three stages; the first batch of messages is announced over host memory."""
    pipe = Pipeline(nn.Linear(4, 4), loss=lambda y: y.square().mean(), num_microbatches=2)
    pipe.step(torch.ones(4, 4))


def test_a_pipe_that_connects_in_its_first_batch():
    """Stage 1 is stopped until stage 2 comes, who waits to be told what stage 1 sends."""
    assert lint(step, {"pipe": 3}).ok
    with planted(groups, "_messages", "ranks, at =", "return; ranks, at ="):
        finding = lint(step, {"pipe": 3}).finding
    assert finding.kind == "first use" and len(finding.ranks) >= 2
    assert "connects the pair" in str(finding)
    with planted(groups, "connect", "if group.size() == 1", "return\n    if group.size() == 1"):
        finding = lint(step, {"pipe": 3}).finding
    assert finding.kind == "first use" and set(finding.ranks) == {1, 2}
    assert tells(str(finding), "rank 2", "pipe 2")


def groups_alone(rank: int) -> None:
    """What tpc makes before a step."""


def test_an_unequal_order_of_groups():
    assert lint(groups_alone, GRID).ok
    with planted(
        groups.Groups, "prepare", "for creation in creations:",
        "for creation in sorted(creations, key=lambda c: c.ranks, reverse=self._rank % 2 == 1):",
    ):  # fmt: skip
        finding = lint(groups_alone, GRID).finding
    assert finding.kind == "group creation" and len(finding.ranks) >= 2
    assert "new_group" in str(finding)


def test_a_group_that_only_some_join():
    with planted(
        groups.Groups, "prepare", "for creation in creations:",
        "for creation in [c for c in creations if self._rank != 3 or c.ranks != (3, 5, 7)]:",
    ):  # fmt: skip
        finding = lint(lambda rank: tpc.groups.prepare(some(rank)), GRID).finding
    assert finding.kind == "group creation" and 3 in finding.ranks
    assert "(ranks 3, 5, 7)" in str(finding)


def some(rank: int) -> list[order.Creation]:
    return [order.Creation((3, 5, 7))] if rank in (3, 5, 7) else []


# -- over all configurations ------------------------------------------------------------

CONFIGS = sorted(Path(__file__).parents[2].joinpath("configs").glob("*.yaml"))
LAYOUTS = ((1, 4, 1), (2, 2, 2), (2, 3, 1), (4, 1, 2))
"""Ranks along data, pipe and tensor."""


def made(plan: Plan) -> LintReport:
    """The groups of every rank."""
    return lint(lambda rank: tpc.groups.prepare(plan.creations(rank)), plan.topology)


def made_bound(plan: Plan) -> LintReport:
    """The same in a world that is bound to a device, from which they would be split."""

    def step(rank: int) -> None:
        dist.group.WORLD.bound_device_id = torch.device("cuda", 0)
        tpc.groups.prepare(plan.creations(rank))

    with splitting():
        return lint(step, plan.topology)


@contextmanager
def splitting() -> Iterator[None]:
    with planted(creation, "create", "_unbound(default_group) as bound", "nullcontext() as bound"):
        creation.nullcontext = nullcontext
        try:
            yield
        finally:
            del creation.nullcontext


def plan_of(config: Path, data: int, pipe: int, tensor: int) -> Plan:
    axes = {"data": data, "pipe": pipe, "tensor": tensor}
    given = [f"parallel.{axis}={size}" for axis, size in axes.items()]
    more = ["launch.local.procs=null", "data.global_batch=96", "pipeline.microbatches=4"]
    if config.stem.startswith("moe"):  # two ranks of data share its experts, where there are two
        more.append(f"parallel.expert={1 + (data % 2 == 0)}")
    return make_plan(load(str(config), [*given, *more]), data * pipe * tensor)


@pytest.mark.few(3)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_groups_of_every_configuration_are_made(config, layout):
    made(plan_of(config, *layout)).check()


def test_split_from_a_bound_world_they_would_not_be():
    """A tied embedding: ranks between the first and the last stage make a group less."""
    tied = next(path for path in CONFIGS if path.stem == "gpt_tiny")
    finding = made_bound(plan_of(tied, 2, 4, 1)).finding
    assert finding.kind == "group creation"


@pytest.mark.full
def test_nor_would_those_of_sixteen():
    slurm = next(path for path in CONFIGS if path.stem == "gpt_slurm")
    settings = load(str(slurm), [], 16)
    finding = made_bound(make_plan(settings, 16)).finding
    assert finding.kind == "group creation"
    assert made(make_plan(settings, 16)).ok


def test_a_group_that_is_split_from_a_bound_world():
    """A member that makes another group first leaves the others with a smaller communicator."""

    def bound(rank: int) -> None:
        dist.group.WORLD.bound_device_id = torch.device("cuda", 0)
        for ranks in ((0, 1, 2), (2, 3)):
            if rank in ranks:
                tpc.groups.of(ranks)

    assert lint(bound, 4).ok
    with splitting():
        finding = lint(bound, 4).finding
    assert finding.kind == "group creation" and finding.ranks == (2, 3)
    assert "ranks (3,) alone get a communicator" in str(finding)
