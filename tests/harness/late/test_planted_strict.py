"""What NCCL would refuse, planted in the package's own code: the strict transport names it."""

import re

import pytest
import torch
from torch import nn

from tests.harness.late.programs import PROGRAMS
from tests.harness.planting import planted
from tests.host_reads import HostReads
from torchdistpackage.comm import primitives
from torchdistpackage.comm.creation import world as everybody
from torchdistpackage.comm.tensor_channel import TensorChannel
from torchdistpackage.ddp.bucket_comm import AllReduceBucket
from torchdistpackage.ddp.naive_ddp import NaiveDDP
from torchdistpackage.ddp.reference import ReferenceDDP
from torchdistpackage.errors import RaceError, RankError
from torchdistpackage.optim import clip
from torchdistpackage.parallel.pipeline import function_call, functional
from torchdistpackage.testing import mirror

STRICT = "late,strict"


@pytest.mark.few(9)
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


# -- pipelines of two real ranks -------------------------------------------------------


def pipeline(with_lengths: bool = False) -> None:
    """Two stages that each have a batch of their own in host memory, as a loader gives it."""
    stage = nn.Linear(4, 4)
    group, device = everybody(), primitives.device_of(everybody())
    last = group.rank() == 1

    def forward(given):
        *received, own = given if isinstance(given, list) else [given]
        if last:
            return (stage(received[0]) - own.to(device)).square().mean()
        lengths = torch.full((2,), 4)
        return stage(own.to(device)), lengths.cpu() if with_lengths else lengths

    batch = torch.ones(4, 4).cpu()
    functional.forward_backward(None, forward, None, [batch], num_microbatches=2, group=group)


def test_rooms_where_the_batch_is(ranks):
    ranks(2).run(pipeline, transport=STRICT)
    with pytest.raises(RankError, match="in host memory") as e:
        ranks(2).run(pipeline_with_rooms_where_the_batch_is, transport=STRICT)
    assert re.search(r"receive [01] \(number \d+\)", str(e.value))


def pipeline_with_rooms_where_the_batch_is() -> None:
    with planted(function_call, "_device", "if is_queued(group):", "if False:"):
        pipeline()


def test_a_member_of_a_message_in_host_memory(ranks):
    with pytest.raises(RankError, match="in host memory") as e:
        ranks(2).run(pipeline, with_lengths=True, transport=STRICT)
    assert "shape (2,) and dtype int64" in str(e.value)


def test_headers_among_the_messages(ranks):
    """Only a tag would tell them apart."""
    with pytest.raises(RankError, match="NCCL ignores tags") as e:
        ranks(2).run(pipeline_with_headers_among_messages, transport="late")
    assert "RaceError" in str(e.value)


def pipeline_with_headers_among_messages() -> None:
    with planted(
        TensorChannel,
        "__init__",
        "P2PChannel(on_cpu(group), timeout_s",
        "P2PChannel(group, timeout_s",
    ):
        pipeline()


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
