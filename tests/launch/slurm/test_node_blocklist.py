"""What speaks against a node, for how long, and who writes it down."""

import json
import logging
import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.launch.slurm.folders import started, submitted
from tests.launch.slurm.scripted import NO_ACCOUNTING, Answer, Scripted
from torchdistpackage.environment.failure import Failure, FailureKind
from torchdistpackage.errors import LaunchError
from torchdistpackage.launch.slurm.node_blocklist import (
    EXPIRY_S,
    NODE_FAIL_EXPIRY_S,
    NodeIncident,
    excluded,
    explain,
    incident_of,
    read,
    reasons,
    record,
    record_failed_nodes,
)
from torchdistpackage.launch.slurm.query import limited
from torchdistpackage.launch.slurm.runs import SubmittedRun

NOW_S = 1_000_000.0
HALF = NodeIncident("n3", "killed by SIGBUS", 0.5, NOW_S, NOW_S + 100.0, "7.0")


def error(text: str, detail: str = "") -> Failure:
    return Failure(2, "n3.cluster.org", 1, NOW_S - 5, FailureKind.ERROR, 1, text, detail or text)


def hung(error: str) -> Failure:
    return Failure(2, "n3", 1, NOW_S - 5, FailureKind.HUNG, 1, error, "rank 0: uncorrectable ECC")


def killed(signum: int, detail: str = "") -> Failure:
    return Failure(2, "n3", 1, NOW_S - 5, FailureKind.SIGNAL, -signum, "", detail)


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (killed(7), "killed by SIGBUS"),
        (error("RuntimeError: CUDA error: uncorrectable ECC error encountered"), "memory error"),
        (error("RuntimeError: CUDA error: Hardware failure"), "hardware error"),
        (killed(6, "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."), "Xid"),
        (error("AcceleratorError: an uncorrectable NVLink error was detected"), "NVLink"),
        (
            error(
                "DistBackendError: NCCL error: remote process exited or there was a network error"
            ),
            "network error",
        ),
        (error("DistBackendError: ncclRemoteError: A call failed possibly due to ..."), "network"),
        (hung("does not answer: no rank on n3 does"), "did not answer in a hang"),
    ],
)
def test_broken_hardware_is_half_of_what_is_needed(failure: Failure, reason: str):
    evidence = incident_of(failure, "7.0", NOW_S)
    assert evidence is not None
    assert reason in evidence.reason
    assert evidence == NodeIncident("n3", evidence.reason, 0.5, NOW_S - 5, NOW_S + EXPIRY_S, "7.0")
    assert evidence.reason.startswith("rank 2: ")


@pytest.mark.parametrize(
    "failure",
    [
        killed(9),
        killed(11),
        killed(6, "terminate called after throwing an instance of 'std::bad_alloc'"),
        error("KeyError: 'xid'"),
        error("ValueError: bad"),
        error("MemoryError"),
        error("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"),
        error("RuntimeError: CUDA error: device-side assert triggered"),
        error("RuntimeError: CUDA error: an illegal memory access was encountered"),
        error("RuntimeError: [..] Connection closed by peer [10.0.0.1]:3"),
        Failure(2, "n3", 1, NOW_S, FailureKind.EXIT, 3),
        hung("is in data loading while 3 other ranks wait for it"),
        replace(killed(7), host=""),
    ],
)
def test_what_the_users_code_does_is_no_evidence(failure: Failure):
    assert incident_of(failure, "7.0", NOW_S) is None


def test_a_node_is_left_out_while_valid_evidence_weighs_one(tmp_path: Path):
    path = tmp_path / "runs" / "suspects.jsonl"
    assert excluded(path, NOW_S) == ()
    record(path, HALF)
    assert excluded(path, NOW_S) == ()
    record(path, replace(HALF, job="7.1", expires_s=NOW_S + 50.0))
    assert excluded(path, NOW_S) == ("n3",)
    assert excluded(path, NOW_S + 49.0) == ("n3",)
    assert excluded(path, NOW_S + 50.0) == ()
    record(path, replace(HALF, node="n1", weight=1.0))
    assert excluded(path, NOW_S) == ("n1", "n3")
    assert [e.job for e in reasons(path, NOW_S)["n3"]] == ["7.0", "7.1"]


