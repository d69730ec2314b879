"""Test the standby of a node: the tasks it starts, the ranks it ends, and a run by its lines."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.slurm.lives import RUN
from torchdistpackage.cli.standby import end_ranks, task_variables
from torchdistpackage.environment.rendezvous import detect

ROOT = Path(__file__).parents[2]
STEP = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0", "SLURM_NODEID": "2", "SLURM_GTIDS": "2", "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NODELIST": "n[1-3]", "SLURM_STEP_TASKS_PER_NODE": "1(x3)", "SLURMD_NODENAME": "n3",
}  # fmt: skip


def test_its_tasks_are_ranks_as_srun_makes_them():
    env = STEP | task_variables(["n1", "n3"], "n3", 1, 4, "7.0.2")
    rank = detect(env)
    assert (rank.rank, rank.world_size, rank.local_rank, rank.local_world_size) == (5, 8, 1, 4)
    assert (rank.node, rank.address, rank.source) == (1, "n1", "slurm")
    assert rank.hosts == ("n1",) * 4 + ("n3",) * 4
    again = detect(STEP | task_variables(["n1", "n3"], "n3", 1, 4, "7.0.3"))
    assert again.ports != rank.ports, "what is left of the start before may hold them"


def test_it_ends_the_ranks_of_its_job_and_no_others():
    code = "from torchdistpackage.launch.process import name_thread as n; n('{}'); input()"

    def process(name: str, job: str) -> subprocess.Popen[bytes]:
        env = os.environ | {"SLURM_JOB_ID": job}
        return subprocess.Popen([sys.executable, "-c", code.format(name)], env=env, stdin=-1)

    job = f"{os.getpid()}"
    found = [process(*x) for x in (("tdp-rank-1", job), ("tdp-rank-1", "8"), ("tdp-other", job))]
    try:
        for x in found:
            until_s = time.monotonic() + 30
            while not Path(f"/proc/{x.pid}/comm").read_text().startswith("tdp-"):
                assert time.monotonic() < until_s
                time.sleep(0.02)
        end_ranks(job)
        assert found[0].wait(timeout=60) == -9
        assert [x.poll() for x in found[1:]] == [None, None]
    finally:
        for x in found:
            x.kill()
            x.communicate()


@pytest.mark.full
def test_it_runs_two_ranks_by_its_lines(tmp_path):
    """And says how they ended; a rank that is killed ends the node's part with its code."""
    run = tmp_path / "run"
    (run / "job").mkdir(parents=True)
    load = "from torchdistpackage.config.load import load; import sys; " \
        "sys.stdout.write(load(sys.argv[1], sys.argv[2:]).to_yaml())"  # fmt: skip
    words = [x for x in RUN if not x.startswith(("train.steps", "train.eval_every"))]
    words += ["parallel.pipe=1", "pipeline.microbatches=1", "parallel.data=2", "train.steps=3"]
    text = subprocess.run(
        [sys.executable, "-c", load, "configs/gpt_tiny.yaml", *words, "train.eval_every=0",
         f"run.dir={tmp_path}", "run.name=run", "launch.slurm.nodes=1"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    (run / "job" / "config.yaml").write_text(text)
    env = {**os.environ, **STEP, "SLURMD_NODENAME": "n1", "TDP_BATCH": "1", "OMP_NUM_THREADS": "1"}
    env |= {"MASTER_ADDR": "127.0.0.1", "SLURM_JOB_NODELIST": "n1"}
    program = [sys.executable, "-m", "torchdistpackage.cli.standby", run / "job" / "config.yaml"]
    standby = subprocess.Popen(
        program, cwd=ROOT, env=env, stdin=-1, stdout=-1, stderr=subprocess.PIPE, text=True
    )
    assert standby.stdin is not None and standby.stdout is not None
    assert standby.stdout.readline() == "ready n1\n"
    standby.stdin.write("who 7.0\nrun 7.0.1 n1 2\n")
    standby.stdin.flush()
    answers = [standby.stdout.readline() for _ in range(2)]
    _, errors = standby.communicate(timeout=60)
    assert answers == ["here 7.0 n1\n", "done 7.0.1 n1 0\n"], errors
    assert (run / "job" / "decision.7.0.1").read_text().startswith("finished")
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 3


def test_numpy_is_not_loaded_before_the_counts_of_threads_are_set():
    """Its threads are made when it loads, and a process with threads gets no standby."""
    code = "import sys, torchdistpackage.cli.standby; sys.exit('numpy' in sys.modules)"
    subprocess.run([sys.executable, "-P", "-c", code], check=True)
