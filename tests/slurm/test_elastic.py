"""Jobs that lose a node and have a spare one, and elastic jobs with copies in their nodes' memory,
of which a node is lost: another than the first, and the first, on which the batch script runs; it
is taken back when it is up again.
"""

import os
import subprocess
import time
from pathlib import Path

import pytest

from tests.slurm.cluster import ROOT, Cluster
from tests.slurm.lives import (
    CONFIG,
    ELASTIC,
    RUN,
    Lived,
    ending,
    on_two_nodes,
    rows,
    send,
    until_step,
)
from torchdistpackage.environment.slurm_env import expand

STEPS, LOCAL_EVERY = 90, 5
WORDS = [*ELASTIC, f"train.steps={STEPS}"]
COPIES = ["checkpoint.local_dir=/dev/shm", f"checkpoint.local_every={LOCAL_EVERY}"]


def submit(cluster: Cluster, folder: Path):
    return {
        "shrunk": cluster.beside(shrunk, cluster, folder),
        "headless": cluster.beside(headless, cluster, folder),
        "ended": cluster.beside(ended, cluster, folder),
        "whole": cluster.beside(whole, folder),
        "spared": cluster.beside(spared, cluster, folder),
    }


def whole(folder: Path) -> Path:
    """The same run by one process, undisturbed."""
    kept = {word.partition("=")[0] for word in WORDS}
    base = [x for x in RUN if x.partition("=")[0] not in kept]
    subprocess.run(
        [Cluster.python, "-m", "torchdistpackage", "train", str(CONFIG), *base, *WORDS,
         "launch.local.procs=1", f"run.dir={folder}", "run.name=whole"],
        check=True, capture_output=True, timeout=300, cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return folder / "whole"


def spared(shared: Cluster, folder: Path) -> tuple[Lived, float]:
    """Of three nodes, one of which is idle, the second loses its power, of which Slurm is not told;
    the seconds until a step is finished again.
    """
    cluster = shared.sibling(nodes=3, accounting=True)
    kept = [x for x in WORDS if not x.startswith("launch.elastic")]
    run, job = send(
        cluster, folder, "spared", *kept, "launch.slurm.nodes=2", "launch.spares=1",
        "checkpoint.local_dir=/dev/shm", "checkpoint.local_every=1",
        "checkpoint.async_mode=disabled",
    )  # fmt: skip
    until_step(cluster, run, 18)
    before, began_s = (run / "metrics.jsonl").stat().st_ino, time.monotonic()
    cluster.node("crash", "n2")
    reached = rows(run)[-1]["step"]

    def is_back() -> bool:
        return (run / "metrics.jsonl").stat().st_ino != before and rows(run)[-1]["step"] > reached

    cluster.wait_for(is_back, 200, f"a step after {reached} on other nodes", 0.1)
    back_s = time.monotonic() - began_s
    found = ending(cluster, run, job)
    cluster.down()
    return found, back_s


def shrunk(shared: Cluster, folder: Path) -> Lived:
    cluster, run, job = on_two_nodes(shared, folder, "shrunk", 18, *WORDS, *COPIES)
    cluster.power_off("n2")
    found = ending(cluster, run, job)
    cluster.down()
    return found


def headless(shared: Cluster, folder: Path) -> Lived:
    cluster, run, job = on_two_nodes(shared, folder, "headless", 18, *WORDS, *COPIES)
    cluster.power_off("n1")
    until_step(cluster, run, 30, restart=1)
    cluster.node("boot", "n1")
    cluster.wait_for(lambda: cluster.node_states()["n1"] == "idle", 60, "n1")
    cluster.run("scontrol", "requeue", job)
    # its accounting has a row for each size of the job, in no order
    found = Lived(run, job, [cluster.wait_end(job, 400)], cluster.job(job)["ExitCode"])
    cluster.down()
    return found


def ended(shared: Cluster, folder: Path) -> Lived:
    cluster, run, job = on_two_nodes(
        shared, folder, "ended", 18, *WORDS, *COPIES, "launch.requeue.mode=never"
    )
    cluster.power_off("n1")
    found = Lived(run, job, [cluster.wait_end(job, 400)], "")
    cluster.down()
    return found


@pytest.mark.full
def test_a_spare_node_takes_the_place_of_one_that_lost_its_power(submitted):
    """One step at most is done again. Ranks of other tests keep the machine busy, so the time only
    has to be less than Slurm needs."""
    life, back_s = submitted["spared"].result(timeout=400)
    assert "COMPLETED" in life.states and life.code == "0:0"
    began = {start["start"]: start["step"] for start in life.starts}
    assert list(began) == [f"{life.job}.0", f"{life.job}.0.1"], "not requeued"
    noted = {start["start"]: start["nodes"] for start in life.starts}
    assert [expand(nodes) for nodes in noted.values()] == [("n1", "n2"), ("n1", "n3")]
    again = (life.run / "job" / f"decision.{life.job}.0").read_text()
    reached = int(again.split("after step ")[1].split(":")[0])
    assert 0 <= reached - began[f"{life.job}.0.1"] <= 1
    assert back_s < 90
    has_the_losses_of(rows(submitted["whole"].result(timeout=400)), life)


@pytest.mark.full
def test_a_job_that_loses_a_node_goes_on_with_the_rest_and_the_copies_of_its_neighbour(submitted):
    life = submitted["shrunk"].result(timeout=400)
    assert life.states == ["RESIZING", "COMPLETED"] and life.code == "0:0", "not requeued"
    began = {start["start"]: start["step"] for start in life.starts}
    assert list(began) == [f"{life.job}.0", f"{life.job}.0.1"]
    assert "goes on with n1" in life.log
    noted = {start["start"]: start["nodes"] for start in life.starts}
    assert list(noted.values()) == ["n[1-2]", "n1"], "those that it has, not those it had"
    again = (life.run / "job" / f"decision.{life.job}.0").read_text()
    reached, step = int(again.split("after step ")[1].split(":")[0]), began[f"{life.job}.0.1"]
    assert step % LOCAL_EVERY == 0 and 0 <= reached - step <= 2 * LOCAL_EVERY
    has_the_losses_of(rows(submitted["whole"].result(timeout=400)), life)


@pytest.mark.full
def test_a_job_that_loses_its_first_node_is_requeued_without_it_and_takes_it_back(submitted):
    life = submitted["headless"].result(timeout=400)
    assert life.states == ["COMPLETED"] and life.code == "0:0"
    before, without, again = {start["start"]: start for start in life.starts}.values()
    assert [x["nodes"] for x in (before, without, again)] == ["n[1-2]", "n2", "n[1-2]"]
    assert without["step"] % LOCAL_EVERY == 0 and 18 - without["step"] <= 2 * LOCAL_EVERY
    decided = life.decision(1)
    assert decided.startswith(f"requeue after step {again['step']}: "), "nothing is lost"
    has_the_losses_of(rows(submitted["whole"].result(timeout=400)), life)


@pytest.mark.full
def test_or_it_is_ended_where_it_is_not_to_be_requeued(submitted):
    life = submitted["ended"].result(timeout=400)
    assert life.states == ["CANCELLED"]
    lost = f"job {life.job}: its first node n1 is lost, so it is ended"
    assert lost in life.log
    assert len(life.starts) == 1


def has_the_losses_of(theirs: list[dict], life: Lived) -> None:
    mine = rows(life.run)
    assert [row["step"] for row in mine] == list(range(1, STEPS + 1)), "each step once"
    for row, expected in zip(mine, theirs, strict=True):
        for key in ("loss", "grad_norm", "lr"):
            assert row[key] == pytest.approx(expected[key], rel=1e-9), row["step"]
