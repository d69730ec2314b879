"""Gradients that come on several streams, as where each half of a forward has one.

Streams here are stand-ins that note what happens on which; benchmarks/gpu/sanitizer.py has real
ones.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchdistpackage.ddp import grad_hooks
from torchdistpackage.ddp.grad_bucket import GradBucket
from torchdistpackage.ddp.naive_ddp import NaiveDDP

MAIN, SIDE = (1, 0, 1), (2, 0, 1)
DIM, STEPS = 64, 3
"""Weights are copied to their bucket at once, biases many at a time."""


class Machine:
    """One device. log: (what, on which stream, of which) in order."""

    def __init__(self):
        self.now, self.log = MAIN, []

    def note(self, what: str, of: object = None) -> None:
        self.log.append((what, self.now, of))

    @contextmanager
    def on(self, stream: "Stream") -> Iterator[None]:
        before, self.now = self.now, stream.numbers
        yield
        self.now = before


class Stream:
    def __init__(self, machine: Machine, numbers: tuple[int, int, int]):
        self.machine, self.numbers = machine, numbers

    def wait_stream(self, other: "Stream") -> None:
        self.machine.log.append(("wait", self.numbers, other.numbers))


def two_streams() -> list[list[tuple]]:
    """Logs of steps in which the gradients of every other layer come on the side."""
    machine, logs = Machine(), []
    adopt, complete = GradBucket.absorb, GradBucket.complete

    def come(grad: Tensor, stream: tuple, name: str) -> None:
        machine.now = stream
        machine.note("gradient", name)

    def noted(function):
        def call(self: GradBucket, *args, **kwargs):
            machine.note(function.__name__, self)
            return function(self, *args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grad_hooks, "device_index", lambda parameter: 0)
        patch.setattr(grad_hooks, "current_stream", lambda place: machine.now)
        patch.setattr(grad_hooks, "stream_of", lambda numbers: Stream(machine, numbers))
        patch.setattr(torch.cuda, "stream", machine.on)
        patch.setattr(Tensor, "record_stream", lambda x, s: machine.note("kept", s.numbers))
        patch.setattr(GradBucket, "absorb", noted(adopt))
        patch.setattr(GradBucket, "complete", noted(complete))
        net = nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(4)))
        ddp = NaiveDDP(net, bucket_cap_mb=0.03)
        for name, p in net.named_parameters():
            stream = SIDE if int(name[0]) % 2 == 0 else MAIN  # the first gradients are of layer 3
            p.register_hook(lambda grad, s=stream, n=name: come(grad, s, n))
        for step in range(STEPS):
            ddp.zero_grad()
            x = torch.full((2, DIM), 1.0 + step + dist.get_rank())
            ddp(x).sum().backward()
            machine.now = MAIN
            logs.append([(what, on, str(of)) for what, on, of in machine.log])
            machine.log.clear()
        truth = torch.zeros_like(net[3].bias) + 2
        assert torch.equal(net[3].bias.grad, truth), "a mean over ranks of the sum over a batch"
    return logs


def test_all_is_copied_and_launched_on_one_stream_that_waits_for_the_others(ranks):
    for logs in ranks(2).run(two_streams):
        for log in logs[1:]:  # from the second step on buckets leave early
            kinds = [what for what, _, _ in log]
            assert {on for what, on, _ in log if what in ("adopt", "complete")} == {MAIN}
            assert kinds.count("complete") > 1
            early = kinds.index("complete")
            assert "gradient" in kinds[early:], "a bucket left in the backward"
            for i, (what, on, _) in enumerate(log):
                if what == "gradient" and on == SIDE:
                    assert log[i + 1][:2] == ("wait", MAIN) and log[i + 1][2] == str(SIDE)
                    assert log[i + 2] == ("kept", SIDE, str(MAIN))


def test_the_stream_of_a_nested_backward_and_that_around_it_wait_for_each_other(monkeypatch):
    """As with reentrant checkpoints: a bucket holds gradients that came on either."""
    machine = Machine()
    monkeypatch.setattr(grad_hooks, "device_index", lambda parameter: 0)
    monkeypatch.setattr(grad_hooks, "current_stream", lambda place: machine.now)
    monkeypatch.setattr(grad_hooks, "stream_of", lambda numbers: Stream(machine, numbers))
    heard = grad_hooks.on_one_stream(
        lambda me, index, parameter: machine.note("heard"), [torch.ones(1)]
    )
    tasks = [(1, MAIN), (2, SIDE), (2, SIDE), (1, SIDE)]
    for task, machine.now in tasks:
        monkeypatch.setattr(torch._C, "_current_graph_task_id", lambda task=task: task)
        heard(None, 0, torch.ones(1))
    assert [entry[:2] for entry in machine.log] == [
        ("heard", MAIN),
        ("wait", SIDE),
        *[("heard", SIDE)] * 3,
    ]
    for task, machine.now in ((3, MAIN), (4, MAIN)):
        monkeypatch.setattr(torch._C, "_current_graph_task_id", lambda task=task: task)
        heard(None, 0, torch.ones(1))
    assert machine.log[5:] == [
        ("wait", MAIN, SIDE),
        ("heard", MAIN, None),
        ("heard", MAIN, None),
    ]


def test_parameters_of_a_cpu_are_heard_of_as_ever():
    def heard(me, index, parameter) -> None: ...

    assert grad_hooks.on_one_stream(heard, [torch.ones(1)]) is heard
