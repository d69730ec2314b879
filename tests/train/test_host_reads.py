"""Steady steps of `tdp train` where calls are queued, as on NCCL: no value of a device is read."""

import gc
import weakref
from pathlib import Path

import pytest
import torch

from tests.host_reads import HostReads
from tests.train import parity
from tests.train.test_nonfinite import BASE
from torchdistpackage.comm import backends
from torchdistpackage.comm.backends import GLOO, Transport
from torchdistpackage.harness.watchdog import Heartbeat
from torchdistpackage.train.build import make_loop
from torchdistpackage.train.metric_rows import read_metrics
from torchdistpackage.train.step import Trainer
from torchdistpackage.train.train_state import TrainState

STEPS = 7
STEADY = range(4, 7)
"""Not the first: they agree on shapes and buckets. Not the last, which is read at once."""

LAYOUTS = {
    "zero3 of two": ["parallel.data=2", "parallel.zero=3"],
    "data": ["parallel.data=4"],
    "zero1": ["parallel.data=4", "parallel.zero=1"],
    "zero2": ["parallel.data=4", "parallel.zero=2"],
    "zero3": ["parallel.data=4", "parallel.zero=3"],
    "pipe": ["parallel.pipe=2", "parallel.data=2", "pipeline.schedule=zb-h1"],
    "pipe, zero1": ["parallel.pipe=2", "parallel.data=2", "parallel.zero=1"],
    "tensor": ["parallel.tensor=2", "parallel.data=2", "parallel.sequence_parallel=true"],
    "pipe, tensor": ["parallel.pipe=2", "parallel.tensor=2", "parallel.data=1"],
    "own model": [
        *("model.target=tests.train.sources:build", "model.args={width: 8}"),
        *("data.target=tests.train.sources:Line", "data.args={}", "parallel.pipe=2"),
        *("model.loss=tests.train.sources:squared_error", "parallel.data=2"),
    ],
    "own model that counts": [
        *("model.target=tests.train.sources:build", "model.args={width: 8}"),
        *("data.target=tests.train.sources:Line", "data.args={}", "parallel.data=4"),
        "model.loss=tests.train.sources:summed_squared_error",
    ],
}


class CountingMarks(Heartbeat):
    """The loop marks the beginning of each step: between two marks lies a whole one."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = HostReads()

    def step(self) -> None:
        super().step()
        if self.num_steps == STEADY.start:
            self.reads.__enter__()
        elif self.num_steps == STEADY.stop:
            self.reads.__exit__(None, None, None)


def whole_run(folder: Path, extra: list[str]) -> tuple[dict[str, int], list[dict]]:
    """(reads in the steady steps, by place; rows of the log)."""
    own = any(x.startswith("model.target") for x in extra)
    base = [x for x in BASE if not own or not x.startswith(("model.", "data.seq_len"))]
    run = parity.trainer([*base, f"train.steps={STEPS}", "train.eval_every=0", *extra])
    loop = make_loop(run, TrainState(), folder)
    loop.heartbeat = CountingMarks()
    loop.run()
    rows = read_metrics(folder / "metrics.jsonl") if run.rank == 0 else []
    kept = ("step", "loss", "grad_norm", "tokens", "lr", "val_loss")
    return dict(loop.heartbeat.reads.found), [{k: row.get(k, 0.0) for k in kept} for row in rows]


SMALL = ("zero3 of two",)


@pytest.mark.parametrize(
    "layout",
    [x if x in SMALL else pytest.param(x, marks=pytest.mark.full) for x in LAYOUTS],
)
def test_a_steady_step_reads_nothing_and_says_what_one_that_waits_says(pool, tmp_path, layout):
    extra = ["precision.dtype=float64", "log.every=2", "train.straggler_every=2", *LAYOUTS[layout]]
    told, num_ranks = {}, 2 if layout == "zero3 of two" else 4
    for transport in ("gloo", "late"):
        folder = tmp_path / transport
        folder.mkdir()
        found = pool(num_ranks).run(whole_run, folder, extra, transport=transport)
        told[transport] = found[0][1]
    assert [reads for reads, _ in found] == [{}] * num_ranks
    assert [row["step"] for row in told["late"]] == list(range(1, STEPS + 1))
    for late, early in zip(told["late"], told["gloo"], strict=True):
        # only the order of sums differs
        assert late == pytest.approx(early, rel=1e-9)


def copied(pipe: int) -> list[str]:
    """What of its batches this rank copies to its device in a step."""
    extra = ["parallel.data=1", f"parallel.pipe={pipe}", "model.layers=3"]
    run = parity.trainer([*BASE, *extra])
    batches, seen = [], []
    made, place = run.batches.of_training, run.to_device
    run.batches.of_training = lambda *number: batches.append(made(*number)) or batches[-1]

    def note(x: torch.Tensor) -> torch.Tensor:
        seen.append("inputs" if x is batches[-1][0] else "targets")
        return place(x)

    run.to_device = note
    run.train_step(1).wait()
    return seen


def test_a_batch_is_copied_where_it_is_used(ranks):
    assert ranks(3).run(copied, 3) == [["inputs"], [], ["targets"]]
    assert ranks(1).run(copied, 1) == [["inputs", "targets"]]


def ends_its_thread(folder: str, fails: bool) -> bool:
    """Whether the data thread of a run that is ahead ended with it."""
    backends.register_transport(Transport("gloo", queued=True))
    try:
        run: Trainer = parity.trainer([*BASE, "checkpoint.save_every=0"])
    finally:
        backends.register_transport(GLOO)
    assert run.runs_ahead
    if fails:
        run.update.step = lambda *_: (_ for _ in ()).throw(ValueError("told to fail"))
    threads = []
    made = run.batches._in_thread
    run.batches._in_thread = lambda n: (made(n), threads.append(run.batches._thread))[0]
    try:
        make_loop(run, TrainState(), Path(folder)).run()
        assert not fails
    except ValueError:
        assert fails
    threads[0].join(10)
    return not threads[0].is_alive() and run.batches._thread is None


def is_let_go() -> bool:
    """Whether a run that reads ahead and was not closed goes, with its thread, once dropped."""
    backends.register_transport(Transport("gloo", queued=True))
    try:
        run: Trainer = parity.trainer([*BASE, "checkpoint.save_every=0"])
    finally:
        backends.register_transport(GLOO)
    run.train_step(1).wait()
    thread, batches = run.batches._thread, weakref.ref(run.batches)
    del run
    gc.collect()
    thread.join(10)
    return batches() is None and not thread.is_alive()


def test_a_run_that_was_dropped_is_not_kept_by_the_thread_of_its_data(ranks):
    assert ranks(1).run(is_let_go) == [True]


@pytest.mark.parametrize("fails", [False, True])
def test_the_thread_of_the_data_ends_with_the_run(ranks, tmp_path, fails):
    assert ranks(1).run(ends_its_thread, str(tmp_path), fails) == [True]
