"""The batch script for a training script of one's own, as it is shipped."""

import os
import re
from pathlib import Path

from tests.slurm.cluster import ROOT, Cluster

PATH = f"{Path(Cluster.python).parent}:{os.environ['PATH']}"


def submit(cluster: Cluster, folder: Path) -> str:
    words = ("-J", "heavy", "--dependency=singleton", "-o", folder / "log")
    env = {"PATH": PATH, "PYTHONPATH": str(ROOT)}
    return cluster.sbatch(*words, ROOT / "scripts" / "sbatch_example.sh", env=env)


def test_four_ranks_on_two_nodes_train_as_one_job(cluster: Cluster, submitted: str, folder: Path):
    assert cluster.wait_end(submitted, limit_s=300) == "COMPLETED", (folder / "log").read_text()
    found = re.findall(r"^(\d): 4 ranks: accuracy (\S+)", (folder / "log").read_text(), re.M)
    assert [rank for rank, _ in found] == ["0"]
    assert float(found[0][1]) > 0.9
