"""A run's life on a real cluster: preempted, requeued, out of time, its node lost, its rank dead.

Every run here trains the same thing, pipe 2 with dropout; what it says of each step must be, to the
digit, what a local run that nobody stopped says. One of data 2 x pipe 2 is in test_faults.py.
"""

import json
import os
import re
import subprocess
import time
from concurrent.futures import Future
from datetime import datetime
from pathlib import Path

import pytest

from tests.processes import survivors
from tests.slurm.cluster import ROOT, Cluster
from tests.slurm.lives import (
    CONFIG,
    ELASTIC,
    RUN,
    STEPS,
    TWO_NODES,
    TWO_RANKS,
    Lived,
    ending,
    on_two_nodes,
    rows,
    send,
    starts,
    told,
    until_step,
)
from torchdistpackage.environment.slurm_env import expand

SUBMIT_FIRST = True
MESSAGE_TIMEOUT_S = 10  # as scripts/slurm/files.py has it
# every rank is told; whether rank 0 has taken notice when another rank's wish arrives is chance
OTHER = "a signal to another rank"


def submit(cluster: Cluster, folder: Path):
    alone = cluster.beside(reference, folder)
    return {
        "reference": alone,
        "lived": cluster.beside(lived, cluster, folder),
        "one after the other": cluster.beside(quieter, cluster, folder),
        "unplugged": cluster.beside(unplugged, cluster, folder),
        "limit": cluster.beside(limit, cluster, folder, alone),
    }


