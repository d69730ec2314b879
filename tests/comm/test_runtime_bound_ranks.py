"""A local rank and the cores near its GPU; tests/environment/test_affinity.py finds which."""

import os

import pytest
import torch

from torchdistpackage.comm import runtime
from torchdistpackage.environment.rendezvous import Rendezvous

EVERY = frozenset(range(8))
NEAR = (frozenset({0, 1, 4, 5}), frozenset({2, 3, 6, 7}))


class Device:
    def __init__(self, **ids: int):
        self.__dict__.update({f"pci_{name}_id": number for name, number in ids.items()})


def bound(monkeypatch: pytest.MonkeyPatch, allowed: frozenset[int], local_rank: int, each: int = 1):
    """Return what a rank says where two GPUs have `each` rank, and the cores that it keeps to."""
    devices = [Device(domain=0, bus=0x17, device=0), Device(domain=0, bus=0x86, device=0)]
    kept = set(allowed)

    def keep(pid: int, cores: frozenset[int]) -> None:
        assert pid == 0
        kept.intersection_update(cores)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(devices))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: devices[index])
    monkeypatch.setattr(os, "cpu_count", lambda: len(EVERY))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(allowed))
    monkeypatch.setattr(os, "sched_setaffinity", keep)

    def near(addresses: list[str], rank: int, every: frozenset[int]) -> frozenset[int]:
        first, second = ["0000:17:00.0"] * each, ["0000:86:00.0"] * each
        assert (addresses, every) == ([*first, *second], EVERY)
        return NEAR[rank // each]

    monkeypatch.setattr(runtime, "cores_of_rank", near)
    place = Rendezvous(
        local_rank, 2 * each, local_rank, 2 * each, 0, "127.0.0.1", (1,), "token", "local"
    )
    return runtime._bind(place), kept


def test_a_local_rank_keeps_to_the_cores_near_its_gpu(monkeypatch):
    assert [bound(monkeypatch, EVERY, rank)[1] for rank in (0, 1)] == list(NEAR)
    said, _ = bound(monkeypatch, EVERY, 1)
    assert said == "each rank keeps to the cores near its GPU (rank 1: 4)"
    some = EVERY - {7}  # as taskset leaves
    assert bound(monkeypatch, some, 1) == ("", set(some))


def test_ranks_that_share_a_gpu_keep_to_the_cores_near_it(monkeypatch):
    kept = [bound(monkeypatch, EVERY, rank, each=2)[1] for rank in range(4)]
    assert kept == [NEAR[0], NEAR[0], NEAR[1], NEAR[1]]


def test_a_gpu_whose_address_torch_does_not_say_binds_nobody(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Device(bus=1))
    assert runtime._pci_address(0) == ""
    device = Device(domain=1, bus=0xAF, device=3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: device)
    assert runtime._pci_address(0) == "0001:af:03.0"
