"""Work that no stream or event orders, planted in the package's own code: each is named."""

import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.harness.late.programs import PROGRAMS, batch, model, zero
from tests.harness.planting import planted
from torchdistpackage.ddp import grad_hooks
from torchdistpackage.ddp.naive_ddp import NaiveDDP
from torchdistpackage.ddp.zero.offload import Offload
from torchdistpackage.ddp.zero.optimizer import ZeroOptimizer
from torchdistpackage.ddp.zero.param_buffer import ParamBuffer
from torchdistpackage.errors import ConfigError, RaceError, RankError
from torchdistpackage.testing import mirror, ordered_streams


def gradients_on_two_streams() -> None:
    """As torch's engine has it where every other layer ran on the side."""
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(5)))
    ddp = NaiveDDP(net, bucket_cap_mb=0.03)

    def come(grad: Tensor, stream) -> Tensor:
        stream.wait_stream(torch.cuda.current_stream())
        torch.cuda.set_stream(stream)
        return grad.clone()

    for name, p in net.named_parameters():
        p.register_hook(lambda grad, s=side if int(name[0]) % 2 else main: come(grad, s))
    for _ in range(3):
        ddp.zero_grad()
        ddp(torch.ones(2, 64)).sum().backward()
        main.wait_stream(side)


def reads_on_the_side(**options) -> None:
    """Forwards run on another stream than the step that began the gather."""
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    net = model(torch.float32)
    inner = torch.optim.AdamW(net.parameters())
    optimizer = ZeroOptimizer(inner, net, bucket_cap_mb=0.004, **options)
    for i in range(3):
        x = batch(i)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            loss = net(x).square().mean()
        main.wait_stream(side)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if i == 0:
            side.wait_stream(main)


def goes_up() -> None:
    offload, x = Offload(torch.device("cpu")), torch.ones(64)
    master = offload.allocate(x, x.dtype)
    offload.offload(master, x)
    offload.wait(master)
    x.sum()
    offload.to_device(master, x)
    dist.all_reduce(x)


def goes_down_and_up() -> None:
    offload, x, y = Offload(torch.device("cpu")), torch.ones(64), torch.ones(64)
    master = offload.allocate(x, x.dtype)
    offload.offload(master, x)
    offload.to_device(master, y)
    offload.offload(master, x)
    offload.free(master)
    x.zero_()


ALL = {
    **PROGRAMS,
    "zero1-offload": partial(zero, 1, offload=True),
    "zero3-offload": partial(zero, 3, offload=True),
    "zero2-offload-bf16": partial(zero, 2, offload=True, dtype=torch.bfloat16, num_micro=2),
    "down and up": goes_down_and_up,
    "two streams": gradients_on_two_streams,
    "side": reads_on_the_side,
    "freed on the side": partial(reads_on_the_side, stage=3, reshard_after_forward=True),
    "up": goes_up,
}

# owner, function, the line that is left out; the program; what is said
MISTAKES = {
    "a copy down before its source is there": (
        (Offload, "offload", "self._down.wait_event(self._streams.current().record_event())"),
        "zero2-offload",
        r"copy on stream 1 reads memory that .* on .* writes",
    ),
    "a copy up before others are done": (
        (Offload, "to_device", "self._up.wait_event(current.record_event())"),
        "up",
        r"copy on stream 2 writes memory that aten.sum.default on stream 0",
    ),
    "a copy up of what is not down": (
        (Offload, "to_device", "self._up.wait_event(arrived)"),
        "down and up",
        r"copy on stream 2 reads memory that copy on stream 1 writes",
    ),
    "overwritten on its way down": (
        (Offload, "free", "self._streams.current().wait_event(arrived)"),
        "down and up",
        r"zero_.default on stream 0 .* writes memory that copy on stream 1 reads",
    ),
    "a gather before what it sends is up": (
        (Offload, "to_device", "current.wait_event(event)"),
        "zero2-offload",
        r"all_gather .* on the stream of ranks .* memory that copy on stream 2 writes",
    ),
    "a step before its gradients are down": (
        (Offload, "wait", "event.synchronize()"),
        "zero2-offload",
        r"on the host .* memory that copy on stream [12] (reads|writes)",
    ),
    "parameters read where nobody waited": (
        (ParamBuffer, "_wait_on_streams", "reader.wait_event(began_on.record_event())"),
        "side",
        r"on stream 1 reads memory that all_gather .* on the stream of ranks .* writes",
    ),
    "memory given away under a reader": (
        (ParamBuffer, "free", "self._streams.keep(self.flat)"),
        "freed on the side",
        r"stream 1 reads",
    ),
    "gradients of another stream": (
        (grad_hooks, "on_one_stream", "stream.wait_stream(stream_of(current))"),
        "two streams",
        r"on stream 0 .* memory that .* on stream 1 writes",
    ),
}