def reference(folder: Path) -> list[tuple]:
    """The same run, on this machine alone."""
    subprocess.run(
        [Cluster.python, "-m", "torchdistpackage", "train", str(CONFIG), *RUN, f"run.dir={folder}",
         "run.name=local", "parallel.data=1"],
        check=True, capture_output=True, timeout=300, cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return told(folder / "local")


def lived(shared: Cluster, folder: Path) -> Lived:
    """One job of two nodes out of three that comes back from each of three ends."""
    cluster = shared.sibling(nodes=3, accounting=True)
    run, job = send(cluster, folder, "lived", *TWO_NODES)
    until_step(cluster, run, 10)
    cluster.run("scontrol", "requeue", job)
    until_step(cluster, run, 35, restart=1)
    high = cluster.sbatch("-p", "high", "-N3", "--exclusive", "-o", "/dev/null", script="sleep 1")
    cluster.wait_end(high)
    until_step(cluster, run, 60, restart=2)
    node = cluster.job(job)["NodeList"]
    assert node == "n[1-2]"
    cluster.power_off("n2")
    until_step(cluster, run, 70, restart=3)
    found = ending(cluster, run, job)
    _, again = send(cluster, folder, "next", *TWO_NODES)
    found.suspects = (folder / "suspects.jsonl").read_text()
    found.excluded = cluster.job(again)["ExcNodeList"]
    found.requeue_s = requeue_s(cluster, job)
    cluster.down()
    return found


def unplugged(shared: Cluster, folder: Path) -> Lived:
    """The cable of an elastic job's second node is cut, and its ranks notice before Slurm does.

    Slurm then never ends their step on the first node, and takes its memory for used.
    """
    steps = ["train.steps=30", "checkpoint.save_every=5", "train.step_timeout_s=15"]
    cluster, run, job = on_two_nodes(shared, folder, "unplugged", 8, *ELASTIC, *steps)
    cluster.node("cut", "n2")
    found = ending(cluster, run, job)
    cluster.node("join", "n2")
    cluster.down()
    return found


def requeue_s(cluster: Cluster, job: str) -> float:
    """How long after slurmctld knew of the lost node the job had ended everywhere else."""
    log = (cluster.conf.parents[1] / "log" / "slurmctld.log").read_text()
    time_of = r"^\[(\S+)\] {} JobId={}\b"
    (knew,) = re.findall(time_of.format("requeue job", job) + " due to failure", log, re.MULTILINE)
    ended = re.findall(time_of.format("Requeuing", job), log, re.MULTILINE)
    times = [datetime.fromisoformat(t) for t in (knew, *ended)]
    return min((t - times[0]).total_seconds() for t in times[1:] if t >= times[0])


def limit(cluster: Cluster, folder: Path, before: Future) -> Lived:
    """A job of three minutes that may use less than one; its steps wait most of their time."""
    before.result()  # where all start at once, starting alone would take that long
    paced = "data.args={seq_len: 32, num_val: 16, pause_s: 0.5}"
    time_s = ["launch.slurm.time=3", "launch.requeue.margin_s=110", "launch.slurm.signal=USR1@1"]
    source = ["data.name=null", "data.target=tests.train.sources:Paced", paced]
    run, job = send(cluster, folder, "limit", *TWO_RANKS, *time_s, *source)
    until_step(cluster, run, 1, restart=1)
    cluster.wait_for(lambda: rows(run)[-1]["step"] > starts(run)[1]["step"], 100, "a step more")
    cluster.cancel(job)  # the rest would be more of the same
    return ending(cluster, run, job)


def quieter(cluster: Cluster, folder: Path) -> dict[str, Lived]:
    """Jobs that one after the other take what they get of this machine's cores."""
    found: dict[str, Lived] = {}
    words = [*TWO_NODES, "launch.slurm.time=60", "--via=submitit"]
    run, job = send(cluster, folder, "submitit", *words)
    until_step(cluster, run, 10)
    cluster.run("scancel", "--signal=USR2", job)
    found["submitit"] = ending(cluster, run, job)

    found["crash"] = crash(cluster, folder, "crash", "exit", rank=1)
    found["killed"] = crash(cluster, folder, "killed", "kill", rank=1)
    return found


def crash(cluster: Cluster, folder: Path, name: str, how: str, rank: int) -> Lived:
    note = folder / f"{name}.note"
    mark = f"TDP_TEST_MARK={folder / name}"
    run, job = send(
        cluster, folder, name, *TWO_RANKS, "data.name=null",
        "data.target=tests.train.sources:Misbehaving",
        f"data.args={{seq_len: 32, vocab: 256, how: {how}, rank: {rank}, step: 5, note: {note}}}",
        f"launch.slurm.prologue=['export {mark}']",
    )  # fmt: skip
    cluster.wait_for(note.exists, 200, "the fault")
    cluster.wait_for(lambda: not survivors(mark, 0), 40, "the end of all processes")
    gone_s = time.time() - float(note.read_text())
    assert gone_s < 30, f"gone after {gone_s:.1f} s"
    return ending(cluster, run, job)


@pytest.fixture(scope="module")
def local(submitted) -> list[tuple]:
    return submitted["reference"].result(timeout=400)


@pytest.fixture(scope="module")
def survivor(submitted) -> Lived:
    return submitted["lived"].result(timeout=600)


@pytest.fixture(scope="module")
def others(submitted) -> dict[str, Lived]:
    return submitted["one after the other"].result(timeout=600)


def test_a_run_that_came_back_three_times_says_what_a_local_one_says(survivor, local):
    assert [row[0] for row in local] == list(range(1, STEPS + 1)), "each step once"
    assert told(survivor.run) == local


def test_each_end_brought_one_start_at_the_step_that_was_saved(survivor):
    assert [s["restart"] for s in survivor.starts] == [0, 1, 2, 3]
    assert [s["start"] for s in survivor.starts] == [f"{survivor.job}.{n}" for n in range(4)]
    steps = [s["step"] for s in survivor.starts]
    assert steps[0] == 0 < steps[1] < steps[2] == steps[3], "a lost node loses what was not saved"
    assert [s["nodes"] for s in survivor.starts] == ["n[1-2]"] * 3 + ["n[1,3]"]
    for restart in (0, 1):
        step = steps[restart + 1]
        # preemption sends SIGUSR1 as well, in no order; see also `OTHER`
        reason = rf"requeue after step {step}: (SIGTERM|SIGUSR1|{OTHER})\n"
        assert re.fullmatch(reason, survivor.decision(restart))
    assert survivor.decision(3).startswith("finished")


def test_accounting_saw_each_end_and_no_other(survivor):
    assert survivor.states[-1] == "COMPLETED" and survivor.code == "0:0"
    assert len(survivor.states) == 4, survivor.states
    assert survivor.states[2] == "NODE_FAIL"


def test_a_lost_node_keeps_no_message_of_slurm_waiting(survivor):
    """The tasks beside it were still there; where none is left, Slurm waits for MessageTimeout."""
    assert survivor.requeue_s < MESSAGE_TIMEOUT_S


def test_the_main_log_has_all_starts_and_ends_well(survivor):
    log = survivor.log
    assert "\r" not in log
    assert log.count(": start ") == 4
    for step in (s["step"] for s in survivor.starts[1:]):
        assert f"resumed after step {step} of {STEPS}" in log
    assert "validation loss" in log.splitlines()[-4:][0] or "validation loss" in log[-600:]
    logs = {path.name for path in (survivor.run / "logs").glob("rank*")}
    assert logs == {f"rank{r}.restart{n}.log" for r in range(2) for n in range(4)}
    own = (survivor.run / "logs" / "rank1.restart0.log").read_text()
    assert not [line for line in own.splitlines() if "step " in line], "rank 0 speaks for all"


def test_the_node_that_failed_is_left_out_of_the_next_submission(survivor):
    evidence = [json.loads(line) for line in survivor.suspects.splitlines()]
    assert [(e["node"], e["job"]) for e in evidence] == [("n2", f"{survivor.job}.2")]
    assert evidence[0]["expires_s"] > evidence[0]["time_s"] and "crash" in evidence[0]["reason"]
    assert survivor.excluded == "n2"


def test_a_run_saves_before_its_time_is_over_and_goes_on(submitted, local):
    found = submitted["limit"].result(timeout=600)
    said = told(found.run)
    expected = local[: len(said)]
    if said[-1][-1] is None:
        # cancelled at a validation, if one was due here: the next start owes it, and none comes
        expected[-1] = (*expected[-1][:-1], None)
    assert said == expected and len(said) > found.starts[1]["step"] >= 1
    assert found.states == ["REQUEUED", "CANCELLED by 0"]
    assert re.match(
        r"requeue after step \d+: the job ends in \d+ s, and 2 steps, two saves and the margin",
        found.decision(0),
    )


def test_an_elastic_job_whose_cable_is_cut_goes_on_without_that_node(submitted):
    found = submitted["unplugged"].result(timeout=600)
    assert found.states[-1] == "COMPLETED" and found.code == "0:0", found.log
    assert [s["nodes"] for s in found.starts] == ["n[1-2]", "n1"]
    assert [s["start"] for s in found.starts] == [f"{found.job}.0", f"{found.job}.0.1"]
    assert found.starts[1]["step"] in range(5, 30, 5), "what was not saved is done again"
    assert [row["step"] for row in rows(found.run)] == list(range(1, 31)), "each step once"


def test_through_submitit_the_same_comes_out(others, local):
    found = others["submitit"]
    assert told(found.run) == local
    assert [s["restart"] for s in found.starts] == [0, 1]
    assert all(len(expand(s["nodes"])) == 2 for s in found.starts)
    step = found.starts[1]["step"]
    reasons = ("SIGUSR2", OTHER)
    assert found.decision(0) in [f"requeue after step {step}: {reason}\n" for reason in reasons]
    assert found.states[-1] == "COMPLETED"
    assert "validation loss" in found.log, "the main log is where it is for every run"
    import submitit

    folder = found.run / "job" / "submitit"
    job = submitit.SlurmJob(folder, found.job, tasks=range(2))
    assert [result.split()[0] for result in job.results()] == ["finished"] * 2


@pytest.mark.parametrize(
    ("name", "rank", "code", "how"),
    [
        ("crash", 1, "7:0", "exit code 7"),
        ("killed", 1, "9:0", "killed by signal 9 (SIGKILL)"),  # 137, as accounting shows it
    ],
)
def test_the_first_failing_rank_gives_the_job_its_code_and_its_last_lines(
    others, name, rank, code, how
):
    found = others[name]
    assert found.states == ["FAILED"] and found.code == code
    block = found.log[found.log.rindex("--- rank") :]
    assert block.startswith(f"--- rank {rank} on host n")
    assert how in block.splitlines()[0]
    assert f"rank {rank} of 2 failed: {how}" in found.log
