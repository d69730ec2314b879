"""A rank that is busy after its part of a call is done, of which the others see nothing."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest

from torchdistpackage.comm.tpc import tpc
from torchdistpackage.harness.calls import Call, tdp_call

DELAY_S = 0.05


@contextmanager
def late_calls(module: ModuleType) -> Iterator[None]:
    """Inside, the calls that `module` measures return DELAY_S later on rank 1."""

    def late_call(*args) -> Call:
        call = tdp_call(*args)

        def slow():
            out = call()
            time.sleep(DELAY_S if tpc.rank == 1 else 0)
            return out

        return slow

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "tdp_call", late_call)
        yield
