"""What forward_backward keeps from call to call, and when it must not."""

import gc
import time
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.parallel.pipeline.whole_model import batch, chain, same, same_gradients, squares
from torchdistpackage import forward_backward, forward_eval
from torchdistpackage.comm import primitives
from torchdistpackage.comm.groups import Groups
from torchdistpackage.comm.tensor_channel import TensorChannel
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.compat.torchdistpackage import function_call
from torchdistpackage.errors import CommError
from torchdistpackage.parallel.pipeline.executor import Executor


class Loop:
    """The stages of this rank, and steps that are held to one process."""

    def __init__(self, schedule: str = "1f1b", chunks: int = 1):
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        num = self.size * chunks
        self.numbers = [self.rank + k * self.size for k in range(chunks)]
        self.schedule, self.model, self.last = schedule, chain(num), num - 1
        self.functions = [self.function(s) for s in self.numbers]
        mine = [p for s in self.numbers for p in self.model[s].parameters()]
        self.optimizer = torch.optim.SGD(mine, lr=0.1)
        self.seed = 0

    def function(self, s: int):
        def fwd_fn(given):
            h, *targets = given if isinstance(given, list) else [given]
            return squares(self.model[s](h), *targets) if s == self.last else self.model[s](h)

        return fwd_fn

    def step(self, samples: int = 8, number: int = 4, functions: list | None = None, **options):
        self.seed += 1
        x, y = batch(samples, self.seed)
        truth = chain(self.last + 1)
        expected = squares(truth(x), y)
        expected.backward()
        given = {0: x, self.last: y}
        inputs = [given.get(s) for s in self.numbers]
        loss = forward_backward(
            self.optimizer,
            functions or self.functions,
            None,
            inputs,
            number,
            schedule=self.schedule,
            **options,
        )
        same_gradients({s: self.model[s] for s in self.numbers}, truth)
        if self.last in self.numbers:
            same(loss, expected.detach())


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Executors made and headers sent by this rank, and how often it asks whether losses count."""
    found: Counter[str] = Counter()
    make, send, ask = Executor.__init__, TensorChannel.send_header, primitives.broadcast_object

    def making(self, *args, **options):
        found["executors"] += 1
        make(self, *args, **options)

    def sending(*args):
        found["headers"] += 1
        return send(*args)

    def asking(*args):
        found["asked"] += 1
        return ask(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Executor, "__init__", making)
        patch.setattr(primitives, "broadcast_object", asking)
        patch.setattr(TensorChannel, "send_header", sending)
        yield found


def one_executor(schedule: str, chunks: int) -> None:
    tpc.setup_process_groups([("pipe", dist.get_world_size())])
    loop = Loop(schedule, chunks)
    for step in range(3):
        with counted() as found:
            loop.step()
        sends = sum(s < loop.last for s in loop.numbers)
        assert found == (
            Counter(executors=1, headers=4 * sends, asked=1) if step == 0 else Counter()
        )
    for step in range(2):
        with counted() as found:
            x, y = batch(2)
            inputs = [{0: x, loop.last: y}.get(s) for s in loop.numbers]
            forward_eval(loop.functions, inputs, schedule=schedule)
        assert found["executors"] == (step == 0)


@pytest.mark.parametrize(
    ("schedule", "chunks"),
    [("1f1b", 1), ("interleaved", 2), pytest.param("gpipe", 1, marks=pytest.mark.full)],
)
def test_steps_alike_make_one_executor_and_announce_messages_once(ranks, schedule, chunks):
    ranks(2).run(one_executor, schedule, chunks)


def changing_calls() -> None:
    """Batches, numbers of microbatches and functions that change, and come back."""
    tpc.setup_process_groups([("pipe", dist.get_world_size())])
    loop = Loop()
    for _ in range(2):  # the second time all are known, on all ranks
        with counted() as found:
            for samples in (8, 8, 5):
                loop.step(samples)
            for number in (2, 8, 4):
                loop.step(8, number)
    assert not found
    other = [loop.function(s) for s in loop.numbers]
    for functions in (other, loop.functions, other):
        loop.step(functions=functions)
    # anew on one rank alone: then all ranks start again
    with counted() as found:
        loop.step(functions=[loop.function(loop.rank)] if loop.rank == 1 else None)
    assert found["executors"] == 1
    # far more than are kept
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(function_call, "MOST_KEPT", 4)
        for samples in (*range(4, 4 + 2 * function_call.MOST_KEPT), 8, 8):
            loop.step(samples)
    for _ in range(3):
        for dynamic in (True, False):
            loop.step(dynamic_shapes=dynamic)


@pytest.mark.late_in_full
def test_what_changes_between_steps_leaves_the_gradient_of_one_process(ranks):
    ranks(3).run(changing_calls)


def frozen_and_thawed() -> None:
    """With the optimizer it is known which parameters are trained."""
    tpc.setup_process_groups([("pipe", 2)])
    loop, rank = Loop(), dist.get_rank()
    for is_frozen in (True, False, True):
        if rank == 0:
            loop.model[0].requires_grad_(not is_frozen)
        x, y = batch(8)
        forward_backward(loop.optimizer, loop.functions, None, [y if rank else x], 4)
        truth = chain(2)
        squares(truth(x), y).backward()
        if rank or not is_frozen:
            same_gradients({rank: loop.model[rank]}, truth)


def test_a_stage_that_was_frozen_in_the_first_step_may_be_thawed(ranks):
    ranks(2).run(frozen_and_thawed)


class Net(nn.Module):
    """A stage that is called by a bound method, which is made anew in each call."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.width = 4

    def stage(self, given: Tensor) -> Tensor:
        out = self.linear(given)[:, : self.width]
        return out.sum() if dist.get_rank() else out


