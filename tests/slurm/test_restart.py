"""A job that comes back against all odds, and one that should have come back and says so.

One run tells most of it: a site whose tools warn, a submission whose answer is lost, a prologue
that takes the names of the script, a rank that is killed, a signal, and a requeue that is refused.
In the small set is one that only meets the tools and the prologue.
"""

import json
import os
import shlex
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.lives import CONFIG, FOUR_NODES, RUN, Lived, ending, rows, send, told, until_step
from torchdistpackage.launch.slurm.requeue import EXIT_REQUEUE_DENIED

STEPS, DIES, SAVE = 200, 9, 5
ONE_RANK = ["launch.slurm.nodes=1", "launch.slurm.ntasks-per-node=1", "parallel.data=1",
            "parallel.pipe=1", "pipeline.microbatches=1"]  # fmt: skip
MEANT_WELL = ["start=$(date +%s)", "run=/elsewhere", "job=1", "word=", "state=", "cd /", "set -eu"]


def submit(cluster: Cluster, folder: Path):
    return {"warned": cluster.beside(warned, cluster, folder)}


def mortal(folder: Path, name: str, rank: int, pause_s: float) -> list[str]:
    args = (
        f"num_val: 16, pause_s: {pause_s}, rank: {rank}, step: {DIES}, note: {folder}/{name}.note"
    )
    return [
        *("data.name=null", "data.target=tests.train.sources:Mortal"),
        *(f"data.args={{seq_len: 32, {args}}}", f"checkpoint.save_every={SAVE}"),
        *("train.eval_every=0", "launch.requeue.in_job_restarts=1"),
    ]


def odd_site(folder: Path) -> dict[str, str]:
    """squeue warns whenever it is asked; sbatch takes the job, and its answer is lost once."""
    commands = folder / "bin"
    commands.mkdir()
    for name, lines in {
        "squeue": 'echo "squeue: warning: this plugin is old" >&2\nexec /usr/bin/squeue "$@"',
        "sbatch": f"""
[ -e {folder}/lost ] && exec /usr/bin/sbatch "$@"
touch {folder}/lost
/usr/bin/sbatch "$@" >/dev/null
echo "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation" >&2
exit 1""",
    }.items():
        (commands / name).write_text(f"#!/bin/bash\n{lines}\n")
        (commands / name).chmod(0o755)
    return {"PATH": f"{commands}:{os.environ['PATH']}"}


def warned(cluster: Cluster, folder: Path) -> Lived:
    """Told to end once, where squeue warns, behind a prologue that takes what it wants."""
    env = odd_site(folder)
    (folder / "lost").touch()
    words = [*ONE_RANK, *mortal(folder, "warned", 1, 0.1), "train.steps=20"]
    words.append(f"launch.slurm.prologue={json.dumps(MEANT_WELL)}")
    run, job = send(cluster, folder, "warned", *words, env=env)
    until_step(cluster, run, 2)
    cluster.run("scancel", "--signal=USR1", job)
    return ending(cluster, run, job)


def back(cluster: Cluster, folder: Path) -> tuple[Lived, str, list[str]]:
    """Killed at step 9, told to end a while later, and once more when it may not be requeued."""
    words = [*ONE_RANK, *mortal(folder, "back", 0, 0.2), f"train.steps={STEPS}"]
    words.append(f"launch.slurm.prologue={json.dumps(MEANT_WELL)}")
    run, job = send(cluster, folder, "back", *words, env=odd_site(folder))
    jobs = cluster.run("squeue", "-h", "-t", "all", "-n", "back", "-o", "%i").stdout.split()
    until_step(cluster, run, DIES + 2, restart=1)
    cluster.run("scancel", "--signal=USR1", job)
    begun = rows(run)[-1]["step"]
    until_step(cluster, run, begun + 2, restart=2)
    after = cluster.sbatch(f"--dependency=afterok:{job}", "-o", "/dev/null", script="true")
    cluster.run("scontrol", "update", f"jobid={job}", "requeue=0")
    cluster.run("scancel", "--signal=USR1", job)
    found = ending(cluster, run, job)
    waits = cluster.job(after)
    cluster.cancel(after)
    return found, waits["Reason"], jobs


def test_neither_a_prologue_nor_a_warning_keeps_a_job_from_coming_back(submitted):
    life = submitted["warned"].result(timeout=400)
    assert life.decision(0).startswith("requeue") and "this plugin is old" in life.log
    assert [s["start"] for s in life.starts] == [f"{life.job}.0", f"{life.job}.1"]
    assert life.states[-1] == "COMPLETED" and life.code == "0:0"
    assert [row["step"] for row in rows(life.run)] == list(range(1, 21)), "each step once"


