"""A job that hangs, one rank a node: the main log ends with the report, and the job with 1."""

import re
import time

import pytest

from tests.processes import survivors
from tests.slurm.lives import FOUR_NODES, ending, send
from tests.tells import tells

TIMEOUT_S = 4
SAID = {
    "sleep": r"is in data loading while \d other ranks? waits? for it",
    "stop": r"is stopped \(process state T, process \d+\), by SIGSTOP or Ctrl-Z",
}


@pytest.mark.full
@pytest.mark.parametrize("how", SAID)
def test_a_hang_ends_the_job_with_the_culprit_named_last(own_cluster, tmp_path, how):
    """A stopped rank is alone on its node, and its watcher lives: the node is no suspect."""
    note, mark = tmp_path / "fault", f"TDP_TEST_MARK={tmp_path / how}"
    args = f"{{seq_len: 32, vocab: 256, how: {how}, rank: 2, step: 4, note: {note}, val_s: 0}}"
    run, job = send(
        own_cluster, tmp_path, how, *FOUR_NODES, "data.name=null",
        "data.target=tests.train.sources:Hanging", f"data.args={args}",
        f"train.step_timeout_s={TIMEOUT_S}", f"launch.slurm.prologue=['export {mark}']",
    )  # fmt: skip
    own_cluster.wait_for(note.exists, 200, "the fault")
    own_cluster.wait_for(lambda: not survivors(mark, 0), 60, "the end of all processes")
    gone_s = time.time() - float(note.read_text())
    assert gone_s < TIMEOUT_S + 15 + 10, f"the batch script included, gone after {gone_s:.1f} s"
    found = ending(own_cluster, run, job)
    assert found.states == ["FAILED"] and found.code == "1:0"

    (report,) = run.glob(f"hang.{job}.0.*.txt")
    text = report.read_text().rstrip()
    assert re.match(rf"hang: rank 2 \(data 1 pipe 0 on n3\) {SAID[how]}", text), text
    assert tells(text, "data 1", "pipe 1", "n4", "RECV_F", "stage 1", "microbatch 0", "data 1")
    assert found.log.rstrip().endswith(text), found.log
    assert re.search(rf"--- rank 2 on host n3 \(pid \d+\): hang: it {SAID[how]} ---", found.log)
    suspects = tmp_path / "suspects.jsonl"
    assert not suspects.exists(), suspects.read_text()