def test_a_start_counts_once_however_many_of_its_ranks_tell(tmp_path: Path):
    path = tmp_path / "suspects.jsonl"
    for rank in range(8):
        record(path, replace(HALF, reason=f"rank {rank}: killed by SIGBUS"))
    assert excluded(path, NOW_S) == ()
    record(path, replace(HALF, weight=1.0, reason="down"))
    assert [e.reason for e in reasons(path, NOW_S)["n3"]] == ["down"]


def test_the_line_says_which_node_why_and_until_when(tmp_path: Path):
    path = tmp_path / "suspects.jsonl"
    assert explain(path, NOW_S) == ""
    record(path, replace(HALF, weight=1.0, job="12.3"))
    first, last = explain(path, NOW_S).splitlines()
    assert first.startswith("leaving out n3: killed by SIGBUS (")
    assert "job 12.3; until " in first
    assert str(path) in last


def test_lines_that_are_none_are_passed_over_with_a_warning(tmp_path: Path, caplog):
    path = tmp_path / "suspects.jsonl"
    path.write_text('\nnot json\n[1]\n{"node": "n9"}\n{"node": "n9", "weig')
    record(path, replace(HALF, weight=1.0))
    with caplog.at_level(logging.WARNING):
        assert excluded(path, NOW_S) == ("n3",)
    assert f"{path}: not read: line 2, 3, 4, 5" in caplog.text


def test_many_writers_do_not_mix(tmp_path: Path):
    path = tmp_path / "suspects.jsonl"

    def write(number: int) -> None:
        for index in range(20):
            record(path, replace(HALF, node=f"n{number}", job=f"{index}.0", reason="x" * 500))

    threads = [threading.Thread(target=write, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = [line for line in path.read_text().splitlines() if line]
    assert len(lines) == len(read(path)) == 160


def test_a_file_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog):
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        record(tmp_path / "file" / "suspects.jsonl", HALF)
    assert "n3: killed by SIGBUS" in caplog.text


AT = int(NOW_S) - 30
SINFO = f"n1|idle|Unknown|none\nn2|down*|{AT}|crashed\nn2|down*|{AT}|crashed\nn9|down*|{AT}|other\n"
EVENTS = f"n1|UNK|{AT}|cold\n|cluster|{AT}|\nn3|DOWN|{AT}|Not responding\nn1|DRAIN|{AT}|by hand\n"
LATER = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}


@pytest.fixture
def run(tmp_path: Path) -> SubmittedRun:
    """A run whose first start, on four nodes, was a minute ago."""
    run = submitted(tmp_path / "a", "7")
    started(run, "7.0", NOW_S - 60, nodes="n[1-4]")
    return run


def note(
    run: SubmittedRun, env: dict[str, str] | None = None, **answers: Answer
) -> list[NodeIncident]:
    """What `LATER`, or another start, finds out."""
    slurm = Scripted(**{"sinfo": SINFO, "sacctmgr": EVENTS, **answers})
    return record_failed_nodes(run.files, LATER if env is None else env, slurm, now_s=NOW_S)


def test_nodes_of_the_earlier_start_that_broke_are_noted_once(run: SubmittedRun, tmp_path: Path):
    new = note(run)
    assert [(e.node, e.reason, e.job) for e in new] == [
        ("n2", "down (crashed) under job 7", "7.0"),
        ("n3", "down (Not responding) under job 7", "7.0"),
    ]
    assert {(e.weight, e.time_s, e.expires_s) for e in new} == {
        (1.0, NOW_S, NOW_S + NODE_FAIL_EXPIRY_S)
    }
    assert excluded(run.files.suspects, NOW_S) == ("n2", "n3")
    assert run.files.suspects.parent == tmp_path
    assert note(run) == note(run, {}) == []
    assert len(read(run.files.suspects)) == 2


