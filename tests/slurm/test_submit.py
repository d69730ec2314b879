"""Jobs of `tdp submit` on a real Slurm: options, environment, code, requeue, chain, arrays.

The ranks have no torch: they write what they see and leave the word of their start
(jobs/submit_probe.py).
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.cluster import ROOT, Cluster
from torchdistpackage.config.load import loads
from torchdistpackage.launch.slurm.query import CompletedCommand, run_command
from torchdistpackage.launch.slurm.run_dir import read_records
from torchdistpackage.launch.slurm.submit import prepare, submit_prepared
from torchdistpackage.run_files import RunDir

PROBE = Path(__file__).parent / "jobs" / "submit_probe.py"
LIMIT_S = 240
POISON = {
    "SLURM_CPU_BIND": "quiet,mask_cpu:0x1",
    "SLURM_CPUS_PER_TASK": "7",
    "RANK": "9",
    "SLURM_MEM_PER_NODE": "1",
    "SBATCH_PARTITION": "nowhere",
    "PMIX_RANK": "9",
    "MASTER_ADDR": "nowhere",
    "WORLD_SIZE": "99",
    "SLURM_TRES_PER_TASK": "cpu=7",
    "TDP_STORE": "/nowhere",
    "SLURM_NTASKS": "99",
    "SLURM_JOB_ID": "999999",
    "CUDA_VISIBLE_DEVICES": "5",
}


def submit(cluster: Cluster, folder: Path) -> dict[str, Future[Any]]:
    scenarios = (one_job, array, a_range, all_gpus, bound, following, refused)
    return {s.__name__: cluster.beside(s, cluster, folder / s.__name__) for s in scenarios}


def project(folder: Path) -> Path:
    """A repository with the probe, and the value it says."""
    work = folder / "my work"
    (work / "lib").mkdir(parents=True)
    shutil.copy(PROBE, work)
    (work / "lib" / "helper.py").write_text("VALUE = 'submitted'\n")
    for words in (["init", "-q", "-b", "main"], ["add", "-A", "."]):
        subprocess.run(["git", "-C", str(work), *words], check=True)
    return work


def submitted_jobs(
    cluster: Cluster,
    work: Path,
    yaml: str,
    seeds: Sequence[int] = (),
    env: dict[str, str] | None = None,
) -> list[str]:
    """Prepare and send; the ids. With seeds: an array, a run for each."""

    def runner(args: Sequence[str], env: Any = None) -> CompletedCommand:
        return run_command(args, cluster.env if env is None else env)

    overrides = [[f"run.seed={x}", f"run.name=run-{x}"] for x in seeds] or [[]]
    configs = [loads(yaml, "run.yaml", x, job=True) for x in overrides]
    prepared = prepare(
        configs,
        work,
        {**cluster.env, "PYTHONPATH": "lib", **(env or {})},
        sweep="swept" if seeds else None,
        max_parallel=2 if seeds else None,
        command=[cluster.python, "-u", "-P", "-m", "submit_probe"],
    )
    sent = submit_prepared(prepared, {**cluster.env, **(env or {})}, runner)
    return [record.job for record in sent.records]


def seen_by(run_folder: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """(start, rank) -> what it saw."""
    found = {}
    for path in run_folder.glob("seen.*"):
        start, _, rank = path.name.removeprefix("seen.").rpartition(".")
        found[start, int(rank)] = json.loads(path.read_text())
    return found


# One job: its options, environment and code; requeued, then chained


def one_job(cluster: Cluster, folder: Path) -> dict[str, Any]:
    work = project(folder)
    before = cluster.sbatch("--hold", script="true")
    yaml = f"""
run: {{name: one, dir: 'my runs'}}
parallel: {{data: 4}}
launch:
  slurm:
    nodes: 2
    cpus_per_task: 2
    time: 0-01:30
    comment: 'a "b" \\ c # $HOME'
    dependency: afterany:{before}
    mem-per-cpu: 50
    prologue:
      - export WORDS=requeue,chain,finished
      - export SLURM_TRES_PER_TASK=cpu=7
