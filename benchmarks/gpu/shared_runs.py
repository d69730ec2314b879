"""Whole runs of `tdp train` on ranks that share a GPU: one is killed, one hangs, one goes on.

Each is a command with a limit of its own, whose processes end with it.
"""

import contextlib
import json
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.gpu.rows import expect
from benchmarks.gpu.shared_ranks import DeviceRanks

SIZES = ["model.dim=32", "data.seq_len=32", "data.global_batch=16", "pipeline.microbatches=2"]
COMMON = [
    *SIZES,
    *("train.steps=8", "optim.warmup_steps=0", "train.generate_tokens=0", "log.every=1"),
    *("precision.dtype=float64", "data.name=null", "launch.share_gpus=true"),
    *("launch.init_timeout_s=60", "train.step_timeout_s=20"),
]
FOUR = ["parallel.data=2", "parallel.pipe=2", "parallel.tensor=1"]
OTHER = ["parallel.data=1", "parallel.pipe=2", "parallel.tensor=2"]
ONE = ["parallel.data=1", "parallel.pipe=1", "parallel.tensor=1"]
PLAIN = [
    "data.target=tests.train.sources:UnevenTokens",
    "data.args={seq_len: 32, vocab: 256}",
]
CLOSE = 1e-9


def _faulty(source: str, **fault: object) -> list[str]:
    words = ", ".join(f"{key}: {value}" for key, value in fault.items())
    return [
        f"data.target=tests.train.sources:{source}",
        f"data.args={{seq_len: 32, vocab: 256, {words}}}",
    ]


def _train(ranks: DeviceRanks, folder: Path, procs: int, changes: Sequence[str]) -> tuple[int, str]:
    """The exit code of a run, and what it wrote; the run is over afterwards, whatever it did."""
    from tests.train.test_job import start  # which needs pytest

    every = [*COMMON, f"launch.local.procs={procs}", *changes]
    last = {change.partition("=")[0]: change for change in every}
    process = start(folder, *last.values())
    try:
        out, _ = process.communicate(timeout=ranks.limit_s)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return process.returncode, out


def _losses(folder: Path) -> dict[int, float]:
    """By step, the last one that was logged."""
    lines = (folder / "gpt_tiny" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def killed(ranks: DeviceRanks, *, on_gpu: bool) -> str:
    """A rank is killed while saves are written beside the steps; the run goes on elsewhere."""
    with tempfile.TemporaryDirectory() as name:
        folder, alone = Path(name, "shared"), Path(name, "alone")
        saves = ["checkpoint.save_every=2", "checkpoint.async_mode=async"]
        fault = _faulty("Misbehaving", how="kill", rank=1, step=6, note=Path(name, "note"))
        began = time.monotonic()
        code, out = _train(ranks, folder, 4, [*FOUR, *saves, *fault])
        took_s = time.monotonic() - began
        expect(code != 0 and "rank 1 of 4 failed: killed by signal 9" in out, out)
        _expect_shared(out, on_gpu=on_gpu)
        code, out = _train(ranks, folder, 4, [*OTHER, *saves, *PLAIN])
        expect(code == 0, out)
        resumed = re.search(r"resumed after step (\d+)", out)
        code, out = _train(ranks, alone, 1, [*ONE, *PLAIN])
        expect(code == 0, out)
        mine, true = _losses(folder), _losses(alone)
    off = max(abs(mine[step] / true[step] - 1) for step in true)
    expect(off < CLOSE, f"losses are off by {off:.1e} of those of one process")
    since = f" after step {resumed[1]}" if resumed else ""
    return (
        f"over {took_s:.0f} s after its start; resumed{since} as pipe 2, tensor 2, losses within "
        f"{off:.1e} of one process"
    )


def hanging(ranks: DeviceRanks, *, on_gpu: bool) -> str:
    """A rank never comes to its step: the report names it, and all ends."""
    with tempfile.TemporaryDirectory() as name:
        folder, note = Path(name), Path(name, "note")
        fault = _faulty("Hanging", how="sleep", rank=2, step=4, note=note, val_s=0)
        code, out = _train(ranks, folder, 4, [*FOUR, *fault, "train.step_timeout_s=5"])
        _expect_shared(out, on_gpu=on_gpu)
        took_s = time.time() - float(note.read_text())
        reports = [x.read_text() for x in (folder / "gpt_tiny").glob("hang.*.txt")]
    named = any(re.match(r"hang: rank 2 .* is in data loading while", x) for x in reports)
    expect(code != 0 and named, "\n".join([*reports, out]))
    return f"the report names rank 2; over {took_s:.0f} s after it stopped"


def _expect_shared(out: str, *, on_gpu: bool) -> None:
    """The start says that the ranks share a GPU, or, without one, that they run on the CPU."""
    expect(("share a GPU" if on_gpu else "running on CPU") in out, out)


RUNS: tuple[tuple[str, Callable[..., str]], ...] = (("killed", killed), ("hanging", hanging))
