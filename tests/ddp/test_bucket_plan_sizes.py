"""One table of bucket sizes, by transport, for NaiveDDP, ZeRO and `tdp train`."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import skip_init

from tests.train import parity
from torchdistpackage.comm.backends import GLOO, Transport, register_transport
from torchdistpackage.ddp.bucket_plan import MIB, bucket_sizes
from torchdistpackage.ddp.naive_ddp import NaiveDDP
from torchdistpackage.ddp.zero.optimizer import ZeroOptimizer

LAYERS = 10


def test_devices_get_larger_buckets_than_hosts():
    host, queued = bucket_sizes(queued=False), bucket_sizes(queued=True)
    assert host.default_bytes == 4 * MIB and host.candidates_bytes[-1] == 32 * MIB
    assert queued.default_bytes == 32 * MIB and queued.candidates_bytes[-1] == 128 * MIB
    for sizes in (host, queued):
        assert sizes.default_bytes in sizes.candidates_bytes
        assert sorted(sizes.candidates_bytes) == list(sizes.candidates_bytes)


@contextmanager
def queued_gloo() -> Iterator[None]:
    """Gloo ranks of which the package believes that calls are queued, as over NCCL."""
    register_transport(Transport("gloo", queued=True))
    try:
        yield
    finally:
        register_transport(GLOO)


def counts() -> dict[str, int]:
    """Buckets of each for layers of 4 MiB, and of a GPT of 7 that `tdp train` builds."""

    def net() -> nn.Module:
        # sizes alone matter here, and drawing so many numbers takes long
        layers = (skip_init(nn.Linear, 1024, 1024, bias=False) for _ in range(LAYERS))
        return nn.Sequential(*layers)

    ddp, module = NaiveDDP(net(), keep_order=True), net()
    zero = ZeroOptimizer(torch.optim.SGD(module.parameters(), lr=1.0), module)
    found = {"ddp": ddp.reducer, "zero": zero.reducer}
    large = ["parallel.data=2", "data.global_batch=8", "model.vocab=12000", "model.dim=128"]
    large += ["data.seq_len=8", "data.target=tests.train.sources:UnevenTokens"]
    large += ["data.args={seq_len: 8, vocab: 12000}"]
    for stage in (0, 1):
        run = parity.trainer([*large, f"parallel.zero={stage}"])
        found[f"train {stage}"] = run.reducer
    sizes = {name: len(reducer.grad_buckets.buckets) for name, reducer in found.items()}
    zero.remove()
    dist.barrier()
    return sizes


def both() -> tuple[dict[str, int], dict[str, int]]:
    with queued_gloo():
        queued = counts()
    return counts(), queued


@pytest.mark.own_transport("sets the transport itself")
def test_everybody_packs_by_the_transport(ranks):
    for host, queued in ranks(2).run(both):
        assert {host[name] for name in ("ddp", "zero")} == {LAYERS}
        assert {queued[name] for name in ("ddp", "zero")} == {2}
        assert host["train 0"] > queued["train 0"] == 1
        assert host["train 1"] > queued["train 1"] == 1
