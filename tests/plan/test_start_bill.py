"""What a start takes, and what is said where this machine allows less."""

import resource
import subprocess
import sys

import pytest

from tests.tells import tells
from torchdistpackage.config.load import loads
from torchdistpackage.environment.rendezvous import Rendezvous
from torchdistpackage.plan.memory_fit import memory_limit
from torchdistpackage.plan.run_plan import make_plan
from torchdistpackage.plan.start_bill import start_bill
from torchdistpackage.plan.step_time import unpredicted


def bill(world_size: int):
    config = loads("parallel: {tensor: 8}\nmodel: {heads: 8}", overrides=["data.global_batch=8192"])
    return start_bill(make_plan(config, world_size))


def test_only_the_keeper_of_the_store_needs_more_for_more_ranks():
    few, many = bill(1024), bill(8192)
    assert (few.communicators, few.peers) == (many.communicators, many.peers)
    assert few.rank_descriptors == many.rank_descriptors
    assert many.requests == 8 * few.requests
    assert many.descriptors - few.descriptors == 2 * 7168


@pytest.mark.parametrize(("hard", "is_said"), [(2109, True), (2110, False), (-1, False)])
def test_a_limit_below_the_bill_is_a_warning(monkeypatch, hard, is_said):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, hard))
    (*warnings,) = bill(1024).warnings()
    assert bool(warnings) == is_said
    assert all(tells(x, "2,110 open", "allows 2,109") for x in warnings)


def test_ranks_that_share_a_gpu_are_planned_with_their_part_of_it():
    job = "launch: {slurm: {ntasks-per-node: 8, gpus-per-node: 'h100:2'}}\nparallel: {data: 8}"

    def plan(*changes: str):
        return make_plan(loads(job, overrides=["data.global_batch=32", *changes]), 8)

    alone, shared = plan(), plan("launch.share_gpus=true")
    assert (alone.ranks_per_gpu, shared.ranks_per_gpu) == (1, 4)
    assert memory_limit(shared) == pytest.approx(0.2 * memory_limit(alone))
    assert unpredicted(alone) is None and "4 ranks" in unpredicted(shared)
    assert plan("launch.share_gpus=true", "launch.slurm.gpus-per-node=8").ranks_per_gpu == 1


def test_tdp_plan_says_so_under_a_real_limit():
    run = 'ulimit -n 1024; exec "$0" -m torchdistpackage plan configs/gpt_slurm.yaml --procs 1024'
    command = ["bash", "-c", f"{run} data.global_batch=2048", sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "open files, and this machine allows 1,024 (ulimit -Hn)" in " ".join(done.stdout.split())


def test_rank_0_says_so_when_it_starts(monkeypatch):
    from torchdistpackage.comm.runtime import _prepare_for_many

    given: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 1024))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: given.append(limits))
    first, other = (
        Rendezvous(rank, 1024, 0, 8, 0, "n0", (20000,), "t", "slurm") for rank in (0, 1)
    )
    assert "needs about 2,110 open files" in _prepare_for_many(first)
    assert _prepare_for_many(other) == ""
    assert given == [(1024, 1024)] * 2
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 4096))
    assert _prepare_for_many(first) == ""
