"""The host's part of a step on a GPU: what `tdp train` adds, on a model that is all host."""

from benchmarks.gpu.here import Here
from benchmarks.gpu.rows import Found
from benchmarks.host_time.train import measured

BAR_US = 300.0


def measure(here: Here, found: Found) -> None:
    with found.case("tdp train"):
        us = measured()
        found.judge_time(
            "tdp train's own part",
            us["own"] <= BAR_US,
            f"{us['own']:.0f} us of the host's in a step of {us['whole']:.0f}",
            **us,
        )
