"""NCCL's flight recorder, stood in for: builds for the CPU have none."""

import json
import time

import pytest
import torch

from torchdistpackage.comm import nccl_flight_recorder


@pytest.fixture
def recorder(monkeypatch):
    """Makes a function the recorder's dump."""
    name = "_dump_nccl_trace_json"
    return lambda dump: monkeypatch.setattr(torch._C._distributed_c10d, name, dump, raising=False)


def test_a_build_without_nccl_has_none(recorder):
    recorder(None)
    assert not nccl_flight_recorder.is_there()
    assert nccl_flight_recorder.take(1.0) is None


def test_it_is_asked_for_what_has_not_ended(recorder):
    recorder(lambda **asked: json.dumps({"entries": [asked]}).encode())
    assert nccl_flight_recorder.is_there()
    assert nccl_flight_recorder.take(10.0) == {
        "entries": [{"includeCollectives": True, "onlyActive": True}]
    }


def test_a_driver_that_is_stuck_takes_nobody_along(recorder):
    recorder(lambda **_: time.sleep(3))
    began_s = time.monotonic()
    assert nccl_flight_recorder.take(0.05) is None
    assert time.monotonic() - began_s < 2
