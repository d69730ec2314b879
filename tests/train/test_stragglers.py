"""Real ranks of which one is slow for a while: named with host and phase, and nobody else ever is.

The delay is 50 ms a step, as a sleep where a user's own code would be slow.
"""

import json
import re
import socket
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.train import metrics_page, parity
from torchdistpackage.comm.flight_recorder import recorder
from torchdistpackage.harness.stragglers.find import SPOKEN
from torchdistpackage.train.build import make_loop
from torchdistpackage.train.callbacks import StragglerCheck
from torchdistpackage.train.step import Trainer
from torchdistpackage.train.train_state import TrainState

DELAY_S = 0.05
MICROBATCHES = 2
TINY = [
    "model.layers=2", "model.dim=16", "model.heads=2", "data.seq_len=16", "data.global_batch=8",
    "model.vocab=256", f"pipeline.microbatches={MICROBATCHES}", "train.steps=100",
    "data.target=tests.train.sources:UnevenTokens", "data.args={seq_len: 16, vocab: 256}",
]  # fmt: skip
LAYOUTS = {
    "data2": ["parallel.data=2"],
    "data2xpipe2": ["parallel.data=2", "parallel.pipe=2"],
    "tensor2": ["parallel.data=1", "parallel.tensor=2"],
    "pipe2": ["parallel.data=1", "parallel.pipe=2"],
}
SMALL_SET = {
    "data2": ("data", "forward", "backward", "optimizer"),
    "data2xpipe2": ("backward", "data"),
    "tensor2": ("forward", "backward"),
    "pipe2": ("forward", "data"),
}

Slow = tuple[int, int, str]
"""(first step, rank, phase): from that step on, until the next."""


def delay(run: Trainer, plan: list[Slow]) -> None:
    """Have `run` sleep on its rank as `plan` says, by the means of a user."""

    def sleep(phase: str, seconds: float) -> None:
        due = [slow[1:] for slow in plan if slow[0] <= recorder.step][-1:]
        if due == [(dist.get_rank(), phase)]:
            time.sleep(seconds)

    draw = run.data.batch

    def batch(*args, **options):
        sleep("data", DELAY_S)
        return draw(*args, **options)

    def hook(module, args, output) -> None:
        sleep("forward", DELAY_S / MICROBATCHES)
        if output.requires_grad:
            output.register_hook(lambda _: sleep("backward", DELAY_S / MICROBATCHES))

    run.data.batch = batch  # type: ignore[method-assign]
    run.stage.register_forward_hook(hook)
    assert run.optimizer is not None
    run.optimizer.register_step_pre_hook(lambda *_: sleep("optimizer", DELAY_S))


def lines(changes: list[str], plan: list[Slow], num_steps: int) -> list[tuple[int, str]]:
    """(step, line) of what was said."""
    run = parity.trainer([*TINY, *changes])
    delay(run, plan)
    compare = StragglerCheck(run, every=10).compare
    said: list[tuple[int, str]] = []
    for step in range(1, num_steps + 1):
        run.train_step(step).wait()
        said += [(step, line) for line in compare(step)]
    return said


def names(line: str) -> tuple[str, int, str]:
    """(`straggler` or `straggler over`, rank, phase) of a line about this host."""
    host = re.escape(socket.gethostname())
    found = re.fullmatch(
        rf"(straggler|straggler over): rank (\d+) \(.*\) on {host}: (.*) (takes|is) .*", line
    )
    assert found, line
    return found[1], int(found[2]), {v: k for k, v in SPOKEN.items()}[found[3]]


def expect_named(ranks, layout: str, phases: tuple[str, ...]) -> None:
    """Ten healthy steps, then ten for each phase, each on another rank than the one before."""
    changes = LAYOUTS[layout]
    size = 4 if "x" in layout else 2
    plan = [(11 + 10 * i, i % size, phase) for i, phase in enumerate(phases)]
    said = ranks(size).run(lines, changes, plan, 11 + 10 * len(phases))
    assert said[1:] == [[]] * (size - 1), "one rank speaks"
    told = [(step, *names(line)) for step, line in said[0]]
    assert [(rank, phase) for _, kind, rank, phase in told if kind == "straggler"] == [
        (rank, phase) for _, rank, phase in plan
    ], "every slow rank, once, and no other"
    for first, rank, phase in plan:
        at = [step for step, kind, *who in told if kind == "straggler" and who == [rank, phase]]
        assert at[0] < first + 20
    over = [(rank, phase) for _, kind, rank, phase in told if kind == "straggler over"]
    assert over == [(rank, phase) for _, rank, phase in plan[: len(over)]]
    assert len(over) == max(len(plan) - 2, 0), "said when it has been quiet for two windows"


@pytest.mark.few(1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_delay_of_50_ms_is_named_with_rank_host_and_phase(ranks, layout):
    expect_named(ranks, layout, SMALL_SET[layout])


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("last", [0, 1, 2, 3])
def test_a_delay_of_50_ms_is_named_in_every_phase_and_layout(ranks, layout, last):
    phases = ("data", "forward", "backward", "optimizer")
    expect_named(ranks, layout, (*phases[last:], *phases[:last]))


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_nobody_is_named_in_a_healthy_run(ranks, layout):
    size = 4 if "x" in layout else 2
    assert ranks(size).run(lines, LAYOUTS[layout], [], 301, timeout_s=120) == [[]] * size


def loop(folder: Path) -> None:
    changes = ["train.steps=23", "train.eval_batches=1", "optim.warmup_steps=0"]
    run = parity.trainer([*TINY, *LAYOUTS["data2"], *changes])
    delay(run, [(3, 1, "data")])
    make_loop(run, TrainState(), folder).run()


def test_a_run_says_so_in_its_log_and_in_its_metrics(ranks, tmp_path):
    ranks(2).run(loop, tmp_path)
    rows = [json.loads(row) for row in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    told = [(row["step"], names(row["stragglers"])) for row in rows if "stragglers" in row]
    assert {key for row in rows for key in row} <= metrics_page.keys()
    # on a busy machine the first window may leave it open
    assert [said for _, said in told] == [("straggler", 1, "data")] and told[0][0] <= 21
