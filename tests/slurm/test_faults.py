"""Ends that take long to see, or to bring about; those of tests/slurm/test_life.py come first.

The quick one is in the small set: a run that gets nowhere is not started for ever.
"""

import json

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.lives import (
    FOUR_NODES,
    ONE_NODE,
    STEPS,
    TWO_RANKS,
    Lived,
    ending,
    send,
    told,
    until_step,
)


def submit(cluster: Cluster, folder):
    return {"nowhere": cluster.beside(nowhere, cluster, folder)}


def nowhere(cluster: Cluster, folder) -> Lived:
    """Requeued from outside as soon as it has started, before a rank has loaded torch."""
    watch = (
        'until grep -qs "\\"$_tdp_start\\"" "$_tdp_run/job/starts.jsonl"; do sleep 0.2; done; '
        'scontrol requeue "$_tdp_job"'
    )
    prologue = f"launch.slurm.prologue={json.dumps([f'({watch}) &'])}"
    run, job = send(cluster, folder, "nowhere", *TWO_RANKS, prologue, "launch.requeue.signals=[]")
    return ending(cluster, run, job)


def test_two_starts_without_a_step_are_not_followed_by_a_third(submitted):
    found = submitted["nowhere"].result(timeout=300)
    assert [(s["restart"], s["step"]) for s in found.starts] == [(0, 0), (1, 0)]
    assert found.states[-1] == "FAILED" and found.code == "75:0"
    assert "two starts in a row ended at step 0, where they had begun" in found.log
    assert found.decision(2).startswith("stop not started again at step 0")
    assert "Traceback" not in found.log and "--- rank" not in found.log, "nothing went wrong there"


@pytest.mark.full
def test_a_run_whose_cable_was_cut_goes_on_without_that_node(own_cluster, tmp_path):
    cluster, plain = own_cluster, ["checkpoint.save_every=10", "train.step_timeout_s=90"]
    _, reference = send(cluster, tmp_path, "reference", *FOUR_NODES, *plain)
    whole = ending(cluster, tmp_path / "reference", reference)
    run, job = send(cluster, tmp_path, "cut", *FOUR_NODES, *plain)
    until_step(cluster, run, 15)
    cluster.node("cut", "n3")
    try:
        found = ending(cluster, run, job)
    finally:
        cluster.node("join", "n3")
    assert told(run) == told(whole.run)
    assert [s["nodes"] for s in found.starts] == ["n[1-4]", "n[1-2,4-5]"]
    assert found.starts[1]["step"] in (10, 20), "what was not saved is done again"
    assert found.states[-1] == "COMPLETED"


@pytest.mark.full
def test_a_rank_that_takes_too_much_memory_ends_the_job_by_name(own_cluster, tmp_path):
    source = ["data.name=null", "data.target=tests.train.sources:Hoarding",
              "data.args={seq_len: 32, vocab: 256, rank: 2, step: 5}"]  # fmt: skip
    memory = ["launch.slurm.mem=4000"]
    run, job = send(own_cluster, tmp_path, "hoard", *ONE_NODE, *source, *memory)
    found = ending(own_cluster, run, job)
    assert found.states[-1] in ("FAILED", "OUT_OF_MEMORY") and found.code != "0:0"
    last = found.log[found.log.rindex("---", 0, found.log.rindex("---")) :]
    assert "Exceeded job memory limit" in found.log or "SIGKILL" in last, found.log


@pytest.mark.full
def test_a_sweep_trains_each_of_its_runs(own_cluster, tmp_path):
    words = ["--sweep", "optim.lr=1e-3,1e-2", *ONE_NODE]
    send(own_cluster, tmp_path, "many", *words, "train.steps=6", record=None)
    runs = [tmp_path / f"many-lr={lr}" for lr in ("1e-3", "1e-2")]
    losses = []
    for index, run in enumerate(runs):
        (line,) = (run / "job" / "submissions.jsonl").read_text().splitlines()
        job = json.loads(line)["job"]
        assert job.endswith(f"_{index}")
        assert ending(own_cluster, run, job).states[-1] == "COMPLETED"
        losses.append([row[1] for row in told(run)])
    assert len(losses[0]) == len(losses[1]) == 6 < STEPS
    assert losses[0][0] == losses[1][0] != losses[0][5] != losses[1][5], "one start, two ways"
