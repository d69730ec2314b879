"""The speed of a device as a rank measures it, and the slowest of several ranks."""

import pytest

from torchdistpackage.harness import device_speed as speeds
from torchdistpackage.harness.bench.profile import MeasuredDevice, slowest


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> MeasuredDevice:
    monkeypatch.setattr(speeds, "_BUDGET_S", 1e-3)
    return speeds.device_speed(False, 2)


def test_a_host_measures_matmuls_of_growing_size_copies_and_calls(device: MeasuredDevice) -> None:
    assert (device.name, device.num_ranks, {*device.matmuls}) == ("cpu", 2, {"float32", "bfloat16"})
    flops = [n for n, _ in device.matmuls["float32"]]
    assert flops == sorted(flops) and flops[0] == 2 * 32**3
    assert device.call_s > 1e-8 and device.bytes_per_s > 1e6 < device.memory_bytes
    assert device.activation_s is not None and min(device.activation_s) > 1e-12
    assert device.attention_s is not None and min(device.attention_s) > 1e-13


def test_the_slowest_rank_counts_at_sizes_that_all_have(device: MeasuredDevice) -> None:
    short = {dtype: times[:1] for dtype, times in device.matmuls.items()}
    slow = device.model_copy(
        update={
            "matmuls": {dtype: ((n, 9.0),) for dtype, ((n, _),) in short.items()},
            "bytes_per_s": 1.0,
            "call_s": 5.0,
            "activation_s": (1.0, 2.0),
            "attention_s": (3.0, 4.0),
        }
    )
    for both in ([device, slow], [slow, device]):
        assert slowest(both) == slow
    assert slowest([slow, slow.model_copy(update={"attention_s": None})]) == slow
