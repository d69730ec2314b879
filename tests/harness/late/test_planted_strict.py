"""What NCCL would refuse, planted in the package's own code: the strict transport names it."""

import re

import pytest
import torch
from torch import nn

from tests.harness.late.programs import PROGRAMS
from tests.harness.planting import planted
from tests.host_reads import HostReads
from torchdistpackage.comm.creation import world as everybody
from torchdistpackage.ddp.bucket_comm import AllReduceBucket
from torchdistpackage.ddp.naive_ddp import NaiveDDP
from torchdistpackage.ddp.reference import ReferenceDDP
from torchdistpackage.errors import RaceError
from torchdistpackage.optim import clip
from torchdistpackage.testing import mirror

STRICT = "late,strict"


@pytest.mark.few(4)
@pytest.mark.parametrize("name", PROGRAMS)
def test_right_programs_pass_with_the_same_bits(name):
    program = PROGRAMS[name]
    with mirror(4):
        expected = program()
    with mirror(4, transport=STRICT):
        got = program()
    assert all(map(torch.equal, got, expected)) and len(got) == len(expected)


def empty_stage() -> torch.Tensor:
    return clip.clip_grad_norm_([], 1.0, group=everybody())


def test_the_norm_of_an_empty_stage():
    with mirror(2, transport=STRICT):
        empty_stage()
    wrong = planted(clip, "grad_sq_norm", "dtype=wide, device=device)", "dtype=wide)")
    with wrong, mirror(2, transport=STRICT), pytest.raises(RaceError, match="in host memory") as e:
        empty_stage()
    assert "all_reduce" in str(e.value) and re.search(
        r"made at .*clip.py:\d+ grad_sq_norm", str(e.value)
    )


def average() -> None:
    net = ReferenceDDP(nn.Linear(3, 2), everybody())
    net(torch.ones(1, 3)).sum().backward()
    net.average()


def test_a_word_of_the_reference():
    with mirror(2, transport=STRICT):
        average()
    wrong = planted(
        ReferenceDDP, "average", "dtype=torch.int32, device=parameter.device", "dtype=torch.int32"
    )
    with wrong, mirror(2, transport=STRICT), pytest.raises(RaceError, match="in host memory") as e:
        average()
    assert re.search(r"made at .*reference.py:\d+ average", str(e.value))


# -- a read that stops the host --------------------------------------------------------


def steps() -> HostReads:
    net = NaiveDDP(nn.Linear(4, 4), bucket_cap_mb=0.004)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step() -> None:
        net(torch.ones(2, 4)).sum().backward()
        optimizer.step()

    step()
    with HostReads() as reads:
        step()
        step()
    return reads


def test_a_host_read_is_counted_where_it_is():
    with mirror(2):
        assert not steps().found
    wrong = planted(
        AllReduceBucket,
        "wait",
        "self._work = None",
        "self._work = float(self._flags[0]) * 0",
    )
    with wrong, mirror(2):
        found = steps().found
    ((where, number),) = found.items()
    assert re.fullmatch(r"ddp/bucket_comm.py:\d+ scalar_dense", where) and number == 2
