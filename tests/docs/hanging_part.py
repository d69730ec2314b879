"""A part of the GPU benchmarks that never ends."""

import time


def measure(here, found):
    found.show("before", "a number")
    time.sleep(1000)