"""
    (job,) = submitted_jobs(cluster, work, yaml, env=POISON)
    (work / "lib" / "helper.py").write_text("VALUE = 'edited'\n")
    (work / "submit_probe.py").write_text("raise SystemExit('edited')\n")
    asked = cluster.job(job)
    shown = cluster.run("scontrol", "-o", "show", "job", job).stdout
    cluster.cancel(before)
    files = RunDir(work / "my runs" / "one")
    cluster.wait_for(lambda: len(read_records(files.records)) == 2, LIMIT_S, "a chained job")
    jobs = [record.job for record in read_records(files.records)]
    ends = [cluster.wait_end(job, LIMIT_S) for job in jobs]
    restarts = cluster.job(job)["Restarts"]
    return {**locals(), "seen": seen_by(files.run), "log": files.main_log.read_text()}


@pytest.fixture(scope="module")
def one(submitted: dict[str, Future[Any]]) -> dict[str, Any]:
    return submitted["one_job"].result()


def test_the_options_arrive(one):
    asked = one["asked"]
    assert (asked["NumNodes"], asked["NumTasks"], asked["CPUs/Task"]) == ("2-2", "4", "2")
    assert (asked["TimeLimit"], asked["Requeue"]) == ("01:30:00", "1")
    assert asked["MinMemoryCPU"] == "50M"
    assert 'Comment=a "b" \\ c # $HOME ' in one["shown"]
    assert f"WorkDir={one['work']} " in one["shown"]
    assert f"StdOut={one['files'].main_log} " in one["shown"]


def test_every_task_has_the_cpus_it_was_promised(one):
    for seen in one["seen"].values():
        assert seen["env"]["SLURM_CPUS_PER_TASK"] == "2"
        assert "CPUs=8 " in seen["step"] and "Tasks=4 " in seen["step"]


def test_the_ranks_are_those_of_the_step_whatever_the_caller_had_set(one):
    for (start, rank), seen in one["seen"].items():
        env = seen["env"]
        assert (env["SLURM_PROCID"], env["SLURM_NTASKS"]) == (str(rank), "4")
        assert env["SLURM_JOB_ID"] == start.partition(".")[0]
        barred = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "PMIX_RANK", "TDP_STORE", "SLURM_CPU_BIND")
        assert not [name for name in (*barred, "CUDA_VISIBLE_DEVICES") if name in env]
        assert "SLURM_TRES_PER_TASK" not in env and env["SLURM_JOB_PARTITION"] == "main"
        assert int(env["TDP_JOB_END_S"]) > 1_600_000_000


def test_a_job_its_requeue_and_its_successor_run_what_was_submitted(one):
    first, second = one["jobs"]
    starts = (f"{first}.0", f"{first}.1", f"{second}.0")
    assert set(one["seen"]) == {(start, rank) for start in starts for rank in range(4)}
    code = read_records(one["files"].records)[0].code
    assert code.startswith(str(one["files"].run / "code"))
    for seen in one["seen"].values():
        assert seen["value"] == "submitted"
        assert seen["modules"] == [
            f"{code}/tree/submit_probe.py",
            f"{code}/tree/lib/helper.py",
            f"{code}/package/torchdistpackage/__init__.py",
        ]
        assert seen["env"]["TDP_CODE"] == f"{code}/tree"
        assert "cpus_per_task: 2" in seen["config"]


def test_it_is_requeued_once_and_chained_once_and_then_over(one):
    assert one["ends"] == ["COMPLETED", "COMPLETED"] and one["restarts"] == "1"
    first, second = read_records(one["files"].records)
    assert (second.script, second.code, second.nodes) == (first.script, first.code, "2")
    assert {seen["env"]["TDP_SERIES"] for seen in one["seen"].values()} == {first.job}


def test_the_main_log_keeps_the_lines_of_every_start(one):
    first, second = one["jobs"]
    for start in (f"{first}.0", f"{first}.1", f"{second}.0"):
        assert one["log"].count(f"start {start} on n") == 1
        for rank in range(4):
            assert one["log"].count(f"rank {rank} of start {start} says submitted\n") == 1
    told = [line for line in one["log"].splitlines() if " at start " in line]
    assert told == [
        f"job {first}: requeue: at start 0",
        f"job {first}: chain: at start 1",
        f"job {second}: finished: at start 2",
    ]


# An array of three runs


def array(cluster: Cluster, folder: Path) -> dict[str, Any]:
    work = project(folder)
    yaml = """
