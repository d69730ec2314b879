"""Which memory the strict transport takes to be on the device, and what it refuses."""

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.harness.planting import planted
from torchdistpackage.comm import primitives
from torchdistpackage.comm.creation import world as everybody
from torchdistpackage.ddp.naive_ddp import NaiveDDP
from torchdistpackage.errors import ConfigError, RaceError
from torchdistpackage.harness.late.strict import DEVICE
from torchdistpackage.testing import mirror

STRICT = "late,strict"


@pytest.fixture
def strict():
    with mirror(2, transport=STRICT):
        yield


MADE = {
    "made": lambda: torch.ones(4),
    "from a list": lambda: torch.tensor([1.0, 2.0]),
    "a view": lambda: torch.ones(4)[1:3],
    "in another dtype": lambda: torch.ones(4).double(),
    "computed": lambda: torch.cat([torch.ones(2) * 2, torch.ones(3)]),
    "a gradient": lambda: gradient(),
    "of a layer": lambda: nn.Linear(2, 2).weight.detach(),
    "like another": lambda: torch.empty_like(torch.ones(3)),
    "written in place": lambda: torch.zeros(3).scatter_(0, torch.tensor([1]), 1.0),
    "taken there": lambda: torch.ones(3).cpu().to(primitives.device_of(everybody())),
    "random": lambda: torch.randn(3, generator=torch.Generator().manual_seed(0)),
}
IN_HOST = {
    "copied to the host": lambda: torch.ones(3).cpu(),
    "by name": lambda: torch.ones(3).to("cpu"),
    "computed there": lambda: torch.ones(3).cpu() * 2,
    "like another there": lambda: torch.zeros_like(torch.ones(3).cpu()),
}


def gradient() -> torch.Tensor:
    x = torch.ones(3, requires_grad=True)
    (x * 2).sum().backward()
    return x.grad


@pytest.mark.parametrize("name", MADE)
def test_what_a_user_makes_is_on_the_device(strict, name):
    x = MADE[name]()
    assert x.device == DEVICE
    dist.all_reduce(x)


@pytest.mark.parametrize("name", IN_HOST)
def test_what_is_taken_to_the_host_is_refused(strict, name):
    x = IN_HOST[name]()
    assert x.device == torch.device("cpu") != DEVICE
    with pytest.raises(RaceError, match=r"all_reduce \(number 1\).*shape \(3,\).*in host memory"):
        dist.all_reduce(x)


def test_tensors_of_both_kinds_are_refused(strict):
    rooms = [torch.empty(2), torch.empty(2).cpu()]
    with pytest.raises(RaceError, match="in host memory"):
        dist.all_gather(rooms, torch.ones(2))


def test_a_result_that_is_read_too_early_is_named_with_both_lines(strict):
    x = torch.ones(3)
    work = dist.all_reduce(x, async_op=True)
    y = x.view(-1)[:1]  # to look at it in another way is no read
    with pytest.raises(RaceError, match=r"before wait\(\)") as e:
        y + 1
    assert len(re.findall(r"test_strict.py:\d+", str(e.value))) >= 2
    work.wait()
    assert (y + 1).item() == 3


def test_a_dtype_that_nccl_does_not_know(strict):
    with pytest.raises(RaceError, match="int16, which NCCL does not know"):
        dist.all_reduce(torch.ones(3, dtype=torch.int16))
    assert primitives.broadcast(torch.ones(3, dtype=torch.int16), everybody()).sum() == 3


def test_numpy_of_the_package_on_a_device_tensor(strict):
    wrong = planted(
        NaiveDDP, "forward", "return ", "next(self.parameters()).detach().numpy(); return "
    )
    net = NaiveDDP(nn.Linear(2, 2))
    net(torch.ones(1, 2))
    with wrong, pytest.raises(RaceError, match=r"numpy\(\) of a tensor on the device"):
        net(torch.ones(1, 2))


def test_afterwards_everything_is_as_it_was():
    run_backward, device = torch.autograd._engine_run_backward, None
    with mirror(2, transport=STRICT):
        device = primitives.device_of(everybody())
    assert device == DEVICE
    with mirror(2):
        assert primitives.device_of(everybody()) == torch.device("cpu") != DEVICE
        dist.all_reduce(torch.ones(3).cpu())
    assert torch.autograd._engine_run_backward is run_backward
    with pytest.raises(ConfigError, match="strict"), mirror(2, transport="late,strikt"):
        pass


def arguments(x: torch.Tensor, y: torch.Tensor) -> None:
    dist.all_reduce(x)
    z = primitives.start_all_reduce(y, everybody()).wait()
    assert z.sum() == 4 and x.device == DEVICE


def test_arguments_of_real_ranks_are_on_the_device(ranks):
    ranks(2).run(arguments, torch.ones(3), torch.ones(2), transport="late:early,strict")
