"""A part of the GPU benchmarks that says a few things and dies."""

import os


def measure(here, found):
    found.show("shown", "a number", number=1)
    found.judge("holds", True, "as it should be")
    found.judge_time("slow", False, "on the CPU nobody minds")
    with found.case("raises"):
        raise ValueError("of this case")
    found.leave("left out", "for no reason")
    print("its last word", flush=True)
    os._exit(7)
