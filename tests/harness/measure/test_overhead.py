"""What our Python adds to a call, counted: a time of microseconds would be a coin toss here.

On torch's fake back end, which returns at once; benchmarks/comm_overhead.py has the times.
"""

import gc
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import torchdistpackage
from torchdistpackage.comm.collective_table import COLLECTIVES
from torchdistpackage.comm.runtime import leave
from torchdistpackage.harness.calls import GroupMember, tdp_call, torch_call

OURS = str(Path(torchdistpackage.__file__).parent)
TORCH = str(Path(torch.__file__).parent)


def counted() -> dict[str, dict[str, Counter]]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    leave()
    store = FakeStore()  # held here: c10d alone would lose the Python half
    dist.init_process_group("fake", store=store, rank=0, world_size=2)
    member = GroupMember(dist.group.WORLD, (0, 1), 0)
    found = {}
    for operation in COLLECTIVES:
        x = torch.zeros(2)
        sides = {"ours": tdp_call(operation, x, member), "bare": torch_call(operation, x, member)}
        found[operation] = {name: functions_of(call) for name, call in sides.items()}
    dist.destroy_process_group()
    return found


def functions_of(call) -> Counter:
    """How many Python functions of this package, of torch, and of built-in ones one call enters."""
    number = Counter()

    def note(frame, event, arg):
        if event == "call":
            file = frame.f_code.co_filename
            number[
                "ours" if file.startswith(OURS) else "torch" if file.startswith(TORCH) else ""
            ] += 1
        elif event == "c_call":
            number["built in"] += 1

    call()
    gc.collect()  # what others left behind is no part of the call
    gc.disable()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        gc.enable()
    return number


@pytest.fixture(scope="module")
def calls(ranks):
    return ranks(1).run(counted)[0]


@pytest.mark.parametrize("operation", COLLECTIVES)
def test_a_call_enters_few_functions_more_than_a_bare_one(calls, operation):
    """Entering a Python function costs 0.05 to 0.1 us, so these are well under 5 us a message."""
    mine, bare = calls[operation]["ours"], calls[operation]["bare"]
    num_messages = 2 if operation == "p2p_both" else 1
    assert mine["torch"] <= bare["torch"], "torch is called no more than by a bare call"
    assert mine["ours"] - bare["ours"] <= 12 * num_messages
    assert mine["built in"] - bare["built in"] <= 24 * num_messages
