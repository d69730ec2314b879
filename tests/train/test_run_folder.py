"""One writer a run folder, an earlier run moved aside in time, and runs killed at any moment."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.train.forked import Forked, places, until
from torchdistpackage.checkpoint.commit import latest
from torchdistpackage.config.load import load
from torchdistpackage.harness.pool import RankPool
from torchdistpackage.launch.fork_server_client import ForkServer
from torchdistpackage.launch.lock import holder_of, take
from torchdistpackage.launch.run_folder import prepare_folder
from torchdistpackage.launch.slurm.requeue import EXIT_TEMPFAIL
from torchdistpackage.launch.slurm.run_dir import Start, read_starts
from torchdistpackage.run_files import RunDir
from torchdistpackage.train.job import WORKER_MAIN

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "gpt_tiny.yaml"
SMALL = [
    "model.dim=16", "model.layers=1", "data.seq_len=16", "data.global_batch=4",
    "parallel.data=1", "parallel.pipe=1", "pipeline.microbatches=1", "launch.local.procs=1",
    "model.dropout=0.2", "train.generate_tokens=0", "train.eval_every=0", "train.eval_batches=1",
    "checkpoint.save_every=1", "log.plot=false", "log.report=false", "log.every=1",
    "optim.warmup_steps=1", "data.name=text", f"data.path={ROOT / 'LICENSE'}",
]  # fmt: skip
KEYS = ("step", "loss", "grad_norm", "lr", "tokens")


def words(folder: Path, *changes: str) -> list[str]:
    kept = {c.partition("=")[0] for c in changes}
    base = [c for c in SMALL if c.partition("=")[0] not in kept]
    return [f"run.dir={folder}", "run.name=run", *base, *changes]


def train(
    folder: Path, *changes: str, prefix: tuple[str, ...] = (sys.executable, "-m"), **env: str
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*prefix, "torchdistpackage", "train", str(CONFIG), *words(folder, *changes)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | env, start_new_session=True,
    )  # fmt: skip


def alone_under_a_launcher(pool: RankPool, folder: Path, *changes: str) -> Forked:
    told = ["train", str(CONFIG), *words(folder, *changes)]
    return Forked(pool.server, folder / "said", told, places(1)[0])


def on_this_machine(pool: RankPool, folder: Path, *changes: str) -> subprocess.Popen[str]:
    return train(folder, *changes)


def rows(folder: Path) -> list[dict]:
    path = folder / "run" / "metrics.jsonl"
    return [json.loads(x) for x in path.read_text().splitlines()] if path.exists() else []


def steps(folder: Path) -> list[int]:
    return [row["step"] for row in rows(folder)]


@pytest.mark.parametrize(
    "start",
    [alone_under_a_launcher, pytest.param(on_this_machine, marks=pytest.mark.full)],
)
def test_a_second_run_is_refused_and_the_first_loses_nothing(tmp_path, pool, start):
    first = start(pool, tmp_path, "train.steps=100000", "checkpoint.save_every=0")
    began = tmp_path / "run" / "resolved.yaml"
    until(lambda: began.exists() or first.poll() is not None, "the first run")
    held = holder_of(RunDir(tmp_path / "run").run_lock)
    assert held is not None and held.pid == first.pid, first.poll()
    told = ["train", str(CONFIG), *words(tmp_path, "train.steps=60", "run.seed=99")]
    second = Forked(pool.server, tmp_path / "second", told, {})
    out, _ = second.communicate(timeout=120)
    assert second.returncode == 2 and f"process {first.pid}" in out, out
    until(lambda: rows(tmp_path) or first.poll() is not None, "a step")
    first.send_signal(signal.SIGTERM)
    said, _ = first.communicate(timeout=120)
    assert first.returncode in (0, EXIT_TEMPFAIL), said
    assert steps(tmp_path) == list(range(1, len(rows(tmp_path)) + 1))
    assert "99" not in began.read_text()
    assert not RunDir(tmp_path / "run").run_lock.exists(), "nothing is left of the lock"


# --resume never


def earlier(folder: Path) -> set[str]:
    """A run that was here before; the names of its files."""
    names = {"metrics.jsonl", "logs/rank0.restart0.log", "logs/rank1.restart0.log"}
    for name in names:
        (folder / "run" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "run" / name).write_text("earlier\n")
    return names


def files(folder: Path) -> set[str]:
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}


def two_under_torchrun(pool: RankPool, folder: Path, *changes: str) -> subprocess.Popen[str]:
    words = ("--standalone", "--nproc-per-node", "2", "-m")
    prefix = (sys.executable, "-m", "torch.distributed.run", *words)
    return train(folder, *changes, "parallel.data=2", "launch.local.procs=2", prefix=prefix)


@pytest.mark.parametrize(
    ("start", "num_ranks"),
    [
        (alone_under_a_launcher, 1),
        pytest.param(two_under_torchrun, 2, marks=pytest.mark.full),
    ],
)
def test_under_a_launcher_an_earlier_run_is_moved_before_any_log_is_begun(
    tmp_path, pool, start, num_ranks
):
    before = earlier(tmp_path)
    process = start(pool, tmp_path, "train.steps=1", "--resume=never")
    out, _ = process.communicate(timeout=180)
    assert process.returncode == 0, out
    assert files(tmp_path / "run.1") == before
    assert {(tmp_path / "run.1" / name).read_text() for name in before} == {"earlier\n"}
    logs = {f"rank{rank}.restart0.log" for rank in range(num_ranks)}
    assert {p.name for p in (tmp_path / "run" / "logs").iterdir()} == logs
    assert "step 1/1" in (tmp_path / "run" / "logs" / "rank0.restart0.log").read_text()
    assert {p.name for p in tmp_path.iterdir() if p.is_dir()} == {"run", "run.1"}


@pytest.mark.parametrize(
    "start",
    [alone_under_a_launcher, pytest.param(on_this_machine, marks=pytest.mark.full)],
)
def test_a_run_whose_folder_is_removed_fails(tmp_path, pool, start):
    """Or it would end well, and leave nothing."""
    process = start(pool, tmp_path, "train.steps=3000", "checkpoint.save_every=0")
    until(lambda: rows(tmp_path) or process.poll() is not None, "the first row")
    (tmp_path / "run").rename(tmp_path / "gone")
    shutil.rmtree(tmp_path / "gone", ignore_errors=True)  # ranks may be writing into it
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 1 and "was removed or replaced" in out, out


def test_under_a_launcher_rank_0_holds_the_lock(tmp_path, pool):
    """And is refused by it, before it makes or moves anything."""
    before = earlier(tmp_path)
    lock = take(RunDir(tmp_path / "run").run_lock, "the run run")
    try:
        process = alone_under_a_launcher(pool, tmp_path, "train.steps=1", "--resume=never")
        out, _ = process.communicate(timeout=180)
    finally:
        lock.release()
    assert process.returncode == 2 and f"process {os.getpid()}" in out, out
    assert files(tmp_path) == {"said", *(f"run/{name}" for name in before)}


@pytest.mark.full
def test_a_slow_slurm_holds_up_no_start_for_long(tmp_path):
    """A task of srun whose job had a start before; nothing that it asks Slurm is answered."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name in ("sinfo", "sacct", "sacctmgr", "squeue", "scontrol"):
        (commands / name).write_text("#!/bin/bash\nexec sleep 100\n")
        (commands / name).chmod(0o755)
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_RESTART_COUNT": "1"}
    place = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": "1"}
    nodes = {"SLURM_STEP_NODELIST": "localhost", "SLURM_JOB_NODELIST": "localhost"}
    tasks = {"SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_GTIDS": "0"}
    job = tmp_path / "run" / "job"
    job.mkdir(parents=True)
    before = Start("7.0", 0, "7", "7", time.time() - 60, "localhost", "localhost", 0)
    (job / "starts.jsonl").write_text(json.dumps(asdict(before)) + "\n")
    path = f"{commands}:{os.environ['PATH']}"
    began_s = time.monotonic()
    process = train(tmp_path, "train.steps=1", PATH=path, **step, **place, **nodes, **tasks)
    out, _ = process.communicate(timeout=180)
    assert process.returncode == 0 and "validation loss" in out, out
    assert time.monotonic() - began_s < 60
    assert [s.start for s in read_starts(job / "starts.jsonl")] == ["7.0", "7.1"]