@pytest.mark.full
def test_a_job_comes_back_from_all_that_and_fails_where_it_is_not_let(own_cluster, tmp_path):
    life, reason, jobs = back(own_cluster, tmp_path)
    # a killed rank: anew in its job
    assert [s["start"] for s in life.starts] == [f"{life.job}.{x}" for x in ("0", "0.1", "1")]
    assert life.starts[1]["step"] == SAVE * (DIES // SAVE)
    again = (life.run / "job" / f"decision.{life.job}.0").read_text()
    assert again.startswith(f"again after step {DIES - 1}: rank 0: killed by signal 9")
    steps = [row["step"] for row in rows(life.run)]
    assert steps == list(range(1, len(steps) + 1)), "each step once"
    assert len(life.starts) - 1 == len(list(life.run.glob("logs/rank0.restart[12].log")))
    # a signal: requeued, by a script that neither the prologue nor the warning has reached
    assert (life.run / "job" / f"decision.{life.job}.0.1").read_text().startswith("requeue")
    # a requeue that is refused: a code of its own, which `afterok` does not take for success
    assert life.decision(1).startswith("requeue") and "this plugin is old" in life.log
    assert life.states[-1] == "FAILED" and life.code == f"{EXIT_REQUEUE_DENIED}:0"
    assert reason in ("Dependency", "DependencyNeverSatisfied")
    # the submission whose answer was lost: one job
    assert jobs == [life.job]
    assert len((life.run / "job" / "submissions.jsonl").read_text().splitlines()) == 1


@pytest.mark.full
def test_four_ranks_of_which_one_is_killed_say_what_they_would_have_said(own_cluster, tmp_path):
    lives = {}
    for name in ("plain", "killed"):
        if name == "plain":
            (tmp_path / "plain.note").write_text("dead")
        words = [*FOUR_NODES, *mortal(tmp_path, name, 2, 0.05), "train.steps=20"]
        run, job = send(own_cluster, tmp_path, name, *words)
        lives[name] = ending(own_cluster, run, job)
    killed = lives["killed"]
    assert told(killed.run) == told(lives["plain"].run) and len(told(killed.run)) == 20
    assert killed.states == ["COMPLETED"] and killed.code == "0:0"
    assert [s["start"] for s in killed.starts] == [f"{killed.job}.0", f"{killed.job}.0.1"]
    assert "--- rank 2 on host n3" in killed.log


TORCHRUN = """#!/bin/bash
#SBATCH --ntasks=1 --time=10 --open-mode=append --output={folder}/out
export TDP_TEST_MARK={folder}/torchrun MASTER_ADDR=127.0.0.1
srun {python} -m torch.distributed.run --nproc-per-node=1 --max-restarts={restarts} \\
    --master-port={port} -m torchdistpackage train {config} {words}
"""


@pytest.mark.full
@pytest.mark.parametrize("requeue", [True, False])
def test_under_torchrun_a_job_comes_back_or_says_before_it_starts_that_it_cannot(
    own_cluster, tmp_path, requeue
):
    source = mortal(tmp_path, "torchrun", 1, 0.2)  # a rank that is not there, so nobody dies
    changes = ["run.name=torchrun", f"run.dir={tmp_path}", "launch.requeue.in_job_restarts=0"]
    words = [*RUN, "parallel.data=1", "parallel.pipe=1", "pipeline.microbatches=1", *source]
    last = {word.partition("=")[0]: shlex.quote(word) for word in [*words, *changes]}
    script = TORCHRUN.format(
        folder=tmp_path, python=Cluster.python, restarts=0 if requeue else 2,
        port=29500 + requeue, config=CONFIG, words=" ".join(last.values()),
    )  # fmt: skip
    how = "--requeue" if requeue else "--no-requeue"
    job, run = own_cluster.sbatch(how, script=script), tmp_path / "torchrun"
    until_step(own_cluster, run, 3)
    said = (tmp_path / "out").read_text()
    assert ("it was submitted with --no-requeue" in said) is not requeue
    own_cluster.run("scancel", "--signal=TERM", job)
    if requeue:
        begun = rows(run)[-1]["step"]
        until_step(own_cluster, run, begun + 2, restart=1)
        own_cluster.cancel(job)
    life = ending(own_cluster, run, job)
    decision = (run / "job" / f"decision.{job}.0").read_text()
    assert decision.startswith("requeue after step") and "SIGTERM" in decision
    steps = [row["step"] for row in rows(run)]
    assert steps == list(range(1, len(steps) + 1)), "each step once"
    if requeue:
        assert [s["start"] for s in life.starts] == [f"{job}.0", f"{job}.1"]
        assert life.starts[1]["step"] >= 3
    else:
        assert life.states == ["FAILED"] and len(life.starts) == 1
