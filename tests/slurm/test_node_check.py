"""A job with a spare node, one of whose nodes the check before the first step finds slow."""

import json
import sys
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.lives import ELASTIC, Lived, ending, rows, send

STEPS = 12
PLANT = Path(__file__).parent / "slow_node" / "on"


def submit(cluster: Cluster, folder: Path):
    return cluster.beside(spared, cluster, folder)


def spared(shared: Cluster, folder: Path) -> Lived:
    cluster = shared.sibling(nodes=3, accounting=True)
    words = [x for x in ELASTIC if not x.startswith("launch.elastic")]
    run, job = send(
        cluster, folder, "slow", *words, f"train.steps={STEPS}", "launch.slurm.nodes=2",
        "launch.spares=1", "launch.node_check=fast", f"launch.slurm.container=[{PLANT}, n2]",
        f"launch.slurm.python={sys.executable}",
    )  # fmt: skip
    life = ending(cluster, run, job)
    cluster.down()
    return life


@pytest.mark.full
def test_a_slow_node_is_named_and_a_spare_one_takes_its_place(submitted):
    life = submitted.result(timeout=400)
    assert life.states == ["COMPLETED"] and life.code == "0:0", "not requeued"
    noted = {start["start"]: start["nodes"] for start in life.starts}
    assert noted == {f"{life.job}.0": "n[1-2]", f"{life.job}.0.1": "n[1,3]"}
    problem = "the node check failed on rank 1 on n2, which is slow: a matmul takes "
    assert problem in life.log
    again = (life.run / "job" / f"decision.{life.job}.0").read_text()
    assert again.startswith("again after step 0: rank 1: ") and problem in again
    (suspect,) = {
        line["node"]
        for line in map(json.loads, (life.run.parent / "suspects.jsonl").read_text().splitlines())
        if line["weight"] >= 1
    }
    assert suspect == "n2"
    assert [row["step"] for row in rows(life.run)] == list(range(1, STEPS + 1))