run: {dir: runs}
launch:
  slurm:
    prologue:
      - export WORDS=finished
      - if [ "$SLURM_ARRAY_TASK_ID" = 2 ]; then export WORDS=requeue,finished; fi
"""
    jobs = submitted_jobs(cluster, work, yaml, seeds=(5, 6, 7))
    ends = [cluster.wait_end(job, LIMIT_S) for job in jobs]
    runs = [RunDir(work / "runs" / f"run-{seed}") for seed in (5, 6, 7)]
    return {**locals(), "seen": [seen_by(files.run) for files in runs]}


def test_an_array_has_a_run_folder_and_a_log_for_each_task(submitted):
    got = submitted["array"].result()
    base = got["jobs"][0].partition("_")[0]
    assert got["jobs"] == [f"{base}_0", f"{base}_1", f"{base}_2"]
    assert got["ends"] == ["COMPLETED"] * 3
    for index, (files, seen) in enumerate(zip(got["runs"], got["seen"], strict=True)):
        log = files.main_log.read_text()
        assert all(f"seed: {index + 5}" in one["config"] for one in seen.values())
        assert all(f"start {start} on " in log for start, _ in seen)
        (record,) = read_records(files.records)
        assert record.job == f"{base}_{index}"


def test_one_task_is_requeued_and_the_others_are_not(submitted):
    """The last one, whose own id is that of the whole array."""
    got = submitted["array"].result()
    restarts = [sorted(start.partition(".")[2] for start, _ in seen) for seen in got["seen"]]
    assert restarts == [["0"], ["0"], ["0", "1"]]
    base = got["jobs"][0].partition("_")[0]
    assert {start.partition(".")[0] for start, _ in got["seen"][2]} == {base}


# Nodes of a range, and GPUs


def a_range(cluster: Cluster, folder: Path) -> dict[str, Any]:
    work = project(folder)
    yaml = """
run: {dir: runs}
data: {global_batch: 48}
launch: {slurm: {nodes: 2-3, ntasks-per-node: 2, prologue: export WORDS=finished}}
"""
    (job,) = submitted_jobs(cluster, work, yaml)
    cluster.wait_end(job, LIMIT_S)
    return {"nodes": int(cluster.job(job)["NumNodes"]), "seen": seen_by(work / "runs" / "run")}


def test_a_range_gives_as_many_ranks_as_nodes_were_granted(submitted):
    got = submitted["a_range"].result()
    assert got["nodes"] in (2, 3) and len(got["seen"]) == 2 * got["nodes"]
    assert len({seen["host"] for seen in got["seen"].values()}) == got["nodes"]


def all_gpus(cluster: Cluster, folder: Path) -> dict[str, Any]:
    work = project(folder)
    yaml = """
run: {dir: runs}
launch: {slurm: {ntasks-per-node: 2, gpus-per-task: 2, prologue: export WORDS=finished}}
parallel: {data: 2}
"""
    with cluster.sibling(nodes=1, gpus=4) as own:
        (job,) = submitted_jobs(own, work, yaml)
        own.wait_end(job, LIMIT_S)
    return seen_by(work / "runs" / "run")


def test_every_task_sees_all_gpus_of_its_node(submitted):
    seen = submitted["all_gpus"].result()
    assert len(seen) == 2
    assert {one["env"]["CUDA_VISIBLE_DEVICES"] for one in seen.values()} == {"0,1,2,3"}


def bound(cluster: Cluster, folder: Path) -> list[list[int]]:
    """CPUs that each task may run on, of 2 tasks with 1 CPU, and of 1 task with 2."""
    work = project(folder)
    found = []
    with cluster.sibling(nodes=1, cpus=2, affinity=True) as own:
        for tasks, cpus in ((2, 1), (1, 2)):
            yaml = f"""
run: {{name: run{cpus}, dir: runs}}
parallel: {{data: {tasks}}}
launch:
  slurm:
    cpus-per-task: {cpus}
    prologue:
      - export WORDS=finished SLURM_TRES_PER_TASK=cpu:7 SLURM_CPUS_PER_TASK=7