def test_a_start_does_not_accuse_its_own_nodes(run: SubmittedRun):
    started(run, "7.1", NOW_S - 1, nodes="n[2-3]")
    assert note(run, {"SLURM_JOB_ID": "7"}, sinfo=f"n1|down|{AT}|crashed\n", sacctmgr="") == []


def test_a_start_whose_ranks_agreed_on_an_end_lost_no_node(run: SubmittedRun):
    run.files.decision("7.0").write_text("requeue after step 5: told to\n")
    assert note(run) == []


@pytest.mark.parametrize(
    ("ended_s", "found"), [(NOW_S - 35, ["n2", "n3"]), (NOW_S - 1000, []), (None, ["n2", "n3"])]
)
def test_what_broke_long_after_a_job_is_not_laid_on_it(tmp_path: Path, ended_s, found):
    run = submitted(tmp_path / "a", "7")
    started(run, "7.0", NOW_S - 1100, nodes="n[1-4]")
    end = "Unknown" if ended_s is None else f"{ended_s:.0f}"
    earlier = f"{NOW_S - 9000:.0f}|{NOW_S - 8000:.0f}\n"
    new = note(run, sacct=f"{earlier}{NOW_S - 1110:.0f}|{end}\nUnknown|Unknown\n")
    assert [e.node for e in new] == found


def test_what_had_broken_before_is_not_laid_on_it_either(run: SubmittedRun):
    long_ago = f"{NOW_S - 500:.0f}"
    assert note(run, sinfo="", sacctmgr=f"n3|DOWN|{long_ago}|x\n") == []


@pytest.mark.parametrize("silent", [NO_ACCOUNTING, LaunchError("no such command here")])
def test_without_accounting_the_nodes_that_are_still_down_are_known(
    run: SubmittedRun, silent: Answer
):
    assert note(run, sinfo=LaunchError("no sinfo"), sacctmgr=silent) == []
    assert [e.node for e in note(run, sacctmgr=silent)] == ["n2"]


def test_half_evidence_of_the_ranks_does_not_hide_a_dead_node(run: SubmittedRun):
    record(run.files.suspects, HALF)
    new = note(run, sinfo=f"n3|fail|{AT}|disk | a\nn4|powered_down|{AT}|\n", sacctmgr="")
    assert [(e.node, e.weight) for e in new] == [("n3", 1.0)]
    assert new[0].reason == "fail (disk | a) under job 7"


def test_a_start_without_nodes_that_can_be_read_accuses_none(tmp_path: Path):
    run, slurm = submitted(tmp_path / "a", "7"), Scripted()
    assert record_failed_nodes(run.files, LATER, slurm, now_s=NOW_S) == []
    started(run, "local", NOW_S - 60, nodes="")
    assert record_failed_nodes(run.files, LATER, slurm, now_s=NOW_S) == []
    started(run, "6.0", NOW_S - 50, nodes="n[1-")
    assert record_failed_nodes(run.files, LATER, slurm, now_s=NOW_S) == []
    assert slurm.asked == []


def test_a_line_is_one_json_object(tmp_path: Path):
    record(tmp_path / "suspects.jsonl", HALF)
    (line,) = (tmp_path / "suspects.jsonl").read_text().splitlines()
    assert set(json.loads(line)) == {"node", "reason", "weight", "time_s", "expires_s", "job"}


def test_a_slow_accounting_costs_no_more_than_what_was_granted(
    run: SubmittedRun, tmp_path, monkeypatch
):
    """Rank 0 asks before it starts, and the other ranks wait for it."""
    commands = tmp_path / "bin"
    commands.mkdir()
    texts = {"sinfo": f"cat <<'END'\n{SINFO}END\n", "sacct": "exec sleep 60\n"}
    for name, text in (texts | {"sacctmgr": texts["sacct"]}).items():
        (commands / name).write_text(f"#!/bin/bash\n{text}")
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    began_s = time.monotonic()
    new = record_failed_nodes(run.files, LATER, limited(1.0), now_s=NOW_S)
    assert time.monotonic() - began_s < 5
    assert [evidence.node for evidence in new] == ["n2"], "what the controller says is noted"
