"""Whether a steady step makes the host wait for the device.

Two ways to see it. torch raises where its own code waits (`set_sync_debug_mode`); and ahead of
a step the stream is put to sleep, so that a host which comes back before the sleep is over has
waited for nothing at all, in NCCL or the driver either.
"""

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch

from benchmarks.gpu.here import Here
from benchmarks.gpu.mirror import world
from benchmarks.gpu.models import overrides, steady, trainer
from benchmarks.gpu.rows import Found
from benchmarks.gpu.sides import SIDES, pipeline
from torchdistpackage.comm.tpc import tpc

SLEEP_S = 0.4
"""Far above what a step takes to issue."""
STEPS = 8
"""Until NaiveDDP has chosen its buckets, and each optimizer has its state."""
SEVERAL = 4
READS_FLAGS = f"NaiveDDP, unused parameters, one of {SEVERAL}"
"""Waits once by design: whether another rank used a parameter is known from the sum alone."""


def measure(here: Here, found: Found) -> None:
    here.join()
    for name, make in SIDES.items():
        with found.case(f"{name}, 1 rank"):
            _judge(here, found, f"{name}, 1 rank", make(here))
    with found.case("Pipeline, 1 rank"):
        tpc.destroy()
        tpc.setup_process_groups([("pipe", 1)])
        _judge(here, found, "Pipeline, 1 rank", pipeline(here))
    here.leave()
    for name, make in SIDES.items():
        with found.case(f"{name}, one of {SEVERAL}"), world(here, SEVERAL):
            _judge(here, found, f"{name}, one of {SEVERAL}", make(here))
    here.join()
    with found.case("tdp train"):
        _train(here, found)
    here.leave()


def _judge(here: Here, found: Found, name: str, step: Callable[[], object]) -> None:
    for _ in range(STEPS):
        step()
    if name != READS_FLAGS:
        with _raises(here):
            step()
    here.sync()
    issued_s, asleep = _behind_a_sleep(here, step)
    text = f"issued in {1e3 * issued_s:.2f} ms"
    if name == READS_FLAGS:
        found.show(name, f"{text}, with one read of flags", issued_s=issued_s)
        return
    if not here.small:
        did = "under" if asleep else "after"
        text += f" {did} a sleep of the stream of {1e3 * SLEEP_S:.0f} ms"
    found.judge_time(name, asleep, text, issued_s=issued_s)


def _behind_a_sleep(here: Here, step: Callable[[], object]) -> tuple[float, bool]:
    """What the host took for a step, and whether the stream still slept then."""
    here.sync()
    here.sleep(SLEEP_S)
    awake = None if here.small else torch.cuda.current_stream().record_event()
    begin = time.perf_counter()
    step()
    issued_s = time.perf_counter() - begin
    asleep = awake is not None and not awake.query()
    here.sync()
    return issued_s, asleep


@contextmanager
def _raises(here: Here) -> Generator[None]:
    """Where torch makes the host wait."""
    if here.small:
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _train(here: Here, found: Found) -> None:
    """Its loop reads the numbers of a step when the next one has been issued."""
    train = trainer(here, [*overrides("tiny"), "optim.warmup_steps=1"])
    go = steady(train)
    for _ in range(STEPS):
        go()
    pending = train.train_step(STEPS + 2, measure=False)
    with _raises(here):
        following = train.train_step(STEPS + 3, measure=False)
    found.judge_time(
        "tdp train: a step is issued", True, "nothing waited" if not here.small else "it ran"
    )
    pending.wait()
    following.wait()
    pending = train.train_step(STEPS + 4, measure=False)
    here.sync()
    here.sleep(SLEEP_S)  # a long step, of which the next one's numbers are a part
    following = train.train_step(STEPS + 5, measure=False)
    begin = time.perf_counter()
    pending.wait()
    read_s = time.perf_counter() - begin
    here.sync()
    found.judge_time(
        "tdp train: numbers are read under a long step",
        read_s < SLEEP_S / 2,
        f"the host waited {1e3 * read_s:.1f} ms"
        + ("" if here.small else f" while the next step took {1e3 * SLEEP_S:.0f} ms"),
        read_s=read_s,
    )
    following.wait()
