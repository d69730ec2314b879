"""Mistakes with calls in flight, planted in the package's own code: each is named."""

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
import torch

from tests.harness.late.programs import PROGRAMS
from tests.harness.planting import planted
from torchdistpackage.comm import work
from torchdistpackage.comm.work import Work
from torchdistpackage.ddp.bucket_comm import AllReduceBucket
from torchdistpackage.ddp.comm_hooks import _Narrowed
from torchdistpackage.ddp.zero.grad_buffer import ReduceScatterBucket
from torchdistpackage.ddp.zero.param_buffer import ParamBuffer
from torchdistpackage.errors import RaceError, RankError
from torchdistpackage.testing import mirror

# owner, function, what it says, what the mistake says; the program; the name of the mistake
MISTAKES = {
    "no wait for a sum": (
        (Work, "wait", "wait_works(self._works, self._limit)", "pass"),
        "ddp",
        r"all_reduce \(number \d+\).*(read before wait\(\), by|no call waited for it)",
    ),
    "no wait for the parameters": (
        (
            ParamBuffer,
            "arrive",
            "else self._work.wait()",
            "else vars(self).update(late=self._work)",
        ),
        "zero1",
        r"all_gather \(number \d+\).*read before wait\(\), by aten",
    ),
    "a copy before the wait": (
        (_Narrowed, "wait", "self._pending.wait()", "self._flat.copy_(self._wire)"),
        "ddp-bf16-wire",
        r"all_reduce \(number \d+\).*read before wait\(\), by aten.copy_",
    ),
    "memory given back before the wait": (
        (
            ReduceScatterBucket,
            "launch",
            "self.gradients.release()",
            "self.gradients.flat.untyped_storage().resize_(0)",
        ),
        "zero2",
        r"reduce_scatter \(number \d+\).*memory was given back",
    ),
    "a bucket written in flight": (
        (
            AllReduceBucket,
            "launch",
            "self._work = self._start(self.gradients.flat, self._group, self._op)",
            "self._work = self._start(self.gradients.flat, self._group, self._op); "
            "self.gradients.flat.mul_(1.0)",
        ),
        "ddp",
        r"all_reduce \(number \d+\).*written to while in flight, by aten.mul_",
    ),
    "the same, unseen by torch": (
        (
            AllReduceBucket,
            "launch",
            "self._work = self._start(self.gradients.flat, self._group, self._op)",
            "seen = self.gradients.flat.detach().numpy(); "
            "self._work = self._start(self.gradients.flat, self._group, self._op); "
            "seen[0] = 1.0",
        ),
        "ddp",
        r"all_reduce \(number \d+\).*written to while in flight",
    ),
    "a lost work": (
        (work, "run_async", "return Work(x, (works,), (call,), finish)", "return Work(x)"),
        "zero1",
        r"(reduce_scatter|all_reduce|all_gather) \(number \d+\).*no call waited for it",
    ),
}


@contextmanager
def mistake(name: str) -> Iterator[None]:
    (owner, function, right, wrong), *_ = MISTAKES[name]
    with ExitStack() as stack:
        stack.enter_context(planted(owner, function, right, wrong))
        yield


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named_and_nothing_is_without_it(name: str):
    _, program, said = MISTAKES[name]
    with mirror(4):
        assert PROGRAMS[program]()
    with mistake(name), pytest.raises(RaceError, match=said) as e, mirror(4):
        PROGRAMS[program]()
    assert re.search(r"torchdistpackage/(ddp|comm)/\S+\.py:\d+", str(e.value))


def with_mistake(name: str) -> None:
    with mistake(name):
        PROGRAMS[MISTAKES[name][1]]()


@pytest.mark.few(3)
@pytest.mark.parametrize("name", MISTAKES)
def test_it_is_named_among_real_ranks_too(ranks, name: str):
    with pytest.raises(RankError) as e:
        ranks(2).run(with_mistake, name, transport="late")
    assert "RaceError" in str(e.value) and re.search(MISTAKES[name][2], str(e.value))


def fails(name: str, transport: str) -> str:
    """What is said of the mistake under an order; nothing if that lets it pass."""
    try:
        with mistake(name), mirror(4, transport=transport):
            PROGRAMS[MISTAKES[name][1]]()
    except RaceError as error:
        assert error.__notes__ == [f"transport: {transport}"]
        return str(error)
    return ""


def test_the_token_of_an_order_that_fails_replays_it():
    name = "a copy before the wait"
    found = {f"late:{seed}": fails(name, f"late:{seed}") for seed in range(6)}
    assert not fails(name, "late:early"), "nothing is in flight there"
    failing = [token for token, said in found.items() if said]
    assert failing
    assert len({*found.values()}) > 1, "orders differ in where it shows"
    for token in failing:
        again = fails(name, token)
        assert re.sub(r"0x\w+", "", again) == re.sub(r"0x\w+", "", found[token])


def one_step() -> torch.Tensor:
    return torch.cat([x.flatten() for x in PROGRAMS["zero2"]()])


@pytest.mark.parametrize("seeds", [4, pytest.param(20, marks=pytest.mark.full)])
def test_real_ranks_get_the_same_bits_in_every_order(ranks, seeds):
    first = ranks(2).run(one_step, transport="late")[0]
    for transport in ("late:early", *(f"late:{seed}" for seed in range(seeds))):
        for found in ranks(2).run(one_step, transport=transport):
            assert torch.equal(found, first), transport
