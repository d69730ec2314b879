"""Runs that are told to end: all ranks at one step, one checkpoint, and on from there exactly."""

import signal
import time
from collections import deque
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.train import parity
from torchdistpackage.config.schema import RequeueSection
from torchdistpackage.errors import ConfigError
from torchdistpackage.launch.process import SignalFlag
from torchdistpackage.launch.slurm.requeue import RequeueDecision
from torchdistpackage.launch.slurm.run_dir import append_start, this_start
from torchdistpackage.run_files import RunDir
from torchdistpackage.train.build import make_loop
from torchdistpackage.train.job import resume_of
from torchdistpackage.train.metric_rows import read_metrics
from torchdistpackage.train.stop import StopController, begin, end
from torchdistpackage.train.train_state import resume

LAYOUT = [
    "parallel.data=2", "parallel.pipe=2", "pipeline.microbatches=2", "train.accumulate=2",
    "model.layers=2", "model.dim=16", "data.seq_len=16", "data.global_batch=16",
    "train.steps=8", "train.eval_every=4", "train.eval_batches=2", "optim.warmup_steps=1",
    "checkpoint.save_every=0", "model.dropout=0.2", "train.generate_tokens=0",
    "log.every=100",
]  # fmt: skip
CASES = [
    ("TERM", "wait", 0),
    ("USR1", "accumulation", 1),
    ("USR2", "eval", 2),
    ("HUP", "anytime", 3),
]
ALL = [
    (name, moment, rank)
    for name in ("USR1", "USR2", "TERM", "HUP")
    for moment in ("wait", "accumulation", "eval", "anytime")
    for rank in range(4)
]


def train(folder: Path, data: str, listen: bool) -> tuple[bool, int]:
    """Whether the run came to its last step, and the step it came to."""
    run = parity.trainer([*LAYOUT, *(data.split("|") if data else [])])
    noted = SignalFlag()
    names = ("USR1", "USR2", "TERM", "HUP")
    before = {name: signal.getsignal(signal.Signals[f"SIG{name}"]) for name in names}
    if listen:
        noted.listen(names)
    try:
        life = StopController(signals=noted, clock=dist.get_rank() == 0)
        loop = make_loop(run, resume(run, folder, "auto"), folder, life)
        finished = loop.run() is not None
        time.sleep(0.06)  # a signal that comes after the last step is this test's own
    finally:
        for name, handler in before.items():
            signal.signal(signal.Signals[f"SIG{name}"], handler)
    return finished, loop.state.step


@pytest.fixture(scope="module")
def uninterrupted(ranks, tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("whole")
    data = "data.target=tests.train.sources:UnevenTokens|data.args={seq_len: 16, vocab: 256}"
    assert ranks(4).run(train, folder, data, False) == [(True, 8)] * 4
    return told(folder)


def told(folder: Path) -> list[dict]:
    """What is said of every step, but for times."""
    timed = ("time_s", "tokens_per_s", "bubble", "flops_per_s", "pipeline")
    return [
        {key: value for key, value in row.items() if key not in timed}
        for row in read_metrics(folder / "metrics.jsonl")
    ]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "moment", "rank"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.full) for case in ALL if case not in CASES)],
)
def test_a_signal_to_one_rank_ends_all_at_one_step_and_the_run_goes_on_exactly(
    ranks, tmp_path, uninterrupted, name, moment, rank
):
    """Bit for bit, with dropout, also where it came in the middle of a validation."""
    args = f"{{seq_len: 16, vocab: 256, signum: {signal.Signals[f'SIG{name}']}, rank: {rank}, "
    data = f"data.target=tests.train.sources:Signalled|data.args={args}moment: {moment}}}"
    ended = ranks(4).run(train, tmp_path, data, True)
    assert len(set(ended)) == 1, "all ranks ended alike"
    finished, step = ended[0]
    assert not finished
    # a step is over when its numbers are summed: what comes later ends the next one
    assert step in {"eval": (4,), "anytime": (3, 4, 5)}.get(moment, (3,))
    saved = [path.name for path in (tmp_path / "checkpoints").iterdir()]
    assert saved == [f"step_{step:06}"], "one complete checkpoint, and nothing half done"
    plain = "data.target=tests.train.sources:UnevenTokens|data.args={seq_len: 16, vocab: 256}"
    assert ranks(4).run(train, tmp_path, plain, True) == [(True, 8)] * 4
    assert told(tmp_path) == uninterrupted