def methods() -> None:
    tpc.setup_process_groups([("pipe", 2)])
    net = Net()
    for step in range(2):
        with counted() as found:
            forward_backward(None, net.stage, None, [torch.ones(4, 4)][dist.get_rank() :], 2)
        assert found["executors"] == found["asked"] == (step == 0)
    ends = weakref.ref(net)
    del net
    gc.collect()
    assert ends() is None


def test_a_bound_method_is_the_same_function_as_before(ranks):
    ranks(2).run(methods)


def nobody_lives_on() -> None:
    tpc.setup_process_groups([("pipe", 2)])
    loop = Loop()
    for _ in range(2):
        loop.step()
    model, optimizer = loop.model, loop.optimizer
    ended = [weakref.ref(x) for x in (loop, model, optimizer, *loop.functions, model[0][0].weight)]
    (shelf,) = function_call._cache.of[loop.functions[0]].values()
    (executor,) = shelf.executors.values()
    ended += [weakref.ref(executor)]
    del loop, model, optimizer, shelf, executor
    gc.collect()
    assert [ref() for ref in ended] == [None] * len(ended)


def test_what_is_kept_keeps_nobody_alive(ranks):
    ranks(2).run(nobody_lives_on)


def another_form() -> None:
    """An output of another form from inputs of the same: by name at the sender, or dynamic."""
    groups, rank = Groups(dist.get_rank()), dist.get_rank()

    def fwd_fn(given: Tensor) -> Tensor:
        out = weight * given[:, :width]
        return out.sum() if rank else out

    inputs = [] if rank else [torch.ones(4, 4)]
    for dynamic in (True, False):
        group, weight = groups.of(range(2), use=f"form{dynamic}"), torch.ones(1, requires_grad=True)
        for width in (4, 4, 3):
            call = lambda limit_s, group=group, dynamic=dynamic: forward_backward(  # noqa: E731
                None, fwd_fn, None, inputs, 2, group=group, timeout_s=limit_s,
                dynamic_shapes=dynamic,
            )  # fmt: skip
            if dynamic or width == 4:
                call(30)
                continue
            text = "for RECV_F of stage 1" if rank else r"stage 0 sends float32\[2, 3\].*dynamic_sh"
            if rank:  # whose slice then is of what comes
                width = 4
            with pytest.raises(CommError, match=text):
                call(0.3)


@pytest.mark.own_transport("a message of gloo has a limit of its own")
def test_an_output_of_another_form_is_refused_at_the_sender_or_dynamic(ranks):
    ranks(2).run(another_form)


def after_an_exception() -> None:
    """A refusal loses nothing; after an error in a stage a new group goes on, and the old one says
    why it does not."""
    loop, groups, fails = Loop(), Groups(dist.get_rank()), []
    good = loop.functions[0]

    def fwd_fn(given):
        if fails and loop.rank == 1:
            raise ValueError("no such sample")
        return good(given)

    for turn in range(2):
        group = groups.of(range(2), use=f"turn{turn}")
        for _ in range(2):
            loop.step(functions=[fwd_fn], group=group)
        with pytest.raises(CommError, match="2 samples cannot fill 4"):
            loop.step(2, functions=[fwd_fn], group=group)
        with counted() as found:
            loop.step(functions=[fwd_fn], group=group)
        assert not found
        fails.append(True)
        with pytest.raises(ValueError if loop.rank else CommError):
            loop.step(functions=[fwd_fn], group=group, timeout_s=30 if loop.rank else 0.3)
        fails.clear()
        begun = time.monotonic()
        with pytest.raises(CommError, match=r"interrupted by \w+Error: .* make a new group"):
            loop.step(functions=[fwd_fn], group=group)
        assert time.monotonic() - begun < 10


@pytest.mark.own_transport("a message of gloo has a limit of its own")
def test_after_an_exception_a_new_group_goes_on(ranks):
    ranks(2).run(after_an_exception)