def test_an_empty_folder_is_not_moved_aside(tmp_path):
    """It may have been made for its quota or striping."""
    config = load(CONFIG, words(tmp_path))
    (tmp_path / "run" / "logs").mkdir(parents=True)
    made = (tmp_path / "run").stat().st_ino
    prepare_folder(config, "never")
    assert (tmp_path / "run").stat().st_ino == made
    assert [p.name for p in tmp_path.iterdir()] == ["run"]
    (tmp_path / "run" / "logs" / "rank0.restart0.log").write_text("x")
    prepare_folder(config, "never")
    assert (tmp_path / "run.1").stat().st_ino == made


# Killed at any moment


def start_ranks(server: ForkServer, folder: Path, num_steps: int, log, start: int):
    """Two ranks in processes of their own, as `tdp train` makes them."""
    # a save beside the steps may be two steps behind the last row
    in_turn = "checkpoint.async_mode=disabled"
    changes = (f"train.steps={num_steps}", "parallel.data=2", "launch.local.procs=2", in_turn)
    config = load(CONFIG, words(folder, *changes))
    return [
        server.spawn(
            WORKER_MAIN,
            (config, "auto"),
            env={
                **os.environ, "OMP_NUM_THREADS": "1", "RANK": str(rank), "WORLD_SIZE": "2",
                "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                "TDP_STORE": str(folder / f"store{start}"),
            },
            stdout=log,
            stderr=log,
        )
        for rank in range(2)
    ]  # fmt: skip