def test_a_run_without_time_left_ends_after_its_first_step(ranks, tmp_path):
    assert ranks(4).run(late, tmp_path) == [(None, 1)] * 4


def late(folder: Path) -> tuple[float | None, int]:
    run = parity.trainer(LAYOUT)
    life = StopController(clock=dist.get_rank() == 0, end_s=time.time() + 5)
    loop = make_loop(run, resume(run, folder, "auto"), folder, life)
    return loop.run(), loop.state.step


def test_only_one_rank_watches_the_clock():
    past = time.time() - 1
    assert (
        StopController(clock=True, end_s=past).should_stop()
        and not StopController(clock=False, end_s=past).should_stop()
    )


def test_a_reason_once_found_stays():
    """Times are measured anew in every step; what was said to the others holds."""
    life = StopController(clock=True, end_s=time.time() + 100, step_s=deque([60.0]), save_s=[1])
    assert life.should_stop() and "the job ends in" in life.stop_reason()
    life.step_s.clear()
    life.end_s = None
    assert life.should_stop() and "the job ends in" in life.stop_reason()
    assert StopController().stop_reason() == "a signal to another rank"


@pytest.mark.parametrize(
    ("env", "left"),
    [
        ({}, None),
        ({"TDP_JOB_END_S": "2000000000"}, 2e9),
        ({"SLURM_JOB_END_TIME": "2000000000"}, 2e9),
        ({"SLURM_JOB_END_TIME": "0"}, None),
        ({"TDP_JOB_END_S": "N/A"}, None),
    ],
)
def test_when_the_job_ends_is_told_by_its_environment(tmp_path, env, left):
    assert begin(tmp_path, RequeueSection(), SignalFlag(), 0, env).end_s == left


def test_word_is_left_for_the_batch_script_and_saves_are_remembered(tmp_path):
    env = {"SLURM_JOB_ID": "12", "SLURM_RESTART_COUNT": "2"}
    files = RunDir(tmp_path)
    append_start(files, this_start(files, env, 5))
    life = StopController(RequeueSection(max_requeues=9), clock=True, end_s=1.0, save_s=[0.5, 0.25])
    life.should_stop()
    decision = end(life, tmp_path, 9, env)
    assert decision.word is RequeueDecision.REQUEUE
    assert files.decision("12.2").read_text() == f"{decision}\n"
    assert begin(tmp_path, RequeueSection(), SignalFlag(), 0, env).save_s == [0.5, 0.25]
    assert begin(tmp_path, RequeueSection(), SignalFlag(), 1, env).save_s == []


@pytest.mark.parametrize(
    ("batch", "word"), [({"TDP_BATCH": "1"}, RequeueDecision.CHAIN), ({}, RequeueDecision.STOP)]
)
def test_a_job_is_chained_only_where_a_script_does_it(tmp_path, batch, word):
    env = {"SLURM_JOB_ID": "12", **batch}
    decision = end(StopController(RequeueSection(mode="chain")), tmp_path, 9, env)
    assert decision.word is word and ("tdp submit" in decision.reason) is (
        word is RequeueDecision.STOP
    )


def test_what_the_user_said_of_resuming_holds_for_the_first_start(tmp_path):
    files, first, second = RunDir(tmp_path), {"SLURM_JOB_ID": "12"}, {"SLURM_RESTART_COUNT": "1"}
    named = tmp_path / "step_000004"
    named.mkdir()
    begun = this_start(files, first, 0)
    for asked in ("never", str(named)):
        assert resume_of(files, begun, asked) == asked
    append_start(files, begun)
    assert resume_of(files, begun, str(named)) == str(named)
    named.rmdir()  # the run that began there has removed it since
    for asked in ("never", str(named)):
        assert resume_of(files, this_start(files, first | second, 4), asked) == "auto"
    with pytest.raises(ConfigError, match="there is no such folder"):
        resume_of(files, begun, str(named))


def test_outside_of_a_job_nothing_is_left_and_the_user_starts_again(tmp_path):
    decision = end(StopController(), tmp_path, 9, {})
    assert decision.word is RequeueDecision.STOP and "goes on" in decision.reason
    assert list(tmp_path.iterdir()) == []
