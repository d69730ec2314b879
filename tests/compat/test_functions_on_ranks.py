"""What `forward_backward` makes a rank wait for: host reads, the order of calls, the transport."""

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.harness.planting import planted
from tests.host_reads import HostReads
from tests.parallel.pipeline.whole_model import batch, chain, squares
from torchdistpackage import NaiveDDP, forward_backward
from torchdistpackage.comm import primitives
from torchdistpackage.comm.creation import world as everybody
from torchdistpackage.comm.tensor_channel import TensorChannel
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.compat.torchdistpackage import function_call
from torchdistpackage.errors import RankError
from torchdistpackage.harness.lint.linter import lint
from torchdistpackage.layout.layout import Layout

STEADY = range(3, 6)
STRICT = "late,strict"


def of_functions() -> dict[str, int]:
    """The same of `forward_backward`."""
    tpc.setup_process_groups([("pipe", 2)])
    rank, found = dist.get_rank(), HostReads()
    stage = chain(2)[rank]
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.01)

    def fwd_fn(given):
        given = given if isinstance(given, list) else [given]
        out = stage(given[0])
        return squares(out, given[-1]) if rank else out

    for step in range(STEADY.stop):
        x, y = batch(8, seed=step)
        if step == STEADY.start:
            found.__enter__()
        forward_backward(optimizer, fwd_fn, None, [y] if rank else [x], 4)
        optimizer.step()
    found.__exit__(None, None, None)
    return dict(found.found)


def test_a_steady_step_of_forward_backward_reads_nothing(pool):
    assert pool(2).run(of_functions, transport="late") == [{}, {}]


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
    forward_backward(None, forward, None, [batch], num_microbatches=2, group=group)


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
