"""tplib's init call, by a program that names nccl where no rank has a GPU."""

import pytest
import torch
import torch.distributed as dist

from tests.comm import conftest as of_comm
from tests.comm.starting import by_hand
from torchdistpackage.comm import runtime
from torchdistpackage.comm.runtime import find_free_port, leave
from torchdistpackage.compat.tplib import init_dist_env

start = of_comm.start


def ask_for_nccl() -> tuple[str, list[str]]:
    """The backend that there is then, and what was warned of."""
    said: list[str] = []
    runtime.log.warning = lambda text, *values: said.append(text % values)
    init_dist_env(backend="nccl")
    backend = dist.get_backend()
    leave()
    return backend, said


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_nccl_means_gloo_where_no_rank_has_a_gpu(start):
    port = find_free_port()
    told = start(ask_for_nccl, [by_hand(r, 2, port) for r in range(2)])
    assert told == [("gloo", [])] * 2