@pytest.mark.few(6)
@pytest.mark.parametrize("name", ALL)
def test_programs_are_in_order(name: str):
    with mirror(4), ordered_streams() as history:
        ALL[name]()
    assert any("of ranks" in stream for stream in history.names.values()) == ("up" not in name)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_missing_wait_is_named(name: str):
    with pytest.raises(RaceError, match=MISTAKES[name][2]) as e, mirror(4):
        with_mistake(name)
    assert re.search(r"torchdistpackage/\S+\.py:\d+", str(e.value))
    assert "the earlier access was issued\n  at /" in str(e.value)


@pytest.mark.parametrize("transport", ["late:early", "late:3"])
def test_another_order_of_completion_changes_nothing(transport: str):
    with mirror(4, transport=transport), ordered_streams():
        ALL["zero2-offload"]()
    with pytest.raises(RaceError, match="on stream 1"), mirror(4, transport=transport):
        with_mistake("parameters read where nobody waited")


def with_mistake(name: str) -> None:
    (owner, function, line), program, _ = MISTAKES[name]
    with planted(owner, function, line, "pass"), ordered_streams():
        ALL[program]()


def test_among_real_ranks_too(ranks):
    name = "a step before its gradients are down"
    with pytest.raises(RankError) as e:
        ranks(2).run(with_mistake, name, transport="late")
    assert re.search(MISTAKES[name][2], str(e.value))


def user(stage: str) -> None:
    side = torch.cuda.Stream()
    x, event = torch.ones(4, 8), torch.cuda.Event()
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    with torch.cuda.stream(side):
        if stage != "no wait on the side":
            work.wait()
        y = x[1:] * 2
        event.record()
    if stage == "written too early":
        x[1].zero_()
    x[0].zero_()  # other bytes
    if stage == "memory given back":
        x.untyped_storage().resize_(0)
    if stage == "last tensor gone":
        del x, work
    if stage == "host reads":
        y.tolist()
    event.synchronize()
    torch.ones(1).add_(1)
    y.add_(1)
    assert y.sum().item() == 9 * 3 * 8


USERS = {
    "no wait on the side": r"aten.mul.Tensor on stream 1 reads memory that all_reduce \(number 1\)",
    "written too early": r"zero_.* on stream 0 .* writes memory that aten.mul.Tensor on stream 1",
    "memory given back": r"free \(resize_\(0\)\) .* memory that aten.mul.Tensor on stream 1 reads",
    "last tensor gone": r"free \(its last tensor went\) .* memory that aten.mul.Tensor on stream 1",
    "host reads": r"tolist on stream 0 .* reads memory that aten.mul.Tensor on stream 1 writes",
}


@pytest.mark.parametrize("stage", USERS)
def test_a_users_mistake_is_named(stage: str):
    with pytest.raises(RaceError, match=USERS[stage]), mirror(4), ordered_streams():
        user(stage)


def test_the_same_in_order_counts_what_the_host_waits_for():
    with mirror(4), ordered_streams() as history:
        user("in order")
    assert history.num_host_syncs == 2, "an event and an item"


def test_another_torch_is_refused_by_name(monkeypatch):
    monkeypatch.delattr("torch.cuda._sanitizer.StreamSynchronizations.record_state")
    with pytest.raises(ConfigError, match="record_state"), ordered_streams():
        pass