"""
            (job,) = submitted_jobs(own, work, yaml)
            own.wait_end(job, LIMIT_S)
            found.append([one["cpus"] for one in seen_by(work / "runs" / f"run{cpus}").values()])
    return found


def test_a_task_may_run_on_as_many_cpus_as_were_asked_for(submitted):
    """And the script starts although a variable asks srun for another number."""
    assert submitted["bound"].result() == [[1, 1], [2]]


# The command itself


def command_line(folder: Path, code: int, seconds: float) -> Path:
    """Where `tdp submit run.yaml` starts a stand-in, which says hello and ends with `code`."""
    folder.mkdir(parents=True)
    stand_in = folder / "stand_in"
    stand_in.write_text(
        f'#!/bin/bash\ncase "$*" in *failure_report*) echo the verdict; exit {code} ;; esac\n'
        f"echo hello from $SLURM_PROCID; sleep {seconds}; echo bye; exit 1\n"
    )
    stand_in.chmod(0o755)
    (folder / "run.yaml").write_text(
        f"parallel: {{data: 2}}\nlaunch: {{slurm: {{container: ['{stand_in}']}}}}\n"
    )
    return folder


def following(cluster: Cluster, folder: Path) -> dict[str, Any]:
    env = {"PYTHONPATH": str(ROOT)}
    work = command_line(folder, code=7, seconds=1)
    done = cluster.tdp(
        "submit", "run.yaml", "--follow", cwd=work, env=env, check=False, limit_s=LIMIT_S
    )
    # Ctrl-C in a second one
    # in the background of a shell SIGINT is ignored, which processes inherit
    words = ["env", "--default-signal=INT", cluster.python, "-m", "torchdistpackage"]
    words += ["submit", "run.yaml", "--follow"]
    words += ["run.name=long", f"launch.slurm.container=['{work / 'long'}']"]
    (work / "long").write_text("#!/bin/bash\necho hello; sleep 60\n")
    (work / "long").chmod(0o755)
    with subprocess.Popen(
        words,
        env=cluster.env | env,
        cwd=work,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as second:
        assert second.stdout is not None
        for line in second.stdout:
            if line == "hello\n":
                break
        second.send_signal(signal.SIGINT)
        _, err = second.communicate(timeout=LIMIT_S)
    (record,) = read_records(RunDir(work / "runs" / "long").records)
    state = cluster.job_state(record.job)
    cluster.cancel(record.job)
    return {"done": done, "code": second.returncode, "err": err, "state": state}


def test_following_shows_the_log_and_ends_with_the_code_of_the_job(submitted):
    done = submitted["following"].result()["done"]
    assert done.returncode == 7
    assert "hello from 0\n" in done.stdout and "hello from 1\n" in done.stdout
    assert done.stdout.endswith("the verdict\n")
    assert "is FAILED" in done.stderr


def test_who_stops_following_leaves_the_job_alone(submitted):
    got = submitted["following"].result()
    assert got["code"] == 130 and "stopped following; job" in got["err"]
    assert "goes on" in got["err"] and "Traceback" not in got["err"]
    assert got["state"] == "RUNNING"


def refused(cluster: Cluster, folder: Path) -> list[subprocess.CompletedProcess[str]]:
    work = command_line(folder, code=0, seconds=0)
    env = {"PYTHONPATH": str(ROOT)}
    hold = ("submit", "run.yaml", "launch.slurm.hold=true")
    done = [cluster.tdp(*hold, cwd=work, env=env, check=False) for _ in range(2)]
    (record,) = read_records(RunDir(work / "runs" / "run").records)
    cluster.cancel(record.job)
    cluster.wait_end(record.job, LIMIT_S)
    more = ["launch.slurm.partition=nowhere"], ["launch.slurm.hold=false"]
    return done + [cluster.tdp(*hold[:2], *x, cwd=work, env=env, check=False) for x in more]


def test_a_run_is_not_submitted_while_a_job_of_it_waits(submitted):
    first, second, third, fourth = submitted["refused"].result()
    assert (first.returncode, second.returncode) == (0, 1)
    assert "is PENDING; follow it" in second.stderr
    assert third.returncode == 1 and "`sinfo -s` lists the partitions" in third.stderr
    assert fourth.returncode == 0
