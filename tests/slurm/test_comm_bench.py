"""`tdp comm bench --slurm` on a real cluster: nodes that talk, files, the exit code."""

from __future__ import annotations

import json
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.slurm.cluster import ROOT, Cluster
from tests.tells import tells
from torchdistpackage.harness.bench.profile import read
from torchdistpackage.run_files import RunDir

pytestmark = pytest.mark.full


@dataclass
class Benched:
    said: str
    state: str
    code: str
    files: RunDir

    @property
    def log(self) -> str:
        return self.files.main_log.read_text()


def submit(cluster: Cluster, folder: Path) -> Future[Benched]:
    return cluster.beside(too_slow, cluster, folder)


def too_slow(cluster: Cluster, folder: Path) -> Benched:
    """Two ranks on each of two nodes, held against a bandwidth that no network has."""
    words = ["--slurm", ROOT / "configs" / "gpt_tiny.yaml", "run.name=tiny", f"run.dir={folder}"]
    words += ["launch.slurm.nodes=2", "launch.slurm.ntasks-per-node=2"]
    words += ["--operations", "all_reduce,p2p_both", "--sizes", "1KiB,64KiB", "--pairs"]
    words += ["--iterations", "3", "--min-busbw", "data=1000000"]
    said = cluster.tdp("comm", "bench", *words).stdout
    job = said.split()[1]
    state = cluster.wait_end(job, 240)
    files = RunDir(folder / "tiny-bench")
    return Benched(said, state, cluster.job(job)["ExitCode"], files)


def test_the_figures_of_both_links_are_in_the_run_folder(submitted):
    got = submitted.result()
    paths = [got.files.run / name for name in ("bench.json", "profile.json")]
    assert all(str(path) in got.said for path in (*paths, got.files.main_log))
    found = json.loads(paths[0].read_text())
    assert len(set(found["hosts"])) == 2 and len(found["hosts"]) == 4
    assert {(row["axis"], row["link"]) for row in found["rows"]} == {
        ("data", "network"),
        ("pipe", "node"),
    }
    assert all(row["verified"] for row in found["rows"]) and len(found["pairs"]["times"]) == 6
    profile = read(paths[1])
    assert profile.line("data", "network", "all_reduce", "float32", 2) is not None
    assert profile.line("data", "network", "broadcast", "float32", 2) is None


def test_a_bandwidth_that_is_missed_fails_the_job_and_ends_its_log(submitted):
    got = submitted.result()
    assert (got.state, got.code) == ("FAILED", "1:0")
    assert tells(got.log, "4 ranks", "2 hosts", "2", "pipe=2")
    _, _, end = got.log.partition("wrote ")
    assert "too slow: data, network, " in end and "below 1e+06" in end
    assert tells(end, "rank 0", "4 failed", "code 1")
