"""What an executor refuses, what is left of a run that failed, and stages that work in place."""

import weakref

import pytest
import torch
import torch.distributed as dist

from tests.parallel.pipeline.whole_model import batch, chain
from torchdistpackage.comm.flight_recorder import recorder
from torchdistpackage.comm.groups import Groups
from torchdistpackage.comm.p2p import receive, send
from torchdistpackage.comm.primitives import Group
from torchdistpackage.errors import CommError
from torchdistpackage.parallel.pipeline.executor import Executor
from torchdistpackage.schedule.generators import build

CPU = torch.device("cpu")
ORDERS = ["1f1b", "interleaved", "zb-v"]
"""With neighbours on other ranks, in a ring, and on the same rank."""


def executor_of(name: str, m: int, group: Group | None = None) -> Executor:
    schedule = build(name, dist.get_world_size(), m)
    return Executor(schedule, group or dist.group.WORLD, device=CPU, timeout_s=30)


def changed_message_is_refused() -> None:
    """By the sender, before anything has left: what is sent next is what arrives. No executor runs
    over the group again, as its peers may have gone on."""
    good, got, groups = torch.ones(2, 4), [], Groups(dist.get_rank())
    bads = (torch.ones(3, 4), good.double(), (good,), {"x": good}, None)
    for number, bad in enumerate(bads):
        group = groups.of(range(2), use=f"a group that loses its messages, {number}")
        executor = executor_of("forward", 1, group)
        run = lambda form, of=executor: of.run(  # noqa: E731
            lambda s, i, r: form if s == 0 else got.append(r) or r
        )
        run(good)
        if dist.get_rank() == 0:
            with pytest.raises(
                CommError, match=r"stage 0 sends .* for microbatch 0, but .* float32\[2, 4\]"
            ):
                run(bad)
            for again in (executor, executor_of("forward", 1, group)):
                with pytest.raises(CommError, match=r"interrupted by CommError: stage 0 sends"):
                    run(good, again)
            send(torch.full((3,), float(number)), group, 1)
        else:
            assert receive(torch.empty(3), group, 0).tolist() == [number] * 3
    assert dist.get_rank() == 0 or [x.sum().item() for x in got] == [8] * 5


def test_a_changed_message_is_refused_before_it_is_sent(ranks):
    ranks(2).run(changed_message_is_refused)


def one_rank_fails(name: str) -> None:
    """Rank 1 fails: rank 0 says for what it waited, in the first run and in later ones; neither
    runs again, and nothing of the run is held."""
    x = batch(4)[0]
    for num_good in (0, 1):
        pair = dist.new_group([0, 1])
        executor = Executor(build(name, 2, 4), pair, device=CPU, timeout_s=30)
        last = executor.schedule.num_stages - 1
        model, held, failing = chain(last + 1), [], []

        def forward(s, i, received, model=model, last=last, held=held, failing=failing):
            if failing and dist.get_rank() == 1 and i == 1:
                raise ValueError("no such sample")
            out = model[s](x[i : i + 1] if s == 0 else received)
            held += [weakref.ref(x) for x in (out, received) if x is not None]
            return out if s < last else out.sum()

        for _ in range(num_good):
            executor.run(forward)
        failing.append(True)
        why = r"for (SEND|RECV)_[FB] of stage \d, microbatch \d over"
        error, text = (ValueError, "no such") if dist.get_rank() else (CommError, why)
        dist.barrier()
        executor.timeout_s = 30 if dist.get_rank() else 2
        with pytest.raises(error, match=text):
            executor.run(forward)
        assert recorder.action is None
        assert not any(ref() is not None for ref in held)
        with pytest.raises(CommError, match=f"interrupted by {error.__name__}.*a new executor"):
            executor.run(forward)


@pytest.mark.own_transport("a message of gloo has a limit of its own")
@pytest.mark.parametrize("name", ["1f1b", pytest.param("zb-v", marks=pytest.mark.full)])
def test_after_a_failure_nobody_runs_again_and_who_waited_says_for_what(ranks, name):
    ranks(2).run(one_rank_fails, name)


def alone_after_a_failure() -> None:
    """Where there are no messages, none are lost."""
    executor, model = executor_of("interleaved", 2), chain(2)
    bad = [True]

    def forward(s, i, received):
        if s == 1 and bad:
            raise ValueError(bad.pop())
        out = model[s](received if s else batch(1)[0])
        return out.sum() if s else out

    with pytest.raises(ValueError):
        executor.run(forward)
    executor.run(forward)


def test_a_rank_alone_may_run_again(ranks):
    ranks(1).run(alone_after_a_failure)


def in_place_with_side_effects() -> None:
    """Each microbatch is counted once, in the first run too."""
    x = batch(4)[0]
    for name in ORDERS:
        executor, counts = executor_of(name, 4), []
        last = executor.schedule.num_stages - 1
        mine = chain(last + 1)

        def forward(s, i, received, mine=mine, last=last, counts=counts):
            counts.append((s, i))
            out = mine[s][0](received.mul_(2) if s else x[i : i + 1])
            return out if s < last else out.square().sum()

        for _ in range(2):
            counts.clear()
            executor.run(forward)
            assert sorted(counts) == [(s, i) for s in executor.stages for i in range(4)]


def test_a_stage_that_works_in_place_runs_each_microbatch_once(ranks):
    ranks(2).run(in_place_with_side_effects)


def in_place_later() -> None:
    """Torch's own error, which says more."""
    executor, model, x = executor_of("interleaved", 2), chain(2), batch(2)[0]
    in_place = False

    def forward(s, i, received):
        given = x[i : i + 1] if s == 0 else received
        out = model[s](given.mul_(2) if s and in_place else given)
        return out.sum() if s else out

    executor.run(forward)
    in_place = True
    with pytest.raises(RuntimeError, match="leaf Variable") as caught:
        executor.run(forward)
    assert "stage 1 changes its input in place" in caught.value.__notes__[0]


def test_a_stage_that_begins_to_work_in_place_later_is_told(ranks):
    ranks(1).run(in_place_later)