def await_exit(server: ForkServer, children) -> None:
    def gone() -> bool:
        server.reap()
        return all(child.exit is not None for child in children)

    until(gone, "the end of the ranks")


@pytest.mark.full
@pytest.mark.parametrize("kills", [6, pytest.param(40, marks=pytest.mark.full)])
def test_a_run_that_is_killed_again_and_again_is_bitwise_one_that_never_was(tmp_path, pool, kills):
    """It saves every step, so it goes on at most one step before the last row that was written."""
    draw, num_steps = random.Random(kills), 3 * kills
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        (folder / "run").mkdir(parents=True)
    lost = []
    server = pool.server
    with (tmp_path / "log").open("ab") as log:
        unbroken = start_ranks(server, whole, num_steps, log, 0)
        for start in range(kills):
            before = len(rows_of_whole_lines(killed))
            children = start_ranks(server, killed, num_steps, log, start)
            until(lambda n=before: len(rows_of_whole_lines(killed)) > max(n, 1), "a step more")
            time.sleep(draw.uniform(0, 0.05))
            for child in draw.sample(children, 2):
                child.signal(signal.SIGKILL)
            await_exit(server, children)
            saved = latest(killed / "run" / "checkpoints")
            assert saved is not None, "two rows are not written before the first save"
            at = int(saved.name.removeprefix("step_"))
            lost.append(rows_of_whole_lines(killed)[-1]["step"] - at)
        last = start_ranks(server, killed, num_steps, log, kills)
        await_exit(server, [*unbroken, *last])
        codes = [child.exit.exit_code for child in (*unbroken, *last) if child.exit]
    assert codes == [0] * 4, (tmp_path / "log").read_text()[-3000:]
    assert max(lost) <= 1, f"steps that were done and not saved: {lost}"
    assert steps(killed) == list(range(1, num_steps + 1))
    told = [[[row[key] for key in KEYS] for row in rows(folder)] for folder in (whole, killed)]
    assert told[0] == told[1]


def rows_of_whole_lines(folder: Path) -> list[dict]:
    """As `rows`, of a file that is being written."""
    path = folder / "run" / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
