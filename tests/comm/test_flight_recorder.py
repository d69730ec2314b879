"""NCCL's flight recorder, stood in for: builds for the CPU have none."""

import json
import time

import pytest
import torch

from torchdistpackage.comm import flight_recorder


@pytest.fixture
def recorder(monkeypatch):
    """Makes a function the recorder's dump."""
    name = "_dump_nccl_trace_json"
    return lambda dump: monkeypatch.setattr(torch._C._distributed_c10d, name, dump, raising=False)


def test_a_build_without_nccl_has_none(recorder):
    recorder(None)
    assert not flight_recorder.has_nccl_trace()
    assert flight_recorder.nccl_trace(1.0) is None


def test_it_is_asked_for_what_has_not_ended(recorder):
    recorder(lambda **asked: json.dumps({"entries": [asked]}).encode())
    assert flight_recorder.has_nccl_trace()
    assert flight_recorder.nccl_trace(10.0) == {
        "entries": [{"includeCollectives": True, "onlyActive": True}]
    }


def test_a_driver_that_is_stuck_takes_nobody_along(recorder):
    recorder(lambda **_: time.sleep(3))
    began_s = time.monotonic()
    assert flight_recorder.nccl_trace(0.05) is None
    assert time.monotonic() - began_s < 2
