"""Who writes to a run folder while a job trains in it, and what a job does where it is taken away.

The jobs are a user's own: a batch script with srun, that starts anew in a folder with a run in it.
"""

import json
import os
import shutil
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.lives import CONFIG, ONE_NODE, RUN, Lived, ending, send
from torchdistpackage.launch.lock import STALE_S, from_json, holder_of, to_json
from torchdistpackage.launch.slurm.failure_report import CANNOT_WRITE
from torchdistpackage.launch.slurm.query import run_command
from torchdistpackage.run_files import RunDir

LAYOUT = ["parallel.data=2", "parallel.pipe=1", "launch.local.procs=2", "train.steps=2000"]
LAYOUT += ["data.name=null", "data.target=tests.train.sources:Paced"]
LAYOUT += ["data.args={seq_len: 32, num_val: 16, pause_s: 0.2}"]
BEFORE = {"metrics.jsonl": "", "logs/rank0.restart0.log": "earlier\n"}


def submit(cluster: Cluster, folder: Path):
    return {"written_to_by_a_job": cluster.beside(written_to_by_a_job, cluster, folder)}


def words(folder: Path) -> list[str]:
    own = {word.partition("=")[0] for word in LAYOUT}
    base = [word for word in RUN if word.partition("=")[0] not in own]
    return [str(CONFIG), f"run.dir={folder}", "run.name=mine", *base, *LAYOUT]


def written_to_by_a_job(cluster: Cluster, folder: Path) -> dict[str, Any]:
    for name, text in BEFORE.items():
        (folder / "mine" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "mine" / name).write_text(text)
    command = " ".join(
        f"'{word}'" for word in (cluster.python, "-m", "torchdistpackage", "train", *words(folder))
    )
    job = cluster.sbatch(
        *("-N2", "-n2", "-o", folder / "out", "--no-requeue"),
        script=f"srun --kill-on-bad-exit=1 {command} --resume never",
    )
    files = RunDir(folder / "mine")
    metrics = files.run / "metrics.jsonl"
    cluster.wait_for(lambda: metrics.exists() and metrics.stat().st_size, 240, "the first row")

    found: dict[str, Any] = {
        "job": job,
        "second": cluster.tdp("train", *words(folder), check=False),
    }
    more = ["launch.slurm.nodes=2", "launch.slurm.ntasks-per-node=1"]
    found["submitted"] = cluster.tdp("submit", *words(folder), *more, check=False)
    found["record"] = found["elsewhere"] = from_json(files.run_lock.read_text())

    # as a machine sees it that shares nothing with the node but the files and Slurm
    copy = folder / ".copy"
    copy.write_text(to_json(replace(found["record"], boot="another")))

    def seen_elsewhere():
        then = time.time() - STALE_S - 5
        os.utime(copy, (then, then))
        return holder_of(copy, {}, lambda args, env=None: run_command(args, cluster.env))

    found["while it runs"] = seen_elsewhere()
    # at once: the job still writes into it, and a folder that fills up cannot be removed
    files.run.rename(folder / ".removed")
    shutil.rmtree(folder / ".removed", ignore_errors=True)
    found["state"] = cluster.wait_end(job, 60)
    found["after it"] = seen_elsewhere()
    copy.unlink()
    return found


def read_only(cluster: Cluster, folder: Path) -> Lived:
    """The run folder takes nothing from the moment on in which the job starts."""
    made = folder / "full"
    folders = " ".join(f"'{path}'" for path in (made, made / "job", made / "logs"))
    lines = f'launch.slurm.prologue=["chattr +i {folders}"]'
    run, job = send(cluster, folder, "full", *ONE_NODE, lines)
    try:
        return ending(cluster, run, job)
    finally:
        subprocess.run(["chattr", "-i", made / "job", made / "logs", made], check=False)


@pytest.fixture(scope="module")
def found(submitted) -> dict[str, Any]:
    return submitted["written_to_by_a_job"].result(timeout=600)


@pytest.mark.full
def test_a_run_folder_that_takes_nothing_is_named_with_a_code_of_its_own(own_cluster, tmp_path):
    found = read_only(own_cluster, tmp_path)
    if "Operation not supported" in found.log:
        pytest.skip("chattr +i is not for this file system")
    assert found.states == ["FAILED"] and found.code == f"{CANNOT_WRITE}:0", found.log
    last = found.log[found.log.rindex("---", 0, found.log.rindex("---")) :]
    assert f"{found.run} cannot be written: Operation not permitted" in last
    assert {p.name for p in found.run.iterdir()} == {"code", "job", "logs"}


def test_a_local_run_and_a_submission_into_the_folder_of_a_running_job_are_refused(found):
    for refused in (found["second"], found["submitted"]):
        assert refused.returncode == 2, refused.stderr
        assert f"job {found['job']}.0 of Slurm" in refused.stderr
        assert f"`scancel {found['job']}`" in refused.stderr


def test_the_lock_has_the_place_of_rank_0(found):
    record = found["record"]
    assert (record.job, record.step, record.restart) == (found["job"], "0", 0)
    assert record.host.startswith("n")


def test_on_another_machine_slurm_tells_whether_the_holder_lives(found):
    """Though the copy of the lock had no heartbeat for too long."""
    assert found["while it runs"] is not None and found["while it runs"].job == found["job"]
    assert found["after it"] is None


def test_the_ranks_of_srun_begin_no_log_before_the_earlier_run_is_moved_aside(found, folder):
    aside = folder / "mine.1"
    names = {p.relative_to(aside).as_posix(): p.read_text() for p in aside.rglob("*.*l*")}
    assert names == BEFORE
    assert not (folder / "mine.2").exists()


def test_a_job_whose_run_folder_is_removed_fails_and_leaves_the_reason(found, folder):
    assert found["state"] == "FAILED", (folder / "out").read_text()
    assert "was removed or replaced" in (folder / "out").read_text()
    (report,) = (folder / "mine" / "job").glob("failures.*/rank0.json")
    assert "DataError" in json.loads(report.read_text())["error"]
    assert not (folder / ".mine.running").exists()
