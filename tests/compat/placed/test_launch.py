"""`launch`: results, logs and failures of placed programs on ranks of their own."""

from __future__ import annotations

import logging

import pytest

from tests.compat.placed.test_programs import at, functor
from tests.host_reads import HOST, HostReads
from tests.tells import facts_pattern
from torchdistpackage.errors import LaunchError, PlacementError, RankError


def steps() -> dict:
    """Host reads of three training steps, on a program whose tensors cross both ways."""
    import torch

    F, (a, b, _), _ = functor()
    with F.under(a):
        first, tail = F(torch.nn.Linear(4, 4)), F(torch.nn.Linear(4, 1))
    with F.under(b):
        middle = F(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout()))
    optimizer = F.optimizer(torch.optim.Adam, [first, middle, tail])
    x = at(F, a, torch.ones(2, 4))
    with HostReads((*HOST, "compat/placed/mail.py")) as reads:
        for _ in range(3):
            first_half = middle(first(x))
            tail(first_half).mean().backward()
    optimizer.step()
    F.finish()
    return dict(reads.found)


def test_a_step_reads_nothing_back_from_a_device(ranks):
    """Flags of gradients, which are in host memory, alone."""
    assert ranks(2).run(steps) == [{}, {}]


def rank_and_log(devices) -> tuple:
    import torch.distributed as dist

    from torchdistpackage.compat.placed import DeviceFunctor

    logging.getLogger("mine").info("hello from %d", dist.get_rank())
    print("printed by", dist.get_rank())
    F = DeviceFunctor(devices)
    return F.program.rank, len(devices), [F.allocate_device().rank for _ in range(5)]


@pytest.mark.full
def test_a_rank_has_a_log_and_may_have_several_devices(tmp_path, capfd):
    from torchdistpackage.compat.placed import launch

    found = launch(rank_and_log, ["cpu"] * 4, num_procs=2, log_dir=tmp_path, debug=True)
    assert found == [(0, 4, [0, 0, 1, 1, 0]), (1, 4, [0, 0, 1, 1, 0])]
    for rank in (0, 1):
        assert f"hello from {rank}" in (tmp_path / f"rank{rank}.log").read_text(encoding="utf-8")
    assert sorted(capfd.readouterr().out.split("\n"))[-2:] == ["printed by 0", "printed by 1"]


def fails_on_1(devices) -> None:
    import torch

    F, (a, b, _), _ = functor()

    def wrong(t):
        raise ValueError("the tensor is not square")

    at(F, a, torch.neg)(at(F, b, wrong)(at(F, a, torch.ones(2)))).item()


@pytest.mark.full
def test_the_rank_that_fails_is_named_with_its_traceback():
    from torchdistpackage.compat.placed import launch

    with pytest.raises(RankError, match=r"rank 1 of 2 failed.*the tensor is not square"):
        launch(fails_on_1, ["cpu", "cpu"])


def test_what_cannot_start_is_refused_before_it_does():
    from torchdistpackage.compat.placed import launch

    with pytest.raises(PlacementError, match="'cuda:77' is not there"):
        launch(fails_on_1, ["cpu", "cuda:77"])
    with pytest.raises(PlacementError, match=facts_pattern("3 devices", "2 ranks")):
        launch(fails_on_1, ["cpu"] * 3, num_procs=2)
    for options, text in (
        ({"devices": 3}, "must be a list with at least one device, not 3"),
        ({"num_procs": 0}, "num_procs is 0; give 1 or more"),
        ({"seed": "a", "timeout_s": -1}, "seed is 'a'; .*timeout_s is -1; give seconds above 0"),
        ({"main": None}, "a function of the devices, not None"),
    ):
        with pytest.raises(PlacementError, match=text):
            launch(**{"main": fails_on_1, "devices": ["cpu"], **options})
    with pytest.raises(PlacementError, match="exactly 1 argument but got 0"):
        launch(lambda: None, ["cpu"])
    import threading

    lock = threading.Lock()
    with pytest.raises(LaunchError, match="cannot be run in another process"):
        launch(lambda devices: lock, ["cpu"])
