"""Batches made ahead equal batches made when due: contents, errors, one call at a time."""

import re
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from tests.tells import facts_pattern
from torchdistpackage.data.batches import Batches
from torchdistpackage.errors import DataError
from torchdistpackage.train.step import Trainer


class Source:
    """A source of samples named after their numbers; records its calls, and fails where told to."""

    def __init__(self, fails_at: int = 0, delay_s: float = 0.0):
        self.fails_at, self.delay_s = fails_at, delay_s
        self.asked: list[tuple] = []
        self.threads: set[str] = set()
        self.inside = 0

    def batch(self, split, seed, step, data_index, num_data, per_rank, *, first=0):
        self.inside += 1
        assert self.inside == 1, "asked for two batches at once"
        self.asked.append((split, step, first))
        self.threads.add(threading.current_thread().name)
        time.sleep(self.delay_s)
        self.inside -= 1
        if split == "train" and step == self.fails_at:
            raise ValueError(f"no step {step}")
        samples = first + data_index * per_rank + torch.arange(per_rank)
        return samples + 1000 * step, samples + 1000 * step + (split == "val") * 10**6


def batches(
    source: Source, *, ahead: bool, rounds: int = 2, num_steps: int = 4, several: bool = False
) -> Batches:
    return Batches(
        source, 7, data_index=1, num_data=2, per_round=3, rounds=rounds, num_steps=num_steps,
        prepare=lambda x, y: (x, y), ahead=ahead, several=several,
    )  # fmt: skip


@pytest.mark.parametrize("start", [1, 3])
@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_the_same_batches_with_validations_between_wherever_the_run_begins(rounds, start):
    found = []
    for ahead in (False, True):
        source = Source()
        made = batches(source, ahead=ahead, rounds=rounds)
        seen = []
        for step in range(start, 5):
            seen += [made.of_training(step, index) for index in range(rounds)]
            seen += [made.of_validation(step, index) for index in range(rounds)]
        made.close()
        found.append([(x.tolist(), y.tolist()) for x, y in seen])
        assert len(source.asked) == len(set(source.asked)) == len(seen), "none is made twice"
        assert source.threads == {"data" if ahead else threading.current_thread().name}
    assert found[0] == found[1]


def test_the_next_step_is_made_while_this_one_is_under_way_and_none_after_the_last():
    source = Source()
    made = batches(source, ahead=True)
    made.of_training(1, 0)
    made.of_training(1, 1)
    _wait_until(lambda: len(source.asked) == 4)
    assert [step for _, step, _ in source.asked] == [1, 1, 2, 2]
    for step in (2, 3, 4):
        for index in (0, 1):
            made.of_training(step, index)
    made.close()
    assert max(step for _, step, _ in source.asked) == 4


@pytest.mark.parametrize("ahead", [False, True])
def test_small_ones_are_made_several_at_once_and_an_error_is_raised_when_it_is_due(ahead):
    source, alone = Source(fails_at=12), batches(Source(), ahead=False, num_steps=40)
    made = batches(source, ahead=ahead, num_steps=40, several=True)
    for step in range(1, 12):
        for index in (0, 1):
            found, one = (x.of_training(step, index) for x in (made, alone))
            assert [x.tolist() for x in found] == [x.tolist() for x in one]
        assert len(source.asked) >= 16, "eight steps of two rounds at once"
        made.of_validation(step, 0)
    with pytest.raises(ValueError, match="no step 12"):
        made.of_training(12, 0)
    assert made.of_training(5, 1)[0].tolist() == alone.of_training(5, 1)[0].tolist()
    assert made.of_training(6, 0)[0].tolist() == alone.of_training(6, 0)[0].tolist()
    made.close()


def test_large_ones_are_made_one_by_one_and_none_after_the_last():
    source = Source()
    made = Batches(
        source, 7, data_index=0, num_data=1, per_round=3000, rounds=1, num_steps=9,
        prepare=lambda x, y: (x, y), several=True,
    )  # fmt: skip
    made.of_training(1, 0)
    assert [step for _, step, _ in source.asked] == [1], "48,000 bytes"
    made = batches(source := Source(), ahead=False, several=True)
    made.of_training(3, 1)
    assert [step for _, step, _ in source.asked] == [3, 4, 4]


def test_a_step_that_is_done_again_is_made_again_and_loses_nothing():
    source = Source()
    made = batches(source, ahead=True, rounds=1)
    first = made.of_training(1, 0)
    second = made.of_training(2, 0)
    again = made.of_training(1, 0)
    third = made.of_training(3, 0)
    made.close()
    assert torch.equal(first[0], again[0]) and not torch.equal(first[0], second[0])
    assert third[0][0] == 3003
    assert [step for _, step, _ in source.asked].count(3) == 1


def test_what_the_source_raises_reaches_who_takes_the_step_it_is_of():
    source = Source(fails_at=3)
    made = batches(source, ahead=True, rounds=1)
    for step in (1, 2):
        made.of_training(step, 0)
    with pytest.raises(ValueError, match="no step 3") as raised:
        made.of_training(3, 0)
    assert raised.traceback[-1].frame.code.name == "batch", "with the line of the source"
    made.close()


@pytest.mark.parametrize("ahead", [False, True])
def test_another_number_of_samples_is_refused(ahead):
    source = Source()
    source.batch = lambda *args, first: (torch.zeros(2), torch.zeros(3))  # type: ignore[method-assign]
    made = batches(source, ahead=ahead)
    with pytest.raises(DataError, match=facts_pattern("2 inputs", "3 targets", "3 samples")):
        made.of_training(1, 0)
    made.close()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (([1, 2, 3], [4, 5, 6]), "gave (list, list); a batch is (inputs, targets), two tensors"),
        ((torch.zeros(3),), "gave (Tensor); a batch is (inputs, targets)"),
    ],
)
def test_a_batch_that_is_no_pair_of_tensors_is_refused(given, said):
    source = Source()
    source.batch = lambda *args, first: given  # type: ignore[method-assign]
    with pytest.raises(DataError, match=re.escape(said)):
        batches(source, ahead=False).of_training(1, 0)


def test_the_thread_ends_with_the_run_and_nobody_waits_for_a_source_that_hangs():
    source = Source(delay_s=0.05)
    made = batches(source, ahead=True)
    made.of_training(1, 0)
    thread = made._thread
    made.close()
    assert not thread.is_alive() and len(source.asked) <= 2, "what was not begun is not made"
    made.of_training(1, 0)
    source.delay_s = 0.5
    _wait_until(lambda: len(source.asked) >= 3)
    began = time.monotonic()
    made.close(wait=False)
    assert time.monotonic() - began < 0.4


def test_what_is_copied_from_here_to_a_device_is_pinned_by_that_device(monkeypatch):
    pinned, entered = [], []

    class Device:
        def __init__(self, device):
            entered.append(device)

        def __enter__(self): ...

        def __exit__(self, *error): ...

    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: pinned.append(x) or x)
    x, y = torch.zeros(1), torch.ones(1)
    for has_first, has_last in ((True, False), (False, False), (False, True)):
        run = SimpleNamespace(
            device=torch.device("cuda", 3), has_first=has_first, has_last=has_last
        )
        Trainer._pinned(run, x, y)  # type: ignore[arg-type]
    assert [p is x for p in pinned] == [True, False]
    assert entered == [torch.device("cuda", 3)] * 3


def _wait_until(condition) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
